"""Configurations of models, shapes of published ones, and which responses a policy can give. Without JAX, which loads slowly."""

import dataclasses
import math
from typing import Any, ClassVar

# Activation -> its names in config.json; export writes the first. layers.py has the functions.
ACTIVATIONS = {
    "silu": ("silu", "swish"),
    "gelu": ("gelu",),
    "gelu_tanh": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "relu": ("relu",),
}

# The activation of gpt-oss, see layers.clamped; its config.json says silu.
CLAMPED, CLAMPED_GAIN, CLAMPED_LIMIT = "clamped", 1.702, 7.0

# Name in config.json -> name in ACTIVATIONS.
ACTIVATION_NAMES = {name: ours for ours, names in ACTIVATIONS.items() for name in names}

STD = 0.02  # standard deviation of initial weights, unless a module takes another


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies: linear, Llama 3's, or YaRN (Peng et al., 2023).

    Linear (original_positions 0): all wavelengths are stretched by `factor`. Llama 3's: wavelengths beyond original_positions /
    low_frequency are stretched, those below original_positions / high_frequency stay, and those between are interpolated. yarn:
    the same, interpolated in the logarithm of the wavelength, and rotated elements are multiplied by 1 + log(factor) / 10.
    """

    factor: float
    low_frequency: float = 0.0
    high_frequency: float = 0.0
    original_positions: int = 0
    yarn: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder. Letters of the axis table: L layers, N heads, G kv_heads, H head_size, D width, F ffn, V vocab.

    architecture: the Hugging Face model_type of its checkpoints. The other fields alone say what is computed.
    norm: "rms", "offset_rms" (RMS norm that multiplies by 1 + scale) or "layer" (layer norm with bias). norm_place:
      attention and feed-forward have a norm "before" them, "after" them (OLMo 2: of what they add to the residual stream), or
      "both" (Gemma 3).
    positions: "rotary" or "learned" (an embedding of max_positions). rotary_size: how many elements of each head are rotated,
      from the first; 0: all. parallel_residual: attention and feed-forward both read the layer's input (GPT-NeoX).
    experts: of each layer, in the place of its feed-forward, each of width ffn; 0: there are none. experts_per_token: those that
      a token goes through. norm_top_k: the weights of a token's experts are divided by their sum.
    activation: a name of ACTIVATIONS. gated: the feed-forward is down(act(gate(x)) * up(x)), otherwise down(act(up(x))). With
      CLAMPED, which needs a gate, it is down(layers.clamped(gate(x), up(x))).
    qkv_bias, out_bias, ffn_bias: whether these linear maps have a bias; ffn_bias: routers, too. sinks: each query head has a
      learned score that takes part in its softmaxes, and no value (gpt-oss). qk_norm: queries and keys are normalised,
      each head by itself ("head", Qwen3) or all heads of a token together ("token", OLMo 2); "": they are not.
    scaled_embedding: embeddings of tokens are multiplied by sqrt(width). query_scalar: attention scores are divided by its square
      root; 0: by the square root of head_size.
    layer_pattern: a letter for each layer, repeated over the layers. "g" (global): the layer attends to all earlier tokens; "l"
      (local): to the last `window` tokens, itself included. "": all layers are global. local_rope_theta: rope_theta of local
      layers, which then have no rope_scaling; 0: local layers rotate as global layers do.
    head: "language_model", or "score": a linear map to `labels` outputs without bias instead (a reward model has one label).
    attention: the kernel of whole sequences, see attention.attend.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocab: int
    max_positions: int
    architecture: str = "llama"
    norm: str = "rms"
    norm_epsilon: float = 1e-6
    positions: str = "rotary"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rotary_size: int = 0
    parallel_residual: bool = False
    experts: int = 0
    experts_per_token: int = 0
    norm_top_k: bool = False
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    sinks: bool = False
    qk_norm: str = ""
    norm_place: str = "before"
    scaled_embedding: bool = False
    query_scalar: int = 0
    layer_pattern: str = ""
    window: int = 0
    local_rope_theta: float = 0.0
    tied_embedding: bool = True
    head: str = "language_model"
    labels: int = 1
    compute_dtype: str = "float32"
    attention: str = "auto"

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(f"model.heads={self.heads} is not divisible by model.kv_heads={self.kv_heads}")
        if self.positions == "rotary" and not self.rotary_size and self.head_size % 2:
            raise ValueError(f"model.head_size={self.head_size} must be even for rotary positions")
        if self.rotary_size % 2 or self.rotary_size > self.head_size:
            raise ValueError(f"rotary_size={self.rotary_size} must be even and at most head_size={self.head_size}")
        if set(self.layer_pattern) - set("gl") or ("l" in self.layer_pattern) != (self.window > 0):
            raise ValueError(f"layer_pattern={self.layer_pattern!r} does not go with window={self.window}: local layers need one")
        among = 1 < self.experts <= 4096 and 0 < self.experts_per_token <= self.experts
        if (self.experts or self.experts_per_token) and not among:
            raise ValueError(
                f"model.experts={self.experts} must be 2 to 4096, of which a token goes through 1 to {self.experts}, "
                f"not model.experts_per_token={self.experts_per_token}"
            )
        if (self.experts or self.activation == CLAMPED) and not self.gated:
            raise ValueError(f"experts={self.experts} and activation={self.activation!r} have a gate, not gated=False")
        if self.sinks and self.attention == "cudnn":
            raise ValueError(f"model.attention=cudnn computes no attention sinks, which {self.architecture} has: use auto or xla")

    @property
    def local_layers(self) -> tuple[bool, ...]:
        """Whether each layer attends to the last `window` tokens only."""
        pattern = self.layer_pattern or "g"
        return tuple(pattern[layer % len(pattern)] == "l" for layer in range(self.layers))

    @property
    def sizes(self) -> dict[str, int]:
        """Letter of the axis table -> size, and also S positions and C labels; f is F."""
        sizes = {"L": self.layers, "D": self.width, "N": self.heads, "G": self.kv_heads, "H": self.head_size, "F": self.ffn}
        return sizes | {"V": self.vocab, "S": self.max_positions, "C": self.labels, "e": self.experts, "f": self.ffn}

    @property
    def residual_std(self) -> float:
        """Standard deviation of the initial weights of maps into the residual stream, whose variance then stays, as in GPT-2."""
        return STD / math.sqrt(2 * self.layers)


# These fields of DecoderConfig say how a model is computed, not which model it is: they may differ between the roles of a run.
FREE_FIELDS = ("compute_dtype", "attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Shape of an encoder; fields that DecoderConfig has too mean the same.

    architecture: "bert" or "roberta".
    max_positions: rows of the position table. position_offset: 0: a token's position is its index in the row (BERT); n > 0: the
      first real token has position n, the next n + 1, and padding n - 1 (RoBERTa: n is the padding token's id + 1).
    token_types: rows of the token-type table (BERT's segments).
    head: "embedding" (see Encoder.sentence_embeddings) or "classification" (see Encoder.classify). labels: names of the classes,
      in the order of the logits; empty with an embedding head.
    pooler: whether the first token goes through a square linear map and tanh, as classification needs.
    """

    # Every encoder has these settings. DecoderConfig has fields of the same names, so both models use the same layers.
    norm: ClassVar[str] = "layer"
    gated: ClassVar[bool] = False
    qkv_bias: ClassVar[bool] = True
    out_bias: ClassVar[bool] = True
    ffn_bias: ClassVar[bool] = True
    sinks: ClassVar[bool] = False
    qk_norm: ClassVar[str] = ""
    query_scalar: ClassVar[int] = 0
    residual_std: ClassVar[float] = STD

    architecture: str
    layers: int
    width: int
    heads: int
    head_size: int
    ffn: int
    vocab: int
    max_positions: int
    token_types: int
    norm_epsilon: float = 1e-12
    activation: str = "gelu"
    position_offset: int = 0
    head: str = "embedding"
    labels: tuple[str, ...] = ()
    pooler: bool = False
    compute_dtype: str = "float32"
    attention: str = "auto"

    def __post_init__(self):
        if self.head == "classification" and not (self.labels and self.pooler):
            raise ValueError(f"head='classification' needs labels and pooler=True, got {self.labels} and {self.pooler}")
        if self.position_limit < 1:
            raise ValueError(f"max_positions={self.max_positions} leaves no position at position_offset={self.position_offset}")

    @property
    def position_limit(self) -> int:
        """The most tokens a row can have."""
        return self.max_positions - self.position_offset

    @property
    def sizes(self) -> dict[str, int]:
        """Letter of the axis table -> size, and also S positions, A token types, C labels, E the pooled token's width."""
        sizes = {"L": self.layers, "D": self.width, "N": self.heads, "G": self.heads, "H": self.head_size, "F": self.ffn}
        return sizes | {"V": self.vocab, "S": self.max_positions, "A": self.token_types, "C": len(self.labels), "E": self.width}


