"""Shapes of published models: for benchmarks, memory estimates (--dry_run) and tests, without their weights."""

from typing import Any

from tba_jax.models.config import DecoderConfig, RopeScaling

# What the models of a family share.
_GPT: dict[str, Any] = dict(norm="layer", norm_epsilon=1e-5, gated=False, qkv_bias=True, out_bias=True, ffn_bias=True)
_GPT2 = _GPT | dict(architecture="gpt2", positions="learned", activation="gelu_tanh")
_PYTHIA = _GPT | dict(architecture="gpt_neox", parallel_residual=True, activation="gelu", tied_embedding=False)
_LLAMA_3 = dict(architecture="llama", norm_epsilon=1e-5, rope_theta=5e5)
_QWEN2 = dict(architecture="qwen2", rope_theta=1e6, qkv_bias=True)
_QWEN3 = dict(architecture="qwen3", rope_theta=1e6, qk_norm=True)
_GEMMA_3 = dict(
    architecture="gemma3_text",
    norm="offset_rms",
    post_norms=True,
    qk_norm=True,
    scaled_embedding=True,
    activation="gelu_tanh",
    layer_pattern="lllllg",
    rope_theta=1e6,
    local_rope_theta=1e4,
)
_UNTIED = dict(tied_embedding=False)
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
}
