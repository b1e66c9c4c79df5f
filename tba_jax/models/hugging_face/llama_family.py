"""Checkpoints of Llama, Mistral, Qwen2 and Qwen3: gated feed-forward, RMS norms, rotary positions. See architectures.py.

gemma.py uses the sizes and the tensors too.
A linear weight is [out, in].
"""

from typing import Any

from tba_jax.models.config import ACTIVATION_NAMES, ACTIVATIONS, DecoderConfig
from tba_jax.models.hugging_face import files, layer_types, llama_family, rotary_settings
from tba_jax.models.hugging_face.files import Settings, Stored, Tensors

_ACTIVATION = "gelu_pytorch_tanh"
# transformers' values of absent keys.
_HEAD_SIZE, _QUERY_SCALAR = 256, 256


def read_gemma3(settings: Settings) -> dict[str, Any]:
    settings.only("attn_logit_softcapping", None)
    settings.only("final_logit_softcapping", None)
    settings.only("use_bidirectional_attention", False, None)
    settings.only("hidden_activation", _ACTIVATION)
    fields = llama_family.read_sizes(settings, kv_heads=4, head_size=_HEAD_SIZE, max_positions=131072)
    bias, layers = settings.flag("attention_bias", False), fields["layers"]
    scalar = settings.size("query_pre_attn_scalar", _QUERY_SCALAR)
    every = settings.size("sliding_window_pattern", 6)
    pattern = "".join("l" if (layer + 1) % every else "g" for layer in range(layers))
    return {
        **fields,
        **rotary_settings.read_two(settings),
        **layer_types.read(settings, absent=pattern, window=layer_types.window(settings)),
        "activation": ACTIVATION_NAMES[_ACTIVATION],
        "norm": "offset_rms",
        "post_norms": True,
        "qk_norm": True,
        "scaled_embedding": True,
        "query_scalar": 0 if scalar == fields["head_size"] else scalar,
        "qkv_bias": bias,
        "out_bias": bias,
        "tied_embedding": settings.flag("tie_word_embeddings", True),
    }


def write_gemma3(config: DecoderConfig) -> dict[str, Any]:
    c = config
    return {
        **llama_family.write_sizes(c),
        **rotary_settings.write_two(c),
        **layer_types.write(c),
        "hidden_activation": _ACTIVATION,
        "query_pre_attn_scalar": c.query_scalar or c.head_size,
        "attention_bias": c.qkv_bias,
    }


