"""The loop of a searcher's process: it searches batches until the run has finished, and loads snapshots in a thread beside it."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tba_jax.roles.searcher.appender import SearchReport
from tba_jax.roles.searcher.reward_watch import RewardWatch
from tba_jax.roles.searcher.samples import SampleTables
from tba_jax.roles.searcher.searcher import Searcher
from tba_jax.roles.work import Work, policy_peaks
from tba_jax.storage import contract, grants, layout, places
from tba_jax.storage.requests import RequestRate
from tba_jax.telemetry import metrics
from tba_jax.telemetry.alarms import Watch
from tba_jax.telemetry.device_peaks import Peaks
from tba_jax.telemetry.metrics import MetricWriter
from tba_jax.telemetry.record import TimeAccount
from tba_jax.telemetry.status import Status

log = logging.getLogger(__name__)


class _Refresher:
    """Loads snapshots in a thread while the searcher decodes: it asks storage every `poll_seconds`."""

    def __init__(self, searcher: Searcher, *, poll_seconds: float):
        self._searcher, self._poll_seconds = searcher, poll_seconds
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        # A daemon thread: the end of the process does not wait for storage that hangs.
        self._thread = threading.Thread(target=self._run, name="refresher", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._searcher.refresh()
                self._stopping.wait(self._poll_seconds)
        except BaseException as failure:  # raised again where the searcher looks
            self._failure = failure

    def check(self) -> None:
        """Raises what loading raised."""
        if self._failure is not None:
            raise self._failure

    def close(self, *, patience_seconds: float) -> None:
        """Waits so long for a load under way: a thread that is within JAX when the process ends would abort the process."""
        self._stopping.set()
        self._thread.join(patience_seconds)


class _Pause:
    """Says what a searcher waits for that may not ask the newest snapshot any more."""

    def __init__(self, status: Status, config: Any):
        self._status, self._config = status, config
        self._since: float | None = None

    def waits(self, step: int, damage: str) -> None:
        """Args: step: of the newest snapshot, -1 before the first. damage: see Sampler.damage."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        c = self._config
        told = (
            f"a snapshot newer than step {step}: the rows of searchers.max_rows_per_snapshot={c.searchers.max_rows_per_snapshot} "
            f"are asked; the trainer publishes every publish.every_steps={c.publish.every_steps} steps, or lets it go on after "
            f"waiting publish.at_most_seconds={c.publish.at_most_seconds:g} for rows"
        )
        if step < 0:
            told = "the first snapshot"
        told = f"{told}; {damage}" if damage else told
        self._status.waits(told, seconds=now - self._since)

    def ends(self) -> None:
        self._since = None
        self._status.waits("", seconds=0.0)


class Rates:
    """Writes a searcher's metrics, a line for each appended batch. Rates begin after the first, which holds the compilation.

    Every batch is also shown to the tables of trackers, and to the watch for alarms.
    """

    def __init__(
        self,
        writer: MetricWriter,
        account: TimeAccount,
        requests: RequestRate,
        tables: SampleTables,
        watch: Watch,
        peaks: Peaks,
    ):
        """Args: peaks: of all devices of the policy."""
        self._writer, self._account, self._requests = writer, account, requests
        self._tables, self._watch, self._peaks, self._work = tables, watch, peaks, Work()
        self._batches, self._begin = 0, 0.0
        self._rows = self._tokens = self._value_tokens = self._unscored = 0

    def write(self, reports: Sequence[SearchReport]) -> None:
        for report in reports:
            self._batches += 1
            self._unscored += report.unscored
            self._tables.note(report.samples, policy_step=report.policy_step)
            self._watch.look(self._batches, report.counts)
            if self._batches == 1:
                self._account.restart()
                self._begin, self._work = report.time, report.work
                continue
            self._rows += report.rows
            self._tokens += report.tokens
            self._value_tokens += report.value_tokens
            elapsed, work = max(report.time - self._begin, 1e-9), report.work - self._work
            scalars = {
                "rows_per_second": self._rows / elapsed,
                "tokens_per_second": self._tokens / elapsed,
                "computed_tokens_per_second": work.computed / elapsed,
                **work.shares(elapsed, self._peaks),
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
            if self._value_tokens:
                scalars["value_tokens_per_second"] = self._value_tokens / elapsed
            self._writer.write(self._batches, scalars | self._account.shares() | self._requests.scalars())


def run_searcher(
    searcher: Searcher, config: Any, run: layout.RunDir, *, name: str, account: TimeAccount, stop: Callable[[], bool]
) -> None:
    """Searches until the run has finished or `stop` says so.

    The batch that is being decoded is completed. Batches that wait for their rewards have searchers.stop_seconds to get them.
    """
    status, profiler = account.record.status, account.record.profiler
    writer = metrics.open_writer(config, run, name, role="searcher", status=status)
    watch = RewardWatch(give_up_seconds=config.searchers.give_up_seconds)
    poll_seconds = places.poll_seconds([run.shared], config.searchers.poll_seconds)
    searcher.refresh()
    status.phase("")
    log.info("%s writes replay/%s", name, searcher.writer)
    refresher, pause = _Refresher(searcher, poll_seconds=poll_seconds), _Pause(status, config)
    tables, alarms = SampleTables(writer, config), Watch(run.metrics(name), config, role="searcher")
    rates = Rates(writer, account, RequestRate([run.shared]), tables, alarms, policy_peaks(searcher.mesh, config))

    def goes_on() -> bool:
        if stop() or contract.is_finished(run):
            return False
        refresher.check()
        watch.look(waiting=searcher.unrewarded, grades=searcher.grades)
        status.trouble(watch.trouble)
        return True

    def take_reports(wait_seconds: float = 0.0) -> None:
        for report in (reports := searcher.appended(wait_seconds=wait_seconds)):
            watch.note(report)
        rates.write(reports)

    try:
        while goes_on():
            if searcher.may_search and watch.may_search:
                pause.ends()
                profiler.batch(searcher.policy_step)
                searcher.advance(ahead=lambda: not stop() and watch.may_search, waits=goes_on)
            else:
                with account.measure("wait_policy" if watch.may_search else "wait_rewards"):
                    time.sleep(poll_seconds)
                if not searcher.may_search:
                    searcher.look_for_grant(grants.number(run))
                    pause.waits(searcher.published_step, searcher.damage)
            take_reports()
        take_reports(config.searchers.stop_seconds)
    finally:
        refresher.close(patience_seconds=config.searchers.stop_seconds)
        searcher.close()
        writer.close()


def wait_for_run(run: layout.RunDir, *, poll_seconds: float, stop: Callable[[], bool]) -> bool:
    """Waits until the run has its initial reference. Returns False if `stop` came first."""
    told = ""
    while lacks := _lacks_reference(run):
        if stop():
            return False
        if told != lacks:
            log.info("waiting for the trainer to write %s: %s", run.initial_reference, lacks)
            told = lacks
        time.sleep(places.poll_seconds([run.shared], poll_seconds))
    return True


def _lacks_reference(run: layout.RunDir) -> str:
    """Why the run's initial reference is not known, "" where it is. The trainer mends a file that is damaged."""
    try:
        layout.reference_id(run)
    except FileNotFoundError:
        return "it is not there yet"
    except ValueError as error:
        return str(error)
    return ""
