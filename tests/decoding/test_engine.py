"""Slots that are refilled while they run give the rows of requests decoded alone; those equal teacher-forced scoring."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import numpy as np
import pytest

from tba_jax import sharding, trajectory
from tba_jax.decoding import requests as requests_lib
from tba_jax.decoding import sampling as sampling_lib
from tba_jax.decoding import slots as slots_lib
from tba_jax.decoding.engine import Engine
from tba_jax.decoding.requests import Generation, Request, Ticket
from tba_jax.models import scoring
from tba_jax.models.config import DecoderConfig
from tba_jax.models.parameters import Params
from tba_jax.models.policy import LoraConfig, Policy
from tba_jax.text.tokenizers import stop_automaton
from tests.support import applied, tiny_decoders
from tests.support import tiny_engine as tiny
from tests.support.tiny_engine import BANNED, EOS, LENGTHS, MODEL, PAD, PARAMS, SIZES, SPACE, TEXTS, P, R


@pytest.fixture(scope="module")
def stream() -> list[Request]:
    return tiny.make_stream(LENGTHS)


@pytest.fixture(scope="module")
def alone(single: Engine, stream: list[Request]) -> Generation:
    return tiny.decoded_alone(single, stream)


def rows_of(stream: Sequence[Request], found: Generation) -> tuple[np.ndarray, ...]:
    """tokens, prompt_length, response_length."""
    prompts = [request.prompt for request in stream for _ in range(request.samples)]
    columns = trajectory.token_columns(prompts, found.responses, prompt_length=P, response_length=R, pad_id=PAD)
    return tuple(columns.values())


@functools.partial(jax.jit, static_argnames="config")
def score(params: Params, *rows: np.ndarray, config: DecoderConfig = MODEL) -> tuple[jax.Array, jax.Array]:
    return applied.response_logprobs(params, *rows, R=R, config=config, space=SPACE, logit_bytes=2**20, remat="none")


def scores(params: Params, stream: Sequence[Request], found: Generation, config: DecoderConfig = MODEL) -> np.ndarray:
    """float32[B, R]: policy log-probs of whole rows in one pass."""
    return np.asarray(score(params, *rows_of(stream, found), config=config)[0])


def teacher_forced_logits(stream, found: Generation, params: Params = PARAMS, config=MODEL) -> np.ndarray:
    """float32[B, R, V]: the logits that every response token was drawn from, in one pass over rows padded on the right."""
    tokens, prompt_length, _ = rows_of(stream, found)
    at = np.minimum(prompt_length[:, None] - 1 + np.arange(R), P + R - 1)
    return np.take_along_axis(np.asarray(tiny_decoders.logits_of_whole(params, tokens, config)), at[:, :, None], axis=1)


def test_a_stream_gives_the_rows_of_requests_decoded_alone(grouped, stream, alone):
    assert slots_lib.buckets(P) == (32, 64)
    found = tiny.decoded_together(grouped, stream)
    tiny.assert_same_rows(found, alone)
    # Of every kind: rows of all lengths, ended and cut.
    assert set(found.length.tolist()) == set(range(1, R + 1)) and 0 < found.finished.sum() < len(found.finished)
    # In another order and from other buffers: the same rows.
    order = np.random.default_rng(1).permutation(len(stream))
    moved = grouped.generate([stream[i] for i in order])
    tiny.assert_same_rows(requests_lib.concatenate([moved[i] for i in np.argsort(order)]), alone)


def test_logprobs_equal_teacher_forced_ones(stream, alone):
    mask = trajectory.response_mask(alone.length, R)
    np.testing.assert_allclose(alone.policy_logprobs, scores(PARAMS, stream, alone), rtol=0, atol=1e-5)
    logits = teacher_forced_logits(stream, alone)
    logits[..., list(BANNED)] = -np.inf
    sampling = tiny.mixed_sampling(len(alone.tokens))
    for row, t in zip(*np.nonzero(mask), strict=True):
        settings = {field.name: getattr(sampling, field.name)[row].item() for field in dataclasses.fields(sampling)}
        behavior = np.log(tiny.numpy_distribution(logits[row, t], **settings)[alone.tokens[row, t]])
        np.testing.assert_allclose(alone.behavior_logprobs[row, t], behavior, rtol=0, atol=2e-5)
    assert not alone.behavior_logprobs[~mask].any() and not alone.policy_logprobs[~mask].any()
    assert (alone.policy_step == np.where(mask, 5, -1)).all()


def test_local_layers_and_ends_of_cut_responses_have_the_logprobs_of_whole_rows():
    """The sampler's log-prob of an end that is forced is that of its own temperature, before truncation."""
    model = dataclasses.replace(MODEL, layers=3, layer_pattern="lg", window=5, local_rope_theta=50.0)
    params = applied.random(applied.specs(model), scale=0.4, seed=3)
    stream, space = tiny.make_stream((1, 30, 5, 28, 17)), dataclasses.replace(SPACE, force_eos=True)
    found = tiny.decoded_together(tiny.make_engine(*SIZES, model=model, space=space, prompt_length=32), stream, params)
    limit = np.concatenate([np.full(each.samples, R) if each.limit is None else each.limit for each in stream])
    cut, rows, last = ~found.finished, np.arange(len(limit)), found.length - 1
    assert len(set(last[cut].tolist())) > 3 and last[cut].max() == R - 1 and (found.tokens[rows, last][cut] == EOS).all()
    np.testing.assert_array_equal(found.length[cut], limit[cut])

    def logits(config) -> np.ndarray:
        return np.array(scoring.restrict(teacher_forced_logits(stream, found, params, config), np.arange(R), SPACE))

    def logprobs(config) -> np.ndarray:
        taken, _ = scoring.chosen_logprobs(logits(config) / SPACE.temperature, found.tokens)
        return np.where(np.arange(R) < found.length[:, None], taken, 0.0)

    np.testing.assert_allclose(found.policy_logprobs, logprobs(model), atol=1e-5)
    assert np.abs(found.policy_logprobs - logprobs(dataclasses.replace(model, window=100))).max() > 0.1
    temperature, its = tiny.mixed_sampling(len(rows)).temperature, logits(model)
    for row in rows[cut & (temperature > 0)]:
        behavior = np.log(tiny.numpy_distribution(its[row, last[row]], temperature[row])[EOS])
        np.testing.assert_allclose(found.behavior_logprobs[row, last[row]], behavior, rtol=0, atol=2e-5)


