"""What a trainer shows and keeps while it holds its lease: snapshots of the policy, and checkpoints of state and replay index."""

import concurrent.futures
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tba_jax import sharding
from tba_jax.models.parameters import Params
from tba_jax.roles import results
from tba_jax.roles.process_group import Group, Member
from tba_jax.roles.trainer.buffer import ReplayBuffer, Retention
from tba_jax.storage import deltas, layout, places, published, snapshots
from tba_jax.storage.checkpoints import Checkpoints
from tba_jax.storage.fenced import StaleEpoch
from tba_jax.storage.lease import EpochLease
from tba_jax.storage.places import Place
from tba_jax.storage.published import Pointer

log = logging.getLogger(__name__)


class FollowersShards:
    """How process 0 has the others write their shards, see snapshots.Others. Each of them has a ShardWriter of the same name."""

    def __init__(self, group: Group, name: str):
        self._group, self._name = group, name

    def start(self, folder: Place, step: int, *, durable: bool) -> None:
        self._group.aside(f"write {self._name}", folder=folder.name, step=step, durable=durable)

    def wait(self, step: int) -> list[snapshots.Sums]:
        reports = self._group.reports(f"written {self._name}")
        for report in reports:
            if report["error"]:
                raise OSError(report["error"])
        return [report["sums"] for report in reports]


class ShardWriter:
    """Writes the shards of a process that follows, in a thread, when process 0 asks for them."""

    def __init__(self, member: Member, name: str, folder: Place, *, dtype: str, keeps_base: bool = False):
        """Args: folder: where the snapshots are; dtype: on disk; keeps_base: whether deltas are written of full ones."""
        self._member, self._name, self._folder, self._dtype = member, name, folder, dtype
        self._base: deltas.Base | None = None  # the last full snapshot that was written
        self._keeps_base = keeps_base
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"shards of {name}")
        self._changed = threading.Condition()
        # Step -> weights that process 0 may ask for. Guarded by the condition.
        self._offered: dict[int, Params] = {}
        self._writes = 0
        member.on_aside(f"write {name}", self._start)

    def offer(self, params: Params, step: int, *, held: Sequence[int] = ()) -> None:
        """Holds the weights of a step until they are written. Args: held: steps that process 0 may still ask for."""
        with self._changed:
            self._offered = {there: each for there, each in self._offered.items() if there in held} | {step: params}
            self._changed.notify_all()

    def drain(self) -> None:
        """Returns when everything that was offered is written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._offered and not self._writes)

    def _start(self, folder: str, step: int, durable: bool) -> None:
        self._thread.submit(self._write, folder, step, durable)

    def _write(self, folder: str, step: int, durable: bool) -> None:
        with self._changed:
            self._changed.wait_for(lambda: step in self._offered)
            params = self._offered.pop(step)
            self._writes += 1
        error, sums, base = "", {}, snapshots.base_of(folder)
        try:
            against = self._base if base else None
            if base and (against is None or against.name != base):
                raise ValueError(f"it does not hold snapshot {base}, of which {folder} is a delta")
            sums = snapshots.write_shards(self._folder / folder, params, dtype=self._dtype, durable=durable, base=against)
            if self._keeps_base and not base:
                self._base = snapshots.as_base(folder, params)
        except Exception as failure:  # process 0 raises it
            error = f"process {self._member.process}: {failure}"
        del params
        self._member.report(f"written {self._name}", error=error, sums=sums)
        with self._changed:
            self._writes -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Returns when what was asked for is written."""
        self._member.off_aside(f"write {self._name}")
        self._thread.shutdown()


