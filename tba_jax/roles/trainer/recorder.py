"""The points that a trainer's run writes to its metrics, and that its alarms look at."""

import math
import os
import time
from typing import Any

import jax
import numpy as np

from tba_jax.learner import settings
from tba_jax.roles.trainer import logprob_gap
from tba_jax.roles.trainer.trainer import Trainer
from tba_jax.roles.work import WorkRates, policy_peaks
from tba_jax.storage import layout
from tba_jax.telemetry import metrics
from tba_jax.telemetry.alarms import Watch


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
        self._policy_rates = settings.policy_rates(trainer.config.learner)

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
        """`take` and `flush`."""
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
        """Returns:
        checkpoint_bytes, logprob_gap_limit. disk_free: bytes, where the disk tells its size.
        reward_low, reward_high: the extent of the rewards of rows that have been resident, where it is known: rows that are gone
          say whether one reward of all others is the best or the worst.
        newest_row_lag: steps since the weights of the newest own row, if there is one.
        """
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