def test_merged_and_rounded_weights_on_a_mesh_draw_what_they_score():
    policy = Policy(model=MODEL, lora=LoraConfig(rank=2, alpha=4.0, targets=("layers.*",)))
    adapters = applied.random(policy.trained_specs, scale=0.3, seed=3)
    mesh = tiny.make_mesh(data=2, tensor=2)
    sharded = jax.device_put(adapters, policy.trained_shardings(mesh)), jax.device_put(PARAMS, policy.model_shardings(mesh))
    params = sharding.on_mesh(mesh, jax.jit(functools.partial(policy.for_sampling, weights="int8")))(*sharded)
    assert params["layers"]["feed_forward"]["up"]["weight"].dtype == np.int8
    stream = tiny.make_stream([1, 24, 3, 17], counts=(4, 3, 9), limits=False)
    found = tiny.decoded_together(tiny.make_engine(8, 4, mesh=mesh, prompt_length=24, weights="int8"), stream, params)
    mask = trajectory.response_mask(found.length, R)
    # Engine and learner sum in other orders, which differ by CPU: 1.05e-5 and 1.8e-5 were seen where weights are rounded.
    scored = scores(jax.device_get(params), stream, found)
    np.testing.assert_allclose(found.policy_logprobs, scored, rtol=0, atol=4e-5)
    assert np.abs(scores(PARAMS, stream, found) - found.policy_logprobs)[mask].max() > 0.05, "the adapters are felt"


