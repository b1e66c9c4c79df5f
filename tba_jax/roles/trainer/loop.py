"""The loop of a trainer: steps as long as there are rows, and the points of its metrics."""

import logging
import math
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tba_jax.learner import optimizer
from tba_jax.roles.trainer import logprob_gap
from tba_jax.roles.trainer.trainer import Trainer
from tba_jax.roles.work import WorkRates, policy_peaks
from tba_jax.run import processes
from tba_jax.storage import layout
from tba_jax.telemetry import metrics
from tba_jax.telemetry.alarms import Watch
from tba_jax.telemetry.status import Status

log = logging.getLogger(__name__)

# A trainer that waits logs so this often.
SAY_SECONDS = 20.0
Clock = Callable[[], float]


class Relief:
    """Counts how long a trainer has waited, and brings relief each time another `seconds` have passed without a step."""

    def __init__(self, *, seconds: float, publish: Callable[[], object], clock: Clock = time.monotonic):
        """Args: seconds: publish.at_most_seconds; publish: publishes the weights unless they are there."""
        self._seconds, self._publish, self._clock = seconds, publish, clock
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
        self._since = None

    def waits(self) -> bool:
        """The trainer finds too few rows. Brings relief where that is so for long enough; returns whether it did now."""
        now = self._clock()
        if self._since is None:
            self._since, self._next = now, now + self._seconds
        if now < self._next:
            return False
        self._next = now + self._seconds
        self._publish()
        return True


class Recorder:
    """Writes a point every metrics.every_steps steps and at the last. Rates begin after the first step of the process."""

    def __init__(self, trainer: Trainer, run: layout.RunDir):
        self._trainer, self._first = trainer, trainer.step_number
        self._writer = metrics.open_writer(trainer.config, run, "trainer", role="trainer", status=trainer.record.status)
        self._watch = Watch(run.metrics("trainer"), trainer.config, role="trainer")
        self._circumstances = Circumstances(trainer)
        self._begin, self._rates = time.monotonic(), WorkRates(policy_peaks(trainer.program.mesh, trainer.config))
        self._taken: dict[str, Any] | None = None
        # A table on the host: to ask the schedule itself would wait for the update that the devices are at.
        self._policy_rates = optimizer.policy_rates(trainer.config.learner)

    def take(self, measurements: dict[str, Any]) -> None:
        """Takes the measurements of the step that was just done, on the devices; `flush` fetches and writes them."""
        trainer = self._trainer
        if trainer.step_number == self._first + 1:
            # The first step holds the compilation, and the wait for the first rows.
            trainer.account.restart()
            self._begin = time.monotonic()
        self._rates.take(trainer.program.work)
        self._taken = measurements

    def flush(self) -> bool:
        """Writes the point of the step that was taken, before the next is counted, if one is due. Returns whether one was."""
        measurements, self._taken = self._taken, None
        trainer = self._trainer
        if measurements is None or not (trainer.step_number % trainer.config.metrics.every_steps == 0 or trainer.is_done):
            return False
        self._write(**jax.device_get(measurements))
        return True

    def note(self, measurements: dict[str, Any]) -> bool:
        self.take(measurements)
        return self.flush()

    def _write(self, *, staleness: Any, **measurements: Any) -> None:
        """staleness: int64[B], of the rows of the batch, in steps."""
        step = self._trainer.step_number
        steps = step - self._first - 1
        # Updates that were left out do not count in the schedule.
        updates = step - 1 - int(measurements["skipped_steps"] - (1 - measurements["finite"]))
        successes, success_rates = self._trainer.index.success_counts.measure()
        scalars = {
            **measurements,
            "learning_rate": self._policy_rates[updates],
            **successes,
            "staleness_mean": staleness.mean(),
            "staleness_max": staleness.max(),
            "steps_per_second": steps / max(time.monotonic() - self._begin, 1e-9),
            "resumed_from": self._first,
            **self._rates.scalars(),
            **self._trainer.scalars(),
        }
        arrays = {"staleness": staleness} | ({"success_rate": success_rates} if success_rates.size else {})
        self._writer.write(step, scalars, arrays)
        self._watch.look(step, {"step": step, **scalars, **self._circumstances()})

    def close(self) -> None:
        self._writer.close()


