"""The loop of a searcher's process: it searches batches until the run has finished, and loads snapshots in a thread beside it."""

import concurrent.futures
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from tba_jax.roles.searcher.appender import SearchReport
from tba_jax.roles.searcher.searcher import Searcher
from tba_jax.roles.work import Work, policy_peaks
from tba_jax.run.processes import NoRewards
from tba_jax.run.threads import Threads
from tba_jax.storage import contract, layout, places
from tba_jax.telemetry import metrics
from tba_jax.telemetry.alarms import Watch
from tba_jax.telemetry.status import Status, TimeAccount

log = logging.getLogger(__name__)

# Of an object store, a thousand searchers ask so often that their polls cost more than their rows (docs/scale.md).
POLL_SECONDS_OF_STORE = 5.0
# The searcher pauses after this many batches in a row in which no row has a reward.
_BATCHES = 3
# Seconds of the first pause, after which one batch is tried; each further pause is twice as long, up to the longest.
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0
# Fields of a report that are metrics as they are.
_REPORTED = ("reward", "finished", "equal_reward_groups", "policy_step", "slot_idle", "useful_token_share", "rows", "tokens")
# Batches that have waited longer than this for their rewards are a trouble.
_MOST_TOLD = 20  # reasons why responses have no reward, in the log
_SLOW_SECONDS = 20.0


class RewardWatch:
    """A searcher whose rows get no rewards says so, writes few useless rows, and gives up at last."""

    def __init__(self, *, give_up_seconds: float, clock: Callable[[], float] = time.monotonic):
        """Args: give_up_seconds: searchers.give_up_seconds."""
        self._give_up_seconds, self._clock = give_up_seconds, clock
        self._rows = self._unscored = 0
        self._reason, self._told = "", set[str]()
        # Batches without a reward since the last that had some; when the first of them came; the next try.
        self._streak, self._since, self._next = 0, 0.0, 0.0
        self._waiting, self._waits_since, self._grades = 0, clock(), 0

    def note(self, report: SearchReport) -> None:
        """A batch was appended."""
        self._rows, self._unscored = self._rows + report.rows, self._unscored + report.unscored
        self._waits_since = now = self._clock()
        self._reason = self._reason or report.failure
        self.tell(report.failure)
        self._since = self._since if self._streak else now
        self._streak = 0 if report.unscored < report.rows else self._streak + 1
        self._next = now + min(FIRST_PAUSE * 2 ** min(max(self._streak - _BATCHES, 0), 99), LONGEST_PAUSE)

    def tell(self, failure: str) -> None:
        """Logs why a response has no reward, each reason once."""
        if failure and failure not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(failure)
            log.warning("a response has no reward: %s", failure)

    def look(self, *, waiting: int, grades: int = 0) -> None:
        """Raises NoRewards where no reward has come for too long. Args: waiting: batches that wait for rewards. grades: responses
        that the task has graded so far, if it counts them."""
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
    """Writes the metrics of a searcher's batches, and shows each batch to trackers, alarms and the watch of `rewards`."""

    def __init__(
        self, config: Any, run: layout.RunDir, name: str, *, status: Status, mesh: jax.sharding.Mesh, serves: bool = False
    ):
        """Args: mesh: of the policy. serves: whether clients give the rewards."""
        self._serves = serves
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
        if self._serves:  # clients may stay away, or leave
            self.rewards.tell(report.failure)
        else:
            self.rewards.note(report)
        self._status.trouble(self.rewards.trouble)
        counts: dict[str, float] = {"rows": report.rows, "unscored": report.unscored}
        counts["finished_rows"] = round(report.finished * report.rows)
        if told := report.environment:
            counts |= {"turns": report.rows * told["turns"], "turn_errors": report.rows * told["errors"]}
        self._alarms.look(self._batches if step is None else step, counts)
        self._unscored += report.unscored
        self._work = report.work
        self._rows, self._tokens = self._rows + report.rows, self._tokens + report.tokens
        self._value_tokens += report.value_tokens
        return self._batches

    def write(self, step: int, report: SearchReport, more: dict[str, float]) -> None:
        """Args: report: of the newest batch; more: further metrics."""
        seconds, work = max(report.time - self._begin, 1e-9), self._work - self._work_before
        scalars = {
            "rows_per_second": self._rows / seconds,
            "tokens_per_second": self._tokens / seconds,
            "computed_tokens_per_second": work.computed / seconds,
            **work.shares(seconds, self._peaks),
            **({"value_tokens_per_second": self._value_tokens / seconds} if self._value_tokens else {}),
            **{name: getattr(report, name) for name in _REPORTED},
            "unscored": self._unscored,
            **{f"environment_{name}": value for name, value in report.environment.items()},
            **{f"engine_{name}": value for name, value in report.engine.items()},
        }
        self._writer.write(step, scalars | more)

    def close(self) -> None:
        self._writer.close()


