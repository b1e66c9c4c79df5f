"""Shapes of published models: for benchmarks, memory estimates (--dry_run) and tests, without their weights."""

import dataclasses

from tba_jax.models.config import DecoderConfig, RopeScaling


def _pythia(*, layers: int, width: int, heads: int, vocab: int) -> DecoderConfig:
    return DecoderConfig(
        architecture="gpt_neox",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        head_size=width // heads,
        rotary_size=width // heads // 4,
        ffn=4 * width,
        vocab=vocab,
        max_positions=2048,
        norm="layer",
        norm_epsilon=1e-5,
        parallel_residual=True,
        activation="gelu",
        gated=False,
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        tied_embedding=False,
    )


def _qwen2_5(
    *, layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocab: int, positions: int, tied: bool
) -> DecoderConfig:
    return DecoderConfig(
        architecture="qwen2",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_size=width // heads,
        ffn=ffn,
        vocab=vocab,
        max_positions=positions,
        norm_epsilon=1e-6,
        rope_theta=1e6,
        qkv_bias=True,
        tied_embedding=tied,
    )


def _qwen3(*, layers: int, width: int, heads: int, ffn: int) -> DecoderConfig:
    return DecoderConfig(
        architecture="qwen3",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=8,
        head_size=128,
        ffn=ffn,
        vocab=151936,
        max_positions=40960,
        norm_epsilon=1e-6,
        rope_theta=1e6,
        qk_norm=True,
    )


def _gemma3(
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    window: int,
    vocab: int = 262144,
    positions: int = 32768,
    rope_scaling: RopeScaling | None = None,
) -> DecoderConfig:
    return DecoderConfig(
        architecture="gemma3_text",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_size=256,
        ffn=ffn,
        vocab=vocab,
        max_positions=positions,
        norm="offset_rms",
        post_norms=True,
        qk_norm=True,
        scaled_embedding=True,
        activation="gelu_tanh",
        layer_pattern="lllllg",
        window=window,
        rope_theta=1e6,
        rope_scaling=rope_scaling,
        local_rope_theta=1e4,
    )


_LLAMA_3_2_1B = DecoderConfig(
    layers=16,
    width=2048,
    heads=32,
    kv_heads=8,
    head_size=64,
    ffn=8192,
    vocab=128256,
    max_positions=131072,
    norm_epsilon=1e-5,
    rope_theta=5e5,
    rope_scaling=RopeScaling(factor=32.0, low_frequency=1.0, high_frequency=4.0, original_positions=8192),
)

PRESETS: dict[str, DecoderConfig] = {
    "gpt2": DecoderConfig(
        architecture="gpt2",
        layers=12,
        width=768,
        heads=12,
        kv_heads=12,
        head_size=64,
        ffn=3072,
        vocab=50257,
        max_positions=1024,
        norm="layer",
        norm_epsilon=1e-5,
        positions="learned",
        activation="gelu_tanh",
        gated=False,
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
    ),
    "pythia-410m": _pythia(layers=24, width=1024, heads=16, vocab=50304),
    "pythia-1b": _pythia(layers=16, width=2048, heads=8, vocab=50304),
    "pythia-2.8b": _pythia(layers=32, width=2560, heads=32, vocab=50304),
    "pythia-6.9b": _pythia(layers=32, width=4096, heads=32, vocab=50432),
    "rho-math-1b": DecoderConfig(
        layers=22,
        width=2048,
        heads=32,
        kv_heads=4,
        head_size=64,
        ffn=5632,
        vocab=32000,
        max_positions=2048,
        norm_epsilon=1e-5,
        tied_embedding=False,
    ),
    "llama-3.2-1b": _LLAMA_3_2_1B,
    "llama-3.1-8b": dataclasses.replace(
        _LLAMA_3_2_1B,
        layers=32,
        width=4096,
        head_size=128,
        ffn=14336,
        tied_embedding=False,
        rope_scaling=RopeScaling(factor=8.0, low_frequency=1.0, high_frequency=4.0, original_positions=8192),
    ),
    "qwen2.5-0.5b": _qwen2_5(layers=24, width=896, heads=14, kv_heads=2, ffn=4864, vocab=151936, positions=32768, tied=True),
    "qwen2.5-1.5b": _qwen2_5(layers=28, width=1536, heads=12, kv_heads=2, ffn=8960, vocab=151936, positions=131072, tied=True),
    "qwen2.5-7b": _qwen2_5(layers=28, width=3584, heads=28, kv_heads=4, ffn=18944, vocab=152064, positions=131072, tied=False),
    "qwen3-0.6b": _qwen3(layers=28, width=1024, heads=16, ffn=3072),
    "gemma-3-270m": _gemma3(layers=18, width=640, heads=4, kv_heads=1, ffn=2048, window=512),
    "gemma-3-1b": _gemma3(layers=26, width=1152, heads=4, kv_heads=1, ffn=6912, window=512),
    "gemma-3-4b-text": _gemma3(
        layers=34,
        width=2560,
        heads=8,
        kv_heads=4,
        ffn=10240,
        window=1024,
        vocab=262208,
        positions=131072,
        rope_scaling=RopeScaling(factor=8.0),
    ),
    "qwen3-4b": _qwen3(layers=36, width=2560, heads=32, ffn=9728),
}
