"""The policy that step 0 of a run starts from, which is its reference policy as well."""

import contextlib
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tba_jax import sharding
from tba_jax.experiment import other_runs
from tba_jax.experiment.composition import Experiment
from tba_jax.models import parameters
from tba_jax.models.hugging_face import load
from tba_jax.models.parameters import Params
from tba_jax.programs import Program
from tba_jax.roles.process_group import Alone, Group, Member
from tba_jax.roles.trainer import publishing
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout, places, snapshots
from tba_jax.storage.places import Place
from tba_jax.supervised import warm_start
from tba_jax.telemetry.status import Status

log = logging.getLogger(__name__)

_CHECKED_EXAMPLES = 256
_SHARDS = "reference"  # what processes of a trainer call the shards of the reference policy


def check(experiment: Experiment, run: layout.RunDir, *, init_from: str = "", fetch: bool = True) -> None:
    """Checks what the initial policy is yet to be made of, if this run makes it: a checkpoint, or worked examples.

    Args: fetch: whether weights are fetched from the hub; where not, and where they are away, they are not checked.

    Raises:
      ValueError: the checkpoint is not whole, or worked examples do not fit task.prompt_length and task.response_length.
    """
    config = experiment.config
    if init_from or config.replay.mount or places.exists(run.initial_reference):
        return
    if not config.model.path and config.warm_start.steps:
        examples = experiment.task.worked_examples(np.random.default_rng(config.seed), _CHECKED_EXAMPLES)
        lengths = {"prompt_length": config.task.prompt_length, "response_length": config.task.response_length}
        warm_start.encode_examples(examples, experiment.tokenizer, **lengths)
    if config.model.path and not config.model.preset:  # with a preset, a dry run, which needs no weights
        with load.named("model.path", config.model.path):
            if fetch or load.holds_weights(config.model.path):
                load.check_weights(config.model.path, experiment.policy.model)


def _warm_start_settings(experiment: Experiment, devices: Sequence[jax.Device] | None = None) -> warm_start.Settings:
    """Args: devices: of the trainer's mesh; None: of this process."""
    config = experiment.config
    lengths = dict(prompt_length=config.task.prompt_length, response_length=config.task.response_length)
    model, mesh = experiment.policy.model, _mesh(config, devices)
    return warm_start.Settings(model=model, mesh=mesh, seed=config.seed, **lengths, **config.warm_start.to_dict())


def programs(experiment: Experiment, run: layout.RunDir, *, devices: Sequence[jax.Device] | None = None) -> dict[str, Program]:
    """Name -> what the warm start compiles, {} where this run has none or is past it. Args: see _warm_start_settings."""
    config = experiment.config
    if not config.warm_start.steps or config.model.path or config.replay.mount or places.exists(run.initial_reference):
        return {}
    return warm_start.programs(_warm_start_settings(experiment, devices))


def ensure(
    experiment: Experiment,
    run: layout.RunDir,
    *,
    report: Callable[[int, float], None],
    status: Status | None = None,
    group: Group | None = None,
) -> str:
    """Makes the policy that step 0 starts from, if the run has none yet, and returns its id.

    The policy is the reference policy of the mounted runs. Without mounts it is the snapshot that --init_from named. Without
    either it is imported, warm-started or random, as the config says.

    Args:
      experiment: with the mesh of the trainer.
      report: of the warm start, see supervised.warm_start.
      group: of the trainer's processes, of which the others are called to `follow`; None: this process alone.

    Returns:
      16 hex digits, a hash of the weights; `run.reference(id)` holds them. Where another process was faster, its policy counts.
    """
    if places.exists(run.initial_reference):
        return layout.reference_id(run)
    group, init_from, draft = group or Alone(), contract_lib.read(run)["init_from"], run.draft
    places.make_folder(draft.parent)
    _write(draft, experiment, init_from, report=report, status=status or Status(None), group=group)
    reference_id = snapshots.fingerprint(draft)
    is_new = _adopt(draft, run.reference(reference_id))
    if not isinstance(run.references, Path):
        with contextlib.suppress(OSError):  # another process is making one
            draft.parent.rmdir()  # the workdir has no reference of its own
    layout.create_json(run.initial_reference, {"id": reference_id})
    # Where there was one after all (the storage was away when this process looked), it stays the run's.
    if (chosen := layout.reference_id(run)) != reference_id and is_new:
        places.remove_tree(run.reference(reference_id))
    reference_id = chosen
    log.info("reference policy %s: %d parameters", reference_id, parameters.count(experiment.policy.model_specs))
    return reference_id


