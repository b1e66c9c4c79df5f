"""The update as a program of the trainer's mesh, the weights that it reads and changes, and what a trainer refuses."""

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tba_jax import packing, sharding, trajectory
from tba_jax.learner import optimizer
from tba_jax.learner import update as update_lib
from tba_jax.models import hardware, scoring
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.objectives import OBJECTIVES
from tba_jax.programs import Program, again, shaped, with_beside
from tba_jax.replay.log import GIVEN
from tba_jax.replay.log_z import FrozenLogZ
from tba_jax.roles.trainer.logprob_gap import SnapshotScores
from tba_jax.roles.work import ShapesLog, Work, of_plan
from tba_jax.run import processes
from tba_jax.sharding import PINNED_HOST
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout

log = logging.getLogger(__name__)

# Updates that learner.non_finite=skip leaves out one after the other before the run stops.
_MOST_IN_A_ROW = 10
_SNAPSHOTS = "snapshots to be written"
_CHECKPOINT = "checkpoint to be written"


def programs(
    config: Any,
    contract: contract_lib.Contract,
    policy: Policy,
    run: layout.RunDir,
    *,
    devices: Sequence[jax.Device] | None = None,
) -> dict[str, Program]:
    """Name -> what a trainer of this config compiles. Nothing is loaded or allocated.

    Args: devices: of its mesh; None: all of this process' world.
    """
    made, c = UpdateProgram(config, contract, policy, devices=devices), config.learner
    found = made.programs(contract.row_shape())
    shapes = made.shapes()
    state, frozen = shapes["state"], shapes["frozen weights"]
    trained = state.params["policy"]
    if c.logprob_gap_every_steps:
        scores = SnapshotScores(made.config, made.mesh, run.policies, sampler_weights=config.searchers.weights)
        found |= scores.programs(frozen, found["update"].arguments[2])
    copy = sharding.copy_program(config.publish.dtype)
    found["publish"] = Program(function=copy, arguments=(trained,))
    published = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, config.publish.dtype, sharding=x.sharding), trained)
    held = {name: tree for name, tree in shapes.items() if not _in_host_memory(tree)}
    checkpointed = [held[name] for name in ("state", "moving reference") if name in held]
    room = {
        "temporaries": ("learner.micro_batch_tokens", "learner.remat", "learner.logit_megabytes"),
        "moving reference": ("learner.reference.offload", "learner.mesh.fsdp"),
        **dict.fromkeys(("arguments", "state", "frozen weights", _SNAPSHOTS, _CHECKPOINT), ("learner.mesh.fsdp",)),
    }
    # One snapshot is being written while the next one waits. A third publish copies the policy before it drops the waiting one.
    written = {_SNAPSHOTS: [published, again(published)]}
    first = {"init": found.pop("init")}
    # Accelerators give a checkpoint to the host without a copy of their own.
    saves = {"checkpoint": Program(function=sharding.copy_program(None), arguments=(checkpointed,))}
    saved = {_CHECKPOINT: again(checkpointed)}
    if made.mesh.devices.flat[0].platform != "cpu":
        saves, saved = {}, {}
    return {
        **with_beside(first, {name: tree for name, tree in held.items() if name == "frozen weights"}, room),
        **with_beside(found, {**held, **written, **saved}, room),
        **with_beside(saves, {**held, **written}, room),
    }


def _in_host_memory(tree: Any) -> bool:
    return any(x.sharding.memory_kind == PINNED_HOST for x in jax.tree.leaves(tree))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """B rows on the learner's mesh, in micro-batches of sequences, as `plan` laid them out. work: of an update on them."""

    batch: update_lib.Batch
    packed: packing.Packed
    plan: packing.Plan
    work: Work


def initial_state(reference: Params, *, policy: Policy, optimizers: Any, seed: int) -> optimizer.TrainState:
    """The state of step 0. Args: reference: the policy that training starts from; {} where adapters are trained alone."""
    return optimizer.init_state(policy, policy.initial(reference, jax.random.key(seed)), optimizers)


