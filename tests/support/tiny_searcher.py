"""A searcher of a prepared run, and the rows that it must append."""

import dataclasses
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tba_jax import trajectory
from tba_jax.decoding import slots
from tba_jax.decoding.requests import Generation, Request, Usage
from tba_jax.experiment import jobs
from tba_jax.replay.reader import LogReader
from tba_jax.roles.searcher import loop
from tba_jax.roles.searcher.searcher import Searcher
from tba_jax.roles.searcher.stream import query_order, writer_number
from tba_jax.storage import published, snapshots
from tba_jax.tasks.interface import Query, Scores, Task
from tba_jax.telemetry.status import Record, TimeAccount
from tests.support import applied, tiny_run, tiny_snapshots

Q, S, R = 3, 4, 12  # queries of a batch, samples of a query, response tokens
ROWS = Q * S
# Ten queries, so that a batch holds queries of two passes; four slots, so that a batch does not fit at once.
STREAM = dict(task__arithmetic__train_queries=10, task__response_length=R, sampling__explore_temperature_probability=0.5)
BATCHES = dict(searchers__queries_per_batch=Q, searchers__samples_per_query=S, searchers__max_rows_per_snapshot=0)
DECODER = dict(searchers__slots=4, searchers__decode_chunk=2, searchers__poll_seconds=0.01)


def settings(folder: Path, **changes: Any) -> jobs.Invocation:
    return tiny_run.settings(folder, tiny_run.config(**{**STREAM, **BATCHES, **DECODER, **changes}))


def make_searcher(
    prepared: Path, folder: Path, name: str = "run", task: Callable[[Task], Task] | None = None, **changes: Any
) -> tuple[jobs.Invocation, Searcher]:
    """A copy of the prepared run, and a searcher that has not looked at it yet. task: makes another of the task."""
    shutil.copytree(prepared, folder / name)
    s = settings(folder / name, **changes)
    if task is not None:
        s = dataclasses.replace(s, experiment=dataclasses.replace(s.experiment, task=task(s.experiment.task)))
    return s, jobs.make_searcher(s, name="tested", account=TimeAccount())


def run_searcher(s: jobs.Invocation, made: Searcher, look: Callable[[], None]) -> None:
    """`look` is called between batches. The searcher and its refresher must have ended after a minute."""
    record = Record(s.run.metrics("tested"))
    end = time.monotonic() + 60
    threads: set[threading.Thread] = set()

    def stop() -> bool:
        threads.update(thread for thread in threading.enumerate() if thread.name == "refresher-0")
        look()
        return time.monotonic() > end

    try:
        loop.run_searcher(made, s.config, s.run, name="tested", account=TimeAccount(record), stop=stop)
    finally:
        record.status.flush()
        (refresher,) = threads
        refresher.join(timeout=10)
        assert not refresher.is_alive()
    assert time.monotonic() < end


def weights(s: jobs.Invocation, step: int) -> dict[str, Any]:
    """Large enough that responses of all lengths are drawn, and that those of two steps are told apart."""
    return applied.random(s.experiment.policy.trained_specs, scale=0.3, seed=step)


def publish(s: jobs.Invocation, step: int, damage: Callable[[Path], None] = lambda folder: None, scale: float = 1.0) -> None:
    """A snapshot, which appears as a whole, damage included."""
    folder = s.run.root / "policy" / snapshots.new_name(step, 1)
    snapshots.write(folder, jax.tree.map(lambda leaf: scale * leaf, weights(s, step)), dtype="float32")
    damage(folder)
    tiny_snapshots.point(s.run.policies, {**published.kept(s.run.policies), step: folder})


def committed(s: jobs.Invocation) -> int:
    return sum(LogReader(s.run.replay, s.experiment.contract.row_shape()).heads().values())