def _write(
    draft: Path, experiment: Experiment, init_from: str, *, report: Callable[[int, float], None], status: Status, group: Group
) -> None:
    """Makes the policy of `ensure` and writes it as a snapshot. Args: see there."""
    config = experiment.config
    if config.replay.mount:
        status.phase(f"copying the reference policy of {config.replay.mount[0]}")
        other_runs.copy_reference(config.replay.mount[0], draft)
        return
    if source := init_from or config.model.path:
        status.phase(f"loading {source}")
    else:
        status.phase("warm start" if config.warm_start.steps else "making a random policy")
    group.call("make reference", settings={"learner.mesh.fsdp": config.learner.mesh.fsdp}, init_from=init_from)
    made = _make(experiment, init_from, report)
    others = publishing.FollowersShards(group, _SHARDS) if group.processes > 1 else None
    status.phase("writing the reference policy")
    snapshots.save(draft, made, snapshots.SnapshotInfo(step=0, epoch=0), dtype="float32", others=others)


def _adopt(draft: Path, folder: Place) -> bool:
    """Makes a draft the snapshot `folder`, or removes it where another process has made the same. Returns whether it did."""
    if not places.exists(folder / snapshots.COMMIT):
        try:
            snapshots.adopt(draft, folder)
            return True
        except OSError:
            if not places.exists(folder / snapshots.COMMIT):
                raise
    shutil.rmtree(draft)
    return False


def mend(run: layout.RunDir) -> bool:
    """Writes initial.json again where it is damaged. Needs the lease. Returns whether it was.

    Raises:
      ValueError: it is damaged, and there is not exactly one whole policy that it can have named.
    """
    try:
        layout.reference_id(run)
        return False
    except ValueError as error:
        damage = error
    folders = places.folders_with(run.references, snapshots.COMMIT)
    whole = [name for name in folders if snapshots.fingerprint(run.reference(name)) == name]
    if len(whole) != 1:
        raise ValueError(
            f"{damage}; it names the policy of step 0, and {run.references} holds {len(whole)} whole ones: restore it from a copy"
        ) from damage
    layout.write_json(run.initial_reference, {"id": whole[0]})
    log.warning("%s; it is written again: the one whole policy in %s is %s", damage, run.references, whole[0])
    return True


def follow(experiment: Experiment, run: layout.RunDir, member: Member, *, init_from: str) -> None:
    """What `ensure` calls the other processes of a trainer for: makes the policy, and writes this process' shards of it."""
    shards = publishing.ShardWriter(member, _SHARDS, run.draft.parent, dtype="float32")
    shards.offer(_make(experiment, init_from, lambda step, loss: None), 0)
    shards.drain()
    shards.close()


def _mesh(config: Any, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    return sharding.make_mesh(tuple(config.learner.mesh.values()), setting="learner.mesh", devices=devices)


def _make(experiment: Experiment, init_from: str, report: Callable[[int, float], None]) -> Params:
    config, model, mesh = experiment.config, experiment.policy.model, _mesh(experiment.config)
    shardings = experiment.policy.model_shardings(mesh)
    if init_from:
        return other_runs.load_policy(init_from, experiment.policy, mesh)
    if config.model.path:
        return load.load_params(load.resolve_folder(config.model.path), model, shardings)
    if not config.warm_start.steps:
        return jax.jit(experiment.policy.base.init, out_shardings=shardings)(jax.random.key(config.seed))
    task, settings = experiment.task, _warm_start_settings(experiment)
    return warm_start.warm_start(task, experiment.tokenizer, settings, report=report)
