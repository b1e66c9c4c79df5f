"""Rewards and appends beside the decoder, in the order of the batches: one waits for its rewards while the next are decoded."""

import concurrent.futures
import dataclasses
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from tba_jax import trajectory
from tba_jax.decoding.requests import Generation
from tba_jax.decoding.state_values import ValuedStates
from tba_jax.replay import success_counts
from tba_jax.replay.log import LogWriter
from tba_jax.rewards.task_models import response_texts, reward_texts
from tba_jax.roles.work import Work
from tba_jax.run import processes
from tba_jax.run.threads import Threads
from tba_jax.tasks.interface import CountsGrades, EncodedQuery, Scores, Task
from tba_jax.text.tokenizers import Tokenizer

# What waits for a thread: a future and the call that gives it; None ends a thread.
T = TypeVar("T")


# A batch that waits for room looks this often whether it is still to wait.
LOOK_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodedBatch:
    """A batch that waits for its rewards.

    rows: all columns but row, reward, reward_parts and state_values. texts, queries: of the rows, one each. scores, values: what
    gives the missing columns. figures: of the decoder, for the SearchReport.
    """

    rows: dict[str, np.ndarray]
    texts: Sequence[str]
    queries: Sequence[EncodedQuery]
    scores: Future[Scores]
    values: ValuedStates | None
    figures: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Samples:
    """The rows of one batch. texts: B responses, to B queries; columns: of the rows, with their rewards."""

    texts: Sequence[str] = ()
    queries: Sequence[EncodedQuery] = ()
    columns: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def table(self, most: int) -> list[dict[str, Any]]:
        """So many rows of the batch at most, of queries as different as may be."""
        count = min(most, len(self.texts))
        return [self._row(i * len(self.texts) // count) for i in range(count)]

    def _row(self, i: int) -> dict[str, Any]:
        columns, query, reward = self.columns, self.queries[i].query, float(self.columns["reward"][i])
        return {
            "query": query.prompt,
            "response": self.texts[i],
            "answer": query.answer,
            "reward": None if math.isnan(reward) else reward,
            "finished": bool(columns["finished"][i]),
            "tokens": int(trajectory.trained(columns)[i].sum()),
            "policy_logprob_sum": float(columns["policy_logprobs"][i].sum()),
            "ref_logprob_sum": float(columns["ref_logprobs"][i].sum()) if columns["reference_id"][i] else None,
            "policy_step": int(columns["policy_step"][i].max()),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchReport:
    """What became of one batch.

    time: when it was appended, time.monotonic().
    tokens: of the responses. value_tokens: that were generated only to value the states of responses.
    reward: mean reward of the rows that have one. unscored: rows whose reward could not be found, NaN in the log.
    finished: share of the responses that ended by themselves.
    failure: why the first unscored row could not be scored, "" if the task does not say.
    equal_reward_groups: share of the queries whose rows all have the same reward.
    policy_step: of the weights in use when it was decoded. slot_idle: share of all slot-steps so far that gave no token.
    useful_token_share, work: of the sampler so far. environment: name -> mean over rows of `turns` and trajectory.ENVIRONMENT.
    engine: ServedEngine.figures, {} where the searcher draws itself.
    """

    time: float
    rows: int
    tokens: int
    reward: float
    unscored: int
    finished: float
    policy_step: int
    slot_idle: float
    useful_token_share: float
    value_tokens: int
    failure: str
    equal_reward_groups: float = float("nan")
    work: Work = dataclasses.field(default_factory=Work)
    samples: Samples = dataclasses.field(default_factory=Samples)
    environment: Mapping[str, float] = dataclasses.field(default_factory=dict)
    engine: Mapping[str, float] = dataclasses.field(default_factory=dict)


def done(result: T) -> Future[T]:
    """A future that has its result."""
    future: Future[T] = Future()
    future.set_result(result)
    return future


class Appender:
    """Asks the task for rewards in threads, and appends each batch in another one once it has them, after the batch before."""

    def __init__(
        self,
        log: LogWriter,
        *,
        task: Task,
        tokenizer: Tokenizer,
        missing_eos_reward: float | None,
        most_waiting: int,
        success_rates: bool = False,
    ):
        """Args: most_waiting: the most batches that wait for rewards, and the most calls of the task's rewards at a time;
        success_rates: whether a reward that is not within [0, 1] is refused, see success_counts."""
        self._log, self._task, self._tokenizer, self._missing_eos_reward = log, task, tokenizer, missing_eos_reward
        self._most_waiting, self._success_rates = most_waiting, success_rates
        self._calls, self._appends = Threads(most_waiting, "reward"), Threads(1, "append")
        self._failed, self._appending = False, threading.Lock()
        self._waiting: deque[Future[SearchReport]] = deque()

    def reward(self, generation: Generation, queries: Sequence[EncodedQuery]) -> tuple[list[str], Future[Scores]]:
        """The B texts of the responses, and a future of their scores."""
        texts = self.texts(generation, queries)
        given: dict[str, Any] = dict(task=self._task, missing_eos_reward=self._missing_eos_reward)
        return texts, self._calls.submit(functools.partial(reward_texts, texts, generation.finished, queries, **given))

    def texts(self, generation: Generation, queries: Sequence[EncodedQuery]) -> list[str]:
        return response_texts(generation.responses, queries, self._tokenizer)

    def put(self, batch: DecodedBatch, *, waits: Callable[[], bool] = lambda: True) -> None:
        """Has the batch appended once its rewards are there. While most_waiting batches wait, waits for the first of them.

        Args: waits: asked now and then during that wait; False gives the batch up. Raises: as `appended`.
        """
        while len(waiting := [report for report in self._waiting if not report.done()]) >= self._most_waiting:
            if concurrent.futures.wait(waiting[:1], timeout=LOOK_SECONDS).done:
                waiting[0].result()
            elif not waits():
                return
        self._waiting.append(self._appends.submit(functools.partial(self._append, batch)))

    def appended(self, *, wait_seconds: float | None = 0.0) -> list[SearchReport]:
        """Reports of the batches that were appended since the last call, in their order.

        Args: wait_seconds: how long to wait for batches that were put and are not appended yet; None: as long as it takes.

        Raises: OSError: the replay log refused the rows (disk full, say). Exception: whatever the task's rewards raised.
        """
        concurrent.futures.wait(self._waiting, timeout=wait_seconds)
        reports = []
        while self._waiting and self._waiting[0].done():
            reports.append(self._waiting.popleft().result())
        return reports

    @property
    def waiting(self) -> int:
        """How many batches were put and are not appended yet."""
        return sum(not report.done() for report in tuple(self._waiting))

    @property
    def grades(self) -> int:
        """How many responses the task has graded so far, 0 if it does not count them."""
        return self._task.grades if isinstance(self._task, CountsGrades) else 0

    def close(self) -> None:
        """Ends the threads without waiting for rewards. An append under way is completed, batches that still wait are dropped."""
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
            if self._success_rates and (i := success_counts.first_outside(scores.reward)) is not None:
                row = f"{self._log.writer}:{self._log.next_row + i}"
                raise processes.BadInput(success_counts.told_outside(row, float(scores.reward[i])))
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
            time=time.monotonic(),
            rows=count,
            tokens=int(trajectory.trained(rows).sum()),
            reward=float(scores.reward[scored].mean()) if scored.any() else float("nan"),
            unscored=int(count - scored.sum()),
            finished=float(rows["finished"].mean()),
            **batch.figures,
            value_tokens=0 if batch.values is None else batch.values.tokens,
            failure=scores.failure,
            equal_reward_groups=_equal_reward_groups(rows["query_id"], scores.reward),
            samples=Samples(batch.texts, batch.queries, rows),
            environment=_of_environment(rows),
        )


def _of_environment(rows: trajectory.Rows) -> dict[str, float]:
    if "environment" not in rows:
        return {}
    told = dict(zip(trajectory.ENVIRONMENT, rows["environment"].mean(axis=0).tolist(), strict=True))
    return {"turns": float(trajectory.turns(trajectory.trained(rows)).sum(axis=1).mean()), **told}


def _equal_reward_groups(query_id: np.ndarray, reward: np.ndarray) -> float:
    """The share of groups whose rewards are all equal. Args: uint64[B], float32[B]: the rows of a group follow each other.

    A reward of NaN counts as any other of its group; a group without any reward is not equal.
    """
    begins = np.flatnonzero(np.r_[True, query_id[1:] != query_id[:-1]])
    return float(np.mean(np.fmax.reduceat(reward, begins) == np.fmin.reduceat(reward, begins)))