# Attention and feed-forward are built from either.
ModelConfig = DecoderConfig | EncoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResponseSpace:
    """Which responses there are, and at which temperature they are scored: the same for the policy and the reference.

    π(y_t|x, y_<t) = softmax(logits / temperature) over all tokens but the banned ones and, where t + 1 < min_length, the
    end of sequence. t counts response tokens from 0, so none ends by it with fewer than min_length of them.

    temperature: the run's scoring temperature T (TBA paper: one constant for the policy and the reference); banned_tokens: ids
    below V that no response holds; eos_id: the end of sequence, -1: there is none; min_length: tokens, 0 and 1: any; force_eos: a
    response that has not ended before its last token gets the end of sequence there, scored by the softmax above.
    """

    temperature: float
    banned_tokens: tuple[int, ...]
    eos_id: int
    min_length: int = 0
    force_eos: bool = False

    def __post_init__(self) -> None:
        if self.min_length > 1 and self.eos_id < 0:
            raise ValueError(f"min_length={self.min_length} holds back the end of sequence, and eos_id={self.eos_id} names none")
        if self.force_eos and self.eos_id < 0:
            raise ValueError(f"force_eos=True puts an end of sequence, and eos_id={self.eos_id} names none")


# Shapes of published models: for benchmarks, memory estimates (--dry_run) and tests, without their weights.
# What the models of a family share.
_GPT: dict[str, Any] = dict(norm="layer", norm_epsilon=1e-5, gated=False, qkv_bias=True, out_bias=True, ffn_bias=True)
_GPT2 = _GPT | dict(architecture="gpt2", positions="learned", activation="gelu_tanh")
_PYTHIA = _GPT | dict(architecture="gpt_neox", parallel_residual=True, activation="gelu", tied_embedding=False)
_LLAMA_3 = dict(architecture="llama", norm_epsilon=1e-5, rope_theta=5e5)
_QWEN2 = dict(architecture="qwen2", rope_theta=1e6, qkv_bias=True)
_QWEN3 = dict(architecture="qwen3", rope_theta=1e6, qk_norm="head")
QWEN3_MOE: dict[str, Any] = _QWEN3 | dict(architecture="qwen3_moe", norm_top_k=True)
_OLMO_2 = dict(architecture="olmo2", rope_theta=5e5, norm_place="after", qk_norm="token", tied_embedding=False)
_GEMMA_3 = dict(
    architecture="gemma3_text",
    norm="offset_rms",
    norm_place="both",
    qk_norm="head",
    scaled_embedding=True,
    activation="gelu_tanh",
    layer_pattern="lllllg",
    rope_theta=1e6,
    local_rope_theta=1e4,
)
GPT_OSS: dict[str, Any] = dict(
    architecture="gpt_oss",
    norm_epsilon=1e-5,
    norm_top_k=True,
    activation=CLAMPED,
    qkv_bias=True,
    out_bias=True,
    ffn_bias=True,
    sinks=True,
    layer_pattern="lg",
    window=128,
    rope_theta=1.5e5,
    rope_scaling=RopeScaling(factor=32.0, low_frequency=1.0, high_frequency=32.0, original_positions=4096, yarn=True),
    tied_embedding=False,
)
_UNTIED = dict(tied_embedding=False)
_OF_128 = dict(experts=128, experts_per_token=8)
_RHO = _UNTIED | dict(norm_epsilon=1e-5)