class UpdateProgram:
    """The compiled update, the train state, the frozen weights, and the reference that moves with the policy if one does.

    rows: B, of one update. work: of the updates so far. state: there once `begin` or `restore` was called. frozen: the part of
    the policy that is not trained, {} where everything is.
    """

    state: optimizer.TrainState

    def __init__(
        self,
        config: Any,
        contract: contract_lib.Contract,
        policy: Policy,
        *,
        devices: Sequence[jax.Device] | None = None,
        donates: bool = True,
    ):
        """Args: devices: of the mesh; None: all of this process' world. donates: whether an update takes the state's memory."""
        c = config.learner
        self._policy = policy
        self._resets_optimizer = c.reference.reset_optimizer
        self.rows, self.work = c.queries * c.completions, Work()
        self._passes = hardware.passes(adapters=policy.lora is not None, held_reference=update_lib.holds_reference(config))
        self.mesh = sharding.make_mesh(tuple(c.mesh.values()), setting="learner.mesh", devices=devices)
        self.config = update_lib.make_learner_config(
            c, contract, policy, self.mesh, stored_reference=config.searchers.scores_reference
        )
        self.frozen: Params = {}
        self.log_z = FrozenLogZ.read(c.log_z_path) if self.config.objective.given_log_z else None
        self._shapes_log = {True: ShapesLog("update"), False: ShapesLog("update in two passes")}
        self._optimizers = optimizer.make_optimizers(c)
        self._shapes = optimizer.state_shapes(policy, self._optimizers, self.mesh)
        self._shardings = jax.tree.map(lambda x: x.sharding, self._shapes)
        update = functools.partial(
            update_lib.train_step,
            optimizers=self._optimizers,
            schedules=update_lib.make_schedules(c),
            config=self.config,
        )
        options: dict[str, Any] = dict(donate_argnums=0 if donates else (), static_argnames="whole_groups")
        options |= dict(out_shardings=(self._shardings, sharding.replicated(self.mesh)))
        self._update = sharding.on_mesh(self.mesh, jax.jit(update, **options))
        initial = functools.partial(initial_state, policy=policy, optimizers=self._optimizers, seed=config.seed)
        self._begin = jax.jit(initial, out_shardings=self._shardings, donate_argnums=0)
        of_policy = self._shardings.opt_state["policy"]
        self._restart_moments = jax.jit(optimizer.restart_moments, donate_argnums=0, out_shardings=of_policy)
        self._moving_reference = update_lib.make_moving_reference(c, self.config, self.mesh)

    @property
    def policy_params(self) -> Params:
        """What is trained of the policy, float32: the content of a snapshot."""
        return self.state.params["policy"]

    def begin(self, reference: Params) -> None:
        """The state of step 0. Args: reference: see `reference_dtype`; without adapters its buffers become the state's."""
        self._keep_frozen(reference)
        self.state = self._begin(reference if self._policy.lora is None else {})
        if self._moving_reference:
            self._moving_reference.start(self.policy_params)

    def checkpointed_shapes(self, step: int) -> dict[str, Any]:
        """Name -> tree of jax.ShapeDtypeStruct: what `trees` gave to the checkpoint of a step."""
        # At step 0 a moving reference is the policy.
        moving = {"reference": self._moving_reference.shapes} if self._moving_reference and step else {}
        return {"state": self._shapes, **moving}

    def trees(self) -> dict[str, Any]:
        """Name -> tree of arrays: what a checkpoint holds."""
        moving = {"reference": self._moving_reference.params} if self._moving_reference else {}
        return {"state": self.state, **moving}

    def restore(self, trees: dict[str, Any], reference: Params) -> None:
        """Goes on from the trees of a checkpoint. Args: reference: as of `begin`, {} where nothing is frozen."""
        self._keep_frozen(reference)
        self.state = trees["state"]
        if self._moving_reference and "reference" in trees:
            self._moving_reference.params = trees["reference"]
        elif self._moving_reference:
            self._moving_reference.start(self.policy_params)

    def _keep_frozen(self, reference: Params) -> None:
        self.frozen = {} if self._policy.lora is None else reference

    @property
    def reference_dtype(self) -> str:
        """The dtype in which the reference policy is loaded: training starts from float32, what stays frozen is only read."""
        return "float32" if self._policy.lora is None else self._policy.model.compute_dtype

    def compile(self, row_shape: trajectory.RowShape) -> None:
        """Compiles the update for rows of this shape before there are any, as if each were as long as it may be."""
        self.compile_where_new(self.place(self._whole_rows(row_shape)))

    def _whole_rows(self, row_shape: trajectory.RowShape) -> trajectory.Rows:
        rows = {name: np.zeros((self.rows, *shape), dtype) for name, (dtype, shape) in row_shape.columns().items()}
        rows["tokens"][:, 0] = np.arange(self.rows) // self.config.settings.completions  # each query has a prompt of its own
        rows["prompt_length"][:], rows["response_length"][:] = row_shape.prompt_length, row_shape.response_length
        if self.log_z is not None:  # any query that has one
            rows["query_id"][:] = next(iter(self.log_z.log_z), 0)
        return rows

    def shapes(self) -> dict[str, Any]:
        """Name -> tree of jax.ShapeDtypeStruct: what rests on the devices (or in pinned memory of the host) between updates."""
        moving = {"moving reference": self._moving_reference.shapes} if self._moving_reference else {}
        return {"state": self._shapes, "frozen weights": self._frozen_shapes, **moving}

    @functools.cached_property
    def _frozen_shapes(self) -> Params:
        return {} if self._policy.lora is None else self._policy.model_shapes(self.mesh, dtype=self.reference_dtype)

    def programs(self, row_shape: trajectory.RowShape) -> dict[str, Program]:
        """Name -> the programs that `begin`, `dispatch` and `move_reference` call, for rows of this shape."""
        on_host = self._on_host(self._whole_rows(row_shape))
        batch = shaped(on_host, sharding.rows_sharding(self.mesh))
        limits, shardings = self.config.limits, scoring.packed_shardings(self.mesh)
        most = limits.shapes[-1]
        packed = shaped(packing.empty(limits, most), shardings)
        state, frozen = self._shapes, self._frozen_shapes
        begun_from = self._policy.model_shapes(self.mesh, dtype=self.reference_dtype) if self._policy.lora is None else {}
        found = {"init": Program(function=self._begin, arguments=(begun_from,))}
        if self._moving_reference:
            found |= self._moving_reference.programs(state.params["policy"], frozen, batch, packed)
            batch = dataclasses.replace(batch, moving_ref_logprobs=batch.ref_logprobs)
        whole = Program(function=self._update, arguments=(state, frozen, batch, packed), options={"whole_groups": True})
        found["update"] = whole
        if limits.micro_batches(most) == 1 and len(limits.shapes) > 1:
            parts = shaped(packing.empty(limits, limits.shapes[-2]), shardings)
            in_parts = dataclasses.replace(whole, arguments=(state, frozen, batch, parts))
            found["update in micro-batches"] = in_parts
        if limits.micro_batches(most) > 1:
            found["update in two passes"] = dataclasses.replace(whole, options={"whole_groups": False})
        if self._moving_reference and self._resets_optimizer:
            found["restart of moments"] = Program(function=self._restart_moments, arguments=(state.opt_state["policy"],))
        return found

    def place(self, rows: trajectory.Rows) -> Placed:
        """Packs B rows and starts their transfer to the mesh. The state is not read: this may be done beside an update."""
        on_host = self._on_host(rows)
        columns = on_host.tokens, on_host.prompt_length, on_host.response_length
        second_pass = update_lib.SCORING_SHARE[self.config.remat]
        settings: dict[str, Any] = dict(limits=self.config.limits, second_pass=second_pass, trained=on_host.trained)
        packed, plan = packing.of_rows(*columns, **settings)
        packed = sharding.put(packed, scoring.packed_shardings(self.mesh))
        responses = int(on_host.response_length.sum())
        work = of_plan(plan, self._policy.model, responses=responses, passes=self._passes)
        return Placed(batch=sharding.put_rows(self.mesh, on_host), packed=packed, plan=plan, work=work)

    def _on_host(self, rows: trajectory.Rows) -> update_lib.Batch:
        """Raises BadInput where a row answers a query of which log Z is needed, and unknown."""
        if self.log_z is None:
            return update_lib.batch_from_rows(rows)
        try:
            log_z = self.log_z.of(rows["query_id"])
        except KeyError as error:
            raise processes.BadInput(
                f"a row answers query {error.args[0]:016x}, of which learner.log_z_path has no log Z"
            ) from error
        return update_lib.batch_from_rows(rows, log_z=log_z)

    def is_new(self, placed: Placed) -> bool:
        """Whether no rows had this shape before."""
        return not self._shapes_log[placed.plan.whole_groups].knows(placed.plan)

    def compile_where_new(self, placed: Placed) -> None:
        """Compiles the update where no rows had this shape before. Only the state's shapes are read, as beside an update."""
        if self._shapes_log[placed.plan.whole_groups].note(placed.plan):
            moving = placed.batch.ref_logprobs if self._moving_reference else None
            batch, whole = dataclasses.replace(placed.batch, moving_ref_logprobs=moving), placed.plan.whole_groups
            self._update.lower(self.state, self.frozen, batch, placed.packed, whole_groups=whole).compile()

    def _rescored(self, placed: Placed) -> update_lib.Batch:
        """The batch, with log-probs of the moving reference as it is now where there is one."""
        moving = self._moving_reference
        return moving.rescore(self.frozen, placed.batch, placed.packed) if moving else placed.batch

    def dispatch(self, placed: Placed) -> dict[str, Any]:
        """Starts one update of the state. Returns the measurements of train_step, on the devices: they come when it is done."""
        whole, batch = placed.plan.whole_groups, self._rescored(placed)
        self.state, measurements = self._update(self.state, self.frozen, batch, placed.packed, whole_groups=whole)
        self.work += placed.work
        return measurements | {"useful_token_share": placed.plan.useful}

    def move_reference(self, step: int) -> None:
        """Moves the reference if that is due after `step` updates, and restarts Adam's moments with it if the config says so."""
        if self._moving_reference and self._moving_reference.advance(self.policy_params, step) and self._resets_optimizer:
            self.restart_moments()

    def restart_moments(self) -> None:
        """Begins Adam's moments of the policy anew; the schedule of the learning rate goes on."""
        of_policy = self._restart_moments(self.state.opt_state["policy"])
        self.state = dataclasses.replace(self.state, opt_state=self.state.opt_state | {"policy": of_policy})


