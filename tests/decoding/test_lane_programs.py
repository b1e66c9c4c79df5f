"""The programs of a lane: they work on the caches in place, also on TPUs, and fewer slots give the same rows."""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from tba_jax import sharding
from tba_jax.decoding import lane_programs
from tba_jax.models import kv_cache
from tests.support import lane_memory
from tests.support.tiny_engine import (
    BANNED,
    COUNTS,
    EOS,
    PARAMS,
    SIZES,
    SPACE,
    assert_same_rows,
    decoded_alone,
    decoded_together,
    make_engine,
    make_request,
    make_stream,
)


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


ENDLESS = dataclasses.replace(SPACE, banned_tokens=(*BANNED, EOS))


@pytest.fixture
def eager(monkeypatch):
    """Samples move whenever they fit, however short they are."""
    monkeypatch.setattr(lane_programs, "WORTHWHILE_STEPS", 1)


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ((8, 1), [(4, 1), (2, 1)]),
        ((8, 8), [(8, 4), (8, 2)]),
        ((8, 2), [(8, 1), (4, 1)]),
        ((3, 3), [(3, 2), (3, 1)]),
        ((5, 1), [(3, 1), (2, 1)]),
        ((1, 2), [(1, 1)]),
        ((1, 1), []),
    ],
)
def test_sizes_halve_the_width_and_then_the_groups(sizes, expected):
    config = dataclasses.replace(make_engine(4, 4).config, groups=sizes[0], width=sizes[1])
    assert [(found.groups, found.width) for found in lane_programs.narrower(config)] == expected


@pytest.mark.parametrize("sizes", ["groups of four", "no groups"])
def test_rows_are_the_same(eager, sizes):
    """Twice, so that the second batch begins with all slots again."""
    (slots, samples), fewer = SIZES[sizes], 0
    engine, single = make_engine(slots, samples), make_engine(1, 1)
    for seed, lengths in enumerate([(3, 20, 33, 5, 64), (9, 1, 50)]):
        stream = make_stream(lengths, counts=(1,) if slots == 8 else COUNTS, seed=seed)
        assert_same_rows(decoded_together(engine, stream), decoded_alone(single, stream))
        fewer += engine._lanes[0]._size > 0
    assert fewer, "nothing was moved, so that nothing was tested"


def test_slots_that_are_idle_at_the_end_take_no_steps():
    """Four groups of one slot: steps 1 to 3 have all slots; then two samples run up to step 50, and one alone after it."""
    engine = make_engine(4, 1, space=ENDLESS, response_length=128, chunk=32)
    engine.set_policy(PARAMS, 0)
    limits = (4, 4, 51, 101)
    engine.generate([make_request([3, 4, 5], 1, seed, limit=np.array([limit])) for seed, limit in enumerate(limits)])
    assert engine.usage.useful == 3 + 3 + 50 + 100
    assert engine.usage.slot_steps == 4 * 3 + 2 * 47 + 1 * 50
    # A sample alone begins in one slot.
    engine.generate([make_request([3, 4, 5], 1, limit=np.array([101]))])
    assert engine.usage.slot_steps == 4 * 3 + 2 * 47 + 1 * 50 + 100
    # One that ends soon is not worth the move.
    engine.generate([make_request([3, 4, 5], 1, limit=np.array([11]))])
    assert engine.usage.slot_steps == 4 * 3 + 2 * 47 + 1 * 50 + 100 + 4 * 10


def test_samples_stay_where_prompts_may_come(eager):
    """A searcher that has no prompt at the moment, because it waits for rewards, say, has one later."""
    engine = make_engine(4, 1, space=ENDLESS, response_length=64)
    engine.set_policy(PARAMS, 0)
    asked, count = [], 0

    def feed() -> bool:
        nonlocal count
        count += 1
        if count % 2 or len(asked) == 6:
            return False
        asked.append(engine.submit(make_request([3, 4, 5], 1, len(asked), limit=np.array([9]))))
        return True

    first = engine.submit(make_request([6, 7], 1, limit=np.array([60])))
    engine.collect([first], feed=feed)
    assert len(asked) == 6 and engine.usage.slot_steps % 4 == 0 and engine.usage.slot_steps < 4 * 70
