"""Search and training in turn in one process, with a fixed lag: the synchronous baseline, and staleness studies.

Searcher, trainer, replay log and snapshots are those of the asynchronous run; only nobody works at the same time.
"""

import functools
import time
from collections.abc import Callable

from tba_jax.roles.evaluator import NOT_EVALUATED, Evaluator, PendingSteps, tell
from tba_jax.roles.searcher.appender import LOOK_SECONDS, SearchReport
from tba_jax.roles.searcher.reward_watch import RewardWatch
from tba_jax.roles.searcher.samples import SampleTables
from tba_jax.roles.searcher.searcher import Searcher
from tba_jax.roles.trainer.loop import end
from tba_jax.roles.trainer.recorder import Recorder
from tba_jax.roles.trainer.trainer import Trainer
from tba_jax.roles.work import Work, policy_peaks
from tba_jax.run import processes
from tba_jax.storage import best_step, layout, snapshots
from tba_jax.storage.damaged_snapshots import DamagedSnapshots
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
    search_record = _SearchRecord(run, trainer, searcher)
    goes_on = functools.partial(search_record.goes_on, searcher, stop)
    report, lacks_rows = None, False
    while not trainer.is_done and goes_on():
        searches = lacks_rows or trainer.step_number % trainer.config.schedule.updates_per_search == 0
        if searches and not search_record.watch.may_search:
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
            search_record.write(trainer.step_number, report)
            report = None
        if evaluations:
            evaluations.catch_up()
    finished = end(trainer, recorder)
    searcher.close()
    reason = "finished" if finished else "stopped"
    search_record.close(reason)
    if evaluations:
        evaluations.close(reason)
    return finished


def _search(
    trainer: Trainer, searcher: Searcher, search_record: "_SearchRecord", goes_on: Callable[[], bool]
) -> SearchReport | None:
    """Appends one batch to the log, and tells of it; None where the run stops before."""
    _load(searcher, max(0, trainer.step_number - trainer.config.schedule.lag))
    searcher.advance(waits=goes_on)
    while not (reports := searcher.appended(wait_seconds=LOOK_SECONDS)) and goes_on():
        pass
    if not reports:
        return None
    (report,) = reports
    search_record.note(trainer.step_number + 1, report)
    return report


class _SearchRecord:
    """The metrics, tables, alarms and trouble with rewards of the half of the process that searches.

    Attributes: watch: says whether the rows get rewards.
    """

    def __init__(self, run: layout.RunDir, trainer: Trainer, searcher: Searcher):
        config, name = trainer.config, "searcher-0"
        self._peaks = policy_peaks(searcher.mesh, config)
        self._work = self._before = Work()  # of the sampler, up to the last batch and up to the one before
        self._status = Status(run.metrics(name))
        self._writer = metrics.open_writer(config, run, name, role="searcher", status=self._status)
        self._tables = SampleTables(self._writer, config)
        self._alarms = Watch(run.metrics(name), config, role="searcher")
        self.watch = RewardWatch(give_up_seconds=config.searchers.give_up_seconds)

    def goes_on(self, searcher: Searcher, stop: Callable[[], bool]) -> bool:
        """Whether nobody asks to stop. Raises NoRewards where no reward has come for too long."""
        self.watch.look(waiting=searcher.unrewarded, grades=searcher.grades)
        self._status.trouble(self.watch.trouble)
        return not stop()

    def note(self, step: int, report: SearchReport) -> None:
        """A batch was appended, of whose rows update number `step` may be made."""
        self.watch.note(report)
        self._before, self._work = self._work, report.work
        self._tables.note(report.samples, policy_step=report.policy_step)
        self._alarms.look(step, report.counts)

    def write(self, step: int, report: SearchReport) -> None:
        """Writes the point of a batch."""
        done = self._work - self._before
        rates = {"computed_tokens_per_second": done.computed / report.seconds} | done.shares(report.seconds, self._peaks)
        self._writer.write(step, _scalars(report) | rates)

    def close(self, reason: str) -> None:
        """Args: reason: see Status.close."""
        self._writer.close()
        self._status.close(reason)


def _load(searcher: Searcher, step: int) -> None:
    """Raises BadInput where the snapshot is damaged: the schedule asks for this one and no other."""
    try:
        searcher.load_step(step)
    except snapshots.Damaged as error:
        raise processes.BadInput(
            f"{error}. schedule.lag needs this snapshot; remove the checkpoints from step {step} on, and it is made again"
        ) from error


class _Evaluations:
    """Evaluates every published snapshot that is due, in this process."""

    def __init__(self, evaluator: Evaluator, run: layout.RunDir, trainer: Trainer):
        self._config = config = trainer.config
        self._watch = Watch(run.metrics("evaluator"), config, role="evaluator")
        self._damaged = DamagedSnapshots(run.policies, follows=NOT_EVALUATED)
        self._evaluator, self._scores = evaluator, best_step.Scores(run.evaluations)
        self._status = Status(run.metrics("evaluator"))
        self._writer = metrics.open_writer(config, run, "evaluator", role="evaluator", status=self._status)
        self._pending = PendingSteps(run, every_steps=config.evaluation.every_steps, final_step=config.learner.steps)

    def catch_up(self) -> None:
        for step in self._damaged.without(self._pending()):
            report = self._damaged.attempt(step, functools.partial(self._evaluator.evaluate, step))
            if report is not None:
                more = best_step.figures(self._scores.best()) | self._evaluator.rates
                tell(report, self._config, writer=self._writer, watch=self._watch, more=more)
                self._status.step = step

    def close(self, reason: str) -> None:
        """Args: reason: see Status.close."""
        self._writer.close()
        self._status.close(reason)


def _scalars(report: SearchReport) -> dict[str, float]:
    """The searcher's metrics of one batch."""
    scalars = {
        "rows_per_second": report.rows / report.seconds,
        "tokens_per_second": report.tokens / report.seconds,
        "reward": report.reward,
        "equal_reward_groups": report.equal_reward_groups,
        "policy_step": report.policy_step,
    }
    return scalars | ({"value_tokens_per_second": report.value_tokens / report.seconds} if report.value_tokens else {})
