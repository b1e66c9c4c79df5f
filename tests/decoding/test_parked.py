"""Turns that go on from a parked cache give the rows that a whole prefill gives, and compute only what is new."""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
import pytest

from tba_jax.decoding import requests as requests_lib
from tba_jax.decoding.engine import Engine
from tba_jax.decoding.requests import Generation, Parked, Request
from tests.support import applied
from tests.support import tiny_engine as tiny
from tests.support.tiny_engine import MODEL, PARAMS, P

TURN = 3  # tokens that each turn may draw
LOCAL = dataclasses.replace(MODEL, layers=3, layer_pattern="lg", window=5, local_rope_theta=50.0)
LEARNED = dataclasses.replace(MODEL, positions="learned", max_positions=P)


def engine(slots: int, **changes) -> Engine:
    return tiny.make_engine(slots, 1, response_length=16, given_length=15, **changes)


def first_turns(lengths: Sequence[int], *, parks: bool) -> list[Request]:
    rng = np.random.default_rng(3)
    keys = tiny.row_keys(len(lengths), seed=5)
    return [
        Request(
            name=f"q{i}",
            prompt=rng.integers(3, MODEL.vocab, length).tolist(),
            keys=keys[i : i + 1],
            sampling=tiny.plain_sampling(1),
            parked=Parked() if parks else None,
            limit=np.array([TURN]),
        )
        for i, length in enumerate(lengths)
    ]


def next_turn(request: Request, made: Generation) -> Request:
    """The request after the turn that was made, with one or two tokens of an environment between them."""
    said = [3 + int(made.length[0]) % 5, 8][: 1 + len(request.prompt) % 2]
    beginning = [*made.tokens[0, : made.length[0]].tolist(), *said]
    return dataclasses.replace(request, beginning=beginning, turn=len(beginning), limit=np.array([len(beginning) + TURN]))


def played(engine: Engine, lengths: Sequence[int], *, turns: int, parks: bool) -> list[Generation]:
    """The generations of all turns, in order."""
    engine.set_policy(engine_params(engine), 5)
    requests, found = first_turns(lengths, parks=parks), []
    for _ in range(turns):
        made = engine.generate(requests)
        found += made
        requests = [next_turn(request, its) for request, its in zip(requests, made, strict=True)]
    return found


def engine_params(engine: Engine):
    model = engine.config.model
    return PARAMS if model == MODEL else applied.random(applied.specs(model), scale=0.4, seed=3)


@pytest.mark.parametrize("model", [MODEL, LOCAL, LEARNED], ids=["global", "local", "learned positions"])
def test_parked_turns_give_the_same_rows_and_compute_what_is_new(model):
    lengths = (20, 33, 5, 17, 41)
    space = dataclasses.replace(tiny.SPACE, banned_tokens=(*tiny.BANNED, tiny.EOS))
    whole, parks = (engine(5, model=model, space=space) for _ in range(2))
    expected = requests_lib.concatenate(played(whole, lengths, turns=3, parks=False))
    found = requests_lib.concatenate(played(parks, lengths, turns=3, parks=True))
    tiny.assert_same_rows(found, expected)
    first = sum(lengths)
    said = sum(1 + length % 2 for length in lengths)
    assert whole.usage.prompt_tokens == 3 * first + 3 * (TURN * 5 + said)
    assert parks.usage.prompt_tokens == first + 2 * (TURN * 5 + said), "each token once"
    assert parks.usage.flops < whole.usage.flops and parks.usage.useful == whole.usage.useful


@pytest.mark.parametrize("ways", [1, 2])
def test_parked_turns_give_way_to_others_and_come_back_by_prefill(ways):
    lengths = tuple(range(10, 40, 3))  # ten conversations, four slots
    space = dataclasses.replace(tiny.SPACE, banned_tokens=(*tiny.BANNED, tiny.EOS))
    expected = requests_lib.concatenate(played(engine(10, space=space), lengths, turns=3, parks=False))
    crowded = engine(4, space=space, mesh=tiny.make_mesh(data=ways))
    tiny.assert_same_rows(requests_lib.concatenate(played(crowded, lengths, turns=3, parks=True)), expected)
    said, all_of_it = sum(1 + length % 2 for length in lengths), 3 * sum(lengths)
    computed = crowded.usage.prompt_tokens
    assert sum(lengths) + 2 * (3 * 10 + said) < computed < all_of_it + 3 * (3 * 10 + said), "some are parked, some are not"