class Publisher:
    """Publishes snapshots from a background thread; the trainer waits only for a copy on the device.

    If storage is slower than the trainer, a waiting snapshot is dropped for the next one, unless retention keeps it for good.
    Those are full and written durably; the others are soon superseded, so writing does not wait for the disk to have their bytes,
    and all but every n-th are deltas of the last full one.
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
        group: Group | None = None,
    ):
        """Takes the pointer to the snapshots.

        Args: epoch: of the trainer. full_every: n; 1: all are full. keep, keep_every, final_step, keep_seconds, scores: see
        published.Pointer. all_durable: whether a reader may need a snapshot again after a loss of power. check: raises where the
        trainer must show nothing more. group: of the processes that hold the weights; None: this process alone. Raises as
        published.Pointer.
        """
        self._group = group or Group()
        self._others = FollowersShards(self._group, "policy") if self._group.processes > 1 else None
        self._policies, self._check, self._all_durable = policies, check, all_durable
        self._dtype, self._epoch, self._every_steps = dtype, epoch, every_steps
        self.copy = sharding.copy_program(dtype)
        self._keep_every, self._final_step = keep_every, final_step
        # The last full snapshot that the pointer has, and the deltas of it so far. Of the thread.
        self._base: deltas.Base | None = None
        self._deltas, self._full_every = 0, full_every
        rule: dict[str, Any] = dict(keep=keep, keep_every=keep_every, final_step=final_step, scores=scores)
        self.pointer = Pointer(policies, epoch=epoch, keep_seconds=keep_seconds, **rule)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._lock = threading.Lock()
        # Snapshots that are not being written yet; only the last may be dropped for a newer one. Guarded by the lock.
        self._waiting: list[tuple[Params, int, Mapping[str, bytes]]] = []
        self._current: int | None = None  # the step that is being written. Guarded by the lock.
        self._writing: concurrent.futures.Future[None] | None = None
        self._published_step = -1  # the last one of this process

    def is_due(self, step: int) -> bool:
        """At every k-th step, at steps that are evaluated, and at the last."""
        return step % self._every_steps == 0 or self._stays(step)

    def is_there(self, step: int, *, by_this_process: bool) -> bool:
        """Whether the step has a snapshot. Args: by_this_process: another process may have left one that is damaged."""
        return step == self._published_step if by_this_process else step in self.pointer.kept

    def publish(self, params: Params, step: int, beside: Mapping[str, bytes] | None = None) -> None:
        """Hands the weights of a step, and files beside them, to the thread.

        Waits only while two snapshots that cannot be dropped are waiting. Raises what `check` or an earlier write raised.
        """
        self._check()
        self._published_step = step
        if self._writing is not None and (self._writing.done() or len(self._waiting) > 2):
            self.wait()
        with self._lock:
            if self._waiting and not self._stays(self._waiting[-1][1]):
                self._waiting.pop()
            held = [step for step in (self._current, *(waiting for _, waiting, _ in self._waiting)) if step is not None]
        self._group.call("publish", step=step, held=held)
        # A copy on the device, in the published dtype: the caller donates its buffers to the next update meanwhile.
        snapshot = jax.block_until_ready(self.copy(params))
        with self._lock:
            self._waiting.append((snapshot, step, beside or {}))
            if self._writing is None:
                self._writing = self._thread.submit(self._write_waiting)

    def _stays(self, step: int) -> bool:
        """Whether retention keeps the snapshot of a step for good."""
        return step % self._keep_every == 0 or step == self._final_step

    def _write_waiting(self) -> None:
        while True:
            with self._lock:
                self._current = None
                if not self._waiting:
                    self._writing = None
                    return
                params, self._current, beside = self._waiting.pop(0)
                step = self._current
            stays = self._stays(step)
            base = None if stays or self._deltas + 1 >= self._full_every else self._base
            name = snapshots.new_name(step, self._epoch, base=base.name if base is not None else "")
            settings: dict[str, Any] = dict(dtype=self._dtype, durable=self._all_durable or stays, beside=beside)
            snapshots.write(self._policies / name, params, step=step, base=base, others=self._others, **settings)
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
        with self._lock:
            writing = self._writing
        if writing is None:
            return
        try:
            writing.result()
        except BaseException:
            self._waiting, self._writing = [], None
            raise

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()
        self.pointer.close()


def publisher(config: Any, run: layout.RunDir, lease: EpochLease, group: Group, *, every_steps: int) -> Publisher:
    """Publishes the snapshots of a run while the lease is held."""
    return Publisher(
        run.policies,
        epoch=lease.epoch,
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
        check=lease.check,
        group=group,
    )


class Checkpointing:
    """Writes checkpoints under the trainer's epoch. Attributes: stored: the checkpoints of the run."""

    def __init__(self, config: Any, run: layout.RunDir, lease: EpochLease, buffer: ReplayBuffer, group: Group):
        self._group = group
        self._lease, self._buffer = lease, buffer
        self._every_steps, self._final_step = config.checkpoint.every_steps, config.learner.steps
        self.stored = Checkpoints(run.checkpoints, keep=config.checkpoint.keep)
        self._expiry = Retention(run.replay, buffer) if config.replay.retention == "checkpoints" else None
        # The step of the newest checkpoint that this process wrote or restored.
        self._newest_step = -1

    def is_due(self, step: int) -> bool:
        return step % self._every_steps == 0 or step == self._final_step

    def save(self, trees: Mapping[str, Any], step: int) -> None:
        """Starts an asynchronous checkpoint of `trees` and the replay buffer, unless this step has one. Raises StaleEpoch."""
        if self._newest_step == step:
            return
        self._lease.check()
        self._newest_step = step
        if self.stored.folder_of(step).exists():
            self._lease.check(anew=True)  # else its successor wrote it
            self.set_aside(step, "a trainer that had been replaced wrote it meanwhile")
        self._buffer.close_silent()
        if self._expiry is not None:
            self.stored.wait()
            self._expiry.remove_unneeded(self.stored.steps())
            self._expiry.note(step)
        self._group.call("checkpoint", step=step)
        self.stored.save(trees, {"epoch": self._lease.epoch, **self._buffer.state()}, step=step)

    def set_aside(self, step: int, reason: str) -> None:
        """See Checkpoints.set_aside; says so. Args: reason: why it does not count, in part of a sentence."""
        folder = self.stored.folder_of(step)
        aside = self.stored.set_aside(step)
        log.warning(
            "checkpoint %s is set aside: %s. It is in %s, which goes when a trainer starts and finds checkpoint.keep newer ones",
            *(folder, reason, aside.name),
        )

    def take(self, step: int, host: Mapping[str, Any]) -> None:
        """Goes on from the replay buffer in the checkpoint of a step. Args: host: see Checkpoints.restore."""
        self._buffer.restore(host, step=step)
        if self._expiry is not None:
            self._expiry.note(step)
        self._newest_step = step

    def close(self) -> None:
        """Returns when the last checkpoint is on disk."""
        self.stored.close()
        if self._expiry is not None:
            self._expiry.close()
