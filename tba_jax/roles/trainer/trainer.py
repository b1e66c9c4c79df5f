"""The trainer: draws batches from the replay buffer, journals them, updates the policy, publishes snapshots."""

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tba_jax import trajectory
from tba_jax.learner.optimizer import TrainState
from tba_jax.models.policy import Policy
from tba_jax.replay import journal, ledger, log_z
from tba_jax.replay.index import ReplayIndex
from tba_jax.roles.backpressure import DemandWriter
from tba_jax.roles.plan import Plan
from tba_jax.roles.trainer import logprob_gap
from tba_jax.roles.trainer.buffer import ReplayBuffer
from tba_jax.roles.trainer.logprob_gap import LogprobGap, SnapshotScores
from tba_jax.roles.trainer.publishing import Checkpointing, publisher
from tba_jax.roles.trainer.update_program import BehaviorCheck, Placed, Refusals, UpdateProgram, behavior_reader
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout, places
from tba_jax.storage.lease import EpochLease
from tba_jax.telemetry.status import Record, TimeAccount, code_digest

log = logging.getLogger(__name__)

# Time between two updates that has a share of its own and is no delay of the trainer's making.
_LEFT_OUT = ("wait_rows", "compile", "publish", "checkpoint", "logprob_gap")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Drawn:
    """A batch that was drawn. takes_gap: whether the comparison of log-probs that is under way ends with this step.

    Of process 0: slots: int64[B]. ids: (writer, row) of its rows. provenance: see ReplayBuffer.provenance.
    """

    rows: trajectory.Rows
    placed: Placed
    takes_gap: bool = False
    slots: np.ndarray | None = None
    ids: Sequence[tuple[str, int]] = ()
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _of_others() -> dict[str, Any]:
    raise AssertionError("process 0 decides")


class TrainerAccount(TimeAccount):
    """A time account that also adds up the time from the end of an update to the dispatch of the next one, without _LEFT_OUT. An
    update that ends unseen counts as done from when the host last saw it under way."""

    def __init__(self, record: Record | None = None) -> None:
        super().__init__(record)
        # Tells whether the update that the devices compute is done; None: they compute none.
        self._is_done: Callable[[], bool] | None = None
        self._seen_under_way = 0.0
        # Since when the devices are idle, and the seconds since then that are left out.
        self._idle_since, self._left_out = time.monotonic(), 0.0
        self._waited = 0.0

    def restart(self) -> None:
        super().restart()
        self._idle_since, self._left_out, self._waited = time.monotonic(), 0.0, 0.0

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            with super().measure(name):
                yield
        finally:
            self.look()
            if name in _LEFT_OUT and self._is_done is None:
                self._left_out += time.monotonic() - begin

    def is_dispatched(self, is_done: Callable[[], bool]) -> None:
        """The devices have the next update. Args: is_done: tells whether it is done, at once."""
        now = time.monotonic()
        self._waited += max(0.0, now - self._idle_since - self._left_out)
        self._is_done, self._seen_under_way = is_done, now

    def look(self) -> None:
        """Looks whether the update is done, if there is one under way."""
        if self._is_done is None:
            return
        if self._is_done():
            self._is_idle_since(self._seen_under_way)
        else:
            self._seen_under_way = time.monotonic()

    def is_done_now(self) -> None:
        """The host waited for the update, which has just ended. Does nothing where it was seen to be done before."""
        if self._is_done is not None:
            self._is_idle_since(time.monotonic())

    def _is_idle_since(self, moment: float) -> None:
        self._is_done, self._idle_since, self._left_out = None, moment, 0.0

    def shares(self) -> dict[str, float]:
        """The shares of TimeAccount, and `devices_wait_for_host`: that in which the devices wait for the trainer's host work."""
        return super().shares() | {"devices_wait_for_host": self._waited / self.total()}


