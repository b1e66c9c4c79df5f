"""Slots that are refilled while they run give the rows of requests decoded alone; those equal teacher-forced scoring."""

import dataclasses
import functools
import itertools
import statistics
import threading
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
import pytest

from tba_jax import sharding, trajectory
from tba_jax.decoding import decode_loop
from tba_jax.decoding import requests as requests_lib
from tba_jax.decoding import sampling as sampling_lib
from tba_jax.decoding import sizes as sizes_lib
from tba_jax.decoding import slots as slots_lib
from tba_jax.decoding.engine import Engine
from tba_jax.decoding.lane import Ticket, Usage
from tba_jax.decoding.requests import Generation, Request
from tba_jax.models import kv_cache, scoring
from tba_jax.models.lora import LoraConfig
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.text import stop_strings as stop_strings_lib
from tests.support import applied
from tests.support.tiny_engine import (
    BANNED,
    EOS,
    LENGTHS,
    MODEL,
    PAD,
    PARAMS,
    SIZES,
    SPACE,
    TEMPERATURE,
    TEXTS,
    P,
    R,
    make_engine,
    make_mesh,
    make_request,
    make_stream,
    mixed_sampling,
    plain_sampling,
    random_params,
    row_keys,
    row_of,
)


@pytest.fixture(scope="module")
def single() -> Engine:
    """One slot: a request at a time, and nothing to share a step with."""
    return make_engine(1, 1, chunk=R)


@pytest.fixture(scope="module")
def grouped() -> Engine:
    return make_engine(*SIZES["groups of four"])


@pytest.fixture(scope="module")
def draining() -> Engine:
    return make_engine(*SIZES["groups of four"], swap="new_sequences", prompt_length=24)


def decoded_alone(single: Engine, stream: Sequence[Request], params: Params = PARAMS) -> Generation:
    single.set_policy(params, 5)
    rows = [row_of(request, i) for request in stream for i in range(request.samples)]
    return requests_lib.concatenate([single.generate([row])[0] for row in rows])


def decoded_together(engine: Engine, stream: Sequence[Request], params: Params = PARAMS) -> Generation:
    engine.set_policy(params, 5)
    return requests_lib.concatenate(engine.generate(stream))


def assert_same_rows(found: Generation, expected: Generation) -> None:
    for field in ("tokens", "length", "finished", "policy_step"):
        np.testing.assert_array_equal(getattr(found, field), getattr(expected, field), err_msg=field)
    for field in ("policy_logprobs", "behavior_logprobs"):
        np.testing.assert_allclose(getattr(found, field), getattr(expected, field), rtol=0, atol=1e-5, err_msg=field)


@pytest.fixture(scope="module")
def stream() -> list[Request]:
    return make_stream(LENGTHS)


@pytest.fixture(scope="module")
def alone(single: Engine, stream: list[Request]) -> Generation:
    return decoded_alone(single, stream)


jit_scores = jax.jit(
    functools.partial(applied.response_logprobs, R=R, config=MODEL, space=SPACE, logit_bytes=1 << 20, remat="none")
)


def scores(params: Params, stream: Sequence[Request], found: Generation) -> np.ndarray:
    """float32[B, R]: policy log-probs of whole rows in one pass."""
    prompts = [request.prompt for request in stream for _ in range(request.samples)]
    responses = [tokens[:length] for tokens, length in zip(found.tokens, found.length, strict=True)]
    rows = trajectory.token_columns(prompts, responses, prompt_length=P, response_length=R, pad_id=PAD)
    return np.asarray(jit_scores(params, *rows.values())[0])


@jax.jit
def all_logits(params: Params, tokens: jax.Array) -> jax.Array:
    hidden = applied.hidden_states(params, tokens, config=MODEL, remat="none")
    return applied.logits_of(params, hidden.reshape(-1, MODEL.width), config=MODEL).reshape(*tokens.shape, -1)


def teacher_forced_logits(stream: Sequence[Request], tokens: np.ndarray) -> np.ndarray:
    """float32[B, R, V]: the logits that every response token was drawn from, in one pass over rows padded on the right."""
    prompts = [list(request.prompt) for request in stream for _ in range(request.samples)]
    rows = np.array([[*prompt, *row, *[PAD] * (P - len(prompt))] for prompt, row in zip(prompts, tokens, strict=True)], np.int32)
    logits = np.asarray(all_logits(PARAMS, rows))
    return np.stack([logits[b, len(prompt) - 1 : len(prompt) - 1 + R] for b, prompt in enumerate(prompts)])