def rows_of_the_stream(s: jobs.Invocation, made: Searcher, queries: int) -> dict[str, np.ndarray]:
    """All rows of the log, which must be those of the first queries of the stream, in their order, S each."""
    reader = LogReader(s.run.replay, s.experiment.contract.row_shape())
    rows = dict(reader.read(made.writer, 0, reader.heads()[made.writer]))
    prompts, number = [query.prompt for query in s.experiment.queries["train"]], writer_number(made.writer)
    orders = [query_order(10, seed=s.config.seed, writer=number, epoch=epoch) for epoch in range(-(-queries // 10))]
    assert all(sorted(order.tolist()) == list(range(10)) for order in orders)
    asked = [prompts[i] for i in np.concatenate(orders)[:queries] for _ in range(S)]
    assert rows["query_id"].tolist() == [trajectory.query_id(prompt) for prompt in asked]
    np.testing.assert_array_equal(rows["row"], np.arange(queries * S))
    np.testing.assert_array_equal(rows["key"], slots.row_keys(s.config.seed, number, np.arange(queries * S, dtype=np.uint32)))
    steps = [row[:n] for row, n in zip(rows["policy_step"], rows["response_length"], strict=True)]
    assert all(len(each) and (each >= 0).all() and (np.diff(each) >= 0).all() for each in steps)
    return rows


def assert_same_rows(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, column in expected.items():
        np.testing.assert_allclose(found[name], column, rtol=0, atol=1e-5 if name.endswith("_logprobs") else 0, err_msg=name)


@dataclasses.dataclass
class InstantTicket:
    request: Request
    generation: Generation
    left: int


class InstantEngine:
    """In the place of decoding.engine.Engine: answers requests at once, by their keys. What is done with them needs no model."""

    prompts, swapped, policy_step = Q, True, -1

    def __init__(self, *_: Any, response_length: int, **__: Any):
        self._length, self.usage = response_length, Usage()
        self._queue, self._is_finite = deque[InstantTicket](), True

    def prepare(self, params: Any, *, consume: bool) -> Any:
        self._is_finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
        return params

    def swap(self, prepared: Any, step: int) -> None:
        self.policy_step = step

    def submit(self, request: Request) -> InstantTicket:
        logprobs, tokens = (np.zeros((request.samples, self._length), kind) for kind in (np.float32, np.int32))
        length, finished = (np.zeros(request.samples, kind) for kind in (np.int32, bool))
        columns = dict(tokens=tokens, length=length, finished=finished, policy_step=tokens - 1)
        made = Generation(**columns, policy_logprobs=logprobs, behavior_logprobs=logprobs)
        self._queue.append(InstantTicket(request, made, request.samples))
        return self._queue[-1]

    def decode(self, tickets: Sequence[InstantTicket]) -> Iterator[int]:
        while any(ticket.left for ticket in tickets):
            yield max(0, self.prompts - len(self._queue))
            self._answer(self._queue.popleft())

    def _answer(self, ticket: InstantTicket) -> None:
        if not self._is_finite:
            raise FloatingPointError(f"log-probs of query {ticket.request.name} are not finite")
        made = ticket.generation
        for row, key in enumerate(ticket.request.keys):
            rng = np.random.default_rng(key)
            made.length[row] = n = rng.integers(1, self._length + 1)
            made.tokens[row, :n], made.policy_step[row, :n] = rng.integers(3, 9, n), self.policy_step
            made.policy_logprobs[row, :n] = rng.uniform(-2, -1, n)
        made.finished[:], ticket.left = made.length < self._length, 0
        tokens = int(made.length.sum())
        done = Usage(slot_steps=2 * tokens, useful=tokens, prefilled=16, prompt_tokens=7, flops=100 * tokens, bytes=10 * tokens)
        self.usage = Usage(*map(sum, zip(dataclasses.astuple(self.usage), dataclasses.astuple(done), strict=True)))


class Held:
    """A task whose n-th call for rewards does what `calls` say for it, before or instead of the task's own."""

    def __init__(self, task: Task, *calls: Callable[[Scores], Scores]):
        self._task, self._calls, self._taken, self._lock = task, calls, 0, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def rewards(self, queries: list[Query], responses: list[str], finished: np.ndarray) -> Scores:
        with self._lock:
            call, self._taken = self._taken, self._taken + 1
        scores = self._task.rewards(queries, responses, finished)
        return self._calls[call](scores) if call < len(self._calls) else scores
