"""The points that a trainer's run writes to its metrics."""

import time
from typing import Any

import jax

from tba_jax.learner import settings
from tba_jax.roles.trainer import alarm_rules
from tba_jax.roles.trainer.trainer import Trainer
from tba_jax.roles.work import WorkRates, policy_peaks
from tba_jax.run import layout, metrics


class Recorder:
    """Writes a point every metrics.every_steps steps and at the last. Rates begin after the first step of the process."""

    def __init__(self, trainer: Trainer, run: layout.RunDir):
        self._trainer, self._first = trainer, trainer.step_number
        self._writer = metrics.open_writer(trainer.config, run, "trainer", role="trainer", cost=trainer.record.cost)
        self._watchdog = alarm_rules.watchdog(run, trainer.config)
        self._circumstances = alarm_rules.Circumstances(trainer)
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
        """Writes the point of the step that was taken, if one is due, before the step after it is counted.

        Returns:
          whether one was due.
        """
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
            **self._rates.scalars(),
            **self._trainer.scalars(),
        }
        arrays = {"staleness": staleness} | ({"success_rate": success_rates} if success_rates.size else {})
        self._writer.write(step, scalars, arrays)
        self._watchdog.look(step, {"step": step, **scalars, **self._circumstances()})

    def close(self) -> None:
        self._writer.close()
