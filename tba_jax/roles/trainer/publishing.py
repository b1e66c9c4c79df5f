"""What a trainer shows and keeps while it holds its lease: snapshots of the policy, and checkpoints of state and replay index."""

import concurrent.futures
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import jax

from tba_jax import sharding
from tba_jax.models.parameters import Params
from tba_jax.roles import results
from tba_jax.roles.plan import Plan
from tba_jax.roles.trainer.buffer import ReplayBuffer, Retention
from tba_jax.storage import deltas, layout, places, published, snapshots
from tba_jax.storage.checkpoints import Checkpoints
from tba_jax.storage.fenced import StaleEpoch
from tba_jax.storage.lease import EpochLease
from tba_jax.storage.places import Place
from tba_jax.storage.published import Pointer

log = logging.getLogger(__name__)


class Publisher:
    """Publishes snapshots from a background thread; the trainer waits only for a copy on the device.

    If storage is slower than the trainer, a step is left out while two snapshots are unwritten, unless retention keeps it for
    good. Snapshots that stay are full and written durably. The others are soon superseded, so writing does not wait for the disk
    to have their bytes, and all but every n-th are deltas of the last full one.
    """

    def __init__(
        self,
        policies: Place,
        *,
        epoch: int,
        dtype: str,
        every_steps: int,
        keep: int,
        keep_every: int,
        final_step: int,
        full_every: int = 1,
        keep_seconds: float = 0.0,
        scores: Callable[[], Mapping[int, float]] = dict,
        all_durable: bool = False,
        check: Callable[[], object] = lambda: None,
        plan: Plan | None = None,
    ):
        """Takes the pointer to the snapshots, in process 0.

        Args: epoch: of the trainer. full_every: n; 1: all are full. keep, keep_every, final_step, keep_seconds, scores: see
        published.Pointer. all_durable: whether a reader may need a snapshot again after a loss of power. check: raises where the
        trainer must show nothing more. plan: of the processes that hold the weights; None: this process alone. Raises as
        published.Pointer.
        """
        self._plan = plan or Plan()
        self._policies, self._check, self._all_durable = policies, check, all_durable
        self._dtype, self._epoch, self._every_steps = dtype, epoch, every_steps
        self.copy = sharding.copy_program(dtype)
        self._keep_every, self._final_step = keep_every, final_step
        # The last full snapshot that the pointer has, and the deltas of it so far. Of the thread.
        self._base: deltas.Base | None = None
        self._deltas, self._full_every = 0, full_every
        if self._plan.leads:
            rule: dict[str, Any] = dict(keep=keep, keep_every=keep_every, final_step=final_step, scores=scores)
            self.pointer = Pointer(policies, epoch=epoch, keep_seconds=keep_seconds, **rule)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="publisher")
        # Snapshots that are not written yet: the first is being written.
        self._unwritten: list[concurrent.futures.Future[None]] = []
        self._published_step = -1  # the last one of this process

    def is_due(self, step: int) -> bool:
        """At every k-th step, at steps that are evaluated, and at the last."""
        return step % self._every_steps == 0 or self._stays(step)

    def is_there(self, step: int, *, by_this_process: bool) -> bool:
        """Whether the step has a snapshot. Args: by_this_process: another process may have left one that is damaged."""
        if by_this_process:
            return step == self._published_step
        return self._plan.share(lambda: step in self.pointer.kept)

    def publish(self, params: Params, step: int, beside: Mapping[str, bytes] | None = None) -> None:
        """Hands the weights of a step, and files beside them, to the thread.

        Waits only where two snapshots are unwritten and this one stays. Raises what `check` or an earlier write raised.
        """
        self._check()
        unique = self._plan.share(lambda: self._begin(step))
        if not unique:
            return
        self._published_step = step
        # A copy on the device, in the published dtype: the caller donates its buffers to the next update meanwhile.
        snapshot = jax.block_until_ready(self.copy(params))
        self._unwritten.append(self._thread.submit(self._write, snapshot, step, unique, beside or {}))

    def _begin(self, step: int) -> str:
        """What makes the name of this step's snapshot unique; "" where the step is left out. Of process 0."""
        self._let_go()
        while len(self._unwritten) > 1:
            if not self._stays(step):
                return ""
            self._unwritten[0].result()
            self._let_go()
        return uuid.uuid4().hex[:8]

    def _let_go(self) -> None:
        """Lets go of what is written. Raises what a write raised, and then drops the others."""
        try:
            while self._unwritten and self._unwritten[0].done():
                self._unwritten[0].result()
                del self._unwritten[0]
        except BaseException:
            for each in self._unwritten:
                each.cancel()
            self._unwritten = []
            raise

    def _stays(self, step: int) -> bool:
        """Whether retention keeps the snapshot of a step for good."""
        return step % self._keep_every == 0 or step == self._final_step

    def _write(self, params: Params, step: int, unique: str, beside: Mapping[str, bytes]) -> None:
        stays = self._stays(step)
        base = None if stays or self._deltas + 1 >= self._full_every else self._base
        name = snapshots.new_name(step, self._epoch, base=base.name if base is not None else "", unique=unique)
        settings: dict[str, Any] = dict(dtype=self._dtype, durable=self._all_durable or stays, beside=beside)
        together = self._plan if self._plan.processes > 1 else None
        snapshots.write(self._policies / name, params, base=base, together=together, **settings)
        if self._plan.leads:
            try:
                self.pointer.add(step, name)
            except StaleEpoch:
                # The pointer may have moved all the same, before the successor took it with what it names.
                if (folder := self._policies / name) not in published.kept(self._policies).values():
                    places.remove_tree(folder)
                raise
        self._deltas = 0 if base is None else self._deltas + 1
        if base is None and self._full_every > 1:
            self._base = snapshots.as_base(name, params)

    def wait(self) -> None:
        """Returns when every snapshot handed over is visible. If a write failed, raises its error and drops the waiting ones."""
        while self._unwritten:
            concurrent.futures.wait(self._unwritten[:1])
            self._let_go()

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()
        if self._plan.leads:
            self.pointer.close()


