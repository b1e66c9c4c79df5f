"""Rewards beside the decoder: batches wait for theirs while the next ones are decoded, and are appended in their order."""

import concurrent.futures
import dataclasses
import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from tba_jax.decoding.requests import Generation
from tba_jax.decoding.state_values import ValuedStates
from tba_jax.replay.log import LogWriter
from tba_jax.rewards.responses import response_texts, reward_texts
from tba_jax.tasks.interface import EncodedQuery, Scores, Task
from tba_jax.text.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchReport:
    """One batch: when it was appended (time.monotonic()), rows written, response tokens in them, mean reward, share that ended by
    itself, seconds it took.

    unscored: rows whose reward could not be found, NaN in the log; the mean is of the others. policy_step: of the weights in use
    when it was decoded; slot_idle: share of the decoder's slot-steps until then that gave no token; value_tokens: generated
    besides the rows to value their states.
    """

    time: float
    rows: int
    tokens: int
    reward: float
    unscored: int
    finished: float
    policy_step: int
    slot_idle: float
    seconds: float
    value_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodedBatch:
    """What is known of a batch without its rewards.

    rows: the columns but row, reward, reward_parts and state_values. begin: time.monotonic() when its decoding began.
    """

    rows: dict[str, np.ndarray]
    scores: Future[Scores]
    values: ValuedStates | None
    policy_step: int
    slot_idle: float
    begin: float


class _Threads:
    """Threads that do calls in their order; the end of the process does not wait for them, as it would for an executor's."""

    def __init__(self, count: int, name: str):
        self._count = count
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        for _ in range(count):
            threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[..., Any], *arguments: Any, **settings: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, functools.partial(function, *arguments, **settings)))
        return future

    def close(self) -> None:
        """The threads end once they have done what was submitted."""
        for _ in range(self._count):
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            try:
                future.set_result(function())
            except BaseException as error:  # raised where the result is asked for
                future.set_exception(error)
            del call, future, function  # what they hold may be large


class Appender:
    """Asks the task for rewards in threads, and appends each batch in another one once it has them.

    A batch is appended after the one before: rows are numbered in the order in which their queries were asked.
    """

    def __init__(self, log: LogWriter, *, task: Task, tokenizer: Tokenizer, missing_eos_reward: float | None, most_waiting: int):
        """Args: most_waiting: batches that may wait at a time; as many calls of the task's rewards are under way at most."""
        self._log, self._task, self._tokenizer, self._missing_eos_reward = log, task, tokenizer, missing_eos_reward
        self._most_waiting = most_waiting
        self._calls, self._appends = _Threads(most_waiting, "reward"), _Threads(1, "append")
        self._failed, self._appending = False, threading.Lock()
        self._waiting: deque[Future[SearchReport]] = deque()

    def reward(self, generation: Generation, queries: Sequence[EncodedQuery]) -> tuple[list[str], Future[Scores]]:
        """B response texts, and what will be their scores."""
        texts = response_texts(generation, queries, self._tokenizer)
        asked: dict[str, Any] = dict(task=self._task, missing_eos_reward=self._missing_eos_reward)
        return texts, self._calls.submit(reward_texts, texts, generation.finished, queries, **asked)

    def put(self, batch: DecodedBatch) -> None:
        """Appends the batch as soon as may be. Waits while as many batches wait as may, until the first of them is appended.

        Raises: what appended() raises.
        """
        while sum(not report.done() for report in self._waiting) >= self._most_waiting:
            next(report for report in self._waiting if not report.done()).result()
        self._waiting.append(self._appends.submit(self._append, batch))

    def appended(self, *, wait_seconds: float | None = 0.0) -> list[SearchReport]:
        """Of the batches that were appended since the last call, in their order.

        Args: wait_seconds: so long for those that were put; None: for as long as it takes.

        Raises:
          OSError: the replay log refused the rows (disk full, say).
          Exception: whatever the task's rewards raised.
        """
        concurrent.futures.wait(self._waiting, timeout=wait_seconds)
        reports = []
        while self._waiting and self._waiting[0].done():
            reports.append(self._waiting.popleft().result())
        return reports

    def close(self) -> None:
        """Ends the threads, but for calls under way; an append under way is completed, what still waits is not appended."""
        with self._appending:
            self._failed = True
        for threads in (self._calls, self._appends):
            threads.close()

    def _append(self, batch: DecodedBatch) -> SearchReport:
        if self._failed:
            raise RuntimeError("the batch before was not appended")
        try:
            scores = batch.scores.result()
            count = len(scores.reward)
            rows = {
                "row": np.arange(self._log.next_row, self._log.next_row + count),
                "reward": scores.reward,
                "reward_parts": scores.parts,
                **batch.rows,
            }
            if batch.values is not None:
                rows["state_values"] = batch.values.finish(scores.reward)
            with self._appending:
                if self._failed:
                    raise RuntimeError("the searcher has ended")
                self._log.append(rows)
        except BaseException:
            self._failed = True
            raise
        scored = ~np.isnan(scores.reward)
        return SearchReport(
            time=(now := time.monotonic()),
            rows=count,
            tokens=int(rows["response_length"].sum()),
            reward=float(scores.reward[scored].mean()) if scored.any() else float("nan"),
            unscored=int(count - scored.sum()),
            finished=float(rows["finished"].mean()),
            policy_step=batch.policy_step,
            slot_idle=batch.slot_idle,
            seconds=now - batch.begin,
            value_tokens=0 if batch.values is None else batch.values.tokens,
        )
