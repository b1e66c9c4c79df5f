"""No settings that pass the checks let trainer and searchers wait for ever, and none are refused that could go on."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from configs import base
from tba_jax.experiment import flow
from tests.support.flow_world import EVENTS, World, goes_on_in_turn

SECONDS = 3.0
AMPLE = 40
NAMED = (
    *("replay.max_draws_per_row", "replay.max_staleness", "publish.every_steps", "evaluation.every_steps"),
    *("searchers.max_rows_per_snapshot", "replay.recent_probability", "replay.min_rows", "replay.capacity", "learner.steps"),
)


def config(sizes: tuple[int, ...], **changes: Any) -> Any:
    c = base.get_config()
    c.learner.queries, c.learner.completions, c.searchers.queries_per_batch, c.searchers.samples_per_query, count = sizes
    c.searchers.count = count
    c.learner.steps, c.publish.at_most_seconds, c.replay.capacity_per_query = 7, SECONDS, 6
    c.update_from_flattened_dict(changes)
    return c


def rounds(c: Any) -> int:
    """Enough for a run in which each step waits for relief several times."""
    return int(c.learner.steps * (8 * SECONDS + 12))


def chaos(world: World, rng: np.random.Generator, events: int) -> None:
    for event, number in zip(rng.choice(EVENTS, events), rng.integers(0, 2, events), strict=True):
        if not world.is_done:
            world.do(event, int(number))


def look(c: Any, seed: int) -> str:
    """The refusal of the settings, "" where they pass; asserts that they are rightly refused or rightly pass."""
    refused, rng = "; ".join(flow.refusals(c)), np.random.default_rng(seed)
    named = {name: c[name.split(".")[0]][name.split(".")[1]] for name in NAMED}
    if refused:
        for _ in range(2):
            world = World(c, relief=False)
            assert not world.goes_on(rounds=rounds(c), rng=rng), f"{named} is refused and could go on: {refused}"
        return refused
    # A small quota may hold too few rows where two searchers happen to ask the same query; then relief is needed.
    if c.replay.capacity >= AMPLE and not c.replay.max_draws_per_row and not c.searchers.max_rows_per_snapshot:
        alone = (World(c, relief=False).goes_on(rounds=rounds(c), rng=rng) for _ in range(3))
        assert any(alone), f"{named} passes, and only relief lets it go on"
    for kinds in (0, 1, 2):
        world = World(c, kinds=kinds)
        chaos(world, rng, 60)
        assert world.goes_on(rounds=rounds(c), rng=rng), f"{named} passes and waits for ever at step {world.step}, {kinds} kinds"
    return ""


def look_in_turn(c: Any) -> str:
    refused = "; ".join(flow.refusals(c))
    for kinds in (0, 1, 2):
        if goes_on_in_turn(World(c, kinds=kinds), rounds=rounds(c)) == bool(refused):
            raise AssertionError(f"{c.to_dict()}: {kinds} kinds of responses, refused: {refused!r}")
    return refused


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
    }
    c.update_from_flattened_dict({name: draw(st.integers(*limits)) for name, limits in ranges.items()})
    c.searchers.lag = c.publish.every_steps * draw(st.integers(0, 3))
    c.replay.recent_probability = draw(st.floats(0, 1))
    c.replay.recent_fill = draw(st.sampled_from(("repeat", "older")))
    c.replay.capacity_per_query = draw(st.integers(K, 2 * S))
    c.replay.capacity = Q * S + draw(st.integers(0, 30))
    return c


@st.composite
def flows_in_turn(draw: Any) -> Any:
    c = draw(flows())
    c.searchers.count, c.searchers.lag, c.schedule.mode = 1, 0, "interleaved"
    c.schedule.lag, c.schedule.updates_per_search = draw(st.integers(0, 4)), draw(st.integers(1, 3))
    return c


@given(c=flows(), seed=st.integers(0, 2**32 - 1))
@hypothesis_settings(max_examples=40, deadline=None, derandomize=True)
def test_no_settings_that_pass_wait_for_ever(c, seed):
    look(c, seed)


@given(c=flows_in_turn())
@hypothesis_settings(max_examples=25, deadline=None, derandomize=True)
def test_no_settings_that_pass_wait_for_ever_in_turn(c):
    look_in_turn(c)


def test_what_was_lost_is_made_up_for_by_relief_alone():
    """A searcher leaves with rows that the first update needs, and so does the one that comes after it, and so on."""
    changes = {"searchers.max_rows_per_snapshot": 4, "publish.every_steps": 1, "replay.max_draws_per_row": 1}
    c = config((4, 2, 2, 2, 2), **changes)
    assert not flow.refusals(c)
    for relief in (False, True):
        world = World(c, relief=relief)
        for event, number in (("refresh", 0), ("refresh", 1), ("search", 0), ("search", 1), ("lose", 0)):
            world.do(event, number)
        assert world.goes_on(rounds=rounds(c), rng=np.random.default_rng(0)) == relief
        assert (world.grants > 0) == relief


@pytest.mark.parametrize("limit", ["max_draws_per_row", "max_staleness"])
@pytest.mark.parametrize("window", [0, 1, 3])
def test_good_duplicates_that_are_used_up_keep_no_run_from_going_on(window, limit):
    """A row that may not be drawn any more stays because its reward is the best; those like it come in all the same."""
    c = config((2, 2, 2, 2, 1), **{"replay.merge_keep": "best", f"replay.{limit}": 1, "replay.recent_window": window})
    assert not flow.refusals(c)
    world = World(c, kinds=2)
    world.reward = lambda: -float(world.step)
    assert world.goes_on(rounds=rounds(c), rng=np.random.default_rng(0))


NEVER: list[tuple[dict[str, Any], str]] = [
    (
        {"replay.max_staleness": 3, "publish.every_steps": 5},
        "replay.max_staleness=3 lets the rows of a snapshot be drawn in 4 steps, and the next snapshot comes after 5 "
        "(publish.every_steps=5): step 5 would wait for ever",
    ),
    (
        {"replay.max_staleness": 4, "publish.every_steps": 2, "searchers.lag": 4},
        "replay.max_staleness=4 lets the rows of a snapshot be drawn in 5 steps, and the next snapshot comes after 6 "
        "(searchers.lag=4): step 6 would wait for ever",
    ),
    (
        {"replay.max_draws_per_row": 1, "publish.every_steps": 5, "searchers.max_rows_per_snapshot": 4},
        "searchers.max_rows_per_snapshot=4 lets searchers.count=2 searchers generate 8 rows with a snapshot, each drawn "
        "replay.max_draws_per_row=1 times at most; the 5 updates until the next snapshot (publish.every_steps=5) draw 20",
    ),
    (
        {"searchers.max_rows_per_snapshot": 2, "searchers.count": 1, "learner.queries": 4},
        "searchers.max_rows_per_snapshot=2 lets searchers.count=1 searchers ask 2 queries before the first update, which",
    ),
    (
        {"searchers.max_rows_per_snapshot": 4, "replay.min_rows": 9},
        "searchers.max_rows_per_snapshot=4 lets searchers.count=2 searchers generate 8 rows before the first update, which",
    ),
    (
        {"searchers.count": 0, "replay.mount": ("runs/first",), "replay.max_staleness": 2},
        "searchers.count=0 leaves only rows of replay.mount, which count as of step 0: under replay.max_staleness=2 no step "
        "after 3 of learner.steps=7 may draw them",
    ),
    (
        {"schedule.mode": "interleaved", "schedule.lag": 4, "replay.max_staleness": 3, "searchers.count": 1},
        "schedule.lag=4 makes every row 4 steps old, more than replay.max_staleness=3: step 5 would wait for ever",
    ),
]


@pytest.mark.parametrize("changes, sentence", NEVER, ids=lambda x: "" if isinstance(x, dict) else x.split("=")[0])
def test_what_can_never_go_on_is_refused_by_its_settings(changes, sentence):
    assert any(refused.startswith(sentence) for refused in flow.refusals(config((2, 2, 2, 2, 2), **changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"replay.max_staleness": 3, "publish.every_steps": 4},
        {"replay.max_staleness": 5, "publish.every_steps": 2, "searchers.lag": 4},
        {"replay.max_draws_per_row": 1, "publish.every_steps": 2, "searchers.max_rows_per_snapshot": 8},
        {"searchers.max_rows_per_snapshot": 3, "publish.every_steps": 1},
        {"searchers.max_rows_per_snapshot": 12, "publish.every_steps": 1, "replay.min_rows": 9, "replay.capacity": 8},
    ],
    ids=["age", "age and lag", "draws", "a quota is of whole batches", "rows that have left again count as come"],
)
def test_what_just_can_go_on_passes(changes):
    assert look(config((2, 2, 2, 2, 1), **changes), 0) == ""


def test_a_lag_up_to_the_limit_passes():
    for lag, steps in ((3, 7), (4, 4)):
        changes = {"schedule.mode": "interleaved", "schedule.lag": lag, "replay.max_staleness": 3, "learner.steps": steps}
        assert look_in_turn(config((2, 2, 2, 2, 1), **changes)) == ""
