"""The table of defaults by kind of device: complete, of values that settings may have, and behind what a user sets."""

import jax
import jax.numpy as jnp
import pytest

from tba_jax import sharding
from tba_jax.experiment import meshes
from tba_jax.experiment.schema import SCHEMA
from tba_jax.models import attention, hardware, layers
from tba_jax.models.hardware import DEFAULTS, Default
from tba_jax.roles.searcher import searcher


def test_every_setting_has_a_value_and_a_source_on_every_platform():
    for setting, platforms in DEFAULTS.items():
        assert platforms.keys() == {"cpu", "gpu", "tpu"} and setting in SCHEMA.rules
        assert all(default.source and default.value not in (hardware.AUTO, 0) for default in platforms.values())
    assert {default.value for default in DEFAULTS["learner.remat"].values()} <= set(layers.REMAT)


def test_what_is_left_to_the_device_is_what_a_run_starts_with():
    config = SCHEMA.defaults()
    assert config.learner.remat == config.model.attention == hardware.AUTO
    assert config.searchers.decode_chunk == config.searchers.slots == 0


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu", "rocm"])
def test_a_users_value_goes_before_the_table(platform):
    assert hardware.value("learner.remat", "dots", platform) == "dots"
    assert hardware.value("searchers.decode_chunk", 8, platform) == 8
    there = platform if platform in ("cpu", "tpu") else "gpu"
    assert hardware.value("searchers.decode_chunk", 0, platform) == DEFAULTS["searchers.decode_chunk"][there].value
    assert hardware.value("learner.remat", "auto", platform) == DEFAULTS["learner.remat"][there].value


def test_attention_is_the_tables_where_the_device_takes_it():
    half = jnp.dtype("bfloat16")
    assert [attention.fastest(platform, half, 64) for platform in ("cpu", "gpu", "tpu")] == ["xla", "cudnn", "splash"]
    assert attention.fastest("gpu", jnp.dtype("float32"), 64) == attention.fastest("gpu", half, 512) == "xla"


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu", "rocm"])
def test_slots_are_a_share_of_a_batch_of_whole_queries(platform, monkeypatch):
    batch = dict(queries=8, samples=24)
    assert hardware.slots(96, **batch, platform=platform) == 96
    assert hardware.slots(0, **batch, platform=platform) == 8 * 24
    monkeypatch.setitem(DEFAULTS, "searchers.slots", dict.fromkeys(("cpu", "gpu", "tpu"), Default(0.25, "for this test")))
    assert hardware.slots(0, **batch, platform=platform) == 2 * 24
    assert hardware.slots(0, queries=1, samples=24, platform=platform) == 24


def test_the_slots_of_the_table_are_those_of_checks_estimates_and_searchers(monkeypatch):
    config = SCHEMA.defaults()
    s = config.searchers
    assert meshes.slots_of(config) == s.queries_per_batch * s.samples_per_query
    monkeypatch.setitem(DEFAULTS, "searchers.slots", dict.fromkeys(("cpu", "gpu", "tpu"), Default(0.5, "for this test")))
    assert meshes.slots_of(config) == s.queries_per_batch * s.samples_per_query // 2
    mesh = sharding.make_mesh((1, 1, 1), setting="test", devices=jax.devices()[:1])
    assert searcher._slots(config, mesh) == meshes.slots_of(config)
    s.slots = 7
    assert searcher._slots(config, mesh) == meshes.slots_of(config) == 7
