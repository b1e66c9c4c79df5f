"""The loop of a trainer's process: steps as long as there are rows, and says what it waits for where there are not."""

import logging
import os
import platform
import time
from collections.abc import Callable

from tba_jax.roles.trainer.recorder import Recorder
from tba_jax.roles.trainer.trainer import Trainer
from tba_jax.run import processes
from tba_jax.storage import layout
from tba_jax.telemetry.status import Status

log = logging.getLogger(__name__)

# A trainer that waits logs so this often.
SAY_SECONDS = 20.0


def run_trainer(trainer: Trainer, run: layout.RunDir, *, stop: Callable[[], bool]) -> bool:
    """Trains until learner.steps are done or `stop` says so. Returns whether the run is finished."""
    log.info("trainer on %s, pid %d, %d resident rows", platform.node(), os.getpid(), len(trainer.index))
    recorder = Recorder(trainer, run)
    wait = _Wait(trainer, trainer.record.status)
    trainer.record.status.phase("")

    def record() -> None:
        if recorder.flush():
            trainer.report_problems()

    def beside() -> None:
        """What is told of the step before, and that there were rows for this one: while the devices compute."""
        wait.ends()
        record()

    profiler = trainer.record.profiler
    profiler.step(trainer.step_number + 1)
    trainer.start()
    while not trainer.is_done and not stop():
        measurements = trainer.step(ahead=True, beside=beside)
        if measurements is None:
            record()
            wait.goes_on()
        else:
            recorder.take(measurements)
        del measurements  # let go of while the devices compute, which would wait for it here
        profiler.step(trainer.step_number + 1)
    record()
    wait.ends()
    return end(trainer, recorder)


def end(trainer: Trainer, recorder: Recorder) -> bool:
    """Marks the run finished if it is, or saves where it stands, and closes the trainer. Returns whether it is finished."""
    finished = trainer.is_done
    if finished:
        trainer.finish()
    else:
        trainer.save_checkpoint()
    recorder.close()
    trainer.close()
    trainer.record.close("finished" if finished else "stopped")
    return finished


class _Wait:
    """The trainer's waiting for rows: says for what. Each time it has lasted another publish.at_most_seconds, the weights are
    published unless they are there, and else searchers that wait for a newer snapshot are let go on."""

    def __init__(self, trainer: Trainer, status: Status):
        self._trainer, self._status, self._seconds = trainer, status, trainer.config.publish.at_most_seconds
        self._since: float | None = None  # None: it does not wait
        self._next = self._say = 0.0

    def goes_on(self) -> None:
        """Waits for rows for a moment. Raises BadInput where none can come."""
        trainer, now = self._trainer, time.monotonic()
        if self._since is None:
            self._since, self._next, self._say = now, now + self._seconds, now + SAY_SECONDS
        trainer.wait(trainer.config.replay.poll_seconds)
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._seconds
            if not trainer.publish_what_is_new():
                trainer.grant()
            if trainer.buffer.is_exhausted():
                raise processes.BadInput(
                    f"step {trainer.step_number + 1} finds too few rows, and none can come: {trainer.shortage()}; "
                    "searchers.count=0, and the runs of replay.mount have finished. Resume with searchers, or with other limits "
                    "(--allow_change)"
                )
        told = (
            f"rows: {trainer.shortage()}; in {self._next - now:.0f} s it publishes step {trainer.step_number} unless that is "
            f"there, or lets waiting searchers go on (publish.at_most_seconds={self._seconds:g})"
        )
        self._status.waits(told, seconds=now - self._since)
        if now > self._say:
            self._say = now + SAY_SECONDS
            log.warning("has waited %.0f s for %s", now - self._since, told)

    def ends(self) -> None:
        """There were rows for a step."""
        self._since = None
        self._status.waits("", seconds=0.0)