def _scaled(factor: float) -> RopeScaling:
    return RopeScaling(factor=factor, low_frequency=1.0, high_frequency=4.0, original_positions=8192)


def _shape(family: dict[str, Any], *sizes: int, **others: Any) -> DecoderConfig:
    """Args: sizes: layers, width, query heads, key and value heads, head size, feed-forward, vocabulary, positions."""
    names = ("layers", "width", "heads", "kv_heads", "head_size", "ffn", "vocab", "max_positions")
    return DecoderConfig(**family | dict(zip(names, sizes, strict=True)) | others)


def _pythia(layers: int, width: int, heads: int, vocab: int) -> DecoderConfig:
    size = width // heads
    return _shape(_PYTHIA, layers, width, heads, heads, size, 4 * width, vocab, 2048, rotary_size=size // 4)


PRESETS: dict[str, DecoderConfig] = {
    "gpt2": _shape(_GPT2, 12, 768, 12, 12, 64, 3072, 50257, 1024),
    "pythia-410m": _pythia(24, 1024, 16, 50304),
    "pythia-1b": _pythia(16, 2048, 8, 50304),
    "pythia-2.8b": _pythia(32, 2560, 32, 50304),
    "pythia-6.9b": _pythia(32, 4096, 32, 50432),
    "rho-math-1b": _shape(_RHO, 22, 2048, 32, 4, 64, 5632, 32000, 2048),
    "llama-3.2-1b": _shape(_LLAMA_3, 16, 2048, 32, 8, 64, 8192, 128256, 131072, rope_scaling=_scaled(32.0)),
    "llama-3.1-8b": _shape(_LLAMA_3 | _UNTIED, 32, 4096, 32, 8, 128, 14336, 128256, 131072, rope_scaling=_scaled(8.0)),
    "qwen2.5-0.5b": _shape(_QWEN2, 24, 896, 14, 2, 64, 4864, 151936, 32768),
    "qwen2.5-1.5b": _shape(_QWEN2, 28, 1536, 12, 2, 128, 8960, 151936, 131072),
    "qwen2.5-7b": _shape(_QWEN2 | _UNTIED, 28, 3584, 28, 4, 128, 18944, 152064, 131072),
    "qwen3-0.6b": _shape(_QWEN3, 28, 1024, 16, 8, 128, 3072, 151936, 40960),
    "gemma-3-270m": _shape(_GEMMA_3, 18, 640, 4, 1, 256, 2048, 262144, 32768, window=512),
    "gemma-3-1b": _shape(_GEMMA_3, 26, 1152, 4, 1, 256, 6912, 262144, 32768, window=512),
    "gemma-3-4b-text": _shape(
        _GEMMA_3, 34, 2560, 8, 4, 256, 10240, 262208, 131072, window=1024, rope_scaling=RopeScaling(factor=8.0)
    ),
    "qwen3-4b": _shape(_QWEN3, 36, 2560, 32, 8, 128, 9728, 151936, 40960),
    "olmo-2-7b": _shape(_OLMO_2, 32, 4096, 32, 32, 128, 11008, 100352, 4096),
    "gpt-oss-20b": _shape(GPT_OSS | dict(experts=32, experts_per_token=4), 24, 2880, 64, 8, 64, 2880, 201088, 131072),
    "qwen3-30b-a3b": _shape(QWEN3_MOE | _UNTIED | _OF_128, 48, 2048, 32, 4, 128, 768, 151936, 40960),
}