def numpy_distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """float64[V]: temperature, top-k, top-p of what is left, min-p, renormalised; the most likely token stays."""
    logits = logits.astype(np.float64)
    logits[list(BANNED)] = -np.inf
    if temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    probs = np.exp((logits - logits.max()) / temperature)
    probs /= probs.sum()
    order = [int(i) for i in np.argsort(-probs, kind="stable")][: top_k or len(probs)]
    kept: list[int] = []
    mass, total = 0.0, sum(probs[order])
    for i in order:
        if not kept or (mass / total < top_p and probs[i] >= min_p * probs[order[0]]):
            kept.append(i)
        mass += probs[i]
    out = np.zeros_like(probs)
    out[kept] = probs[kept] / probs[kept].sum()
    return out


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_stream_through_few_slots_gives_the_rows_of_requests_decoded_alone(request, sizes, stream, alone):
    engine = request.getfixturevalue("grouped") if sizes == SIZES["groups of four"] else make_engine(*sizes)
    assert sizes_lib.buckets(P) == (32, 64)
    found = decoded_together(engine, stream)
    assert_same_rows(found, alone)
    # Of every kind: rows of all lengths, ended and cut.
    assert set(found.length.tolist()) == set(range(1, R + 1)) and 0 < found.finished.sum() < len(found.finished)
    # In another order, beside others, and from other buffers: the same rows.
    order = np.random.default_rng(1).permutation(len(stream))
    moved = engine.generate([stream[i] for i in order])
    assert_same_rows(requests_lib.concatenate([moved[i] for i in np.argsort(order)]), alone)


def test_logprobs_equal_teacher_forced_ones(stream, grouped):
    found = decoded_together(grouped, stream)
    mask = trajectory.response_mask(found.length, R)
    np.testing.assert_allclose(found.policy_logprobs, scores(PARAMS, stream, found), rtol=0, atol=1e-5)
    logits = teacher_forced_logits(stream, found.tokens)
    sampling = mixed_sampling(len(found.tokens))
    for row, t in zip(*np.nonzero(mask), strict=True):
        settings = {field.name: getattr(sampling, field.name)[row].item() for field in dataclasses.fields(sampling)}
        behavior = numpy_distribution(logits[row, t], **settings)
        np.testing.assert_allclose(found.behavior_logprobs[row, t], np.log(behavior[found.tokens[row, t]]), rtol=0, atol=2e-5)
    assert not found.behavior_logprobs[~mask].any() and not found.policy_logprobs[~mask].any()
    assert (found.policy_step == np.where(mask, 5, -1)).all()


def test_local_layers_read_a_window_of_prompt_and_response():
    """Prompts and responses are longer than the window, and slots take up another buffer's prompt while others run."""
    model = dataclasses.replace(MODEL, layers=3, layer_pattern="lg", window=5, local_rope_theta=50.0)
    params = applied.random(applied.specs(model), scale=0.4, seed=3)
    stream = make_stream((1, 33, 5, 3, 8, 60, 4, 17))
    found = decoded_together(make_engine(*SIZES["groups of four"], model=model), stream, params)
    prompts = [request.prompt for request in stream for _ in range(request.samples)]
    rows = np.array([[*prompt, *row, *[PAD] * (P - len(prompt))] for prompt, row in zip(prompts, found.tokens, strict=True)])

    def logprobs(config) -> np.ndarray:
        hidden = applied.hidden_states(params, rows, config=config).reshape(-1, config.width)
        logits = np.asarray(applied.logits_of(params, hidden, config=config)).reshape(*rows.shape, -1)
        drawn_from = np.stack([logits[b, len(prompt) - 1 :][:R] for b, prompt in enumerate(prompts)])
        distribution = scoring.log_softmax(drawn_from, np.arange(R), SPACE)
        taken = np.take_along_axis(np.asarray(distribution), found.tokens[:, :, None], axis=2)[..., 0]
        return np.where(np.arange(R) < found.length[:, None], taken, 0.0)

    assert max(found.length) > 5
    np.testing.assert_allclose(found.policy_logprobs, logprobs(model), atol=1e-5)
    assert np.abs(found.policy_logprobs - logprobs(dataclasses.replace(model, window=100))).max() > 0.1


def test_an_untruncated_row_at_the_scoring_temperature_is_the_policy(grouped):
    grouped.set_policy(PARAMS, 5)
    requests = [make_request([5, 3, n], 4, n, sampling=sampling_lib.constant(4, temperature=TEMPERATURE)) for n in range(2, 10)]
    for found in grouped.generate(requests):
        np.testing.assert_allclose(found.behavior_logprobs, found.policy_logprobs, rtol=0, atol=2e-6)