@pytest.mark.parametrize("weights, data, tensor", [("full", 1, 1), ("int8", 2, 2)])
def test_experts_draw_what_they_score(weights, data, tensor):
    policy = Policy(model=dataclasses.replace(MODEL, ffn=8, experts=4, experts_per_token=2))
    mesh = tiny.make_mesh(data=data, tensor=tensor)
    sharded = jax.device_put(applied.random(policy.model_specs, scale=0.4), policy.model_shardings(mesh))
    params = sharding.on_mesh(mesh, jax.jit(functools.partial(policy.for_sampling, weights=weights)))(sharded, {})
    stream = tiny.make_stream([1, 24, 3, 17], counts=(4, 3, 9), limits=False)
    engine = tiny.make_engine(8, 4, model=policy.model, mesh=mesh, prompt_length=24, weights=weights)
    found = tiny.decoded_together(engine, stream, params)
    scored = scores(jax.device_get(params), stream, found, policy.model)
    np.testing.assert_allclose(found.policy_logprobs, scored, rtol=0, atol=4e-5)


def compiled(caplog: pytest.LogCaptureFixture) -> dict[str, int]:
    told = "\n".join(record.getMessage() for record in caplog.records)
    return {name: told.count(f"Finished XLA compilation of jit({name})") for name in ("prefill", "decode")}


