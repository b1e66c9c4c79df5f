"""What a searcher tells of its batches: metrics, rows in the tables of trackers, alarms, and whether its rows get rewards."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tba_jax.roles.work import Work, policy_peaks
from tba_jax.run.processes import NoRewards
from tba_jax.storage import layout
from tba_jax.tasks.interface import EncodedQuery
from tba_jax.telemetry import metrics
from tba_jax.telemetry.alarms import Watch
from tba_jax.telemetry.status import Status

# The searcher pauses after this many batches in a row in which no row has a reward.
_BATCHES = 3
# Seconds of the first pause, after which one batch is tried; each further pause is twice as long, up to the longest.
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0
# Batches that have waited longer than this for their rewards are a trouble.
_SLOW_SECONDS = 20.0


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
            "tokens": int(columns["response_length"][i]),
            "policy_logprob_sum": float(columns["policy_logprobs"][i].sum()),
            "ref_logprob_sum": float(columns["ref_logprobs"][i].sum()),
            "policy_step": int(columns["policy_step"][i].max()),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchReport:
    """What became of one batch.

    time: when it was appended, time.monotonic(). seconds: from the beginning of its decoding until then.
    tokens: of the responses. value_tokens: that were generated only to value the states of responses.
    reward: mean reward of the rows that have one. unscored: rows whose reward could not be found, NaN in the log.
    finished: share of the responses that ended by themselves.
    failure: why the first unscored row could not be scored, "" if the task does not say.
    equal_reward_groups: share of the queries whose rows all have the same reward.
    policy_step: of the weights in use when it was decoded. slot_idle: share of all slot-steps so far that gave no token.
    useful_token_share: of all tokens so far that prefill and reference computed, those of prompts and rows.
    work: of the sampler so far.
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
    seconds: float
    value_tokens: int
    failure: str
    equal_reward_groups: float = float("nan")
    work: Work = dataclasses.field(default_factory=Work)
    samples: Samples = dataclasses.field(default_factory=Samples)


class RewardWatch:
    """Looks at the batches that a searcher has appended, and at those that wait for their rewards.

    A searcher whose rows get no rewards says so, writes few useless rows, and gives up at last.
    """

    def __init__(self, *, give_up_seconds: float, clock: Callable[[], float] = time.monotonic):
        """Args: give_up_seconds: searchers.give_up_seconds."""
        self._give_up_seconds, self._clock = give_up_seconds, clock
        self._rows = self._unscored = 0
        self._reason = ""
        # Batches without a reward since the last that had some; when the first of them came; the next try.
        self._streak, self._since, self._next = 0, 0.0, 0.0
        self._waiting, self._waits_since, self._grades = 0, clock(), 0

    def note(self, report: SearchReport) -> None:
        """A batch was appended."""
        self._rows, self._unscored = self._rows + report.rows, self._unscored + report.unscored
        self._waits_since = now = self._clock()
        self._reason = self._reason or report.failure
        self._since = self._since if self._streak else now
        self._streak = 0 if report.unscored < report.rows else self._streak + 1
        self._next = now + min(FIRST_PAUSE * 2 ** min(max(self._streak - _BATCHES, 0), 99), LONGEST_PAUSE)

    def look(self, *, waiting: int, grades: int = 0) -> None:
        """Looks at how many batches wait for their rewards. Raises NoRewards where no reward has come for too long.

        Args: grades: how many responses the task has graded so far, if it counts them (tasks.interface.CountsGrades).
        """
        if not (waiting and self._waiting) or grades > self._grades:
            self._waits_since = self._clock()
        self._waiting, self._grades = waiting, grades
        limit = f"searchers.give_up_seconds={self._give_up_seconds:g}"
        if self._waited > self._give_up_seconds:
            raise NoRewards(f"{self._slow}, and none came within {limit}; raise it if rewards take so long")
        if self._streak and self._clock() - self._since > self._give_up_seconds:
            raise NoRewards(f"{self.trouble}; nothing has had a reward for {limit}")

    @property
    def may_search(self) -> bool:
        """Whether another batch is to be decoded: not where the last had no rewards, until it is time for another try."""
        return self._streak < _BATCHES or (not self._waiting and self._clock() >= self._next)

    @property
    def _waited(self) -> float:
        """Seconds for which batches have waited without any of them being done."""
        return self._clock() - self._waits_since if self._waiting else 0.0

    @property
    def _slow(self) -> str:
        return f"{self._waiting} batches have waited {self._waited:.0f} s for their rewards"

    @property
    def trouble(self) -> str:
        """One sentence that names the trouble with rewards, "" if there is none."""
        if self._waited > _SLOW_SECONDS:
            return self._slow
        if not self._unscored:
            return ""
        which = "no row has a" if self._unscored == self._rows else f"{'the last' if self._streak else 'some'} rows have no"
        pause = "; the searcher pauses, and tries a batch now and then" if self._streak >= _BATCHES else ""
        reason = f", {self._reason}" if self._reason else ""
        return f"{which} reward: {self._unscored:,} of {self._rows:,} failed{reason}{pause}"


