"""How a lane uses its slots and caches: counted by hand, in place on TPUs, as much as its samples need, and in fewer slots."""

import dataclasses
import functools
import importlib.util
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from tba_jax import sharding
from tba_jax.decoding import decode_loop
from tba_jax.decoding import sizes as sizes_lib
from tba_jax.decoding import slots as slots_lib
from tba_jax.decoding.requests import concatenate
from tba_jax.models import flops, kv_cache, parameters
from tests.support import lane_memory
from tests.support.tiny_engine import (
    BANNED,
    EOS,
    PARAMS,
    SPACE,
    assert_same_rows,
    decoded_alone,
    decoded_together,
    make_engine,
    make_request,
    make_stream,
)

ENDLESS = dataclasses.replace(SPACE, banned_tokens=(*BANNED, EOS))


def test_usage_counts_slots_operations_and_bytes():
    engine = make_engine(8, 4, space=ENDLESS)
    engine.set_policy(PARAMS, 5)
    # A row of four tokens, without an end: the first comes from prefill, three from as many steps of eight slots.
    engine.generate([make_request([6, 6, 3], 1, limit=np.array([4]))])
    usage, c, m = engine.usage, engine.config, engine.config.model
    assert (usage.slot_steps, usage.useful) == (3 * 8, 3)
    assert (usage.prefilled, usage.prompt_tokens) == (32 * engine._lanes[0]._arrivals, 3)
    assert usage.flops == flops.forward(
        m, positions=6, logits=4
    )  # three tokens of the prompt give one token, and three drawn ones
    weights = sum(x.nbytes for name, x in parameters.flatten(PARAMS).items() if m.tied_embedding or name != "embedding.weight")
    entries = c.groups * c.buffers * c.prompt_length + 8 * (c.response_length - 1)
    assert usage.bytes == 3 * (weights + entries * 2 * m.layers * m.kv_heads * m.head_size * 4)
    # The others idle while the longest goes on, for eight steps in two calls.
    engine.generate([make_request([6, 6, 3], 3, limit=np.array([4, 1, 9]))])
    assert (engine.usage.slot_steps, engine.usage.useful) == ((3 + 8) * 8, 3 + 3 + 0 + 8)
    assert engine.usage.prompt_tokens == 3 + 2 * 3  # samples in two groups read the prompt twice


def test_fewer_slots_give_the_same_rows(monkeypatch, grouped):
    """Twice, so that the second batch begins with all slots again."""
    monkeypatch.setattr(sizes_lib, "WORTHWHILE_STEPS", 1)
    for seed, lengths in enumerate([(3, 20, 33, 5, 64), (9, 1, 50)]):
        stream, used, found = make_stream(lengths, seed=seed), [], []
        for last in (True, False):
            grouped.set_policy(PARAMS, 5)
            before, tickets = grouped.usage.slot_steps, [grouped.submit(request) for request in stream]
            list(grouped.decode(tickets, last=last))
            found.append(concatenate([ticket.generation for ticket in tickets]))
            used.append(grouped.usage.slot_steps - before)
        assert_same_rows(*found)
        assert used[0] < used[1], "nothing was moved, so that nothing was tested"


@pytest.fixture
def traced(monkeypatch) -> list[tuple[str, int, int]]:
    """(name, buffers, window) of the programs that are traced, in order."""
    found, decode, rotate = [], decode_loop.decode, decode_loop.rotate

    @functools.wraps(decode)
    def noted_decode(*args, **static):
        found.append(("decode", static["buffers"], static["window"]))
        return decode(*args, **static)

    @functools.wraps(rotate)
    def noted_rotate(*args, **static):
        found.append(("rotate", 0, static["window"]))
        return rotate(*args, **static)

    monkeypatch.setattr(decode_loop, "decode", noted_decode)
    monkeypatch.setattr(decode_loop, "rotate", noted_rotate)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("tiled, short, windows", [(False, 32, {10, 20, 30, 39}), (True, 48, {16, 32, 48})])
def test_a_stream_reads_as_much_of_its_rings_as_its_samples_need(traced, monkeypatch, tiled, short, windows):
    """Short samples for a round, then long ones beside short ones: the rings become shorter, are rotated, and are whole again."""
    engines = dict(space=ENDLESS, prompt_length=8, response_length=40)
    single = make_engine(1, 1, chunk=40, **engines)
    monkeypatch.setattr(slots_lib, "in_tiles", lambda mesh: tiled)
    monkeypatch.setattr(sizes_lib, "_TILE_COLUMNS", 16)  # so that rings of 48 entries have windows
    monkeypatch.setattr(kv_cache, "_TILE_COLUMNS", 1)  # so that the heads of a tiny model fill them
    engine = make_engine(8, 4, chunk=8, **engines)
    limits = [4] * short + [40, 5, 40, 3, 4] * 2
    stream = [make_request([3 + i % 6, 5], 4, i, limit=np.full(4, limit)) for i, limit in enumerate(limits)]
    found = decoded_together(engine, stream)
    assert len(set(traced)) == len(traced), "each program is made once"
    assert traced[0] == ("decode", 2, max(windows)) and traced[1] == ("decode", 2, min(windows))
    assert ("rotate", 0, min(windows)) in traced and {window for _, _, window in traced} <= windows
    assert_same_rows(found, decoded_alone(single, stream))
    np.testing.assert_array_equal(found.length, np.repeat(limits, 4))


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


def test_caches_of_heads_that_are_shared_are_not_repeated():
    """Four query heads share a key head."""
    config, arrivals = lane_memory.lane("gsm8k_qwen2_5_1_5b", tiled=False, layers=1, dtype="float32")
    model = dataclasses.replace(config.model, width=64, heads=8, kv_heads=2, head_size=64, ffn=32, vocab=64)
    config = dataclasses.replace(config, model=model, graphdef=kv_cache.define(model).graphdef)
    mesh = sharding.make_mesh((1, 1, 1), setting="tensor", devices=jax.devices()[:1])
    size = lane_memory.cache_entries(config, mesh) * 4
    found = lane_memory.programs(config, mesh, arrivals)["decode"].lower().compile().memory_analysis()
    assert size <= found.argument_size_in_bytes <= 1.1 * size
    # Less than the keys of all slots; repeated, they would be four times as large.
    assert found.temp_size_in_bytes < 0.5 * config.groups * config.width * 511 * 2 * 64 * 4