def test_nothing_is_compiled_after_a_request_of_each_bucket(caplog):
    engine = tiny.make_engine(6, 3)  # sizes of no other test, so that no program is shared
    with jax.log_compiles():
        engine.set_policy(PARAMS, 5)
        engine.generate([tiny.make_request([3], 1), tiny.make_request([3] * P, 1)])
        before = compiled(caplog)
        assert before == {"prefill": 2, "decode": 1}
        tickets: list[Ticket] = []
        for i, request in enumerate(tiny.make_stream(LENGTHS, counts=(1, 4, 2, 9, 3), seed=1)):
            tickets.append(engine.submit(request))
            if i % 7 == 0:
                engine.set_policy(tiny.random_params(i), i)
                list(engine.decode(tickets[: i // 2]))
        list(engine.decode(tickets))
        engine.generate([tiny.make_request(prompt, 2, beginning=[3, 4, 5]) for prompt in ([7, 8], [7] * 50)])
    assert compiled(caplog) == before


def test_a_beginning_is_continued_as_the_whole_response_goes_on(grouped):
    grouped.set_policy(PARAMS, 5)
    checked = 0
    for request in tiny.make_stream([3, 40], counts=(4,), limits=False):
        whole = grouped.generate([request])[0]
        pairs = [(i, k) for i, length in enumerate(whole.length) for k in range(1, length)]
        rows = [tiny.row_of(request, i, beginning=whole.tokens[i, :k].tolist()) for i, k in pairs]
        for (i, k), found in zip(pairs, grouped.generate(rows), strict=True):
            np.testing.assert_array_equal(found.tokens[0], whole.tokens[i])
            assert found.length[0] == whole.length[i] and found.finished[0] == whole.finished[i]
            assert (found.policy_step[0, :k] == -1).all() and (found.policy_step[0, k : whole.length[i]] == 5).all()
            for field in ("policy_logprobs", "behavior_logprobs"):
                assert not getattr(found, field)[0, :k].any()
                np.testing.assert_allclose(getattr(found, field)[0, k:], getattr(whole, field)[i, k:], rtol=0, atol=1e-5)
            checked += 1
    assert checked > 20


STOPS, MIN_LENGTH = ("aba", "cd"), 3


def test_rows_end_by_stop_strings_and_by_ends_in_time():
    """Against the joined text: a row ends with the first token that completes a stop string, or by an end from the third on."""
    token_bytes = [TEXTS[i].encode() if i in TEXTS else None for i in range(MODEL.vocab)]
    stop_strings = stop_automaton(token_bytes, STOPS, vocab=MODEL.vocab)
    space = dataclasses.replace(SPACE, min_length=MIN_LENGTH)
    stopping = tiny.make_engine(8, 4, space=space, stop_strings=stop_strings, prompt_length=16)
    stopping.set_policy(PARAMS, 5)
    beginnings = itertools.cycle([[], [5], [6], [3, 4], [10, 10, 3], [10, 4, 10, 3]])
    requests = [
        # Prompts end with what a stop string could begin with: that does not count.
        tiny.make_request([5, 3 + i % 4], 6, i, beginning=next(beginnings), sampling=sampling_lib.constant(6, temperature=1.5))
        for i in range(36)
    ]
    why = set()
    for request, generation in zip(requests, stopping.generate(requests), strict=True):
        given = len(request.beginning)
        for tokens, length, finished in zip(generation.tokens, generation.length, generation.finished, strict=True):
            texts = [TEXTS.get(int(token), "|") for token in tokens]
            stops = [t for t in range(given, length) if any(stop in "".join(texts[: t + 1]) for stop in STOPS)]
            ends = np.flatnonzero(tokens[:length] == EOS).tolist()
            first = min([*stops, *ends], default=None)
            assert all(t + 1 >= MIN_LENGTH for t in ends)
            assert length == (R if first is None else first + 1) and finished == (first is not None)
            begun = first in stops and not any(stop in "".join(texts[given:length]) for stop in STOPS)
            kind = "cut" if first is None else "end" if first in ends else "begun" if begun else "stop"
            why.add((kind, np.sign(length - MIN_LENGTH)))
    assert {("cut", 1), ("end", 0), ("end", 1), ("begun", 1), ("stop", -1), ("stop", 1)} <= why
    with pytest.raises(ValueError, match="query q: the given response tokens hold a stop string"):
        stopping.submit(tiny.make_request([5], 2, name="q", beginning=[7, 7]))


def test_engines_that_cannot_be_made_are_refused():
    with pytest.raises(ValueError, match="slots=7 cannot be divided by the 2 ways of the mesh's data axis"):
        tiny.make_engine(7, 1, mesh=tiny.make_mesh(2))
    with pytest.raises(ValueError, match="samples=0 of a query must be at least 1"):
        tiny.make_engine(4, 0)
    learned = dataclasses.replace(MODEL, positions="learned")
    with pytest.raises(ValueError, match="prompt_length=6 and response_length=12 need more than the model's 16 positions"):
        tiny.make_engine(1, 1, model=learned, prompt_length=6)
    assert tiny.make_engine(1, 1, model=learned, prompt_length=5).config.prompt_length == 5  # 5 + 12 - 1 positions are read


@pytest.mark.parametrize("prompt, given, limit", [(0, 0, "1 to 64"), (65, 0, "1 to 64"), (60, 5, "0 to 4"), (3, 12, "0 to 11")])
def test_requests_that_do_not_fit_are_refused(grouped, prompt, given, limit):
    with pytest.raises(ValueError, match=f"query q: {prompt} tokens of prompt and {given} of the response .*{limit}"):
        grouped.submit(tiny.make_request([3] * prompt, 2, beginning=[3] * given))


def test_logits_that_are_no_numbers_name_the_query():
    engine, broken = tiny.make_engine(*SIZES), jax.tree.map(np.copy, PARAMS)
    broken["layers"]["feed_forward"]["up"]["weight"][1, 0, 0] = np.nan
    engine.set_policy(broken, 6)
    with pytest.raises(FloatingPointError, match="policy step 6 are not finite at response token 0 of query the broken one"):
        engine.generate([tiny.make_request([3, 4], 2, name="the broken one")])
