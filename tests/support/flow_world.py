"""Trainer and searchers without models: the real index, draw, publishing, relief, quota and stream of queries, with a counter as
clock, and events in whatever order a test says. A row is a query, a response and the step of its weights."""

from collections import deque
from typing import Any

import numpy as np

from tba_jax.replay.index import ReplayIndex
from tba_jax.roles.searcher.stream import QueryStream, Quota
from tba_jax.roles.trainer.buffer import draw, make_selection
from tba_jax.roles.trainer.loop import Relief
from tba_jax.tasks.interface import EncodedQuery, Query
from tba_jax.trajectory import RowShape

SHAPE = RowShape(prompt_length=1, response_length=1, reward_parts=())
VOCAB = 2**30
EVENTS = ("search", "deliver", "lose", "fail", "refresh", "leave", "train", "tick")


class _Searcher:
    def __init__(self, world: "World", number: int):
        s = world.config.searchers
        self.world, self.name = world, f"searcher-{number}"
        self.stream = QueryStream(world.queries, seed=0, writer=number)
        self.quota = Quota(
            max_rows=s.max_rows_per_snapshot, queries_per_batch=s.queries_per_batch, samples_per_query=s.samples_per_query
        )
        self.step = self.newest = -1
        self.batches: deque[tuple[int, list[int]]] = deque()  # decoded, not delivered: step of the weights, queries
        self.rows = 0

    def refresh(self) -> None:
        if self.world.newest > self.newest:
            self.newest = self.world.newest
            self.quota.renew()
            wanted = max(0, self.newest - self.world.config.searchers.lag)
            self.step = max(step for step in self.world.published if step <= wanted)
        if not self.quota.is_left and not self.batches:
            self.quota.wait(self.world.grants)

    def search(self) -> None:
        if self.step < 0 or not self.quota.is_left or len(self.batches) > 2:
            return
        asked = []
        for _ in range(self.world.config.searchers.queries_per_batch):
            asked.append(next(self.stream).prompt[0])
            self.quota.ask()
        self.batches.append((self.step, asked))

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

    def __init__(self, config: Any, *, kinds: int = 0):
        self.config, self.queries = config, [EncodedQuery(query=Query(prompt=str(i)), prompt=(i,)) for i in range(6)]
        self.recent_window = 1 if config.schedule.mode == "interleaved" else config.publish.every_steps
        replay = config.replay
        self.index = ReplayIndex(
            shape=SHAPE,
            vocab_size=VOCAB,
            capacity=replay.capacity,
            capacity_per_query=replay.capacity_per_query,
            merge_duplicates=True,
            merge_keep=replay.merge_keep,
        )
        self.step, self.published, self.grants, self.clock = 0, [0], 0, 0.0
        self.arrived: list[tuple[str, dict[str, np.ndarray]]] = []
        self._kinds, self._responses = kinds, 0
        self.relief = Relief(
            seconds=config.publish.at_most_seconds, publish=self._publish, grant=self._grant, clock=lambda: self.clock
        )
        self._joined = 0
        self.searchers = [self._join() for _ in range(config.searchers.count)]

    def _join(self) -> _Searcher:
        self._joined += 1
        return _Searcher(self, self._joined)

    def response(self) -> int:
        self._responses += 1
        return 1 + (self._responses % self._kinds if self._kinds else self._responses)

    @property
    def newest(self) -> int:
        return self.published[-1]

    def _publish(self) -> bool:
        missing = self.newest < self.step
        if missing:
            self.published.append(self.step)
        return missing

    def _grant(self) -> None:
        self.grants += 1

    @property
    def is_done(self) -> bool:
        return self.step >= self.config.learner.steps

    def train(self) -> bool:
        """One look of the trainer. Returns whether it did a step."""
        for name, rows in self.arrived:
            self.index.add(name, rows, step=self.step)
        self.arrived.clear()
        c = self.config
        selection = make_selection(c, recent_window=self.recent_window)
        self.index.merge(before=self.index.recent_since(selection.recent_window))
        slots = draw(self.index, selection, min_rows=c.replay.min_rows, seed=0, step=self.step)
        if slots is None:
            self.relief.waits()
            return False
        self.index.mark_drawn(slots)
        self.step += 1
        self.relief.stepped()
        steps = c.publish.every_steps, c.evaluation.every_steps, c.learner.steps
        if any(self.step % every == 0 for every in steps):  # as Publisher.is_due: no run goes on after learner.steps
            self._publish()
        return True

    def do(self, event: str, number: int) -> None:
        """One of EVENTS; `number` says whose."""
        searcher = self.searchers[number % len(self.searchers)]
        if event == "train":
            self.train()
        elif event == "tick":
            self.clock += 1
        elif event == "leave":
            self.searchers[number % len(self.searchers)] = self._join()
        elif event == "lose" and searcher.batches:
            searcher.batches.popleft()
        elif event == "fail":
            searcher.deliver(scored=False)
        elif event in ("search", "deliver", "refresh"):
            getattr(searcher, event)()

    def goes_on(self, *, rounds: int, rng: np.random.Generator) -> bool:
        """Whether the run ends if from now on nothing is lost: everybody gets a turn in each round, in any order."""
        for _ in range(rounds):
            if self.is_done:
                return True
            turns = [(event, i) for i in range(len(self.searchers)) for event in ("search", "deliver", "refresh")]
            for event, i in [(*turns, ("train", 0))[k] for k in rng.permutation(len(turns) + 1)]:
                if not self.is_done:
                    self.do(event, i)
            self.clock += 1
        return self.is_done


def goes_on_in_turn(world: World, *, rounds: int) -> bool:
    """As `World.goes_on`, in one process: the loop of roles/interleaved.py."""
    (searcher,) = world.searchers
    lacks_rows = False
    for _ in range(rounds * world.config.schedule.updates_per_search):
        if world.is_done:
            return True
        if lacks_rows or world.step % world.config.schedule.updates_per_search == 0:
            searcher.step = max(0, world.step - world.config.schedule.lag)
            searcher.quota.renew()
            searcher.search()
            searcher.deliver()
        lacks_rows = not world.train()
    return world.is_done