def read_sizes(settings: Settings, *, kv_heads: int | None, head_size: int | None, max_positions: int) -> dict[str, Any]:
    """The sizes and the epsilon of the norms.

    The arguments are the values of transformers for absent keys. None: the value follows from other keys.
    """
    width, heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    if settings.values.get("head_dim") is None and head_size is None and width % heads:
        raise ValueError(
            f"{settings.path}: hidden_size={width} is not divisible by num_attention_heads={heads}, and head_dim is not given"
        )
    settings.only("quantization_config", None)
    return {
        "layers": settings.size("num_hidden_layers"),
        "width": width,
        "heads": heads,
        "kv_heads": settings.size("num_key_value_heads", kv_heads or heads, heads),
        "head_size": settings.size("head_dim", head_size or width // heads),
        "ffn": settings.size("intermediate_size"),
        "vocab": settings.size("vocab_size"),
        "max_positions": settings.size("max_position_embeddings", max_positions),
        "norm_epsilon": settings.number("rms_norm_eps", 1e-6),
    }


def _read_gated(settings: Settings, **absent: Any) -> dict[str, Any]:
    """The fields that Llama, Mistral and Qwen share. Args: absent: see read_sizes."""
    sizes = read_sizes(settings, **absent)
    settings.only("partial_rotary_factor", 1.0, 1, None)
    rope, rotated = rotary_settings.read(settings, theta=10_000.0)
    if rotated not in (None, 1.0):
        raise ValueError(f"{settings.path}: partial_rotary_factor={rotated!r} is not supported; whole heads are rotated (1.0)")
    return {
        **sizes,
        **rope,
        "activation": settings.choice("hidden_act", ACTIVATION_NAMES, "silu"),
        "tied_embedding": settings.flag("tie_word_embeddings", False),
    }


def read_llama(settings: Settings) -> dict[str, Any]:
    settings.only("sliding_window", None)
    fields = _read_gated(settings, kv_heads=None, head_size=None, max_positions=2048)
    bias = settings.flag("attention_bias", False)
    return fields | {"qkv_bias": bias, "out_bias": bias, "ffn_bias": settings.flag("mlp_bias", False)}


def read_mistral(settings: Settings) -> dict[str, Any]:
    settings.only("attention_bias", False)
    settings.only("mlp_bias", False)
    settings.only("layer_types", None)
    fields = _read_gated(settings, kv_heads=8, head_size=None, max_positions=131072)
    window = layer_types.window(settings)
    return fields | layer_types.read(settings, absent=("l" if window else "g") * fields["layers"], window=window)


def _read_qwen(settings: Settings, *, head_size: int | None) -> dict[str, Any]:
    """The fields that Qwen2 and Qwen3 share. With windows, the layers from max_window_layers on are local."""
    settings.only("use_mrope", False, None)
    fields = _read_gated(settings, kv_heads=32, head_size=head_size, max_positions=32768)
    layers, window = fields["layers"], None
    if settings.flag("use_sliding_window", False):
        window = layer_types.window(settings)
    whole = layers
    if window is not None:
        whole = 0 if settings.values.get("max_window_layers") == 0 else min(layers, settings.size("max_window_layers", 28))
    return fields | layer_types.read(settings, absent="g" * whole + "l" * (layers - whole), window=window)


def read_qwen2(settings: Settings) -> dict[str, Any]:
    return _read_qwen(settings, head_size=None) | {"qkv_bias": True}


def read_qwen3(settings: Settings) -> dict[str, Any]:
    fields = _read_qwen(settings, head_size=128)
    bias = settings.flag("attention_bias", False)
    return fields | {"qkv_bias": bias, "out_bias": bias, "qk_norm": True}


def write_sizes(config: DecoderConfig) -> dict[str, Any]:
    """The keys that Gemma has as well."""
    c = config
    return {
        "model_type": c.architecture,
        "hidden_size": c.width,
        "intermediate_size": c.ffn,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_size,
        "vocab_size": c.vocab,
        "max_position_embeddings": c.max_positions,
        "rms_norm_eps": c.norm_epsilon,
        "tie_word_embeddings": c.tied_embedding,
    }


def _write_gated(config: DecoderConfig) -> dict[str, Any]:
    return write_sizes(config) | rotary_settings.write(config) | {"hidden_act": ACTIVATIONS[config.activation].names[0]}


def write_llama(config: DecoderConfig) -> dict[str, Any]:
    return _write_gated(config) | {"attention_bias": config.qkv_bias, "mlp_bias": config.ffn_bias}


def write_mistral(config: DecoderConfig) -> dict[str, Any]:
    return _write_gated(config) | {"sliding_window": config.window or None}


def write_qwen2(config: DecoderConfig) -> dict[str, Any]:
    c = config
    if not c.window:
        return _write_gated(c) | {"use_sliding_window": False}
    # max_window_layers is for versions of transformers that do not know layer_types.
    windows = {"use_sliding_window": True, "max_window_layers": c.local_layers.index(True)} | layer_types.write(c)
    return _write_gated(c) | windows


def write_qwen3(config: DecoderConfig) -> dict[str, Any]:
    return write_qwen2(config) | {"attention_bias": config.qkv_bias}


def tensors(config: DecoderConfig) -> Tensors:
    c = config
    layer = "model.layers.{layer}"
    tensors: Tensors = {"model.embed_tokens.weight": (Stored("embedding.weight", "V D", "V D"),)}
    tensors |= files.norm(f"{layer}.input_layernorm", "layers.attention_norm")
    tensors |= files.linear(f"{layer}.self_attn.q_proj", "layers.attention.query", ("(N H) D", "D N H", "(N H)"), c.qkv_bias)
    tensors |= files.linear(f"{layer}.self_attn.k_proj", "layers.attention.key", ("(G H) D", "D G H", "(G H)"), c.qkv_bias)
    tensors |= files.linear(f"{layer}.self_attn.v_proj", "layers.attention.value", ("(G H) D", "D G H", "(G H)"), c.qkv_bias)
    tensors |= files.linear(f"{layer}.self_attn.o_proj", "layers.attention.out", ("D (N H)", "N H D", "D"), c.out_bias)
    if c.qk_norm:
        tensors |= files.norm(f"{layer}.self_attn.q_norm", "layers.attention.query_norm", "H")
        tensors |= files.norm(f"{layer}.self_attn.k_norm", "layers.attention.key_norm", "H")
    if c.post_norms:
        tensors |= files.norm(f"{layer}.post_attention_layernorm", "layers.attention_post_norm")
        tensors |= files.norm(f"{layer}.pre_feedforward_layernorm", "layers.feed_forward_norm")
        tensors |= files.norm(f"{layer}.post_feedforward_layernorm", "layers.feed_forward_post_norm")
    else:
        tensors |= files.norm(f"{layer}.post_attention_layernorm", "layers.feed_forward_norm")
    tensors |= files.linear(f"{layer}.mlp.gate_proj", "layers.feed_forward.gate", ("F D", "D F", "F"), c.ffn_bias)
    tensors |= files.linear(f"{layer}.mlp.up_proj", "layers.feed_forward.up", ("F D", "D F", "F"), c.ffn_bias)
    tensors |= files.linear(f"{layer}.mlp.down_proj", "layers.feed_forward.down", ("D F", "F D", "D"), c.ffn_bias)
    tensors |= files.norm("model.norm", "final_norm")
    return tensors | files.head(c.head, c.tied_embedding, "lm_head.weight")
