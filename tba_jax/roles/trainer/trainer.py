"""The trainer: tails the replay log, draws batches, journals them, updates the policy, publishes snapshots.

Order of a resume:
  1. hold the epoch lease; nobody else writes journal, checkpoints or snapshots from here on
  2. restore the newest checkpoint: train state and replay index (none: the reference policy, an empty index)
  3. do every journalled step after the checkpoint again, exactly: same rows, same order, same hash
  4. publish where that ends, then go on live
"""

import concurrent.futures
import dataclasses
import functools
import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from tba_jax import sharding, trajectory
from tba_jax.learner import optimizer, settings, state
from tba_jax.learner import update as update_lib
from tba_jax.models import parameters
from tba_jax.models.policy import Policy
from tba_jax.replay import journal, ledger, retention
from tba_jax.replay.expiry import remove_segments
from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.reader import LogReader
from tba_jax.replay.selection import Selection, draw_batch
from tba_jax.replay.tail import Tail, not_resident, replay_visible
from tba_jax.roles.trainer.logprob_gap import LogprobGap
from tba_jax.run import contract as contract_lib
from tba_jax.run import layout, places, snapshots
from tba_jax.run.checkpoints import Checkpoints
from tba_jax.run.lease import EpochLease
from tba_jax.run.metrics import MetricWriter, TimeAccount

log = logging.getLogger(__name__)

# Updates that learner.non_finite=skip leaves out one after the other before the run stops.
_MOST_REFUSED_IN_A_ROW = 10
# So often a trainer that waits says so.
_SAY_WAITING_SECONDS = 20.0


def make_index(config: Any, contract: contract_lib.Contract) -> ReplayIndex:
    """The empty index of a run."""
    return ReplayIndex(
        shape=contract.row_shape(),
        capacity=config.replay.capacity,
        capacity_per_query=config.replay.capacity_per_query,
        merge_duplicates=config.replay.merge_duplicates,
        merge_edit_distance=config.replay.merge_edit_distance,
        merge_cosine_distance=config.replay.merge_cosine_distance,
        drop=config.replay.drop,
        vocab_size=contract.model["vocab"],
    )


