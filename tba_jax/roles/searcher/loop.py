"""The loop of a searcher's process: it searches batches until the run has finished, and loads snapshots in a thread beside it."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from tba_jax.roles.searcher.report import SearchRecord
from tba_jax.roles.searcher.searcher import Searcher
from tba_jax.storage import contract, layout, places
from tba_jax.storage.polling import RequestRate
from tba_jax.telemetry.status import TimeAccount

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


def _awaited(searcher: Searcher, config: Any) -> str:
    """What a searcher waits for that may not ask the newest snapshot any more."""
    told, s, publish = "the first snapshot", config.searchers, config.publish
    if searcher.sampler.published >= 0:
        told = (
            f"a snapshot newer than step {searcher.sampler.published}: the rows of searchers.max_rows_per_snapshot="
            f"{s.max_rows_per_snapshot} are asked; the trainer publishes every publish.every_steps={publish.every_steps} steps, "
            f"or lets it go on after waiting publish.at_most_seconds={publish.at_most_seconds:g} for rows"
        )
    return f"{told}; {searcher.sampler.damage}" if searcher.sampler.damage else told


def run_searcher(
    searcher: Searcher, config: Any, run: layout.RunDir, *, name: str, account: TimeAccount, stop: Callable[[], bool]
) -> None:
    """Searches until the run has finished or `stop` says so.

    The batch that is being decoded is completed. Batches that wait for their rewards have searchers.stop_seconds to get them.
    """
    status, profiler = account.record.status, account.record.profiler
    record, requests = SearchRecord(config, run, name, status=status, mesh=searcher.mesh), RequestRate([run.shared])
    poll_seconds = places.poll_seconds([run.shared], config.searchers.poll_seconds)
    searcher.refresh()
    status.phase("")
    log.info("%s writes replay/%s", name, searcher.writer)
    refresher = _Refresher(searcher, poll_seconds=poll_seconds)

    def goes_on() -> bool:
        if stop() or contract.is_finished(run):
            return False
        refresher.check()
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
                if not searcher.may_search:
                    searcher.look_for_grant(layout.grants_given(run))
                    waits_since = waits_since or time.monotonic()
                    status.waits(_awaited(searcher, config), seconds=time.monotonic() - waits_since)
            take_reports()
        take_reports(config.searchers.stop_seconds)
    finally:
        refresher.close(patience_seconds=config.searchers.stop_seconds)
        searcher.close()
        record.close()


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
