"""The processes of a trainer beside the first one: each does with its own devices what process 0 calls for."""

import concurrent.futures
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tba_jax import sharding
from tba_jax.models.policy import Policy
from tba_jax.roles.process_group import Member
from tba_jax.roles.trainer import publishing
from tba_jax.roles.trainer.logprob_gap import SnapshotScores
from tba_jax.roles.trainer.resume import load_frozen, load_reference
from tba_jax.roles.trainer.update_program import Placed, UpdateProgram
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout
from tba_jax.storage.checkpoints import Checkpoints
from tba_jax.telemetry.status import Record


class Follower:
    """What a process holds of a trainer whose process 0 is elsewhere: its shards of the state, and the same programs.

    It draws, journals and decides nothing. `do` does what roles/trainer calls for, in the order in which it is called for.
    """

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
        sampler_weights = config.searchers.weights
        self._scores = SnapshotScores(self._program.config, self._program.mesh, run.policies, sampler_weights=sampler_weights)
        self._copy = sharding.copy_program(config.publish.dtype)
        self._shards = publishing.ShardWriter(member, "policy", run.policies, dtype=config.publish.dtype)
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