class Trainer:
    """One trainer over one mesh. Constructing it takes the lease and resumes; `step` does one update."""

    def __init__(
        self,
        config: Any,
        contract: contract_lib.Contract,
        run: layout.RunDir,
        *,
        policy: Policy,
        lease: EpochLease,
        publish_every_steps: int,
        replay_until: int | None = None,
    ):
        """Args: replay_until: the last journalled step that is done again under this config; default: all of them."""
        self._config, self._contract, self._run, self._policy, self._lease = config, contract, run, policy, lease
        self._publish_every, self._replay_until = publish_every_steps, replay_until
        c = config.learner
        self.rows = c.queries * c.completions
        self._mesh = sharding.make_mesh(tuple(c.mesh.values()), setting="learner.mesh")
        self._shape = contract.row_shape()
        self._learner_config = settings.make_learner_config(config, contract, policy, devices=self._mesh.size)
        self._optimizers = settings.make_optimizers(config)
        self._state_shapes = state.state_shapes(policy, self._optimizers, self._mesh)
        update = functools.partial(
            update_lib.train_step,
            optimizers=self._optimizers,
            schedules=settings.make_schedules(config),
            config=self._learner_config,
        )
        out_shardings = (jax.tree.map(lambda x: x.sharding, self._state_shapes), sharding.replicated(self._mesh))
        jit_update = jax.jit(update, donate_argnums=0, out_shardings=out_shardings)
        self._update = sharding.on_mesh(self._mesh, jit_update)
        self._lower_update = sharding.on_mesh(self._mesh, jit_update.lower)
        self._restart_moments = jax.jit(
            optimizer.restart_moments, donate_argnums=0, out_shardings=out_shardings[0].opt_state["policy"]
        )
        self._reference = settings.make_moving_reference(config, self._learner_config, self._mesh)
        self._gap = LogprobGap(
            self._learner_config,
            self._mesh,
            run.policies,
            sampler_weights=config.searchers.weights,
            limit=c.logprob_gap_limit,
        )
        self._checkpoints = Checkpoints(run.checkpoints, keep=config.checkpoint.keep)
        self._publisher = snapshots.Publisher(
            run.policies,
            dtype=config.publish.dtype,
            keep=config.publish.keep,
            keep_every=config.evaluation.every_steps,
            final_step=c.steps,
            check=lease.check,
        )
        self.account = TimeAccount()
        self._last_gap: dict[str, float] = {}
        self._saved_step = -1
        self._refused_in_a_row = 0
        self._resume()

    # Resume

    def _resume(self) -> None:
        run = self._run
        snapshots.sweep(run.policies)
        recorded = journal.read_lineage(run.journal)
        lineage = recorded[: self._replay_until]
        leaves = contract_lib.flatten(self._config.to_dict())
        self._mounts = contract_lib.mounted_logs(leaves, reward_version=self._contract.reward_version)
        self._reader = LogReader(run.replay, self._shape, mounts=self._mounts)
        # Checkpointed step -> what a resume from there reads of each writer.
        self._needs: dict[int, dict[str, retention.Need]] = {}
        self._remover = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="retention")
        self._expiry: concurrent.futures.Future[None] | None = None
        step = self._checkpoints.latest_step()
        if step is None and not lineage and (there := snapshots.latest_step(run.policies, newer_than=0)) is not None:
            raise ValueError(
                f"{run.policies} holds the policy of step {there} of a trainer whose checkpoints and journal are not in "
                f"{run.root}: restore them, or begin a new run in another workdir (--init_from={run.shared}@{there})"
            )
        # Heads that were integrated since the last journalled step; to do so twice changes nothing.
        self._visible: list[dict[str, int]] = []
        self._restore(step, lineage)
        if lineage and self.step_number > lineage[-1]["step"]:
            raise ValueError(f"checkpoint {self.step_number} is ahead of the journal, which ends at step {lineage[-1]['step']}")
        self._publish_unless_there()
        if lines := lineage[self.step_number :]:
            self._visible = []  # they are in the first of these lines
            self._replay_journal(lines, end=recorded[-1]["step"])
            # A trainer that is killed again and again must get further than before.
            self.save_checkpoint()
            self._publish_unless_there()
        self._reference_number = int(layout.read_json(run.initial_reference)["id"], 16)
        self._journal = journal.Journal(run.journal, self._lease.epoch)
        poll_seconds = self._config.replay.poll_seconds
        self._tail = Tail(run.replay, self._shape, self.index.heads, poll_seconds=poll_seconds, mounts=self._mounts)
        self._known_problems: set[str] = set()
        # In the order of index.writers. A writer that is not followed has no resident rows.
        self._writer_is_mounted = [
            self._reader.segment_rows(writer) is not None and not self._reader.is_own(writer) for writer in self.index.writers
        ]
        places.remove(run.finished)
        if step is not None or lineage:
            log.info("resumed at step %d with %d resident rows (epoch %d)", self.step_number, len(self.index), self._lease.epoch)

    def _restore(self, step: int | None, lineage: list[dict[str, Any]]) -> None:
        """State and index of the checkpoint of `step`; without one, those that a run begins with."""
        # What is trained starts from float32; what stays as it is rests in the dtype that is computed with.
        base: parameters.Params = {}
        if step is None or self._policy.lora is not None:
            base = snapshots.load(
                self._run.reference(layout.read_json(self._run.initial_reference)["id"]),
                self._policy.model_specs,
                self._policy.model_shardings(self._mesh),
                dtype="float32" if self._policy.lora is None else self._policy.model.compute_dtype,
            )
        self._frozen = {} if self._policy.lora is None else base
        if step is None:
            out_shardings = jax.tree.map(lambda x: x.sharding, self._state_shapes)
            initial_state = jax.jit(self._initial_state, out_shardings=out_shardings, donate_argnums=0)
            self.state = initial_state(base if self._policy.lora is None else {})
            if self._reference:
                self._reference.start(self.state.params["policy"])
            self.index = make_index(self._config, self._contract)
            self.step_number = 0
            return
        try:
            held = {"reference": self._reference.shapes} if self._reference and step else {}
            trees, host = self._checkpoints.restore(step, {"state": self._state_shapes, **held})
        except Exception as error:  # orbax raises what its storage does
            folder = self._run.checkpoints / layout.step_name(step)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"checkpoint {folder} cannot be restored: {reason[:300]}. If it is damaged, remove "
                "that folder: the run then goes on from the checkpoint before, or from its reference, exactly"
            ) from error
        epoch = host["epoch"]
        if 0 < step <= len(lineage) and epoch < lineage[step - 1]["epoch"]:
            raise ValueError(
                f"checkpoint {step} was written under epoch {epoch}, but step {step} belongs to epoch "
                f"{lineage[step - 1]['epoch']}: a trainer that had been replaced wrote it; remove it from {self._run.checkpoints}"
            )
        self.state = trees["state"]
        if self._reference and step:
            self._reference.params = trees["reference"]
        elif self._reference:
            self._reference.start(self.state.params["policy"])
        self._reader.heads()
        self.index = ReplayIndex.restore(host["index"], self._reader)
        self._visible = host["visible"]
        self._note_needs(step)
        self.step_number = self._saved_step = step

    def _initial_state(self, base: parameters.Params) -> state.TrainState:
        key = jax.random.key(self._config.seed)
        return state.init_state(self._policy, self._policy.initial(base, key), self._optimizers)

    def _replay_journal(self, lines: list[dict[str, Any]], *, end: int) -> None:
        """end: the last step that is journalled."""
        for line in lines:
            for heads in line["visible"]:
                replay_visible(self.index, self._reader, heads, step=self.step_number)
            slots = self.index.slots_of(journal.line_ids(line))
            if (slots < 0).any():
                raise not_resident(self._reader, line, slots)
            rows = self.index.gather(slots)
            if journal.batch_hash(rows) != line["batch"]:
                raise ValueError(f"journalled step {line['step']}: the rows in the log are not those that were drawn")
            self.index.mark_drawn(slots)
            self._apply(rows, journal.line_ids(line), was_passed=line["step"] < end)
            if self._publish_is_due():
                self._publish_unless_there()
                self._publisher.wait()  # so that every step that may have been published is there again

    # Live

    def start(self) -> None:
        """Starts to follow the log in the background, and compiles the update while the first rows are on their way."""
        self._tail.start()
        if self.step_number >= self._config.learner.steps:
            return
        rows = {name: np.zeros((self.rows, *shape), dtype) for name, (dtype, shape) in self._shape.columns().items()}
        with self.account.measure("update"):
            self._lower_update(self.state, self._frozen, self._batch(rows)).compile()

    def poll(self) -> None:
        """Reads the log once, in a one-process run."""
        self._tail.poll()

    def step(self) -> dict[str, Any] | None:
        """One update. Returns its measurements, or None when there are not enough rows yet (nothing has changed then).

        Raises:
          StaleEpoch: another trainer has taken over. FloatingPointError: names the step; the state is that before it.
          OSError: the journal, a snapshot or a checkpoint could not be written.
        """
        with self.account.measure("integrate"):
            if heads := self._tail.integrate(self.index, step=self.step_number):
                self._visible.append(heads)
        slots = self._draw()
        if slots is None:
            return None
        with self.account.measure("draw"):
            rows = self.index.gather(slots)
            self._check_reference(rows)
        ids = self.index.ids(slots)
        with self.account.measure("journal"):
            self._lease.check()
            make_line = functools.partial(
                journal.journal_line,
                step=self.step_number + 1,
                visible=self._visible,
                ids=ids,
                reward_version=self._contract.reward_version,
                key=self.step_number,
                rows=rows,
            )
            self._visible = []
            # The line becomes durable while the devices compute: nothing shows the update's result before it is.
            durable = self._journal.submit(make_line)
        self.index.mark_drawn(slots)
        try:
            with self.account.measure("update"):
                measurements = self._apply(rows, ids)
        finally:
            with self.account.measure("journal"):
                durable.result()
        oldest = self.index.row_step[slots]
        staleness = np.where(oldest < 0, 0, self.step_number - 1 - oldest)
        if self._mounts:
            measurements["mounted_share"] = self._is_mounted(slots).mean()
        self._housekeeping()
        return {**measurements, "staleness": staleness, **self._last_gap}

    def _is_mounted(self, slots: np.ndarray) -> np.ndarray:
        """bool[n]: whether the rows in `slots` are of other runs."""
        for writer in self.index.writers[len(self._writer_is_mounted) :]:
            self._writer_is_mounted.append(not self._tail.is_own(writer))
        return np.array(self._writer_is_mounted, bool)[self.index.slot_writer[slots]]

    def _draw(self) -> np.ndarray | None:
        c, replay = self._config.learner, self._config.replay
        if len(self.index) < max(replay.min_rows, 1):
            return None
        with self.account.measure("draw"):
            selection = Selection(
                queries=c.queries,
                completions=c.completions,
                recent_probability=replay.recent_probability,
                recent_window=replay.recent_window or self._publish_every,
                strategy=replay.strategy,
                inverse_temperature=replay.inverse_temperature,
                max_draws_per_row=replay.max_draws_per_row,
                max_staleness=replay.max_staleness,
            )
            rng = np.random.Generator(np.random.Philox(key=[self._config.seed, self.step_number]))
            return draw_batch(self.index, selection, rng=rng, step=self.step_number)

    def _check_reference(self, rows: trajectory.Rows) -> None:
        foreign = rows["reference_id"] != self._reference_number
        if foreign.any():
            raise ValueError(
                f"{foreign.sum()} drawn rows have log-probs of reference {rows['reference_id'][foreign.argmax()]:016x}, "
                f"the run's reference is {self._reference_number:016x}"
            )

    def _batch(self, rows: trajectory.Rows) -> state.Batch:
        """What the update takes: on the mesh, scored by the moving reference where there is one."""
        batch = sharding.put_rows(self._mesh, state.batch_from_rows(rows))
        return self._reference.rescore(self._frozen, batch) if self._reference else batch

    def _apply(self, rows: trajectory.Rows, ids: Sequence[tuple[str, int]], *, was_passed: bool = False) -> dict[str, Any]:
        """One update. was_passed: whether the journal shows that the run went on after it."""
        self.state, measurements = self._update(self.state, self._frozen, self._batch(rows))
        measurements = jax.device_get(measurements)
        self.step_number += 1
        row_finite = measurements.pop("row_finite")
        self._refused_in_a_row = 0 if measurements["finite"] else self._refused_in_a_row + 1
        if self._refused_in_a_row:
            rows_to_blame = [f"{writer}:{row}" for (writer, row), ok in zip(ids, row_finite, strict=True) if not ok]
            self._refuse(measurements, rows_to_blame, was_passed=was_passed)
        moved = self._reference is not None and self._reference.advance(self.state.params["policy"], self.step_number)
        if moved and self._config.learner.reference.reset_optimizer:
            of_policy = self._restart_moments(self.state.opt_state["policy"])
            self.state = dataclasses.replace(self.state, opt_state=self.state.opt_state | {"policy": of_policy})
        return measurements

    def _refuse(self, measurements: dict[str, Any], rows: Sequence[str], *, was_passed: bool) -> None:
        """Says which step and rows an update was refused for; raises unless such steps are skipped.

        Where every row is at fault, or step after step, skipping would lead nowhere.
        """
        listed = ", ".join(rows[:8]) + (" …" if len(rows) > 8 else "")
        sentence = (
            f"step {self.step_number} is not finite (loss {measurements['loss']}, gradient norm {measurements['grad_norm']}): "
            + (
                f"{len(rows)} of {self.rows} rows are not, {listed}"
                if rows
                else "its rows are, its gradient or new weights are not"
            )
            + f"; its batch is the line of that step in {self._run.journal}"
        )
        skips = self._config.learner.non_finite == "skip"
        if was_passed or (skips and len(rows) < self.rows and self._refused_in_a_row < _MOST_REFUSED_IN_A_ROW):
            log.warning("%s; the update is left out (learner.non_finite=skip)", sentence)
            return
        self._checkpoints.wait()  # the process may end now, one that is on its way should not be torn
        if skips:
            reason = (
                "all rows are at fault" if len(rows) == self.rows else f"it is step {self._refused_in_a_row} of such in a row"
            )
            raise FloatingPointError(
                f"{sentence}; {reason}, so the run stops in spite of learner.non_finite=skip: another run may begin from an "
                "earlier snapshot (--init_from=RUN@STEP)"
            )
        advice = "learner.non_finite=skip --allow_change=learner.non_finite would leave such updates out"
        raise FloatingPointError(f"{sentence}; --config.{advice}")

    def _publish_is_due(self) -> bool:
        """At every k-th step, at steps that are evaluated, and at the last."""
        n, c = self.step_number, self._config
        return n % self._publish_every == 0 or n % c.evaluation.every_steps == 0 or n == c.learner.steps

    def _housekeeping(self) -> None:
        c = self._config
        last = self.step_number == c.learner.steps
        if self._publish_is_due():
            with self.account.measure("publish"):
                self.publish()
        if self.step_number % c.checkpoint.every_steps == 0 or last:
            with self.account.measure("checkpoint"):
                self.save_checkpoint()
        every = c.learner.logprob_gap_every_steps
        if every and self.step_number % every == 0:
            with self.account.measure("logprob_gap"):
                resident = np.flatnonzero(self.index.slot_query >= 0)
                usable = resident[(self.index.row_step[resident] >= 0) & ~self._is_mounted(resident)]
                self._last_gap = self._gap.measure(self.index, usable, self._frozen)

    def _publish_unless_there(self) -> None:
        if self.step_number not in snapshots.committed_steps(self._run.policies):
            self.publish()

    def publish(self) -> None:
        """Hands the current weights to the publishing thread."""
        self._lease.check()
        self._publisher.publish(
            self.state.params["policy"], snapshots.SnapshotInfo(step=self.step_number, epoch=self._lease.epoch)
        )

    def flush_snapshot(self) -> None:
        """Returns when the last published snapshot is visible: a one-process run reads it next."""
        self._publisher.wait()

    def save_checkpoint(self) -> None:
        """Starts an asynchronous checkpoint of state and index, unless this step has one."""
        if self._saved_step == self.step_number:
            return
        self._lease.check()
        self._saved_step = self.step_number
        if self._config.replay.retention == "checkpoints":
            self._expire_segments()
        host = {"epoch": self._lease.epoch, "index": self.index.state(), "visible": self._visible}
        held = {"reference": self._reference.params} if self._reference else {}
        self._checkpoints.save({"state": self.state, **held}, host, step=self.step_number)

    def _expire_segments(self) -> None:
        """Removes what the checkpoints that are there do not need, and notes what the next one will."""
        if self._expiry is not None:
            self._expiry.result()
        self._checkpoints.wait()
        steps = set(self._checkpoints.steps())
        # A checkpoint of an earlier process may need anything, until it is replaced.
        if steps <= self._needs.keys():
            self._needs = {step: self._needs[step] for step in steps}
            gone = {writer: n for writer, n in retention.expired(self._needs).items() if self._reader.is_own(writer)}
            self._expiry = self._remover.submit(remove_segments, self._run.replay, gone)
        self._reader.heads()
        self._note_needs(self.step_number)

    def _note_needs(self, step: int) -> None:
        """Notes what a resume from the checkpoint of this step reads. Where that cannot be told, nothing is removed meanwhile."""
        if self._config.replay.retention == "checkpoints":
            sizes = {writer: self._reader.segment_rows(writer) for writer in self.index.writers}
            known = {writer: size for writer, size in sizes.items() if size is not None}
            if len(known) == len(sizes):
                self._needs[step] = retention.needs(self.index, known)

    def say_waiting(self) -> None:
        """Says what a step needs, and what there is."""
        c = self._config
        log.warning(
            "waiting for rows: a step needs those of learner.queries=%d queries, at least replay.min_rows=%d; %d are resident",
            c.learner.queries,
            c.replay.min_rows,
            len(self.index),
        )

    def wait(self, seconds: float) -> None:
        """Waits for rows, at the latest until `seconds` have passed; counted as the trainer's waiting time."""
        with self.account.measure("wait_rows"):
            self._tail.wait(seconds)
        self.report_problems()

    def report_problems(self) -> None:
        """Logs every folder or row that is left out of training, once."""
        rejected = [
            f"replay log of writer {writer}: row {row} is not valid ({reason}), it and others like it are left out and counted"
            for (writer, reason), row in self.index.rejected_first.items()
        ]
        for problem in [*self._tail.problems(), *rejected]:
            if problem not in self._known_problems:
                self._known_problems.add(problem)
                log.warning("%s", problem)

    def scalars(self) -> dict[str, float]:
        """Sizes of the replay and shares of time, for the metrics."""
        entries = self.index.ledger().values()
        seen = sum(entry["seen"] for entry in entries)
        return {
            "buffer_rows": float(len(self.index)),
            "buffer_queries": float(np.count_nonzero(self.index.query_rows)),
            "rows_seen": float(seen),
            "rows_rejected": float(sum(sum(entry["rejected"].values()) for entry in entries) + self._tail.corrupted_rows),
            "draws_per_row": self.step_number * self.rows / max(seen, 1),
            **self.account.shares(),
        }

    def finish(self) -> None:
        """Makes everything durable, checks that every row and every step is accounted for, and marks the run finished."""
        self._publisher.wait()
        self._checkpoints.wait()
        accounts = ledger.accounts(self.index, self.index.heads)
        balanced = all(account.balances for account in accounts.values())
        recorded = len(journal.read_lineage(self._run.journal))
        if not balanced or recorded != self.step_number:
            log.error(
                "the ledger does not balance: %d steps are journalled, %d were done; %s",
                recorded,
                self.step_number,
                {writer: account for writer, account in accounts.items() if not account.balances},
            )
        told = {
            "step": self.step_number,
            "epoch": self._lease.epoch,
            "balanced": balanced and recorded == self.step_number,
            "ledger": self.index.ledger(),
        }
        layout.write_json(self._run.finished, {**told, **self.scalars()})

    def close(self) -> None:
        """Stops the threads; what was handed to them is written first."""
        self._tail.close()
        self._publisher.close()
        self._checkpoints.close()
        self._journal.close()
        self._remover.shutdown()


