"""Checkpoints of Llama, Mistral, Qwen2 and Qwen3: gated feed-forward, RMS norms, rotary positions. See architectures.py.

gemma.py uses the sizes and the tensors too.
A linear weight is [out, in].
"""

from typing import Any

from tba_jax.models.activations import ACTIVATIONS, OURS
from tba_jax.models.config import DecoderConfig
from tba_jax.models.hugging_face import files, rotary_settings
from tba_jax.models.hugging_face.files import Settings, Stored, Tensors


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
        "activation": settings.choice("hidden_act", OURS, "silu"),
        "tied_embedding": settings.flag("tie_word_embeddings", False),
    }


def read_llama(settings: Settings) -> dict[str, Any]:
    settings.only("sliding_window", None)
    fields = _read_gated(settings, kv_heads=None, head_size=None, max_positions=2048)
    bias = settings.flag("attention_bias", False)
    return fields | {"qkv_bias": bias, "out_bias": bias, "ffn_bias": settings.flag("mlp_bias", False)}


def read_mistral(settings: Settings) -> dict[str, Any]:
    if settings.values.get("sliding_window", 4096) is not None:
        raise ValueError(
            f"{settings.path}: sliding_window={settings.values.get('sliding_window', 4096)!r} is not supported (where the key is "
            "absent, transformers takes 4096); attention is over whole sequences, sliding_window=null"
        )
    settings.only("attention_bias", False)
    settings.only("mlp_bias", False)
    return _read_gated(settings, kv_heads=8, head_size=None, max_positions=131072)


def _refuse_windows(settings: Settings) -> None:
    settings.only("use_sliding_window", False, None)
    settings.only("use_mrope", False, None)
    if other := sorted(set(settings.names("layer_types")) - {"full_attention"}):
        raise ValueError(f"{settings.path}: layer_types holds {other}; all layers must be 'full_attention'")


def read_qwen2(settings: Settings) -> dict[str, Any]:
    _refuse_windows(settings)
    fields = _read_gated(settings, kv_heads=32, head_size=None, max_positions=32768)
    return fields | {"qkv_bias": True}


def read_qwen3(settings: Settings) -> dict[str, Any]:
    _refuse_windows(settings)
    fields = _read_gated(settings, kv_heads=32, head_size=128, max_positions=32768)
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
    return _write_gated(config) | {"sliding_window": None}


def write_qwen2(config: DecoderConfig) -> dict[str, Any]:
    return _write_gated(config) | {"use_sliding_window": False}


def write_qwen3(config: DecoderConfig) -> dict[str, Any]:
    return _write_gated(config) | {"use_sliding_window": False, "attention_bias": config.qkv_bias}


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
