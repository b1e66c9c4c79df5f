"""The last samples of a job move into fewer slots, and their rows are what they would have been."""

import dataclasses

import numpy as np
import pytest

from tba_jax.decoding import lane_programs
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
    random_params,
    row_keys,
)

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


@pytest.mark.parametrize("slots, samples", SIZES.values(), ids=SIZES)
def test_rows_are_the_same(eager, slots, samples):
    """Twice, so that the second batch begins with all slots again."""
    engine, single = make_engine(slots, samples), make_engine(1, 1)
    fewer = 0
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


@pytest.mark.parametrize("swap", ["at_once", "new_sequences"])
def test_few_slots_take_up_new_weights(eager, swap):
    engine = make_engine(4, 1, space=ENDLESS, response_length=40, swap=swap)
    engine.set_policy(PARAMS, 0)
    tickets = [engine.submit(make_request([3, 4, 5], 1, limit=np.array([limit]))) for limit in (40, 2)]
    engine.collect(tickets[1:])
    assert engine._lanes[0]._size > 0
    engine.set_policy(random_params(1), 1)
    later = engine.submit(make_request([3, 4, 5], 1, 7, keys=row_keys(1), limit=np.array([30])))
    (old, new) = engine.collect([tickets[0], later])
    assert set(new.policy_step[0, :30]) == {1}
    assert set(old.policy_step[0, :40]) == ({0, 1} if swap == "at_once" else {0})