def test_greedy_is_the_argmax_of_every_step(grouped):
    grouped.set_policy(PARAMS, 5)
    requests = [make_request([3 + i, 5, i + 2], 1, i, sampling=sampling_lib.constant(1, temperature=0.0)) for i in range(8)]
    found = requests_lib.concatenate(grouped.generate(requests))
    other_keys = [dataclasses.replace(request, keys=row_keys(1, 99)) for request in requests]
    assert_same_rows(requests_lib.concatenate(grouped.generate(other_keys)), found)
    tokens = np.full((8, R), PAD, np.int32)
    done = np.zeros(8, bool)
    for t in range(R):
        logits = teacher_forced_logits(requests, tokens)[:, t]
        logits[:, list(BANNED)] = -np.inf
        tokens[:, t] = np.where(done, PAD, logits.argmax(axis=1))
        done |= tokens[:, t] == EOS
    np.testing.assert_array_equal(found.tokens, tokens)
    np.testing.assert_array_equal(found.finished, done)
    assert not found.behavior_logprobs.any() and (found.policy_logprobs.sum(axis=1) < 0).all()


@pytest.mark.parametrize("sizes", [(2, 1, 2), pytest.param((1, 2, 1), marks=pytest.mark.slow)], ids=["data=2,tensor=2", "fsdp=2"])
def test_meshes_give_the_rows_of_one_device(single, sizes):
    """Lanes on the ways of the data axis share the requests; caches, prefill and weights are split over the others."""
    stream = make_stream([1, 24, 3, 17, 9, 2, 20, 11, 5, 8, 24, 6], counts=(4, 3, 9))
    mesh = make_mesh(*sizes)
    engine = make_engine(4 * sizes[0], 4, mesh=mesh, prompt_length=24)
    sharded = jax.device_put(PARAMS, applied.shardings(MODEL, mesh))
    assert_same_rows(decoded_together(engine, stream, sharded), decoded_alone(single, stream))


@pytest.mark.parametrize("weights", ["full", "int8"])
def test_merged_and_rounded_weights_draw_what_they_score(request, weights):
    """Adapters merged and weights rounded on eight devices; scored by the same weights on one."""
    policy = Policy(model=MODEL, lora=LoraConfig(rank=2, alpha=4.0, targets=("layers.*",)))
    adapters = applied.random(policy.trained_specs, scale=0.3, seed=3)
    sample = jax.jit(functools.partial(policy.for_sampling, weights=weights))
    mesh = make_mesh(2, 2, 2)
    sharded = jax.device_put(adapters, policy.trained_shardings(mesh)), jax.device_put(PARAMS, policy.model_shardings(mesh))
    params = sharding.on_mesh(mesh, sample)(*sharded)
    assert (params["layers"]["feed_forward"]["up"]["weight"].dtype == np.int8) == (weights == "int8")
    stream = make_stream([1, 20, 7, 13, 5, 2], counts=(4,), limits=False)
    rounds = weights == "int8"
    engine = make_engine(8, 4, mesh=mesh, prompt_length=24, weights="int8") if rounds else request.getfixturevalue("grouped")
    found = decoded_together(engine, stream, params if rounds else jax.device_get(params))
    mask = trajectory.response_mask(found.length, R)
    np.testing.assert_allclose(found.policy_logprobs, scores(sample(adapters, PARAMS), stream, found), rtol=0, atol=1e-5)
    # The adapters and the rounding are felt, so that scoring by other weights would be noticed.
    assert np.abs(scores(PARAMS, stream, found) - found.policy_logprobs)[mask].max() > 0.05
    if rounds:
        merged = jax.jit(functools.partial(policy.for_sampling, weights="full"))(adapters, PARAMS)
        assert np.abs(scores(merged, stream, found) - found.policy_logprobs)[mask].max() > 1e-3
    assert len(set(found.length.tolist())) > 1