class Circumstances:
    """What alarms look at beside the metrics of a point. A look costs what rows that came since the last one cost."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        # The newest row that was looked at, the extent of all rewards, and the newest weights that a row came from.
        self._arrival, self._low, self._high, self._row_step = -1, math.inf, -math.inf, -1
        # A trainer that resumes does not know the rewards of rows that were evicted before.
        self._sees_all = len(trainer.index) == trainer.index.arrivals
        needed = float(sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.program.trees())))
        self._always = {"checkpoint_bytes": needed, "logprob_gap_limit": logprob_gap.limit(trainer.config)}

    def __call__(self) -> dict[str, float]:
        """checkpoint_bytes, logprob_gap_limit; disk_free in bytes, where the disk tells; reward_low and reward_high, the extent
        of the rewards of all rows that have been resident, where it is known; newest_row_lag, the steps since the weights of the
        newest own row, if there is one."""
        self._look_at_new_rows()
        found = dict(self._always)
        if self._low < self._high or (self._arrival >= 0 and self._sees_all):
            found |= {"reward_low": self._low, "reward_high": self._high}
        if self._row_step >= 0 and self._trainer.buffer.has_own_rows():
            found["newest_row_lag"] = float(self._trainer.step_number - self._row_step)
        try:
            disk = os.statvfs(self._trainer.run.root)
        except OSError:  # storage that refuses is told by the writers of what must not be lost
            return found
        return found | ({"disk_free": float(disk.f_bavail * disk.f_frsize)} if disk.f_blocks else {})

    def _look_at_new_rows(self) -> None:
        index = self._trainer.index
        new = np.flatnonzero(index.arrival > self._arrival)
        if len(new):
            self._arrival, rewards = int(index.arrival[new].max()), index.reward[new]
            self._low, self._high = min(self._low, float(rewards.min())), max(self._high, float(rewards.max()))
            self._row_step = max(self._row_step, int(index.row_step[new].max()))


class _Wait:
    """The trainer's waiting for rows: it says for what, and brings relief where it takes too long."""

    def __init__(self, trainer: Trainer, status: Status):
        self._trainer, self._status = trainer, status
        self._relief = Relief(seconds=trainer.config.publish.at_most_seconds, publish=trainer.publish_what_is_new)
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
            f"rows: {trainer.shortage()}; in {relief.due_in:.0f} s it publishes step {trainer.step_number} unless that is there "
            f"(publish.at_most_seconds={seconds:g})"
        )
        self._status.waits(told, seconds=relief.waited)
        if relief.waited > self._say + SAY_SECONDS:
            self._say = relief.waited
            log.warning("has waited %.0f s for %s", relief.waited, told)

    def ends(self) -> None:
        self._relief.stepped()
        self._status.waits("", seconds=0.0)
        self._say = 0.0


def run_trainer(trainer: Trainer, run: layout.RunDir, *, stop: Callable[[], bool]) -> bool:
    """Trains until learner.steps are done or `stop` says so, in any process. Returns whether the run is finished.

    Process 0 alone waits for rows and writes metrics; the others wait for what it shares.
    """
    if not trainer.plan.leads:
        return _follow(trainer)
    log.info("trainer on %s, pid %d, %d resident rows", platform.node(), os.getpid(), len(trainer.index))
    recorder = Recorder(trainer, run)
    wait = _Wait(trainer, trainer.record.status)
    trainer.record.status.phase("")

    def record() -> None:
        if recorder.flush():
            trainer.report_problems()

    def beside() -> None:
        wait.ends()
        record()

    profiler = trainer.record.profiler
    profiler.step(trainer.step_number + 1)
    trainer.start()
    trainer.stops, is_alone = lambda: stop() or trainer.plan.is_asked_to_stop(), trainer.plan.processes == 1
    while not (trainer.is_done or trainer.is_stopped or (is_alone and stop())):  # a batch that is shared is trained on
        measurements = trainer.step(ahead=True, beside=beside)
        if measurements is not None:
            recorder.take(measurements)
        elif not trainer.is_stopped:
            record()
            wait.goes_on()
        del measurements  # let go of while the devices compute, which would wait for it here
        profiler.step(trainer.step_number + 1)
    record()
    wait.ends()
    return end(trainer, recorder)


def _follow(trainer: Trainer) -> bool:
    """The same steps in another process than the first."""
    log.info("process %d of the trainer, pid %d, follows process 0", trainer.plan.process, os.getpid())
    trainer.record.status.phase("")
    trainer.start()
    while not (trainer.is_done or trainer.is_stopped):
        trainer.step(ahead=True)
        trainer.record.profiler.step(trainer.step_number + 1)
    return end(trainer)


def end(trainer: Trainer, recorder: Recorder | None = None) -> bool:
    """Marks the run finished if it is, or saves where it stands, and closes the trainer. Returns whether it is finished."""
    finished = trainer.is_done
    if finished:
        trainer.finish()
    else:
        trainer.save_checkpoint()
    if recorder is not None:
        recorder.close()
    trainer.close()
    trainer.record.close("finished" if finished else "stopped")
    return finished
