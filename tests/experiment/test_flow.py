"""Trainer and searchers never wait for ever: not under settings that pass the checks, and none are refused that could go on."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from configs import base
from tba_jax.experiment import checks
from tests.support.flow_world import EVENTS, World, goes_on_in_turn

SECONDS = 3.0


def config(sizes: tuple[int, ...] = (2, 2, 2, 2, 2), **changes: Any) -> Any:
    c = base.get_config()
    c.learner.queries, c.learner.completions, c.searchers.queries_per_batch, c.searchers.samples_per_query, count = sizes
    c.searchers.count = count
    c.learner.steps, c.publish.at_most_seconds, c.replay.capacity_per_query = 7, SECONDS, 6
    c.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
    return c


def goes_on(c: Any, kinds: int, rng: np.random.Generator) -> bool:
    """Whether a run ends after 60 events in any order, of which some lose rows; each step may wait for relief several times."""
    world, rounds = World(c, kinds=kinds), int(c.learner.steps * (16 * SECONDS + 12))
    if c.schedule.mode == "interleaved":
        return goes_on_in_turn(world, rounds=rounds)
    for event, number in zip(rng.choice(EVENTS, 60), rng.integers(0, 2, 60), strict=True):
        if not world.is_done and c.publish.at_most_seconds == SECONDS:
            world.do(event, int(number))
    return world.goes_on(rounds=rounds, rng=rng)


@st.composite
def flows(draw: Any) -> Any:
    Q, K, count = (draw(st.integers(1, 4)) for _ in range(3))
    S, per_batch = K + draw(st.integers(0, 3)), draw(st.integers(1, 4))
    c = config((Q, K, per_batch, S, count))
    ranges = {
        "replay.max_draws_per_row": (0, 4),
        "replay.max_staleness": (0, 6),
        "publish.every_steps": (1, 8),
        "evaluation.every_steps": (1, 12),
        "searchers.max_rows_per_snapshot": (0, 40),
        "replay.min_rows": (0, 30),
        "replay.recent_window": (0, 4),
        "learner.steps": (1, 9),
        "schedule.updates_per_search": (1, 3),
    }
    c.update_from_flattened_dict({name: draw(st.integers(*limits)) for name, limits in ranges.items()})
    if draw(st.booleans()):
        c.searchers.count, c.schedule.mode, c.schedule.lag = 1, "interleaved", draw(st.integers(0, 4))
    else:
        c.searchers.lag = c.publish.every_steps * draw(st.integers(0, 3))
    c.replay.recent_probability = draw(st.floats(0, 1))
    c.replay.recent_fill, c.replay.merge_keep = (
        draw(st.sampled_from(("repeat", "older"))),
        draw(st.sampled_from(("newest", "best"))),
    )
    c.replay.capacity_per_query = draw(st.integers(K, 2 * S))
    c.replay.capacity = Q * S + draw(st.integers(0, 30))
    return c


@given(c=flows(), seed=st.integers(0, 2**32 - 1))
# A row that may not be drawn any more stays where its reward is the best, and others like it come all the same.
@example(config(searchers__max_rows_per_snapshot=2, replay__max_draws_per_row=1, publish__every_steps=5), 0)
@example(config(replay__merge_keep="best", replay__max_staleness=1, replay__recent_window=3), 0)
@example(config(replay__max_staleness=5, publish__every_steps=2, searchers__lag=4), 0)
@hypothesis_settings(max_examples=40, deadline=None, derandomize=True)
def test_settings_that_pass_go_on_and_those_that_are_refused_wait_for_ever(c, seed):
    if refused := "; ".join(checks.waits_for_ever(c)):
        c.publish.at_most_seconds = 1e9  # where relief comes for another reason, its snapshot may happen to be the one that lacks
    for kinds in (0, 1, 2):  # different responses that the policy gives; 0: all differ
        assert goes_on(c, kinds, np.random.default_rng(seed)) != bool(refused), f"{kinds} kinds, {refused!r}\n{c.replay}"


NEVER: list[tuple[dict[str, Any], str]] = [
    (
        {"replay__max_staleness": 4, "publish__every_steps": 2, "searchers__lag": 4},
        "replay.max_staleness=4 lets the rows of a snapshot be drawn in 5 steps, and searchers take up the next one after 6 "
        "(searchers.lag=4): step 6 would wait for ever",
    ),
    (
        {"searchers__count": 0, "replay__mount": ("runs/first",), "replay__max_staleness": 2},
        "searchers.count=0 leaves only rows of replay.mount, which count as of step 0: under replay.max_staleness=2 no step "
        "after 3 of learner.steps=7 may draw them",
    ),
    (
        {"schedule__mode": "interleaved", "schedule__lag": 4, "replay__max_staleness": 3, "searchers__count": 1},
        "schedule.lag=4 makes every row 4 steps old, more than replay.max_staleness=3: step 5 would wait for ever",
    ),
]


@pytest.mark.parametrize("changes, sentence", NEVER, ids=["lag", "no searchers", "in turn"])
def test_what_can_never_go_on_is_refused_by_its_settings(changes, sentence):
    assert [*checks.waits_for_ever(config(**changes))] == [sentence]
