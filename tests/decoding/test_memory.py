"""The programs of the engine on TPUs, compiled without one: they work on the caches in place."""

import dataclasses
import importlib.util

import pytest

from benchmarks import decode_memory
from tba_jax.models.presets import PRESETS


@pytest.mark.slow
def test_prefill_and_decode_loop_are_in_place_on_a_tpu():
    """A ring needs 511 entries and a prompt 205, which do not fill a TPU's tiles."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu, which holds the compiler for TPUs, is not installed: it comes with the extra `tpu`")
    model = dataclasses.replace(PRESETS["qwen2.5-1.5b"], compute_dtype="bfloat16", layers=3, vocab=1024)
    config, arrivals = decode_memory.lane_config(model, slots=96, samples=16, prompt=205, response=512)
    mesh = decode_memory.topology_mesh("v5e:2x2", 1)
    caches = decode_memory.cache_bytes(config, mesh)
    weights = decode_memory.unstacked_shapes(decode_memory.compile_unstack(config, mesh))
    for program in (
        decode_memory.compile_prefill(config, mesh, weights, arrivals),
        decode_memory.compile_decode(config, mesh, weights),
    ):
        memory = decode_memory.memory(program)
        assert memory.temporaries <= 0.1 * caches
        assert memory.aliased >= 0.75 * caches, "rings are donated to decoding, prefill takes prompts as well"
