"""Weights that are exchanged while sequences are decoded."""

import functools
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from tba_jax.decoding.engine import Engine
from tba_jax.decoding.lane import Lane
from tba_jax.decoding.requests import Generation, Request, Ticket
from tba_jax.models import kv_cache
from tba_jax.sharding import PINNED_HOST
from tests.support import applied
from tests.support import tiny_engine as tiny
from tests.support.tiny_engine import BANNED, MODEL, PAD, SIZES, TEMPERATURE, R, numpy_distribution, random_params

jit_prefill = jax.jit(functools.partial(applied.prefill, config=MODEL))
jit_decode_step = jax.jit(functools.partial(applied.decode_step, config=MODEL))
unstacked = functools.lru_cache(lambda step: jax.jit(functools.partial(kv_cache.unstack, config=MODEL))(random_params(step)))


def segment_logprobs(prompt: Sequence[int], tokens: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Policy log-probs of one row alone, token t by the weights of steps[t], on a cache that earlier weights have written."""
    length = np.array([len(prompt)], np.int32)
    padded = np.array([[*prompt, *[PAD] * (24 - len(prompt))]], np.int32)
    logits, shared = jit_prefill(unstacked(int(steps[0])), padded, length)
    own = jax.tree.map(lambda x: np.zeros((1, x.shape[1], R, x.shape[3]), x.dtype), shared)
    found = []
    for t, token in enumerate(tokens):
        if t:
            masks = kv_cache.Masks(prompt=(np.arange(24) < length)[None, None], own=np.arange(R)[None] < t)
            weights, last = unstacked(int(steps[t])), np.array([tokens[t - 1]], np.int32)
            logits, own = jit_decode_step(weights, last, length + t - 1, np.int32(t - 1), shared, own, masks)
        probs = numpy_distribution(np.where(np.isin(np.arange(MODEL.vocab), BANNED), -np.inf, logits[0]), TEMPERATURE)
        found.append(np.log(probs[token]))
    return np.array(found)


def assert_drawn_by_the_weights_of_their_steps(stream: Sequence[Request], found: Sequence[Generation]) -> int:
    mixed = 0
    for request, generation in zip(stream, found, strict=True):
        for i, length in enumerate(generation.length):
            steps, tokens = generation.policy_step[i, :length], generation.tokens[i, :length]
            assert (generation.policy_step[i, length:] == -1).all() and (np.diff(steps) >= 0).all()
            expected = segment_logprobs(request.prompt, tokens, steps)
            np.testing.assert_allclose(generation.policy_logprobs[i, :length], expected, rtol=0, atol=1e-5)
            mixed += len(set(steps.tolist())) > 1
    return mixed


def swapping_stream(engine: Engine) -> tuple[list[Request], list[Generation]]:
    """27 requests, fed one by one; with every ninth, which is more than run at a time, new weights are handed over."""
    every = 9
    stream = tiny.make_stream([1, 24, 3, 17, 9, 2, 20, 11, 6] * 3, counts=(4, 2), limits=False)
    prepared = {step: engine.prepare(random_params(step)) for step in range(len(stream) // every + 1)}
    engine.swap(prepared[0], 0)
    tickets: list[Ticket] = []

    def ask() -> None:
        tickets.append(engine.submit(stream[len(tickets)]))
        if len(tickets) % every == 0:
            engine.swap(prepared[len(tickets) // every], len(tickets) // every)

    # Where running sequences end before a swap, none is left for a while, so that `decode` ends early.
    while len(tickets) < len(stream):
        ask()
        for room in engine.decode(tickets):
            for _ in range(min(room, len(stream) - len(tickets))):
                ask()
    return stream, [answer.generation for answer in tickets]


def test_weights_swapped_in_flight_draw_the_next_tokens(grouped):
    stream, found = swapping_stream(grouped)
    assert assert_drawn_by_the_weights_of_their_steps(stream, found) > 5
    assert {step for g in found for step in g.policy_step.flatten().tolist()} == set(range(-1, 4)) and grouped.policy_step == 3
    # Taken up in place, they draw the same tokens.
    for mine, other in zip(swapping_stream(tiny.make_engine(*SIZES, swap_memory="in_place"))[1], found, strict=True):
        np.testing.assert_array_equal(mine.tokens, other.tokens)
        np.testing.assert_array_equal(mine.policy_step, other.policy_step)


@pytest.mark.parametrize("memory, sets", [("beside", 2), ("in_place", 1)])
def test_memory_during_a_swap(memory, sets, monkeypatch):
    """Bytes of all arrays on the devices: one set of weights and a parameter, or two sets and a parameter."""
    engine = tiny.make_engine(*SIZES, swap_memory=memory)
    engine.set_policy(random_params(0), 0)
    engine.generate([tiny.make_request([3, 4, 5], 4)])
    held = on_devices()
    shardings = applied.shardings(MODEL, tiny.make_mesh())
    if memory == "in_place":
        shardings = jax.tree.map(lambda x: x.with_memory_kind(PINNED_HOST), shardings)
    given = jax.device_put(random_params(1), shardings)
    sizes = [x.nbytes for x in jax.tree.leaves(given)]
    most, prepare = [on_devices()], Lane.prepare

    def prepared(lane: Lane, params):
        made = prepare(lane, params)
        most.append(on_devices())
        return made

    monkeypatch.setattr(Lane, "prepare", prepared)
    engine.swap(engine.prepare(given, consume=True), 1)
    list(engine.decode([]))
    extra = max(most) - held
    assert (sets - 1) * sum(sizes) <= extra <= (sets - 1) * sum(sizes) + 2 * max(sizes), (extra, sum(sizes), max(sizes))
    assert engine.policy_step == 1


def on_devices() -> int:
    return sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind != PINNED_HOST)


def test_new_sequences_alone_take_up_new_weights():
    draining = tiny.make_engine(*SIZES, swap="new_sequences")
    stream, found = swapping_stream(draining)
    assert assert_drawn_by_the_weights_of_their_steps(stream, found) == 0
    first = np.concatenate([generation.policy_step[:, 0] for generation in found])
    assert set(first.tolist()) == {0, 1, 2, 3} and (np.diff(first) >= 0).all()
    # A sequence that is asked for after the last hand-over has the last weights.
    assert (draining.generate([tiny.make_request([3, 4], 4)])[0].policy_step[:, 0] == 3).all() and draining.policy_step == 3