class Refusals:
    """Looks at each update. The update itself has left the state as it was where it is not finite (see train_step)."""

    def __init__(self, *, skips: bool, journal: Path):
        """Args: skips: whether learner.non_finite=skip; journal: the folder that messages name."""
        self._skips, self._journal = skips, journal
        self._in_a_row = 0

    def look_at(
        self,
        measurements: Mapping[str, Any],
        row_finite: jax.Array,
        ids: Sequence[tuple[str, int]],
        *,
        step: int,
        was_passed: bool,
    ) -> None:
        """Does nothing where the update of `step` is finite; else says which rows are to blame.

        Args: measurements, row_finite: of train_step, on the devices. ids: (writer, row) of the B rows. was_passed: whether the
          journal shows that the run went on after this step: then it does so again.

        Raises FloatingPointError where such updates are not skipped, every row is at fault, or it is one after the other.
        """
        if measurements["finite"]:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        measurements, row_finite = jax.device_get((measurements, row_finite))
        rows = [f"{writer}:{row}" for (writer, row), ok in zip(ids, row_finite, strict=True) if not ok]
        sentence = self._sentence(measurements, rows, step=step, of=len(ids))
        all_rows = len(rows) == len(ids)
        if was_passed or (self._skips and not all_rows and self._in_a_row < _MOST_IN_A_ROW):
            log.warning("%s; the update is left out (learner.non_finite=skip)", sentence)
            return
        if not self._skips:
            advice = "--config.learner.non_finite=skip --allow_change=learner.non_finite would leave such updates out"
            raise FloatingPointError(f"{sentence}; {advice}")
        reason = "all rows are at fault" if all_rows else f"it is step {self._in_a_row} of such in a row"
        raise FloatingPointError(
            f"{sentence}; {reason}, so the run stops in spite of learner.non_finite=skip: another run may begin from an "
            "earlier snapshot (--init_from=RUN@STEP)"
        )

    def _sentence(self, measurements: Mapping[str, Any], rows: Sequence[str], *, step: int, of: int) -> str:
        listed = ", ".join(rows[:8]) + (" …" if len(rows) > 8 else "")
        blamed = f"{len(rows)} of {of} rows are not, {listed}" if rows else "its rows are, its gradient or new weights are not"
        return (
            f"step {step} is not finite (loss {measurements['loss']}, gradient norm {measurements['grad_norm']}): {blamed}; "
            f"its batch is the line of that step in {self._journal}"
        )