class Trainer:
    """One trainer over one mesh, the same in each of its processes: built, brought to where the run stands by `resume`, then
    stepped. Process 0 alone has lease, buffer, index and journal: it draws, and the plan tells the others. step_number: updates
    done, refused ones included. is_stopped: whether the plan has ended the loop."""

    lease: EpochLease
    buffer: ReplayBuffer

    def __init__(
        self,
        config: Any,
        contract: contract_lib.Contract,
        run: layout.RunDir,
        *,
        policy: Policy,
        lease: EpochLease | None,
        publish_every_steps: int,
        plan: Plan | None = None,
        record: Record | None = None,
    ):
        """Args: lease: of process 0. plan: of the processes of this trainer; None: this process alone. record: of this process;
        None: nothing is recorded."""
        self.config, self.run, self.policy = config, run, policy
        self.plan = plan or Plan()
        self._contract = contract
        self.reference_id = layout.reference_id(run)
        self.step_number, self.is_stopped = 0, False
        self.resumed_from = 0  # the step of the checkpoint that this trainer began with
        self.demand: DemandWriter | None = None  # where there is backpressure
        self.stops: Callable[[], bool] = lambda: False  # whether a signal asks for the end of the loop, in process 0
        self.account = TrainerAccount(record)
        self.program = UpdateProgram(config, contract, policy)
        if self.program.log_z is not None:
            self.program.log_z.check_reference(contract.reference_of_rows(self.reference_id))
        if lease is not None:
            if self.program.log_z is not None:
                log_z.keep(Path(config.learner.log_z_path), run.log_z)
            self.lease, self.buffer = lease, ReplayBuffer(config, contract, run, recent_window=publish_every_steps)
        epoch = self.plan.share(lambda: self.lease.epoch)
        self.publishing = publisher(config, run, lease, self.plan, epoch=epoch, every_steps=publish_every_steps)
        self.checkpoints = Checkpointing(config, run, lease, self.buffer if self.plan.leads else None, self.plan)
        self._check_behavior = BehaviorCheck(config.learner)
        self._refusals = Refusals(skips=config.learner.non_finite == "skip", journal=run.journal)
        learner, sampler_weights = self.program.config, config.searchers.weights
        self._scores = SnapshotScores(learner, self.program.mesh, run.policies, sampler_weights=sampler_weights)
        # A server's log-probs are another program's. They are a figure, where no objective reads them.
        is_figure = config.searchers.engine != "own" and not behavior_reader(config.learner)
        limit = float("inf") if is_figure else logprob_gap.limit(config)
        self._gap = LogprobGap(self._scores, learner, self.plan, limit=limit)
        self._last_gap: dict[str, float] = {}
        self._journal: journal.Journal | None = None
        # The batch of the next step, where it was prepared beside the last update.
        self._next: _Drawn | None = None
        # The batch of the last update that was dispatched.
        self._last: _Drawn | None = None
        self._known_problems: set[str] = set()

    @property
    def record(self) -> Record:
        return self.account.record

    @property
    def state(self) -> TrainState:
        return self.program.state

    @property
    def index(self) -> ReplayIndex:
        return self.buffer.index

    @property
    def is_done(self) -> bool:
        return self.step_number >= self.config.learner.steps

    def go_live(self) -> None:
        """Opens the journal of the lease's epoch and follows the log from the heads of the index on: the end of a resume, in
        process 0."""
        self._journal = journal.Journal(self.run.journal, self.lease.epoch, code=code_digest())
        self.lease.journals(self.step_number, workdir=self.run.root)  # before the first line
        self.buffer.follow()
        if self.config.searchers.max_updates_ahead and self.config.schedule.mode == "asynchronous":
            self.demand = DemandWriter(self.run.demand, seconds=self.config.searchers.poll_seconds)
            self.demand.tell(self.buffer.demand(step=self.step_number, waits=False))
        places.remove(self.run.finished)

    def start(self) -> None:
        """Starts to follow the log in the background, and compiles the update while the first rows are on their way."""
        if self.plan.leads:
            self.buffer.tail.start()
        if not self.is_done:
            with self.account.measure("compile"), self.record.status.during("compiling the update"):
                self.program.compile(self._contract.row_shape())

    def poll(self) -> None:
        """Reads the log once, in a one-process run."""
        self.buffer.tail.poll()

    def step(self, *, ahead: bool = False, beside: Callable[[], object] = lambda: None) -> dict[str, Any] | None:
        """One update. Returns its measurements, on the devices; None where there are not enough rows, and nothing has changed, or
        where the plan has something else to do.

        Order of a step:
          1. the batch: prepared beside the last update, or drawn, shared and transferred now
          2. the update is dispatched, its rows count as drawn, and its line goes to the journal's thread
          3. while the devices compute: `beside`, and the next batch is prepared; not before a checkpoint or the end of the run,
             which show the replay index as it is after this step
          4. the result comes: the update is finite and its line is durable, or the run stops and the next batch is dropped
          5. what is due follows: a snapshot, a checkpoint, a comparison of log-probs

        Args: ahead: whether the next batch may be prepared while the devices compute. beside: host work for that time.

        Raises: StaleEpoch: another trainer has taken over. FloatingPointError: names the step; the state is that before it.
        BadInput: all rows that have come are refused. OSError: something could not be written.
        """
        drawn, self._next = self._next or self._draw(self.step_number), None  # 1
        if drawn is None:
            return None
        step = self.step_number + 1
        ahead &= step < self.config.learner.steps
        with self.account.measure("update"):
            measurements = self._dispatch(drawn)  # 2
        durable, beside_policy = None, {}
        if self.plan.leads:
            with self.account.measure("journal"):
                self.lease.check()
                # The line becomes durable while the devices compute: nothing shows the update's result before it is.
                durable = self._submit_line(drawn)
                # These counts are of the rows that the journal names up to this step, so a resume publishes the same ones.
                beside_policy = self.buffer.beside_policy() if self.publishing.is_due(step) else {}
        try:
            beside()  # 3
            prepared = self._draw(step, ahead=True) if ahead and not self.checkpoints.is_due(step) else None
            with self.account.measure("update"):
                measurements = self._take_result(drawn, measurements)  # 4
        finally:
            if durable is not None:
                with self.account.measure("journal"):
                    durable.result()
                    self.lease.reached(step)
        self._next = prepared
        self._follow_up(beside_policy, takes_gap=drawn.takes_gap, settle=not ahead)  # 5
        return {**measurements, **drawn.provenance, **self._last_gap}

    def _draw(self, step: int, *, ahead: bool = False) -> _Drawn | None:
        """The batch of the update after `step` updates, whose transfer has begun; None where there is none, or where process 0
        tells of something else to do, which is done. Args: ahead: whether the last update is still under way."""
        if self.plan.leads:
            return self._draw_here(step, ahead=ahead)
        told = self.plan.share(_of_others)
        if told["do"] == "update":
            return self._place(told["rows"], takes_gap=told["takes_gap"])
        if told["do"] == "publish":
            self.publish_unless_there()
        self.is_stopped = told["do"] == "stop"
        return None

    def _draw_here(self, step: int, *, ahead: bool) -> _Drawn | None:
        """Draws the batch, and shares it. Rows that have come are integrated in any case: the next journal line tells of them.
        The draw itself leaves no trace."""
        if self.stops():
            self.is_stopped = True
            self.plan.share(lambda: {"do": "stop"})
            return None
        with self.account.measure("integrate"):
            self.buffer.integrate(step=step)
        with self.account.measure("draw"):
            slots = self.buffer.draw(step=step)
            if self.demand is not None:
                self.demand.tell(self.buffer.demand(step=step, waits=slots is None))
            if slots is None:
                self.buffer.check_not_all_refused()
                if ahead:  # the others ask for a batch before they take the result of the last update
                    self.plan.share(lambda: {"do": "wait"})
                return None
            rows, ids = self.index.gather(slots), self.index.ids(slots)
            self._check_behavior(rows, ids)
            takes_gap = self._gap.is_loaded
            self.plan.share(lambda: {"do": "update", "rows": rows, "takes_gap": takes_gap})
        return self._place(rows, takes_gap=takes_gap, **self._facts(slots, rows, ids, step=step))

    def _facts(self, slots: np.ndarray, rows: trajectory.Rows, ids: Sequence[tuple[str, int]], *, step: int) -> dict[str, Any]:
        """Fields of _Drawn. A slot may hold another row once more rows are integrated, so all that is told is read now."""
        return dict(slots=slots, ids=ids, provenance=self.buffer.provenance(slots, rows["reward"], step=step + 1))

    def _place(self, rows: trajectory.Rows, **facts: Any) -> _Drawn:
        with self.account.measure("draw"):
            placed = self.program.place(rows)
        new = self.program.is_new(placed)
        telling = self.record.status.during("compiling the update") if new else contextlib.nullcontext()
        with self.account.measure("compile"), telling:
            self.program.compile_where_new(placed)
        return _Drawn(rows=rows, placed=placed, **facts)

    def _submit_line(self, drawn: _Drawn) -> Future[None]:
        """Hands the journal line of the next step to the journal's thread, which also computes the hash of the batch."""
        assert self._journal is not None, "the trainer has not resumed"
        make_line = functools.partial(
            journal.journal_line,
            step=self.step_number + 1,
            visible=self.buffer.take_visible(),
            ids=drawn.ids,
            reward_version=self._contract.reward_version,
            key=self.step_number,
            rows=drawn.rows,
        )
        return self._journal.submit(make_line)

    def update(self, rows: trajectory.Rows, *, slots: np.ndarray | None = None, was_passed: bool = False) -> dict[str, Any]:
        """One update on a journalled batch: its measurements, on the devices. Raises FloatingPointError where it is not finite.

        Args: slots: int64[B], of the rows, in process 0. was_passed: whether the journal shows that the run went on after it.
        """
        facts = {} if slots is None else self._facts(slots, rows, self.index.ids(slots), step=self.step_number)
        drawn = self._place(rows, **facts)
        return self._take_result(drawn, self._dispatch(drawn), was_passed=was_passed)

    def _dispatch(self, drawn: _Drawn) -> dict[str, Any]:
        """Starts the update on a batch. Returns its measurements, on the devices: they come when it is done."""
        # To let go of many arrays takes time, for which the devices would wait before they have the next update.
        consumed = self.program.state, self._last
        measurements = self.program.dispatch(drawn.placed)
        self.account.is_dispatched(measurements["finite"].is_ready)
        self._last = drawn
        del consumed
        if drawn.slots is not None:
            self.index.mark_drawn(drawn.slots)
        return measurements

    def _take_result(self, drawn: _Drawn, measurements: dict[str, Any], *, was_passed: bool = False) -> dict[str, Any]:
        """Waits for an update and counts it. Returns its measurements. Raises FloatingPointError, see `update`."""
        self.account.look()
        jax.block_until_ready(measurements)
        self.account.is_done_now()
        self.plan.is_updated()
        self.step_number += 1
        self.record.status.step = self.step_number
        row_finite = measurements.pop("row_finite")
        try:
            self._refusals.look_at(measurements, row_finite, drawn.ids, step=self.step_number, was_passed=was_passed)
        except FloatingPointError:
            self.checkpoints.stored.wait()  # the process may end now, and a checkpoint that is being written should not be torn
            raise
        self.program.move_reference(self.step_number)
        return measurements

    def _follow_up(self, beside_policy: Mapping[str, bytes], *, takes_gap: bool, settle: bool) -> None:
        """Does what is due after a step. Args: beside_policy: files of a snapshot, see ReplayBuffer.beside_policy. takes_gap: see
        _Drawn. settle: whether the measurements of this step wait for the comparison of log-probs."""
        step, every = self.step_number, self.config.learner.logprob_gap_every_steps
        if self.publishing.is_due(step):
            with self.account.measure("publish"):
                self.publishing.publish(self.program.policy_params, step, beside_policy)
        with self.account.measure("checkpoint"):
            self.checkpoints.stored.check()
            if self.checkpoints.is_due(step):
                self.save_checkpoint()
        with self.account.measure("logprob_gap"):
            if every and step % every == 0:
                self._gap.begin(self.plan.share(lambda: self._gap.pick(self.index, self.buffer.sampled_here())))
            if (takes_gap or settle) and (gap := self._gap.take(self.program.frozen)) is not None:
                self._last_gap = gap

    def publish_unless_there(self, *, by_this_process: bool = False) -> bool:
        """Publishes the current weights, unless this step has a snapshot, see Publisher.is_there: a second one would take the
        first away from whoever reads it. Returns whether it was published now."""
        missing = not self.publishing.is_there(self.step_number, by_this_process=by_this_process)
        if missing:
            beside = self.buffer.beside_policy() if self.plan.leads else {}
            self.publishing.publish(self.program.policy_params, self.step_number, beside)
        return missing

    def publish_what_is_new(self) -> bool:
        """Calls `publish_unless_there` once what is being published is there, in all processes: of process 0."""
        self.publishing.wait()
        self.plan.share(lambda: {"do": "publish"})
        return self.publish_unless_there()

    def shortage(self) -> str:
        """What the next step needs, and what there is."""
        return self.buffer.shortage(step=self.step_number)

    def flush_snapshot(self) -> None:
        """Returns when the last published snapshot is visible: a one-process run reads it next."""
        self.publishing.wait()

    def save_checkpoint(self) -> None:
        """See Checkpointing.save."""
        self.checkpoints.save(self.program.trees(), self.step_number)

    def wait(self, seconds: float) -> None:
        """Waits for rows, at the latest until `seconds` have passed; counted as the trainer's waiting time."""
        with self.account.measure("wait_rows"):
            self.buffer.tail.wait(seconds)
        self.report_problems()

    def report_problems(self) -> None:
        """Logs every folder or row that is left out of training, once."""
        for problem in self.buffer.problems():
            if problem not in self._known_problems:
                self._known_problems.add(problem)
                log.warning("%s", problem)

    def scalars(self) -> dict[str, float]:
        """Sizes of the replay buffer and shares of time, for the metrics."""
        sizes = self.buffer.scalars()
        draws = self.step_number * self.program.rows
        return {**sizes, "draws_per_row": draws / max(sizes["rows_seen"], 1), **self.account.shares()}

    def finish(self) -> None:
        """Makes everything durable; process 0 checks that every row and step is accounted for, and marks the run finished."""
        self.publishing.wait()
        self.checkpoints.stored.wait()
        if not self.plan.leads:
            return
        accounts = ledger.accounts(self.index, self.index.heads)
        unbalanced = {writer: account for writer, account in accounts.items() if not account.balances}
        try:
            # Steps before the checkpoint were looked at by the trainers that did them, or did them again.
            recorded = journal.read_lineage(self.run.journal, after=self.resumed_from).last
        except ValueError as error:
            recorded = self.resumed_from
            log.error("%s", error)
        balanced = not unbalanced and recorded == self.step_number
        if not balanced:
            sentence = "the ledger does not balance: step %d was done, the journal is whole to step %d; %s"
            log.error(sentence, self.step_number, recorded, unbalanced)
        told = {"step": self.step_number, "epoch": self.lease.epoch, "balanced": balanced, "ledger": self.index.ledger()}
        layout.write_json(self.run.finished, {**told, **self.scalars()})

    def close(self) -> None:
        """Stops the threads; what was handed to them is written first."""
        if self.demand is not None:
            self.demand.close()
        if self.plan.leads:
            self.buffer.close()
        self._scores.close()
        self.publishing.close()
        self.checkpoints.close()
        if self._journal is not None:
            self._journal.close()