@pytest.mark.parametrize("slots, samples, queries", [(64, 16, 100), pytest.param(64, 1, 1000, marks=pytest.mark.slow)])
def test_slots_are_seldom_idle_while_requests_wait(slots, samples, queries):
    """Long-tailed lengths: half of the responses have 32 tokens at most, one in twenty more than 119, as many as 128."""
    space = scoring.ResponseSpace(temperature=1.0, banned_tokens=(0, 1, EOS, 9), eos_id=EOS)
    engine = make_engine(slots, samples, space=space, prompt_length=4, response_length=128, chunk=32)
    engine.set_policy(PARAMS, 0)
    rng = np.random.default_rng(0)
    limits = np.clip(np.round(32 * np.exp(0.8 * rng.standard_normal((queries, samples)))), 4, 128).astype(np.int32)
    keys = row_keys(samples)
    tickets = [engine.submit(make_request([3, 4, 5], samples, keys=keys, limit=limit)) for limit in limits]
    found = engine.collect(tickets[: 7 * queries // 10])
    assert all(not answer.generation.length.any() for answer in tickets[-queries // 10 :])  # requests still wait
    print(f"idle share with {samples} samples: {engine.usage.idle:.4f} of {engine.usage.slot_steps} slot-steps")
    assert engine.usage.slot_steps > 30_000
    # A batch without refill waits for its longest: 1 - mean / largest of 16 is about a half.
    assert engine.usage.idle <= 0.05
    np.testing.assert_array_equal(np.concatenate([g.length for g in found]), limits[: len(found)].reshape(-1))
    assert not any(generation.finished.any() for generation in found)


def test_usage_counts_slots_without_a_token():
    space = dataclasses.replace(SPACE, banned_tokens=(*BANNED, EOS))
    engine = make_engine(8, 4, space=space)
    engine.set_policy(PARAMS, 5)
    # Rows of four tokens, without an end: the first comes from prefill, three from as many steps of eight slots.
    engine.generate([make_request([6, 6, 3], 1, limit=np.array([4]))])
    assert engine.usage == Usage(slot_steps=3 * 8, useful=3)
    # The others idle while the longest goes on, for eight steps in two calls.
    engine.generate([make_request([6, 6, 3], 3, limit=np.array([4, 1, 9]))])
    assert engine.usage == Usage(slot_steps=(3 + 8) * 8, useful=3 + 3 + 0 + 8)
    assert Usage().idle == 0.0 and Usage(slot_steps=8, useful=2).idle == 0.75


def compiled(caplog: pytest.LogCaptureFixture) -> dict[str, int]:
    """How many programs of an engine have been compiled, by name."""
    told = "\n".join(record.getMessage() for record in caplog.records)
    return {name: told.count(f"Finished XLA compilation of jit({name})") for name in ("prefill", "decode", "unstack")}


def test_nothing_is_compiled_after_a_request_of_each_bucket(caplog):
    engine = make_engine(*SIZES["groups of four"])
    with jax.log_compiles():
        engine.set_policy(PARAMS, 5)
        engine.generate([make_request([3], 1), make_request([3] * P, 1)])
        before = compiled(caplog)
        assert before == {"prefill": 2, "decode": 1, "unstack": 1}
        tickets: list[Ticket] = []
        for i, request in enumerate(make_stream(LENGTHS * 3, counts=(1, 4, 2, 9, 3), seed=1)):
            tickets.append(engine.submit(request))
            if i % 7 == 0:
                engine.set_policy(random_params(i), i)
                engine.collect(tickets[: i // 2])
        engine.collect(tickets)
        beginning = [3, 4, 5]
        engine.generate([make_request([7, 8], 2, beginning=beginning), make_request([7] * 50, 2, beginning=beginning)])
    assert compiled(caplog) == before


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
        probs = numpy_distribution(np.array(logits[0]), TEMPERATURE, 0, 1.0, 0.0)
        found.append(np.log(probs[token]))
    return np.array(found)


def assert_drawn_by_the_weights_of_their_steps(stream: Sequence[Request], found: Sequence[Generation], atol: float = 1e-5) -> int:
    """Returns how many rows mix steps."""
    mixed = 0
    for request, generation in zip(stream, found, strict=True):
        for i, length in enumerate(generation.length):
            steps, tokens = generation.policy_step[i, :length], generation.tokens[i, :length]
            assert (generation.policy_step[i, length:] == -1).all() and (np.diff(steps) >= 0).all()
            expected = segment_logprobs(request.prompt, tokens, steps)
            np.testing.assert_allclose(generation.policy_logprobs[i, :length], expected, rtol=0, atol=atol)
            mixed += len(set(steps.tolist())) > 1
    return mixed


def swapping_stream(engine: Engine) -> tuple[list[Request], list[Generation]]:
    """32 requests, fed one by one; after every eighth, which is more than run at a time, new weights are handed over."""
    every = 8
    stream = make_stream([1, 24, 3, 17, 9, 2, 20, 11] * 4, counts=(4, 2), limits=False)
    prepared = {step: engine.prepare(random_params(step)) for step in range(len(stream) // every + 1)}
    engine.swap(prepared[0], 0)
    tickets: list[Ticket] = []

    def feed() -> bool:
        if len(tickets) == len(stream):
            return False
        tickets.append(engine.submit(stream[len(tickets)]))
        if len(tickets) % every == 0:
            engine.swap(prepared[len(tickets) // every], len(tickets) // every)
        return True

    # Where running sequences end before a swap, none is left for a while, so that `collect` comes back early.
    while feed():
        engine.collect(tickets, feed=feed)
    return stream, [answer.generation for answer in tickets]


def test_weights_swapped_in_flight_draw_the_next_tokens(grouped):
    stream, found = swapping_stream(grouped)
    assert assert_drawn_by_the_weights_of_their_steps(stream, found) > 5
    assert {step for g in found for step in g.policy_step.flatten().tolist()} == set(range(-1, 5)) and grouped.policy_step == 4


def test_weights_swapped_by_another_thread_draw_the_next_tokens(grouped):
    stream = make_stream([5, 2, 9, 24] * 2, counts=(4,), limits=False)
    grouped.set_policy(random_params(0), 0)

    def swap() -> None:
        for step in range(1, 6):
            time.sleep(0.01)
            grouped.swap(grouped.prepare(random_params(step)), step)

    swapper = threading.Thread(target=swap)
    swapper.start()
    rounds = [grouped.generate(stream)]
    while swapper.is_alive():
        rounds.append(grouped.generate(stream))
    swapper.join()
    # The clock decides which weights meet in a row: float32's rounding of some mixtures was seen to reach 2e-5.
    mixed = sum(assert_drawn_by_the_weights_of_their_steps(stream, found, atol=1e-4) for found in rounds)
    assert mixed > 0 and rounds[-1][-1].policy_step.max() > 0


def test_new_sequences_alone_take_up_new_weights(draining):
    stream, found = swapping_stream(draining)
    assert assert_drawn_by_the_weights_of_their_steps(stream, found) == 0
    first = np.concatenate([generation.policy_step[:, 0] for generation in found])
    assert set(first.tolist()) == {0, 1, 2, 3} and (np.diff(first) >= 0).all()
    # A sequence that is asked for after the last hand-over has the last weights.
    assert (draining.generate([make_request([3, 4], 4)])[0].policy_step[:, 0] == 4).all() and draining.policy_step == 4


def test_a_swap_does_not_hold_up_decoding(grouped):
    """80 queries of which each comes with new weights, and as many on the same weights all along."""
    stream, prepared = make_stream([3] * 80, counts=(4,), limits=False), [grouped.prepare(PARAMS) for _ in range(2)]

    def answer(swaps: bool) -> tuple[float, set[int]]:
        """Returns the seconds, and the policy steps that were used."""
        grouped.swap(prepared[0], 0)
        tickets: list[Ticket] = []

        def feed() -> bool:
            if len(tickets) == len(stream):
                return False
            tickets.append(grouped.submit(stream[len(tickets)]))
            if swaps:
                grouped.swap(prepared[len(tickets) % 2], len(tickets))
            return True

        begin = time.perf_counter()
        while feed():
            grouped.collect(tickets, feed=feed)
        seconds = time.perf_counter() - begin
        return seconds, {step for ticket in tickets for step in ticket.generation.policy_step.flatten().tolist()}

    answer(swaps=True)
    before = grouped.usage.slot_steps
    without = min(answer(swaps=False)[0] for _ in range(3))
    steps = (grouped.usage.slot_steps - before) / 3 / 8
    rounds = [answer(swaps=True) for _ in range(3)]
    assert all(len(used) > 20 for _, used in rounds)
    of_a_swap = (min(seconds for seconds, _ in rounds) - without) / len(stream)
    print(f"a step: {1e3 * without / steps:.2f} ms; a swap: {1e3 * of_a_swap:.2f} ms more")
    # Two steps, and what a busy host adds.
    assert of_a_swap < 2 * without / steps + 3e-3, (of_a_swap, without / steps)


def test_rows_end_by_their_first_end_or_at_their_limit(grouped):
    grouped.set_policy(PARAMS, 5)
    rng = np.random.default_rng(0)
    limits = [rng.integers(1, R + 1, 4) if i % 2 else np.full(4, R) for i in range(60)]
    requests = [
        make_request([3 + i % 8, 5], 4, i, limit=limit, sampling=sampling_lib.constant(4, temperature=1.3))
        for i, limit in enumerate(limits)
    ]
    found = requests_lib.concatenate(grouped.generate(requests))
    seen = set()
    for tokens, length, done, limit in zip(found.tokens, found.length, found.finished, np.concatenate(limits), strict=True):
        ends = np.flatnonzero(tokens == EOS)
        assert done == (len(ends) > 0)
        assert length == (ends[0] + 1 if done else limit)
        assert (tokens[length:] == PAD).all() and not np.isin(tokens[:length], BANNED).any()
        seen.add((bool(done), int(length)))
    assert seen == {(done, length) for done in (False, True) for length in range(1, R + 1)}


def test_samples_that_end_by_their_first_token_need_no_step(grouped):
    """Buffers are then free again before anything was decoded."""
    grouped.set_policy(PARAMS, 5)
    before = grouped.usage.slot_steps
    requests = [make_request([3, 4, i % 9], 3, i, limit=np.ones(3, np.int32)) for i in range(30)]
    found = requests_lib.concatenate(grouped.generate(requests))
    assert (found.length == 1).all() and grouped.usage.slot_steps == before
    whole = requests_lib.concatenate(grouped.generate([dataclasses.replace(request, limit=None) for request in requests]))
    np.testing.assert_array_equal(found.tokens[:, 0], whole.tokens[:, 0])
    np.testing.assert_array_equal(found.finished, found.tokens[:, 0] == EOS)


def test_responses_of_one_token(grouped):
    grouped.set_policy(PARAMS, 5)
    engine = make_engine(2, 2, response_length=1, prompt_length=4)
    engine.set_policy(PARAMS, 5)
    requests = [make_request([3, 4, 2 + i], 2, i) for i in range(9)]
    found, longer = (requests_lib.concatenate(e.generate(requests)) for e in (engine, grouped))
    np.testing.assert_array_equal(found.tokens, longer.tokens[:, :1])
    np.testing.assert_allclose(found.policy_logprobs, longer.policy_logprobs[:, :1], atol=1e-5)
    np.testing.assert_array_equal(found.finished, found.tokens[:, 0] == EOS)


def test_a_beginning_is_continued_as_the_whole_response_goes_on(grouped):
    """Greedy and sampled rows: given its own first tokens and its key, a row goes on as it did."""
    grouped.set_policy(PARAMS, 5)
    checked = 0
    for request in make_stream([3, 40, 7, 32], counts=(4,), limits=False):
        whole = grouped.generate([request])[0]
        pairs = [(i, k) for i, length in enumerate(whole.length) for k in range(1, length)]
        rows = [row_of(request, i, beginning=whole.tokens[i, :k].tolist()) for i, k in pairs]
        for (i, k), found in zip(pairs, grouped.generate(rows), strict=True):
            np.testing.assert_array_equal(found.tokens[0], whole.tokens[i])
            assert found.length[0] == whole.length[i] and found.finished[0] == whole.finished[i]
            assert (found.policy_step[0, :k] == -1).all() and (found.policy_step[0, k : whole.length[i]] == 5).all()
            for field in ("policy_logprobs", "behavior_logprobs"):
                assert not getattr(found, field)[0, :k].any()
                np.testing.assert_allclose(getattr(found, field)[0, k:], getattr(whole, field)[i, k:], rtol=0, atol=1e-5)
            checked += 1
    assert checked > 40


def test_samples_of_a_beginning_share_it_and_its_limit_counts_it(grouped):
    grouped.set_policy(PARAMS, 5)
    beginning, limit = [4, 6, 3], np.array([4, 5, 8, R, 9])
    found = grouped.generate([make_request([5, 7], 5, beginning=beginning, limit=limit)])[0]
    assert (found.tokens[:, :3] == beginning).all() and (found.length > 3).all()
    assert (found.length[~found.finished] == limit[~found.finished]).all() and (found.length <= limit).all()


STOPS, MIN_LENGTH = ("aba", "cd"), 3


@pytest.fixture(scope="module")
def stopping() -> Engine:
    token_bytes = [TEXTS[i].encode() if i in TEXTS else None for i in range(MODEL.vocab)]
    stop_strings = stop_strings_lib.build(token_bytes, STOPS, vocab=MODEL.vocab)
    space = dataclasses.replace(SPACE, min_length=MIN_LENGTH)
    return make_engine(8, 4, space=space, stop_strings=stop_strings, prompt_length=16)


def test_rows_end_by_stop_strings_and_by_ends_that_are_not_too_early(stopping):
    """Against the joined text: a row ends with the first token that completes a stop string, or by an end from the third on."""
    stopping.set_policy(PARAMS, 5)
    beginnings: Iterator[list[int]] = itertools.cycle([[], [5], [6], [3, 4], [10, 10, 3], [10, 4, 10, 3]])
    requests = [
        # Prompts end with what a stop string could begin with: that does not count.
        make_request([5, 3 + i % 4], 6, i, beginning=next(beginnings), sampling=sampling_lib.constant(6, temperature=1.5))
        for i in range(36)
    ]
    why: dict[str, int] = dict.fromkeys(("eos", "stop", "cut", "begun before", "earliest end", "earlier stop"), 0)
    for request, generation in zip(requests, stopping.generate(requests), strict=True):
        given = len(request.beginning)
        for tokens, length, finished in zip(generation.tokens, generation.length, generation.finished, strict=True):
            texts = [TEXTS.get(int(token), "|") for token in tokens]
            held = ["".join(texts[: t + 1]) for t in range(R)]
            stops = [t for t in range(given, length) if any(stop in held[t] for stop in STOPS)]
            ends = np.flatnonzero(tokens[:length] == EOS).tolist()
            assert all(t + 1 >= MIN_LENGTH for t in ends)
            first = min([*stops, *ends], default=None)
            assert length == (R if first is None else first + 1) and finished == (first is not None)
            why["cut"] += first is None
            why["eos"] += first in ends
            why["stop"] += first in stops
            why["earliest end"] += first in ends and length == MIN_LENGTH
            why["earlier stop"] += first in stops and length < MIN_LENGTH
            own = "".join(texts[given:length])
            why["begun before"] += first in stops and not any(stop in own for stop in STOPS)
    assert min(why.values()) > 0, why
    with pytest.raises(ValueError, match="query q: the given response tokens hold a stop string"):
        stopping.submit(make_request([5], 2, name="q", beginning=[7, 7]))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(prompt=[]), r"query q: 0 tokens of prompt \(with 0 of the response\) do not fit the cache, which holds 1 to 64"),
        (dict(prompt=[3] * 65), r"query q: 65 tokens of prompt .* holds 1 to 64"),
        (dict(prompt=[3] * 60, beginning=[3] * 5), r"query q: 65 tokens of prompt \(with 5 of the response\) .* 1 to 64"),
        (dict(beginning=[3] * 12), "query q: 12 given response tokens leave none of response_length=12"),
        (dict(beginning=[3, EOS]), f"query q: the given response tokens hold {EOS}, which ends a response or is banned"),
        (dict(prompt=[3, 11]), "query q: token 11 is not an id of the vocabulary of 11"),
        (dict(prompt="12"), "query q: token '1' is not an id"),
        (dict(keys=np.zeros((2, 2))), r"query q: keys are float64\[2, 2\], not uint32\[2, 2\]"),
        (dict(limit=np.array([3])), r"query q: limits have shape \[1\], the samples are 2"),
        (dict(limit=np.array([3, 13])), "query q: limits 3 to 13 must be within 1 to 12 response tokens"),
        (dict(limit=np.array([0, 3])), "query q: limits 0 to 3 must be within 1 to 12 response tokens"),
        (dict(limit=np.array([2, 3]), beginning=[3, 4]), "limits 2 to 3 must be within 3 to 12"),
        (dict(keys=row_keys(0), sampling=plain_sampling(0)), "query q: no samples are asked for"),
        (dict(sampling=plain_sampling(3)), r"query q: sampling.temperature has shape \(3,\), the samples are 2"),
    ],
    ids=lambda value: "" if isinstance(value, str) else ",".join(value),
)
def test_requests_that_cannot_be_answered_are_refused(grouped, changes, message):
    with pytest.raises(ValueError, match=message):
        grouped.submit(make_request([3, 4], 2, **changes) if "prompt" not in changes else make_request(samples=2, **changes))


@pytest.mark.parametrize(
    "setting, value, message",
    [
        ("temperature", -1.0, "temperature=-1.0 must be at least 0"),
        ("temperature", np.nan, "temperature=nan must be at least 0"),
        ("temperature", np.inf, "temperature=inf must be"),
        ("top_k", -1, "top_k=-1 must be at least 0"),
        ("top_p", 0.0, r"top_p=0.0 must be within \(0, 1\]"),
        ("top_p", 1.1, r"top_p=1.1\d* must be within \(0, 1\]"),
        ("min_p", 1.0, r"min_p=1.0 must be within \[0, 1\)"),
        ("min_p", -0.5, r"min_p=-0.5 must be within \[0, 1\)"),
    ],
)
def test_sampling_settings_out_of_range_are_refused(grouped, setting, value, message):
    sampling = plain_sampling(3)
    getattr(sampling, setting)[1] = value
    with pytest.raises(ValueError, match=f"query q: {message}"):
        grouped.submit(make_request([3, 4], 3, sampling=sampling))


def test_engines_that_cannot_be_made_are_refused():
    with pytest.raises(ValueError, match="slots=7 cannot be divided by the 2 ways of the mesh's data axis"):
        make_engine(7, 1, mesh=make_mesh(2))
    with pytest.raises(ValueError, match="slots=1 cannot be divided by the 2 ways"):
        make_engine(1, 1, mesh=make_mesh(2))
    with pytest.raises(ValueError, match="samples=0 of a query must be at least 1"):
        make_engine(4, 0)
    for name in ("prompt_length", "response_length", "chunk"):
        with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
            make_engine(1, 1, **{name: 0})
    with pytest.raises(ValueError, match=r"swap='later' is not one of \['at_once', 'new_sequences'\]"):
        make_engine(1, 1, swap="later")
    learned = dataclasses.replace(MODEL, positions="learned")
    with pytest.raises(ValueError, match="prompt_length=6 and response_length=12 need more than the model's 16 positions"):
        make_engine(1, 1, model=learned, prompt_length=6)
    assert make_engine(1, 1, model=learned, prompt_length=5).config.prompt_length == 5  # 5 + 12 - 1 positions are read


def test_arrangements_and_buckets_by_hand():
    # (groups, width): half of a query's samples side by side, a quarter of many; a width that divides what a way has.
    assert sizes_lib.arrange(8, 4, 1) == (4, 2) and sizes_lib.arrange(8, 4, 2) == (2, 2)
    assert sizes_lib.arrange(64, 16, 1) == (8, 8) and sizes_lib.arrange(192, 24, 2) == (8, 12)
    assert sizes_lib.arrange(4, 6, 1) == (2, 2) and sizes_lib.arrange(64, 1, 4) == (16, 1)
    assert sizes_lib.arrange(128, 128, 1) == (4, 32) and sizes_lib.arrange(7, 4, 1) == (7, 1)
    assert sizes_lib.windows(127, 32) == (32, 64, 96, 127) and sizes_lib.windows(20, 32) == (20,)
    assert sizes_lib.buckets(256) == (64, 128, 256) and sizes_lib.buckets(100) == (50, 100)
    assert sizes_lib.buckets(64) == (32, 64) and sizes_lib.buckets(63) == (32, 63) and sizes_lib.buckets(1) == (1,)


def test_logits_that_are_no_numbers_name_the_query_and_stop_the_engine():
    engine = make_engine(2, 2, prompt_length=4, response_length=3)
    engine.set_policy(PARAMS, 5)
    good = make_request([3, 4], 2)
    engine.generate([good])
    broken = jax.tree.map(np.copy, PARAMS)
    broken["layers"]["feed_forward"]["up"]["weight"][1, 0, 0] = np.nan
    engine.set_policy(broken, 6)
    with pytest.raises(FloatingPointError, match="policy step 6 are not finite at response token 0 of query the broken one"):
        engine.generate([dataclasses.replace(good, name="the broken one")])
    engine.set_policy(PARAMS, 7)
    with pytest.raises(RuntimeError, match="the decoder stopped on an error before"):
        engine.generate([good])


def test_an_engine_without_weights_says_so_and_takes_them_later():
    engine = make_engine(2, 2)
    request = make_request([3, 4], 2)
    with pytest.raises(RuntimeError, match="has no weights yet"):
        engine.generate([request])
    engine.set_policy(PARAMS, 3)
    assert all((generation.policy_step[:, 0] == 3).all() for generation in engine.collect([engine.submit(request)]))


def test_batches_read_windows_of_caches_and_share_queries(single, monkeypatch):
    """Two batches of two queries over four groups, then more than there are slots for, so that the rings wrap."""
    traced, decode = [], decode_loop.decode

    @functools.wraps(decode)
    def noted(*args, **static):
        traced.append((static["buffers"], static["window"]))
        return decode(*args, **static)

    monkeypatch.setattr(decode_loop, "decode", noted)
    engine = make_engine(8, 4, lockstep=True, chunk=6)
    # Programs are made when they are first needed: the shortest window that holds the six steps of a call, then the whole.
    for lengths, programs in [([3, 5], [(1, 6), (1, 11)]), ([7, 2], []), ([3, 5, 7, 2, 6, 4, 1], [(2, 6), (2, 11)])]:
        traced.clear()
        before = engine.usage.slot_steps
        stream = make_stream(lengths, counts=(4,), limits=False, seed=len(lengths))
        found = decoded_together(engine, stream)
        assert_same_rows(found, decoded_alone(single, stream))
        assert traced == programs
        steps = (engine.usage.slot_steps - before) / 8
        if len(lengths) == 2:  # all samples begin at once
            assert steps == found.length.max() - 1
    assert steps > R, "the rings have wrapped"


def test_row_keys_differ_by_run_writer_and_row():
    rows = np.arange(50, dtype=np.uint32)
    keys = [np.asarray(slots_lib.row_keys(seed, writer, rows)) for seed, writer in ((0, 1), (1, 1), (0, 2))]
    assert keys[0].shape == (50, 2) and keys[0].dtype == np.uint32
    assert len({tuple(key) for part in keys for key in part.tolist()}) == 150
    np.testing.assert_array_equal(slots_lib.row_keys(0, 1, rows[10:20]), keys[0][10:20])