def test_new_weights_of_sequences_that_end_by_the_old_ones_leave_nothing_parked():
    lengths, other = (20, 33), tiny.random_params(1)
    space = dataclasses.replace(tiny.SPACE, banned_tokens=(*tiny.BANNED, tiny.EOS))
    rows = {}
    for swap, parks in (("at_once", True), ("new_sequences", True), ("new_sequences", False)):
        its = engine(2, space=space, swap=swap)
        its.set_policy(PARAMS, 5)
        requests = first_turns(lengths, parks=parks)
        made = its.generate(requests)
        its.set_policy(other, 6)
        rows[swap, parks] = requests_lib.concatenate(
            its.generate([next_turn(request, each) for request, each in zip(requests, made, strict=True)])
        )
    tiny.assert_same_rows(rows["new_sequences", True], rows["new_sequences", False])
    kept, new = (rows[swap, True].policy_logprobs for swap in ("at_once", "new_sequences"))
    assert np.abs(kept - new).max() > 1e-3, "the caches of old weights are read"


@pytest.mark.slow
def test_what_parked_turns_cost_beside_one_turn_of_as_many_tokens(capsys):
    """Eight turns of 8 drawn tokens, with 24 of an environment between them, 16 conversations in as many slots."""
    model = dataclasses.replace(MODEL, layers=2, width=256, heads=8, kv_heads=8, head_size=32, ffn=1024)
    space = dataclasses.replace(tiny.SPACE, banned_tokens=(*tiny.BANNED, tiny.EOS))
    turns, drawn, said, count = 8, 8, 24, 16
    R, sizes = turns * (drawn + said), dict(model=model, space=space, chunk=8)
    params = applied.random(applied.specs(model), scale=0.05, seed=3)
    engine = tiny.make_engine(count, 1, prompt_length=64 + R, given_length=R - 1, response_length=R, **sizes)
    whole = tiny.make_engine(count, 1, prompt_length=64, response_length=turns * drawn, **sizes)
    rng = np.random.default_rng(3)
    prompts = rng.integers(3, MODEL.vocab, (count, 60)).tolist()
    requests = [tiny.make_request(each, 1, seed=seed, limit=np.array([drawn])) for seed, each in enumerate(prompts)]
    for its in (engine, whole):
        its.set_policy(params, 5)

    def conversations(parks: bool) -> float:
        asked = [dataclasses.replace(each, parked=Parked() if parks else None) for each in requests]
        begun = time.perf_counter()
        for turn in range(turns):
            made = engine.generate(asked)
            beginnings = [[*its.tokens[0, : its.length[0]].tolist(), *([7] * said)] for its in made]
            given = len(beginnings[0])
            if turn < turns - 1:
                asked = [
                    dataclasses.replace(each, beginning=its, turn=given, limit=np.array([given + drawn]))
                    for each, its in zip(asked, beginnings, strict=True)
                ]
        return time.perf_counter() - begun

    def one_turn() -> float:
        begun = time.perf_counter()
        whole.generate([dataclasses.replace(each, limit=np.array([turns * drawn])) for each in requests])
        return time.perf_counter() - begun

    kinds = {"parked": lambda: conversations(True), "prefilled again": lambda: conversations(False), "one turn": one_turn}
    computed, seconds = {}, {kind: [] for kind in kinds}
    for measured in range(6):
        for kind, run in kinds.items():
            before = engine.usage.prompt_tokens + whole.usage.prompt_tokens
            took = run()
            if measured:  # the first compiles
                seconds[kind].append(took)
            computed[kind] = engine.usage.prompt_tokens + whole.usage.prompt_tokens - before
    cache = 2 * model.layers * model.kv_heads * model.head_size * 4
    with capsys.disabled():
        print(f"\n{cache} bytes of cache a token, {cache * (64 + R + R - 1)} a slot, parked or not")
        for kind, took in seconds.items():
            share = np.median(np.array(took) / np.array(seconds["one turn"]))
            rate = turns * drawn * count / np.median(took)
            print(f"{kind}: {computed[kind]} tokens of prefill, {rate:.0f} tokens/s, x {share:.2f} the time")
    assert np.median(np.array(seconds["parked"]) / np.array(seconds["prefilled again"])) < 0.9
