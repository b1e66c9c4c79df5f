"""The memory of the engine's programs: they work on the caches in place, on TPUs too, which are compiled for without one."""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys

import jax
import pytest

from tba_jax import sharding
from tba_jax.models import kv_cache
from tests.support import lane_memory


@pytest.mark.slow
@pytest.mark.parametrize("recipe, layers", [("gsm8k_qwen2_5_1_5b", 3), ("tldr_pythia_1b", 3), ("gsm8k_rho1b", 8)])
def test_prefill_and_decode_loop_are_in_place_on_a_tpu(recipe, layers):
    """Rings of the first recipe need 511 entries, which do not fill tiles. Heads of the second are wider than a tile, and those
    of the third share no keys.

    In a process of its own: libtpu does not know the tests' XLA_FLAGS.
    """
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu, which holds the compiler for TPUs, is not installed: it comes with the extra `tpu`")
    environment = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    }
    # Rings of 128 entries have one window, and are not rotated.
    programs = ["prefill", "decode", *(["rotation of a ring"] if "gsm8k" in recipe else [])]
    for window in (0, 128):
        command = [sys.executable, "-m", "tests.support.lane_memory", recipe, str(layers), str(window), *programs]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        shares = [float(share) for share in re.findall(r": ([\d.]+)\n", done.stdout)]
        assert len(shares) == len(programs) and max(shares) <= 0.1, done.stdout


@pytest.mark.parametrize("dtype, itemsize", [("float32", 4), ("bfloat16", 2)])
def test_caches_have_the_compute_dtype_and_heads_that_are_shared_are_not_repeated(dtype, itemsize):
    """Four query heads share a key head. On CPUs, XLA computes products of bfloat16 in float32."""
    config, arrivals = lane_memory.lane("gsm8k_qwen2_5_1_5b", tiled=False, layers=1, dtype=dtype)
    model = dataclasses.replace(config.model, width=64, heads=8, kv_heads=2, head_size=64, ffn=32, vocab=64)
    config = dataclasses.replace(config, model=model, graphdef=kv_cache.define(model).graphdef)
    mesh = sharding.make_mesh((1, 1, 1), setting="tensor", devices=jax.devices()[:1])
    entries = lane_memory.cache_entries(config, mesh)
    found = lane_memory.programs(config, mesh, arrivals)["decode"].lower().compile().memory_analysis()
    assert entries * itemsize <= found.argument_size_in_bytes <= 1.1 * entries * itemsize
    if dtype == "float32":
        keys = config.groups * config.width * 511 * 2 * 64 * itemsize  # of all slots; repeated, they are four times as large
        assert found.temp_size_in_bytes < 0.5 * keys
