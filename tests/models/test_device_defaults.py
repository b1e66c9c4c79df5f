"""The table of defaults by kind of device: complete, of values that settings may have, and behind what a user sets."""

import jax.numpy as jnp
import pytest

from tba_jax.experiment.schema import SCHEMA
from tba_jax.models import attention, hardware, layers
from tba_jax.models.hardware import DEFAULTS


def test_every_setting_has_a_value_on_every_platform_and_is_left_to_the_device():
    config = SCHEMA.defaults()
    assert config.learner.remat == config.model.attention == hardware.AUTO and config.searchers.decode_chunk == 0
    for setting, platforms in DEFAULTS.items():
        assert platforms.keys() == {"cpu", "gpu", "tpu"} and setting in SCHEMA.rules
        assert not {hardware.AUTO, 0} & set(platforms.values())
    assert set(DEFAULTS["learner.remat"].values()) <= set(layers.REMAT)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "rocm"])
def test_a_users_value_goes_before_the_table(platform):
    there = "gpu" if platform == "rocm" else platform
    assert hardware.value("searchers.decode_chunk", 8, platform) == 8
    assert hardware.value("searchers.decode_chunk", 0, platform) == DEFAULTS["searchers.decode_chunk"][there]
    assert hardware.value("learner.remat", "dots", platform) == "dots"
    assert hardware.value("learner.remat", "auto", platform) == DEFAULTS["learner.remat"][there]


def test_attention_is_the_tables_where_the_device_takes_it():
    half = jnp.dtype("bfloat16")
    assert [attention.fastest(platform, half, 64) for platform in ("cpu", "gpu", "tpu")] == ["xla", "cudnn", "splash"]
    assert attention.fastest("gpu", jnp.dtype("float32"), 64) == attention.fastest("gpu", half, 512) == "xla"
