"""Trainer and searchers never wait for ever: not under settings that pass the checks, and none are refused that could go on.

Without models: the real index, draw, publishing, relief, backpressure and stream of queries, with a counter as clock, and events
in any order. A row is a query, a response and the step of its weights.
"""

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from configs import base
from tba_jax.experiment import checks
from tba_jax.replay.index import ReplayIndex
from tba_jax.roles import backpressure
from tba_jax.roles.searcher.stream import QueryStream
from tba_jax.roles.trainer.buffer import draw, make_selection
from tba_jax.roles.trainer.loop import Relief
from tba_jax.tasks.interface import EncodedQuery, Query
from tba_jax.trajectory import RowShape

SHAPE = RowShape(prompt_length=1, response_length=1, reward_parts=())
QUERIES = [EncodedQuery(query=Query(prompt=str(i)), prompt=(i,)) for i in range(6)]
SECONDS = 3.0


class Searcher:
    def __init__(self, world: "World", number: int):
        self.world, self.name, self.rows = world, f"searcher-{number}", 0
        self.stream = QueryStream(QUERIES, seed=0, writer=number)
        self.room = backpressure.Room(Path(), self.name)
        self.step = self.newest = -1
        self.batches: deque[tuple[int, list[int]]] = deque()  # decoded, not delivered: step of the weights, queries

    def refresh(self) -> None:
        published = self.world.published
        if published[-1] > self.newest:
            self.newest = published[-1]
            self.step = max(step for step in published if step <= max(0, self.newest - self.world.config.searchers.lag))
        if self.world.told is not None:
            self.room.take(self.world.told)

    def search(self) -> None:
        s = self.world.config.searchers
        if self.step < 0 or not self.room.allows(self.stream.taken * s.samples_per_query) or len(self.batches) > 2:
            return
        asked = [next(self.stream).prompt[0] for _ in range(s.queries_per_batch)]
        self.batches.append((self.step, asked))

    def fail(self) -> None:
        self.deliver(scored=False)

    def deliver(self, *, scored: bool = True) -> None:
        if not self.batches:
            return
        step, asked = self.batches.popleft()
        samples = self.world.config.searchers.samples_per_query
        rows = {name: np.zeros((len(asked) * samples, *row), dtype) for name, (dtype, row) in SHAPE.columns().items()}
        count = len(rows["row"])
        rows["row"] = np.arange(self.rows, self.rows + count)
        rows["query_id"] = np.repeat(np.array(asked, np.uint64), samples)
        rows["prompt_length"][:] = rows["response_length"][:] = 1
        rows["tokens"][:, 1] = [self.world.response() for _ in range(count)]
        rows["policy_step"][:] = step
        # Of two equal responses, the older one is better.
        rows["reward"] = np.full(count, -float(self.world.step) if scored else np.nan, np.float32)
        self.rows += count
        self.world.arrived.append((self.name, rows))


