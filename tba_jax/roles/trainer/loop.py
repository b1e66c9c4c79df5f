"""The loop of a trainer: steps as long as there are rows, and the points of its metrics; and what its other processes do."""

import concurrent.futures
import logging
import math
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tba_jax import sharding
from tba_jax.learner import optimizer
from tba_jax.models.policy import Policy
from tba_jax.roles.process_group import Member
from tba_jax.roles.trainer import logprob_gap, publishing
from tba_jax.roles.trainer.resume import load_frozen, load_reference
from tba_jax.roles.trainer.trainer import Trainer
from tba_jax.roles.trainer.update_program import Placed, UpdateProgram
from tba_jax.roles.work import WorkRates, policy_peaks
from tba_jax.run import processes
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import deltas, layout
from tba_jax.storage.checkpoints import Checkpoints
from tba_jax.telemetry import metrics
from tba_jax.telemetry.alarms import Watch
from tba_jax.telemetry.status import Record, Status

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
    """Trains until learner.steps are done or `stop` says so. Returns whether the run is finished."""
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


class Follower:
    """What a process holds of a trainer whose process 0 is elsewhere: its shards of the state, and the same programs. It draws,
    journals and decides nothing."""

    def __init__(
        self,
        config: Any,
        contract: contract_lib.Contract,
        run: layout.RunDir,
        *,
        policy: Policy,
        member: Member,
        record: Record | None = None,
    ):
        """Args: record: of this process; None: nothing is recorded."""
        self._record = record or Record()
        self._contract, self._run, self._policy, self._member = contract, run, policy, member
        self._program = UpdateProgram(config, contract, policy)
        self._checkpoints = Checkpoints(run.checkpoints, keep=config.checkpoint.keep)
        self._checkpointing = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._scores = logprob_gap.SnapshotScores(
            self._program.config, self._program.mesh, run.policies, sampler_weights=config.searchers.weights
        )
        self._copy = sharding.copy_program(config.publish.dtype)
        keeps_base = deltas.are_written(config.publish)
        self._shards = publishing.ShardWriter(member, "policy", run.policies, dtype=config.publish.dtype, keeps_base=keeps_base)
        # The trees of a checkpoint that is read, until process 0 says that all processes have read it.
        self._restored: dict[str, Any] = {}
        # Batches that are placed, and not updated on yet; the measurements of the last update.
        self._placed: list[Placed] = []
        self._measurements: dict[str, Any] = {}
        self._actions: dict[str, Callable[..., None]] = {
            "begin": self._begin,
            "restore": self._restore,
            "take restored": self._take_restored,
            "compile": self._compile,
            "place": self._place,
            "update": self._update,
            "settle": self._settle,
            "publish": self._publish,
            "checkpoint": self._checkpoint,
            "load snapshot": self._load_snapshot,
            "tell loaded step": self._tell_loaded_step,
            "drop snapshot": self._scores.drop,
            "score rows": self._score_rows,
        }

    def do(self, name: str, content: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Does what process 0 calls `name`. Args: arrays: rows, where there are any."""
        action = self._actions[name]
        if arrays:
            action(arrays)
        else:
            action(**content)

    def _begin(self, reference: str) -> None:
        self._program.begin(load_reference(self._policy, self._program, self._run, reference))

    def _restore(self, step: int) -> None:
        error = ""
        try:
            self._restored, _ = self._checkpoints.restore(step, self._program.checkpointed_shapes(step))
        except ValueError as failure:  # process 0 says what follows
            error = f"process {self._member.process}: {failure}"
        self._member.report("restored", error=error)

    def _take_restored(self, reference: str) -> None:
        restored, self._restored = self._restored, {}
        self._program.restore(restored, load_frozen(self._policy, self._program, self._run, reference))

    def _compile(self) -> None:
        self._program.compile(self._contract.row_shape())

    def _place(self, rows: dict[str, np.ndarray]) -> None:
        placed = self._program.place(rows)
        self._program.compile_where_new(placed)
        self._placed.append(placed)

    def _update(self) -> None:
        self._measurements = self._program.dispatch(self._placed.pop(0))

    def _settle(self, step: int) -> None:
        jax.block_until_ready(self._measurements)
        self._program.move_reference(step)
        self._record.status.step = step
        self._record.profiler.step(step + 1)

    def _publish(self, step: int, held: list[int]) -> None:
        self._shards.offer(self._copy(self._program.policy_params), step, held=held)

    def _checkpoint(self, step: int) -> None:
        self._checkpoints.save(self._program.trees(), {}, step=step)
        # Process 0 would wait for this process' part for long; nothing else asks orbax soon whether it is written.
        self._checkpointing.submit(self._await_checkpoint)

    def _await_checkpoint(self) -> None:
        try:
            self._checkpoints.wait()
        except Exception as error:  # orbax raises what its storage does
            self._member.fail(error)

    def _load_snapshot(self, steps: list[int]) -> None:
        self._scores.load(steps)

    def _tell_loaded_step(self) -> None:
        self._member.report("loaded step", step=self._scores.loaded_step())

    def _score_rows(self, rows: dict[str, np.ndarray]) -> None:
        self._scores.score(self._program.frozen, rows)

    def close(self) -> None:
        """Stops the threads; what was handed to them is written first."""
        self._checkpointing.shutdown()
        self._scores.close()
        self._shards.close()
        self._checkpoints.close()