class SearchRecord:
    """Writes the metrics of a searcher's batches, and shows each batch to trackers, alarms and the watch of rewards.

    Attributes: rewards: the watch.
    """

    def __init__(self, config: Any, run: layout.RunDir, name: str, *, status: Status, mesh: jax.sharding.Mesh):
        """Args: mesh: of the policy."""
        c = config.metrics
        self._writer = metrics.open_writer(config, run, name, role="searcher", status=status)
        self._samples, self._samples_every = c.samples if self._writer.shows_tables else 0, c.samples_every_batches
        self._alarms = Watch(run.metrics(name), config, role="searcher")
        self.rewards = RewardWatch(give_up_seconds=config.searchers.give_up_seconds)
        self._status, self._peaks = status, policy_peaks(mesh, config)
        self._batches = self._unscored = 0
        self._work = Work()  # of the newest batch
        self.begin(0.0)

    def look(self, *, waiting: int, grades: int) -> None:
        """Tells what is wrong with rewards. Args, Raises: see RewardWatch.look."""
        self.rewards.look(waiting=waiting, grades=grades)
        self._status.trouble(self.rewards.trouble)

    def begin(self, time: float) -> None:
        """Rates are those from here on. Args: time: time.monotonic()."""
        self._begin, self._work_before = time, self._work
        self._rows = self._tokens = self._value_tokens = 0

    def note(self, report: SearchReport, *, step: int | None = None) -> int:
        """A batch was appended. Returns its number, from 1. Args: step: of an alarm; None: this number."""
        if self._samples and self._batches % self._samples_every == 0:
            self._writer.table("samples", report.policy_step, report.samples.table(self._samples))
        self._batches += 1
        self.rewards.note(report)
        counts = {"rows": report.rows, "finished_rows": round(report.finished * report.rows), "unscored": report.unscored}
        self._alarms.look(self._batches if step is None else step, counts)
        self._unscored += report.unscored
        self._work = report.work
        self._rows, self._tokens = self._rows + report.rows, self._tokens + report.tokens
        self._value_tokens += report.value_tokens
        return self._batches

    def write(self, step: int, report: SearchReport, more: dict[str, float]) -> None:
        """Writes a point. Args: report: of the newest batch; more: further metrics."""
        seconds, work = max(report.time - self._begin, 1e-9), self._work - self._work_before
        scalars = {
            "rows_per_second": self._rows / seconds,
            "tokens_per_second": self._tokens / seconds,
            "computed_tokens_per_second": work.computed / seconds,
            **work.shares(seconds, self._peaks),
            **({"value_tokens_per_second": self._value_tokens / seconds} if self._value_tokens else {}),
            "reward": report.reward,
            "finished": report.finished,
            "equal_reward_groups": report.equal_reward_groups,
            "policy_step": report.policy_step,
            "slot_idle": report.slot_idle,
            "useful_token_share": report.useful_token_share,
            "rows": report.rows,
            "tokens": report.tokens,
            "unscored": self._unscored,
        }
        self._writer.write(step, scalars | more)

    def close(self) -> None:
        self._writer.close()
