"""How slots are used: counted by hand, and what of the caches they read."""

import dataclasses
import functools

import numpy as np
import pytest

from tba_jax.decoding import decode_loop
from tba_jax.decoding import sizes as sizes_lib
from tba_jax.decoding import slots as slots_lib
from tba_jax.models import flops, kv_cache, parameters
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
)


def test_usage_counts_slots_without_a_token():
    space = dataclasses.replace(SPACE, banned_tokens=(*BANNED, EOS))
    engine = make_engine(8, 4, space=space)
    engine.set_policy(PARAMS, 5)
    # Rows of four tokens, without an end: the first comes from prefill, three from as many steps of eight slots.
    engine.generate([make_request([6, 6, 3], 1, limit=np.array([4]))])
    assert (engine.usage.slot_steps, engine.usage.useful) == (3 * 8, 3)
    assert (engine.usage.prefilled, engine.usage.prompt_tokens) == (32 * engine._lanes[0]._arrivals, 3)
    # The others idle while the longest goes on, for eight steps in two calls.
    engine.generate([make_request([6, 6, 3], 3, limit=np.array([4, 1, 9]))])
    assert (engine.usage.slot_steps, engine.usage.useful) == ((3 + 8) * 8, 3 + 3 + 0 + 8)
    assert engine.usage.prompt_tokens == 3 + 2 * 3  # samples in two groups read the prompt twice


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
    engines = dict(space=dataclasses.replace(SPACE, banned_tokens=(*BANNED, EOS)), prompt_length=8, response_length=40)
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


def test_operations_and_bytes_of_one_sample():
    """A prompt of three tokens and a sample of four: the first is drawn from the logits of the prompt, three take a step each."""
    engine = make_engine(8, 4, space=dataclasses.replace(SPACE, banned_tokens=(*BANNED, EOS)))
    engine.set_policy(PARAMS, 5)
    engine.generate([make_request([6, 6, 3], 1, limit=np.array([4]))])
    c, m = engine.config, engine.config.model
    whole = flops.forward(m, positions=6, logits=4)  # the prompt's three tokens, of which one gives logits, and three drawn ones
    assert engine.usage.flops == whole
    weights = sum(x.nbytes for name, x in parameters.flatten(PARAMS).items() if m.tied_embedding or name != "embedding.weight")
    entries = c.groups * c.buffers * c.prompt_length + 8 * (c.response_length - 1)
    caches = entries * 2 * m.layers * m.kv_heads * m.head_size * 4
    assert engine.usage.bytes == 3 * (weights + caches)