def publisher(
    config: Any, run: layout.RunDir, lease: EpochLease | None, plan: Plan, *, epoch: int, every_steps: int
) -> Publisher:
    """Publishes the snapshots of a run while the lease is held. Args: lease: of process 0. epoch: of it."""
    return Publisher(
        run.policies,
        epoch=epoch,
        dtype=config.publish.dtype,
        every_steps=every_steps,
        full_every=config.publish.full_every if deltas.are_written(config.publish) else 1,
        keep=config.publish.keep,
        keep_seconds=config.publish.keep_seconds,
        keep_every=config.evaluation.every_steps,
        final_step=config.learner.steps,
        # A resumed run may have other steps that are evaluated, and another last one.
        scores=results.Scores(run.evaluations),
        # A run that is resumed samples with those of the last steps again.
        all_durable=config.schedule.mode == "interleaved" and config.schedule.lag > 0,
        check=lease.check if lease is not None else lambda: None,
        plan=plan,
    )


class Checkpointing:
    """Writes checkpoints under the trainer's epoch. Attributes: stored: the checkpoints of the run."""

    def __init__(self, config: Any, run: layout.RunDir, lease: EpochLease | None, buffer: ReplayBuffer | None, plan: Plan):
        """Args: lease, buffer: of process 0."""
        self._plan = plan
        self._lease, self._buffer = lease, buffer
        self._every_steps, self._final_step = config.checkpoint.every_steps, config.learner.steps
        self.stored = Checkpoints(run.checkpoints, keep=config.checkpoint.keep)
        removes = buffer is not None and config.replay.retention == "checkpoints"
        self._expiry = Retention(run.replay, buffer) if removes else None  # type: ignore[arg-type]
        # The step of the newest checkpoint that this process wrote or restored.
        self._newest_step = -1

    def is_due(self, step: int) -> bool:
        return step % self._every_steps == 0 or step == self._final_step

    def save(self, trees: Mapping[str, Any], step: int) -> None:
        """Starts an asynchronous checkpoint of `trees` and the replay buffer, unless this step has one. Raises StaleEpoch."""
        if self._newest_step == step:
            return
        self._newest_step = step
        self._plan.share(lambda: self._make_room(step))
        host: dict[str, Any] = {}
        if self._lease is not None and self._buffer is not None:
            host = {"epoch": self._lease.epoch, **self._buffer.state()}
        self.stored.save(trees, host, step=step)

    def _make_room(self, step: int) -> None:
        """What process 0 does before a checkpoint."""
        assert self._lease is not None and self._buffer is not None
        self._lease.check()
        if self.stored.folder_of(step).exists():
            self._lease.check(anew=True)  # else its successor wrote it
            self.set_aside(step, "a trainer that had been replaced wrote it meanwhile")
        self._buffer.close_silent()
        if self._expiry is not None:
            self.stored.wait()
            self._expiry.remove_unneeded(self.stored.steps())
            self._expiry.note(step)

    def set_aside(self, step: int, reason: str) -> None:
        """See Checkpoints.set_aside; says so. Args: reason: why it does not count, in part of a sentence."""
        folder = self.stored.folder_of(step)
        aside = self.stored.set_aside(step)
        log.warning(
            "checkpoint %s is set aside: %s. It is in %s, which goes when a trainer starts and finds checkpoint.keep newer ones",
            *(folder, reason, aside.name),
        )

    def take(self, step: int, host: Mapping[str, Any]) -> None:
        """Goes on from the checkpoint of a step. Args: host: see Checkpoints.restore."""
        if self._buffer is not None:
            self._buffer.restore(host, step=step)
        if self._expiry is not None:
            self._expiry.note(step)
        self._newest_step = step

    def close(self) -> None:
        """Returns when the last checkpoint is on disk."""
        self.stored.close()
        if self._expiry is not None:
            self._expiry.close()
