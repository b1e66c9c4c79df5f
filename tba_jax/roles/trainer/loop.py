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

Clock = Callable[[], float]


class Relief:
    """Counts how long a trainer has waited, and brings relief each time another `seconds` have passed without a step."""

    def __init__(self, *, seconds: float, publish: Callable[[], bool], grant: Callable[[], None], clock: Clock = time.monotonic):
        """Args: seconds: publish.at_most_seconds; publish: publishes the weights unless they are there, returns whether it did;
        grant: lets waiting searchers go on."""
        self._seconds, self._publish, self._grant, self._clock = seconds, publish, grant, clock
        self._since: float | None = None
        self._next = 0.0

    @property
    def waited(self) -> float:
        """Seconds since the trainer began to wait; 0 where it does not."""
        return 0.0 if self._since is None else self._clock() - self._since

    @property
    def due_in(self) -> float:
        """Seconds until the next relief."""
        return max(0.0, self._next - self._clock())

    def stepped(self) -> None:
        """The trainer does a step: nothing is waited for."""
        self._since = None

    def waits(self) -> bool:
        """The trainer finds too few rows. Brings relief where that is so for long enough; returns whether it did now."""
        now = self._clock()
        if self._since is None:
            self._since, self._next = now, now + self._seconds
        if now < self._next:
            return False
        self._next = now + self._seconds
        if not self._publish():
            self._grant()
        return True


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
    """The trainer's waiting for rows: it says for what, and brings relief where it takes too long."""

    def __init__(self, trainer: Trainer, status: Status):
        self._trainer, self._status = trainer, status
        self._relief = Relief(
            seconds=trainer.config.publish.at_most_seconds, publish=trainer.publish_what_is_new, grant=trainer.grant
        )
        self._say = 0.0

    def goes_on(self) -> None:
        """Waits for rows for a moment. Raises BadInput where none can come."""
        trainer, relief = self._trainer, self._relief
        trainer.wait(trainer.config.replay.poll_seconds)
        seconds = trainer.config.publish.at_most_seconds
        if relief.waits() and trainer.buffer.is_exhausted():
            raise processes.BadInput(
                f"step {trainer.step_number + 1} finds too few rows, and none can come: {trainer.shortage()}; searchers.count=0, "
                "and the runs of replay.mount have finished. Resume with searchers, or with other limits (--allow_change)"
            )
        told = (
            f"rows: {trainer.shortage()}; in {relief.due_in:.0f} s it publishes step {trainer.step_number} unless that is there, "
            f"or lets waiting searchers go on (publish.at_most_seconds={seconds:g})"
        )
        self._status.waits(told, seconds=relief.waited)
        if relief.waited > self._say + SAY_SECONDS:
            self._say = relief.waited
            log.warning("has waited %.0f s for %s", relief.waited, told)

    def ends(self) -> None:
        """There were rows for a step."""
        self._relief.stepped()
        self._status.waits("", seconds=0.0)
        self._say = 0.0
