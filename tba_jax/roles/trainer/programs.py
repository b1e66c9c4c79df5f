"""All programs of a trainer, with what lies on its devices while each runs."""

from collections.abc import Sequence
from typing import Any

import jax

from tba_jax import sharding
from tba_jax.models.policy import Policy
from tba_jax.programs import Program, again, with_beside
from tba_jax.roles.trainer.logprob_gap import SnapshotScores
from tba_jax.roles.trainer.update_program import UpdateProgram
from tba_jax.run import contract as contract_lib
from tba_jax.run import layout
from tba_jax.sharding import PINNED_HOST

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
