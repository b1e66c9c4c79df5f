"""Search and training in turn in one process, with a fixed lag: the synchronous baseline, and staleness studies.

Searcher, trainer, replay log and snapshots are those of the asynchronous run; only nobody works at the same time.
"""

import contextlib
import time
from collections.abc import Callable

from tba_jax.roles import results
from tba_jax.roles.evaluator import Evaluator, PendingSteps, tell
from tba_jax.roles.searcher.appender import LOOK_SECONDS, SearchReport
from tba_jax.roles.searcher.loop import SearchRecord
from tba_jax.roles.searcher.searcher import Searcher
from tba_jax.roles.trainer.loop import Recorder, end
from tba_jax.roles.trainer.trainer import Trainer
from tba_jax.run import processes
from tba_jax.storage import layout
from tba_jax.storage.snapshots import Damaged
from tba_jax.telemetry import metrics
from tba_jax.telemetry.alarms import Watch
from tba_jax.telemetry.status import Status


def run_interleaved(
    trainer: Trainer,
    searcher: Searcher,
    evaluator: Evaluator | None,
    run: layout.RunDir,
    *,
    stop: Callable[[], bool],
) -> bool:
    """A search batch and schedule.updates_per_search updates, until learner.steps are done. Returns whether the run is finished.

    Fresh rows of step n come from the weights after n − 1 − lag updates. If an update finds too few rows, a batch comes at once.
    """
    recorder = Recorder(trainer, run)
    record = trainer.record
    evaluations = _Evaluations(evaluator, run, trainer) if evaluator is not None else None
    record.status.phase("")
    record.profiler.step(trainer.step_number + 1)
    trainer.flush_snapshot()
    if evaluations:
        evaluations.catch_up()
    status = Status(run.metrics("searcher-0"))
    search_record = SearchRecord(trainer.config, run, "searcher-0", status=status, mesh=searcher.mesh)
    report, lacks_rows = None, False

    def goes_on() -> bool:
        search_record.look(waiting=searcher.appender.waiting, grades=searcher.appender.grades)
        return not stop()

    while not trainer.is_done and goes_on():
        searches = lacks_rows or trainer.step_number % trainer.config.schedule.updates_per_search == 0
        if searches and not search_record.rewards.may_search:
            time.sleep(trainer.config.searchers.poll_seconds)
            continue
        if searches and (report := _search(trainer, searcher, search_record, goes_on)) is None:
            break
        trainer.poll()
        measurements = trainer.step()
        lacks_rows = measurements is None
        record.profiler.step(trainer.step_number + 1)
        trainer.report_problems()
        if measurements is None:
            continue
        trainer.flush_snapshot()
        if recorder.note(measurements) and report is not None:
            search_record.write(trainer.step_number, report, {})
            report = None
        if evaluations:
            evaluations.catch_up()
    finished = end(trainer, recorder)
    searcher.close()
    reason = "finished" if finished else "stopped"
    search_record.close()
    status.close(reason)
    if evaluations:
        evaluations.close(reason)
    return finished


def _search(trainer: Trainer, searcher: Searcher, record: SearchRecord, goes_on: Callable[[], bool]) -> SearchReport | None:
    """Appends one batch to the log, and tells of it; None where the run stops before.

    Raises BadInput where the snapshot is damaged: the schedule asks for this one and no other.
    """
    step = max(0, trainer.step_number - trainer.config.schedule.lag)
    try:
        searcher.load_step(step)
    except Damaged as error:
        raise processes.BadInput(
            f"{error}. schedule.lag needs this snapshot; remove the checkpoints from step {step} on, and it is made again"
        ) from error
    record.begin(time.monotonic())
    searcher.advance(waits=goes_on)
    while not (reports := searcher.appended(wait_seconds=LOOK_SECONDS)) and goes_on():
        pass
    if not reports:
        return None
    (report,) = reports
    record.note(report, step=trainer.step_number + 1)
    return report


class _Evaluations:
    """Evaluates every published snapshot that is due, in this process."""

    def __init__(self, evaluator: Evaluator, run: layout.RunDir, trainer: Trainer):
        self._config = config = trainer.config
        self._watch = Watch(run.metrics("evaluator"), config, role="evaluator")
        self._evaluator, self._scores = evaluator, results.Scores(run.evaluations)
        self._status = Status(run.metrics("evaluator"))
        self._writer = metrics.open_writer(config, run, "evaluator", role="evaluator", status=self._status)
        due = dict(every_steps=config.evaluation.every_steps, final_step=config.learner.steps)
        self._pending = PendingSteps(run, **due, snapshots=evaluator.snapshots)

    def catch_up(self) -> None:
        for step in self._pending():
            with contextlib.suppress(Damaged):
                report = self._evaluator.evaluate(step)
                more = results.best_figures(self._scores.best()) | self._evaluator.rates
                tell(report, self._config, writer=self._writer, watch=self._watch, more=more)
                self._status.step = step

    def close(self, reason: str) -> None:
        """Args: reason: see Status.close."""
        self._writer.close()
        self._status.close(reason)
