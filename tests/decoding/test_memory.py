"""The programs of the engine on TPUs, compiled without one: they work on the caches in place."""

import dataclasses
import importlib.util

import pytest

from benchmarks import decode_memory


@pytest.mark.slow
def test_prefill_and_decode_loop_are_in_place_on_a_tpu():
    """A ring needs 511 entries and a prompt 205, which do not fill a TPU's tiles."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu, which holds the compiler for TPUs, is not installed: it comes with the extra `tpu`")
    recipe = dataclasses.replace(decode_memory.RECIPES["gsm8k_qwen2_5_1_5b"], prompt=205)
    config, arrivals = decode_memory.lane_config(recipe, tiled=True, layers=3)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab=1024))
    mesh = decode_memory.topology_mesh("v5e:2x2", 1)
    caches = decode_memory.cache_bytes(config, mesh)
    made = decode_memory.programs(config, mesh, arrivals)
    shorter = {f"{name} of a window": decode_memory.with_window(made[name], 128) for name in ("decode", "rotate")}
    for name, program in (made | shorter).items():
        memory = decode_memory.memory(program.lower().compile(), config, mesh)
        assert memory.temporaries <= 0.1 * caches, name
        if name != "swap":
            assert memory.aliased >= 0.75 * caches, f"{name}: rings are donated to decoding, prefill takes prompts as well"
