"""Publishes snapshots of the policy when they are due, only while the trainer holds its lease."""

from collections.abc import Callable, Mapping
from typing import Any

from tba_jax.models.parameters import Params
from tba_jax.run import best_step, layout, publisher, snapshots
from tba_jax.run.lease import EpochLease
from tba_jax.run.process_group import Group


def is_due(step: int, *, every_steps: int, evaluated: int, final: int) -> bool:
    """Whether a step is published: every k-th, those that are evaluated, and the last."""
    return step % every_steps == 0 or step % evaluated == 0 or step == final


class Publishing:
    """Publishes snapshots under the trainer's epoch: each is handed to a thread that writes it."""

    def __init__(self, config: Any, run: layout.RunDir, lease: EpochLease, group: Group, *, every_steps: int):
        self._policies, self._lease, self._every_steps = run.policies, lease, every_steps
        self._evaluated_every_steps, self._final_step = config.evaluation.every_steps, config.learner.steps
        self._publisher = publisher.Publisher(
            run.policies,
            dtype=config.publish.dtype,
            keep=config.publish.keep,
            keep_every=self._evaluated_every_steps,
            final_step=self._final_step,
            # A resumed run may have other steps that are evaluated, and another last one.
            scores=best_step.Scores(run.evaluations),
            # A run that is resumed samples with those of the last steps again.
            all_durable=config.schedule.mode == "interleaved" and config.schedule.lag > 0,
            check=lease.check,
            group=group,
        )
        # The last step whose weights this process has published.
        self._published_step = -1

    def is_due(self, step: int) -> bool:
        """At every k-th step, at steps that are evaluated, and at the last."""
        return is_due(step, every_steps=self._every_steps, evaluated=self._evaluated_every_steps, final=self._final_step)

    def publish(self, params: Params, step: int, beside: Mapping[str, bytes]) -> None:
        """Hands the weights of a step to the publishing thread. Raises StaleEpoch where another trainer has taken over.

        Args: beside: see snapshots.SnapshotInfo.
        """
        self._lease.check()
        self._published_step = step
        self._publisher.publish(params, snapshots.SnapshotInfo(step=step, epoch=self._lease.epoch, beside=beside))

    def publish_unless_there(self, params: Params, step: int, beside: Callable[[], Mapping[str, bytes]]) -> bool:
        """Does nothing where the step has a snapshot: a second one would take the first away from whoever reads it.

        Args: beside: makes what `publish` asks for, where it is needed.

        Returns:
          whether it was published now.
        """
        missing = step not in snapshots.committed_steps(self._policies)
        if missing:
            self.publish(params, step, beside())
        return missing

    def publish_again(self, params: Params, step: int, beside: Callable[[], Mapping[str, bytes]]) -> None:
        """Publishes a step whose snapshot another process may have left damaged, unless this process has published it."""
        if self._published_step != step:
            self.publish(params, step, beside())

    def wait(self) -> None:
        """Returns when the last published snapshot is visible."""
        self._publisher.wait()

    def close(self) -> None:
        self._publisher.close()
