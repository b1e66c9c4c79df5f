"""Text-only checkpoints of Gemma 3. See architectures.py; the tensors are those of llama_family.py and more norms."""

from typing import Any

from tba_jax.models.activations import OURS
from tba_jax.models.config import DecoderConfig
from tba_jax.models.hugging_face import layer_types, llama_family, rotary_settings
from tba_jax.models.hugging_face.files import Settings

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
        "activation": OURS[_ACTIVATION],
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