def record(writer: MetricWriter, trainer: Trainer, measurements: dict[str, Any], *, begin: float, steps: int) -> None:
    """Writes one point of the trainer's metrics. `steps` were done since `begin` (monotonic seconds)."""
    staleness = measurements.pop("staleness")
    scalars = {
        **measurements,
        "staleness_mean": staleness.mean(),
        "staleness_max": staleness.max(),
        "steps_per_second": steps / max(time.monotonic() - begin, 1e-9),
        **trainer.scalars(),
    }
    writer.write(trainer.step_number, scalars, {"staleness": staleness})


def run_trainer(trainer: Trainer, config: Any, run: layout.RunDir, *, stop: Callable[[], bool]) -> bool:
    """Trains until learner.steps are done or `stop` says so. Returns whether the run is finished."""
    writer = MetricWriter(run.metrics("trainer"))
    log.info("trainer on %s, pid %d, %d resident rows", platform.node(), os.getpid(), len(trainer.index))
    trainer.start()
    begin, first = 0.0, trainer.step_number
    waiting_since = time.monotonic()
    while trainer.step_number < config.learner.steps and not stop():
        measurements = trainer.step()
        if measurements is None:
            trainer.wait(config.replay.poll_seconds)
            if time.monotonic() - waiting_since > _SAY_WAITING_SECONDS:
                trainer.say_waiting()
                waiting_since = time.monotonic()
            continue
        waiting_since = time.monotonic()
        if trainer.step_number == first + 1:
            # The first step holds the compilation, and the wait for the first rows.
            trainer.account.restart()
            begin = time.monotonic()
        if trainer.step_number % config.metrics.every_steps == 0 or trainer.step_number == config.learner.steps:
            record(writer, trainer, measurements, begin=begin, steps=trainer.step_number - first - 1)
            trainer.report_problems()
    finished = trainer.step_number >= config.learner.steps
    if finished:
        trainer.finish()
    else:
        trainer.save_checkpoint()
    writer.close()
    trainer.close()
    return finished