def _awaited(searcher: Searcher, config: Any) -> str:
    """What a searcher waits for that may not search."""
    sampler, most = searcher.sampler, config.searchers.max_updates_ahead
    told = f"the trainer, which has the rows of searchers.max_updates_ahead={most} updates before it, or soon will"
    return "; ".join(filter(None, (told if sampler.step >= 0 else "the first snapshot", sampler.damage)))


def run_searcher(
    searcher: Searcher, config: Any, run: layout.RunDir, *, name: str, account: TimeAccount, stop: Callable[[], bool]
) -> None:
    """Searches until the run has finished or `stop` says so. The batch that is being decoded is completed; batches that wait for
    their rewards have searchers.stop_seconds to get them."""
    status, profiler = account.record.status, account.record.profiler
    record, requests = (
        SearchRecord(config, run, name, status=status, mesh=searcher.mesh, serves=searcher.serves),
        places.RequestRate([run.shared]),
    )
    poll_seconds = places.poll_seconds([run.shared], config.searchers.poll_seconds, of_store=POLL_SECONDS_OF_STORE)
    searcher.refresh()
    status.phase("")
    log.info("%s writes replay/%s", name, searcher.writer)
    stopping, thread = threading.Event(), Threads(1, "refresher")

    def refresh() -> None:
        while not stopping.is_set():
            searcher.refresh()
            stopping.wait(poll_seconds * random.uniform(0.5, 1.5))  # many searchers do not ask in step

    refreshing = thread.submit(refresh)  # loads snapshots while the searcher decodes

    def goes_on() -> bool:
        if stop() or contract.is_finished(run):
            return False
        if refreshing.done():  # by an error
            refreshing.result()
        record.look(waiting=searcher.appender.waiting, grades=searcher.appender.grades)
        return True

    def take_reports(wait_seconds: float = 0.0) -> None:
        for report in searcher.appended(wait_seconds=wait_seconds):
            number = record.note(report)
            if number == 1:  # it holds the compilation
                account.restart()
                record.begin(report.time)
            else:
                record.write(number, report, account.shares() | requests.scalars())

    waits_since: float | None = None
    said: set[str] = set()
    try:
        while goes_on():
            may_search = record.rewards.may_search
            if searcher.may_search and may_search:
                waits_since = None
                status.waits("", seconds=0.0)
                profiler.batch(searcher.sampler.step)
                searcher.advance(ahead=lambda: not stop() and record.rewards.may_search, waits=goes_on)
            else:
                with account.measure("wait_policy" if may_search else "wait_rewards"):
                    time.sleep(poll_seconds)
                searcher.idle()
                if not searcher.may_search:
                    waits_since, awaited = waits_since or time.monotonic(), _awaited(searcher, config)
                    status.waits(awaited, seconds=time.monotonic() - waits_since)
                    if awaited not in said:
                        log.info("waits for %s", awaited)
                        said.add(awaited)
            take_reports()
        take_reports(config.searchers.stop_seconds)
    finally:
        stopping.set()
        thread.close()
        # A thread that is within JAX when the process ends would abort the process.
        concurrent.futures.wait([refreshing], timeout=config.searchers.stop_seconds)
        searcher.close()
        record.close()


def wait_for_run(run: layout.RunDir, *, poll_seconds: float, stop: Callable[[], bool]) -> bool:
    """Waits until the run has its initial reference, which the trainer mends where it is damaged. False if `stop` came first."""
    told = ""
    while not stop():
        try:
            layout.reference_id(run)
            return True
        except (FileNotFoundError, ValueError) as error:
            lacks = "it is not there yet" if isinstance(error, FileNotFoundError) else str(error)
        if told != lacks:
            log.info("waiting for the trainer to write %s: %s", run.initial_reference, lacks)
            told = lacks
        time.sleep(places.poll_seconds([run.shared], poll_seconds))
    return False
