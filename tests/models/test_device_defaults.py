"""The table of defaults by kind of device: complete, of values that settings may have, and behind what a user sets."""

import jax.numpy as jnp
import pytest

from tba_jax.experiment.schema import SCHEMA
from tba_jax.models import attention, device_defaults, layers
from tba_jax.models.device_defaults import DEFAULTS


def test_every_setting_has_a_value_and_a_source_on_every_platform():
    for setting, platforms in DEFAULTS.items():
        assert platforms.keys() == {"cpu", "gpu", "tpu"} and setting in SCHEMA.rules
        assert all(default.source and default.value not in (device_defaults.AUTO, 0) for default in platforms.values())
    assert {default.value for default in DEFAULTS["learner.remat"].values()} <= set(layers.REMAT)


def test_what_is_left_to_the_device_is_what_a_run_starts_with():
    config = SCHEMA.defaults()
    assert config.learner.remat == config.model.attention == device_defaults.AUTO and config.searchers.decode_chunk == 0


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu", "rocm"])
def test_a_users_value_goes_before_the_table(platform):
    assert device_defaults.value("learner.remat", "dots", platform) == "dots"
    assert device_defaults.value("searchers.decode_chunk", 8, platform) == 8
    there = platform if platform in ("cpu", "tpu") else "gpu"
    assert device_defaults.value("searchers.decode_chunk", 0, platform) == DEFAULTS["searchers.decode_chunk"][there].value
    assert device_defaults.value("learner.remat", "auto", platform) == DEFAULTS["learner.remat"][there].value


def test_attention_is_the_tables_where_the_device_takes_it():
    half = jnp.dtype("bfloat16")
    assert [attention.fastest(platform, half, 64) for platform in ("cpu", "gpu", "tpu")] == ["xla", "cudnn", "splash"]
    assert attention.fastest("gpu", jnp.dtype("float32"), 64) == attention.fastest("gpu", half, 512) == "xla"