def behavior_reader(learner: Any) -> str:
    """SETTING=VALUE of the setting by which the learner reads the rows' behaviour log-probs; "" if none does."""
    return f"learner.objective={learner.objective}" if OBJECTIVES[learner.objective].behavior_logprobs else ""


class BehaviorCheck:
    """Refuses rows that no setting told of when the trainer began: of before a change of the objective, or of mounted runs."""

    def __init__(self, learner: Any):
        self._reader = behavior_reader(learner)
        self._as_drawn = OBJECTIVES[learner.objective].as_drawn

    def __call__(self, rows: trajectory.Rows, ids: Sequence[tuple[str, int]]) -> None:
        """Raises BadInput for the first row of a batch whose behaviour nobody knows, or that is truncated where none may be.

        Args: ids: (writer, row) of each of the rows.
        """
        if not self._reader:
            return
        if given := next((f"{writer}:{row}" for writer, row in ids if writer.startswith(GIVEN)), ""):
            raise processes.BadInput(
                f"{self._reader} reads π_behaviour of every row, and nobody knows that of row {given}, a response of a file: "
                f"resume without it (--allow_change={self._reader.partition('=')[0]})"
            )
        truncated = (rows["top_k"] > 0) | (rows["top_p"] < 1) | (rows["min_p"] > 0)
        if self._as_drawn and truncated.any():
            at = int(np.argmax(truncated))
            how = ", ".join(f"{name}={rows[name][at]:g}" for name in ("top_k", "top_p", "min_p"))
            raise processes.BadInput(
                f"{self._reader} needs rows that are not truncated, and row {ids[at][0]}:{ids[at][1]} was drawn with {how}: "
                "resume with another objective, such as trajectory_balance (--allow_change=learner.objective)"
            )
