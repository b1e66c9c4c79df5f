"""The table of architectures: published config.json files, configs written and read again, and names of tensors."""

import dataclasses
import json
from pathlib import Path

import pytest

from tba_jax.models.config import PRESETS, DecoderConfig
from tba_jax.models.hugging_face import load
from tba_jax.models.hugging_face.architectures import ARCHITECTURES
from tba_jax.models.hugging_face.files import Settings

# As the models' pages show them, without keys that only training and sampling read.
PUBLISHED = {
    "gpt2": """{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "vocab_size": 50257}""",
    "pythia-410m": """{"architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu", "hidden_size": 1024,
        "intermediate_size": 4096, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "gpt_neox",
        "num_attention_heads": 16, "num_hidden_layers": 24, "rotary_emb_base": 10000, "rotary_pct": 0.25,
        "tie_word_embeddings": false, "torch_dtype": "float16", "use_parallel_residual": true, "vocab_size": 50304}""",
    "llama-3.2-1b": """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16", "vocab_size": 128256}""",
    "qwen2.5-0.5b": """{"architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 32768, "tie_word_embeddings": true, "use_mrope": false, "use_sliding_window": false,
        "vocab_size": 151936}""",
    "qwen3-0.6b": """{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
        "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true,
        "use_sliding_window": false, "vocab_size": 151936}""",
    "gemma-3-1b": """{"architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attn_logit_softcapping": null,
        "cache_implementation": "hybrid", "final_logit_softcapping": null, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26,
        "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
        "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16", "vocab_size": 262144}""",
    "mistral-7b-v0.3": """{"architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "sliding_window": null, "tie_word_embeddings": false, "vocab_size": 32768}""",
}
MISTRAL = dataclasses.replace(
    PRESETS["llama-3.1-8b"], architecture="mistral", vocab=32768, max_positions=32768, rope_theta=1e6, rope_scaling=None
)


def read(values: dict) -> DecoderConfig:
    return load.config_of(Settings(Path("config.json"), values), compute_dtype="float32")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    assert read(json.loads(PUBLISHED[name])) == (PRESETS | {"mistral-7b-v0.3": MISTRAL})[name]


@pytest.mark.parametrize("config", [*PRESETS.values(), MISTRAL], ids=[*PRESETS, "mistral"])
def test_written_configs_are_read_again(config):
    assert read(ARCHITECTURES[config.architecture].write(config)) == config


def test_written_configs_are_what_transformers_reads():
    import transformers

    def theirs(config_class: str, preset: str, **changes):
        config = dataclasses.replace(PRESETS[preset], **changes)
        return getattr(transformers, config_class)(**ARCHITECTURES[config.architecture].write(config))

    neox = theirs("GPTNeoXConfig", "pythia-1b")
    assert neox.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
    llama, gemma = theirs("LlamaConfig", "llama-3.2-1b", rope_theta=123.0), theirs("Gemma3TextConfig", "gemma-3-4b-text")
    assert gemma.rope_parameters == {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert gemma.layer_types == [*(["sliding_attention"] * 5 + ["full_attention"]) * 5, *["sliding_attention"] * 4]
    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    assert llama.rope_parameters == {"rope_type": "llama3", "rope_theta": 123.0, **scaling}
