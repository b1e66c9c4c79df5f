"""Checkpoints of GPT-NeoX (Pythia) and GPT-2: layer norms, biases, query, key and value in one tensor. See architectures.py.

A linear weight is [out, in] in GPT-NeoX, and [in, out] in GPT-2 (its Conv1D).
"""

from typing import Any

from tba_jax.models.config import ACTIVATION_NAMES, ACTIVATIONS, DecoderConfig
from tba_jax.models.hugging_face import files, rotary_settings
from tba_jax.models.hugging_face.files import Settings, Stored, Tensors


def _read_block(settings: Settings, *, width_key: str, heads_key: str) -> dict[str, Any]:
    """The fields that both families share: layer norms, keys and values for every head, a feed-forward with biases."""
    width, heads = settings.size(width_key), settings.size(heads_key)
    if width % heads:
        raise ValueError(f"{settings.path}: {width_key}={width} is not divisible by {heads_key}={heads}")
    settings.only("quantization_config", None)
    return {
        "width": width,
        "heads": heads,
        "kv_heads": heads,
        "head_size": width // heads,
        "vocab": settings.size("vocab_size"),
        "norm": "layer",
        "gated": False,
        "ffn_bias": True,
    }


def read_gpt_neox(settings: Settings) -> dict[str, Any]:
    block = _read_block(settings, width_key="hidden_size", heads_key="num_attention_heads")
    head_size = block["head_size"]
    settings.only("head_dim", None, head_size)
    rope, rotated = rotary_settings.read(settings, theta=10_000.0, theta_key="rotary_emb_base")
    factor = settings.number("rotary_pct", 0.25) if rotated is None else rotated
    if not 1 <= head_size * factor <= head_size:
        key = "rotary_pct" if rotated is None else "partial_rotary_factor"
        raise ValueError(f"{settings.path}: {key}={factor!r} of heads of {head_size} elements rotates {head_size * factor:g}")
    rotary_size = int(head_size * factor)
    bias = settings.flag("attention_bias", True)
    fields = {
        "layers": settings.size("num_hidden_layers"),
        "ffn": settings.size("intermediate_size"),
        "max_positions": settings.size("max_position_embeddings", 2048),
        "norm_epsilon": settings.number("layer_norm_eps", 1e-5),
        "rotary_size": 0 if rotary_size == head_size else rotary_size,
        "parallel_residual": settings.flag("use_parallel_residual", True),
        "activation": settings.choice("hidden_act", ACTIVATION_NAMES, "gelu"),
        "qkv_bias": bias,
        "out_bias": bias,
        "tied_embedding": settings.flag("tie_word_embeddings", False),
    }
    return block | rope | fields


def write_gpt_neox(config: DecoderConfig) -> dict[str, Any]:
    c = config
    factor = (c.rotary_size or c.head_size) / c.head_size
    rope = rotary_settings.write(c)
    rope["rope_parameters"] = rope["rope_parameters"] | {"partial_rotary_factor": factor}
    return rope | {
        "model_type": "gpt_neox",
        "hidden_size": c.width,
        "intermediate_size": c.ffn,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "vocab_size": c.vocab,
        "max_position_embeddings": c.max_positions,
        "layer_norm_eps": c.norm_epsilon,
        "rotary_pct": factor,
        "rotary_emb_base": c.rope_theta,
        "use_parallel_residual": c.parallel_residual,
        "hidden_act": ACTIVATIONS[c.activation].names[0],
        "attention_bias": c.qkv_bias,
        "tie_word_embeddings": c.tied_embedding,
    }


def gpt_neox_tensors(config: DecoderConfig) -> Tensors:
    c = config
    layer = "gpt_neox.layers.{layer}"
    tensors: Tensors = {"gpt_neox.embed_in.weight": (Stored("embedding.weight", "V D", "V D"),)}
    tensors |= files.norm(f"{layer}.input_layernorm", "layers.attention_norm", bias=True)
    tensors |= files.fused(f"{layer}.attention.query_key_value.weight", "(N 3 H) D", "D N H", "weight")
    if c.qkv_bias:
        tensors |= files.fused(f"{layer}.attention.query_key_value.bias", "(N 3 H)", "N H", "bias")
    tensors |= files.linear(f"{layer}.attention.dense", "layers.attention.out", ("D (N H)", "N H D", "D"), c.out_bias)
    tensors |= files.norm(f"{layer}.post_attention_layernorm", "layers.feed_forward_norm", bias=True)
    tensors |= files.linear(f"{layer}.mlp.dense_h_to_4h", "layers.feed_forward.up", ("F D", "D F", "F"), c.ffn_bias)
    tensors |= files.linear(f"{layer}.mlp.dense_4h_to_h", "layers.feed_forward.down", ("D F", "F D", "D"), c.ffn_bias)
    tensors |= files.norm("gpt_neox.final_layer_norm", "final_norm", bias=True)
    return tensors | files.head(c.head, c.tied_embedding, "embed_out.weight")


def read_gpt2(settings: Settings) -> dict[str, Any]:
    block = _read_block(settings, width_key="n_embd", heads_key="n_head")
    settings.only("scale_attn_weights", True)
    settings.only("scale_attn_by_inverse_layer_idx", False)
    settings.only("reorder_and_upcast_attn", False)
    settings.only("add_cross_attention", False)
    return block | {
        "layers": settings.size("n_layer"),
        "ffn": settings.size("n_inner", 4 * block["width"]),
        "max_positions": settings.size("n_positions", 1024),
        "norm_epsilon": settings.number("layer_norm_epsilon", 1e-5),
        "positions": "learned",
        "activation": settings.choice("activation_function", ACTIVATION_NAMES, "gelu_new"),
        "qkv_bias": True,
        "out_bias": True,
        "tied_embedding": settings.flag("tie_word_embeddings", True),
    }


def write_gpt2(config: DecoderConfig) -> dict[str, Any]:
    c = config
    return {
        "model_type": "gpt2",
        "n_embd": c.width,
        "n_inner": c.ffn,
        "n_layer": c.layers,
        "n_head": c.heads,
        "vocab_size": c.vocab,
        "n_positions": c.max_positions,
        "layer_norm_epsilon": c.norm_epsilon,
        "activation_function": ACTIVATIONS[c.activation].names[0],
        "tie_word_embeddings": c.tied_embedding,
    }


def gpt2_tensors(config: DecoderConfig) -> Tensors:
    layer = "transformer.h.{layer}"
    tensors: Tensors = {
        "transformer.wte.weight": (Stored("embedding.weight", "V D", "V D"),),
        "transformer.wpe.weight": (Stored("position_embedding.weight", "S D", "S D"),),
    }
    tensors |= files.norm(f"{layer}.ln_1", "layers.attention_norm", bias=True)
    tensors |= files.fused(f"{layer}.attn.c_attn.weight", "D (3 N H)", "D N H", "weight")
    tensors |= files.fused(f"{layer}.attn.c_attn.bias", "(3 N H)", "N H", "bias")
    tensors |= files.linear(f"{layer}.attn.c_proj", "layers.attention.out", ("(N H) D", "N H D", "D"), True)
    tensors |= files.norm(f"{layer}.ln_2", "layers.feed_forward_norm", bias=True)
    tensors |= files.linear(f"{layer}.mlp.c_fc", "layers.feed_forward.up", ("D F", "D F", "F"), True)
    tensors |= files.linear(f"{layer}.mlp.c_proj", "layers.feed_forward.down", ("F D", "F D", "D"), True)
    tensors |= files.norm("transformer.ln_f", "final_norm", bias=True)
    return tensors | files.head(config.head, config.tied_embedding, "lm_head.weight")
