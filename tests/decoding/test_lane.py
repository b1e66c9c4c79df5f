"""How a lane uses its slots and caches: counted by hand, in place on TPUs, and as much as its samples need."""

import dataclasses
import functools
import importlib.util
import math

import jax
import numpy as np
import pytest

from tba_jax import sharding
from tba_jax.decoding import decode_loop
from tba_jax.decoding import slots as slots_lib
from tba_jax.decoding.engine import Engine
from tba_jax.experiment import topologies
from tba_jax.models import decoder, hardware, kv_cache, parameters
from tba_jax.models.config import PRESETS
from tba_jax.programs import shaped
from tests.support import tiny_engine as tiny
from tests.support.tiny_engine import BANNED, EOS, PARAMS, SIZES, SPACE

ENDLESS = dataclasses.replace(SPACE, banned_tokens=(*BANNED, EOS))


def test_usage_counts_slots_operations_and_bytes():
    for seed in range(200):  # until no row ends before its limit
        engine = tiny.make_engine(*SIZES)
        engine.set_policy(PARAMS, 5)
        # A row of four tokens: the first comes from prefill, three from as many steps of eight slots.
        (short,) = engine.generate([tiny.make_request([6, 6, 3], 1, seed, limit=np.array([4]))])
        usage, c, m = engine.usage, engine.config, engine.config.model
        # The others idle while the longest goes on, for eight steps in two calls.
        (long,) = engine.generate([tiny.make_request([6, 6, 3], 3, seed, limit=np.array([4, 1, 9]))])
        if not (short.finished.any() or long.finished.any()):
            break
    assert (usage.slot_steps, usage.useful) == (3 * 8, 3)
    assert (usage.prefilled, usage.prompt_tokens) == (32 * engine._lanes[0]._arrivals, 3)
    # Three tokens of the prompt give one token, and three drawn ones.
    assert usage.flops == hardware.forward_flops(m, positions=6, logits=4)
    weights = sum(x.nbytes for name, x in parameters.flatten(PARAMS).items() if m.tied_embedding or name != "embedding.weight")
    entries = c.groups * c.buffers * c.prompt_length + 8 * (c.response_length - 1)
    assert usage.bytes == 3 * (weights + entries * 2 * m.layers * m.kv_heads * m.head_size * 4)
    assert (engine.usage.slot_steps, engine.usage.useful) == ((3 + 8) * 8, 3 + 3 + 0 + 8)
    assert engine.usage.prompt_tokens == 3 + 2 * 3  # samples in two groups read the prompt twice


@pytest.mark.slow
def test_a_stream_reads_as_much_of_its_rings_as_its_samples_need(monkeypatch):
    """As on TPUs: rings become shorter in a round of short samples, and are rotated and whole again where long ones come."""
    traced: list[tuple[str, int]] = []  # name and window of each program
    for name in ("decode", "rotate"):
        function = getattr(decode_loop, name)

        def noted(*args, name=name, function=function, **static):
            traced.append((name, static["window"]))
            return function(*args, **static)

        monkeypatch.setattr(decode_loop, name, functools.wraps(function)(noted))
    windows = {16, 32, 48}
    engines = dict(space=ENDLESS, prompt_length=8, response_length=40)
    single = tiny.make_engine(1, 1, chunk=40, **engines)
    monkeypatch.setattr(slots_lib, "are_tiled", lambda mesh: True)
    monkeypatch.setattr(slots_lib, "_TILE_COLUMNS", 16)  # so that rings of 48 entries have windows
    monkeypatch.setattr(kv_cache, "_TILE_COLUMNS", 1)  # so that the heads of a tiny model fill them
    engine = tiny.make_engine(8, 4, chunk=8, **engines)
    limits = [4] * 48 + [40, 5, 40, 3, 4] * 2
    stream = [tiny.make_request([3 + i % 6, 5], 4, i, limit=np.full(4, limit)) for i, limit in enumerate(limits)]
    found = tiny.decoded_together(engine, stream)
    assert len(set(traced)) == len(traced), "each program is made once"
    assert traced[:2] == [("decode", max(windows)), ("decode", min(windows))]
    assert ("rotate", min(windows)) in traced and {window for _, window in traced} <= windows
    tiny.assert_same_rows(found, tiny.decoded_alone(single, stream))
    np.testing.assert_array_equal(found.length, np.repeat(limits, 4))


def programs_of(model, mesh, **sizes):
    engine = Engine(model, SPACE, mesh, pad_id=0, chunk=32, **sizes)
    cast = functools.partial(parameters.cast, dtype=model.compute_dtype)
    definition = decoder.define(model)
    found = engine.programs(shaped(jax.eval_shape(cast, parameters.shapes(definition.specs)), definition.shardings(mesh)))
    prompts, slots = jax.eval_shape(functools.partial(slots_lib.init, engine.config))
    return found, sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves((prompts.cache, slots.own)))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, which compiles for TPUs, is not installed")
@pytest.mark.parametrize(
    "preset, layers, slots, samples, response",
    [("qwen2.5-1.5b", 3, 96, 16, 512), ("pythia-1b", 3, 40, 20, 128), ("rho-math-1b", 8, 96, 24, 512)],
)
def test_prefill_and_decode_loop_are_in_place_on_a_tpu(preset, layers, slots, samples, response):
    """511 entries do not fill tiles; heads of the second preset are wider than a tile; those of the third share no keys."""
    topologies.use_no_devices()
    mesh = sharding.make_mesh((1, 1, 1), setting="tensor", devices=topologies.devices("v5e:2x2")[:1])
    model = dataclasses.replace(PRESETS[preset], compute_dtype="bfloat16", layers=layers)
    sizes = dict(slots=slots, samples=samples, prompt_length=512, response_length=response)
    made, caches = programs_of(model, mesh, **sizes)
    part = dataclasses.replace(made["decode"], options={**made["decode"].options, "window": 128})
    rotation = [made["rotation of a ring"]] if "rotation of a ring" in made else []
    for program in (made["prefill"], made["decode"], part, *rotation):
        assert program.lower().compile().memory_analysis().temp_size_in_bytes <= 0.1 * caches, program


def test_a_ring_of_a_cache_begins_at_another_entry():
    own = np.arange(2 * 3 * 8 * 2).reshape(2, 3, 8, 2)
    for by in (0, 1, 3):
        (found,) = decode_loop.rotate((own,), by, window=5)
        np.testing.assert_array_equal(found[:, :, :5], own[:, :, (np.arange(5) + by) % 5])
        np.testing.assert_array_equal(found[:, :, 5:], own[:, :, 5:])
