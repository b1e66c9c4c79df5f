"""The table of architectures: published config.json files, configs written and read again, and names of tensors."""

import dataclasses
import json
from pathlib import Path

import pytest

from tba_jax.models.config import PRESETS, DecoderConfig
from tba_jax.models.hugging_face import load
from tba_jax.models.hugging_face.architectures import ARCHITECTURES
from tba_jax.models.hugging_face.files import Settings
from tests.support.tiny_checkpoints import FIXTURES

# config.json files as the models' pages show them, without keys that only training and sampling read.
PUBLISHED = json.loads((FIXTURES / "published_configs.json").read_text())
MISTRAL = dataclasses.replace(
    PRESETS["llama-3.1-8b"], architecture="mistral", vocab=32768, max_positions=32768, rope_theta=1e6, rope_scaling=None
)


def read(values: dict) -> DecoderConfig:
    return load.config_of(Settings(Path("config.json"), values), compute_dtype="float32")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    assert read(PUBLISHED[name]) == (PRESETS | {"mistral-7b-v0.3": MISTRAL})[name]


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