class World:
    """kinds: different responses that the policy gives; 0: all differ."""

    def __init__(self, config: Any, *, kinds: int):
        self.config, self.in_turn, replay = config, config.schedule.mode == "interleaved", config.replay
        limits = dict(capacity=replay.capacity, capacity_per_query=replay.capacity_per_query)
        self.index = ReplayIndex(shape=SHAPE, vocab_size=2**30, **limits, merge_duplicates=True, merge_keep=replay.merge_keep)
        self.step, self.published, self.told, self.clock, self.kinds, self.responses = 0, [0], None, 0.0, kinds, 0
        self.arrived: list[tuple[str, dict[str, np.ndarray]]] = []
        self.relief = Relief(seconds=config.publish.at_most_seconds, publish=self.publish, clock=lambda: self.clock)
        self.searchers = [Searcher(self, number) for number in range(config.searchers.count)]
        self.joined = len(self.searchers)

    def response(self) -> int:
        self.responses += 1
        return 1 + (self.responses % self.kinds if self.kinds else self.responses)

    def publish(self) -> None:
        self.published += [self.step] * (self.published[-1] < self.step)

    @property
    def is_done(self) -> bool:
        return self.step >= self.config.learner.steps

    def train(self) -> bool:
        """One look of the trainer. Returns whether it did a step."""
        for name, rows in self.arrived:
            self.index.add(name, rows, step=self.step)
        self.arrived.clear()
        c = self.config
        selection = make_selection(c, recent_window=1 if self.in_turn else c.publish.every_steps)
        self.index.merge(before=self.index.recent_since(selection.recent_window))
        slots = draw(self.index, selection, min_rows=c.replay.min_rows, seed=0, step=self.step)
        if c.searchers.max_updates_ahead and not self.in_turn:
            limits = dict(updates_ahead=c.searchers.max_updates_ahead, min_rows=c.replay.min_rows, is_own=lambda writer: True)
            self.told = backpressure.demand(self.index, selection, **limits, step=self.step, waits=slots is None)
        if slots is None:
            self.relief.waits()
            return False
        self.index.mark_drawn(slots)
        self.step += 1
        self.relief.stepped()
        if any(self.step % every == 0 for every in (c.publish.every_steps, c.evaluation.every_steps, c.learner.steps)):
            self.publish()
        return True

    def do(self, event: str, number: int) -> None:
        number %= len(self.searchers)
        searcher = self.searchers[number]
        if event == "train":
            self.train()
        elif event == "tick":
            self.clock += 1
        elif event == "leave":
            self.joined += 1
            self.searchers[number] = Searcher(self, self.joined)
        else:
            getattr(searcher, event)()

    def goes_on(self, *, rounds: int, rng: np.random.Generator) -> bool:
        """Whether the run ends if from now on nothing is lost: everybody gets a turn in each round, in any order."""
        for _ in range(rounds):
            turns = [(event, i) for i in range(len(self.searchers)) for event in ("search", "deliver", "refresh")]
            for event, i in [(*turns, ("train", 0))[k] for k in rng.permutation(len(turns) + 1)]:
                if self.is_done:
                    return True
                self.do(event, i)
            self.clock += 1
        return self.is_done

    def goes_on_in_turn(self, *, rounds: int) -> bool:
        """The same in one process: the loop of roles/interleaved.py."""
        (searcher,), lacks_rows, updates = self.searchers, False, self.config.schedule.updates_per_search
        for _ in range(rounds * updates):
            if self.is_done:
                return True
            if lacks_rows or self.step % updates == 0:
                searcher.step = max(0, self.step - self.config.schedule.lag)
                searcher.search()
                searcher.deliver()
            lacks_rows = not self.train()
        return self.is_done


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
    if world.in_turn:
        return world.goes_on_in_turn(rounds=rounds)
    events = ("search", "deliver", "fail", "refresh", "leave", "train", "tick")
    for event, number in zip(rng.choice(events, 60), rng.integers(0, 2, 60), strict=True):
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
        "searchers.max_updates_ahead": (0, 3),
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
    c.replay.recent_fill = draw(st.sampled_from(("repeat", "older")))
    c.replay.merge_keep = draw(st.sampled_from(("newest", "best")))
    c.replay.capacity_per_query = draw(st.integers(K, 2 * S))
    c.replay.capacity = Q * S + draw(st.integers(0, 30))
    return c


@given(c=flows(), seed=st.integers(0, 2**32 - 1))
# A row that may not be drawn any more stays where its reward is the best, and others like it come all the same.
@example(config(searchers__max_updates_ahead=1, replay__max_draws_per_row=1, publish__every_steps=5), 0)
# More rows are needed before the first step than may be ahead.
@example(config(searchers__max_updates_ahead=1, replay__min_rows=30), 0)
@example(config(replay__merge_keep="best", replay__max_staleness=1, replay__recent_window=3), 0)
@example(config(replay__max_staleness=5, publish__every_steps=2, searchers__lag=4), 0)
@hypothesis_settings(max_examples=25, deadline=None, derandomize=True)
def test_settings_that_pass_go_on_and_those_that_are_refused_wait_for_ever(c, seed):
    if refused := "; ".join(checks.waits_for_ever(c)):
        c.publish.at_most_seconds = 1e9  # where relief comes for another reason, its snapshot may happen to be the one that lacks
    for kinds in (0, 1, 2):
        assert goes_on(c, kinds, np.random.default_rng(seed)) != bool(refused), f"{kinds} kinds, {refused!r}\n{c.replay}"
