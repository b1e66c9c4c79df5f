"""The policy that step 0 of a run starts from, which is its reference policy as well; and other runs that a run begins from
(--init_from=RUN@STEP) or whose rows it trains on (replay.mount)."""

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.experiment.composition import Experiment
from tba_jax.models import parameters
from tba_jax.models.hugging_face import load
from tba_jax.models.parameters import Params
from tba_jax.models.policy import LoraConfig, Policy
from tba_jax.objectives import OBJECTIVES
from tba_jax.programs import Program
from tba_jax.replay.log import GIVEN, REGISTER, registration
from tba_jax.roles.plan import Plan
from tba_jax.roles.trainer.update_program import behavior_reader
from tba_jax.schemas import Mistakes, require
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import file_systems, layout, places, published, snapshots
from tba_jax.supervised.tuning import WarmStart, encode_examples
from tba_jax.telemetry.status import Status

log = logging.getLogger(__name__)

_CHECKED_EXAMPLES = 256


def begins_as_mounts(config: Any) -> bool:
    """Whether step 0 is the reference policy of the runs of replay.mount, whose rows hold its log-probs."""
    return bool(config.replay.mount) and config.searchers.scores_reference


def check(experiment: Experiment, run: layout.RunDir, *, init_from: str = "", fetch: bool = True) -> None:
    """Checks what the initial policy is yet to be made of, if this run makes it: a checkpoint, or worked examples.

    Args: fetch: whether weights are fetched from the hub; where not, and where they are away, they are not checked.

    Raises ValueError: the checkpoint is not whole, or worked examples do not fit task.prompt_length and task.response_length.
    """
    config = experiment.config
    if init_from or begins_as_mounts(config) or places.exists(run.initial_reference):
        return
    if not config.model.path and config.warm_start.steps:
        examples = experiment.task.worked_examples(np.random.default_rng(config.seed), _CHECKED_EXAMPLES)
        lengths = {"prompt_length": config.task.prompt_length, "response_length": config.task.response_length}
        encode_examples(examples, experiment.tokenizer, **lengths)
    if config.model.path and not config.model.preset:  # with a preset, a dry run, which needs no weights
        with load.named("model.path", config.model.path):
            if fetch or load.holds_weights(config.model.path):
                load.check_weights(config.model.path, experiment.policy.model)


def _warm_start(experiment: Experiment, devices: Sequence[jax.Device] | None = None) -> WarmStart:
    """Args: devices: of the trainer's mesh; None: of this process."""
    c, mesh = experiment.config, _mesh(experiment.config, devices)
    lengths = dict(prompt_length=c.task.prompt_length, response_length=c.task.response_length)
    return WarmStart(model=experiment.policy.model, mesh=mesh, seed=c.seed, **lengths, **c.warm_start.to_dict())


def programs(experiment: Experiment, run: layout.RunDir, *, devices: Sequence[jax.Device] | None = None) -> dict[str, Program]:
    """Name -> what the warm start compiles, {} where this run has none or is past it. Args: see _warm_start."""
    config = experiment.config
    if not config.warm_start.steps or config.model.path or begins_as_mounts(config) or places.exists(run.initial_reference):
        return {}
    return _warm_start(experiment, devices).programs()


def make(
    experiment: Experiment,
    run: layout.RunDir,
    *,
    report: Callable[[int, float], None],
    status: Status | None = None,
    plan: Plan | None = None,
) -> str:
    """Makes the policy that step 0 starts from, and returns its id.

    Where the run begins as those that it mounts, the policy is their reference policy. Else it is the snapshot that --init_from
    named, or it is imported, warm-started or random, as the config says.

    Args: experiment: with the mesh of the trainer. report: see WarmStart.train. plan: of the trainer's processes, all of which
    call this; None: this process alone.

    Returns:
      16 hex digits, a hash of the weights; `run.reference(id)` holds them.
    """
    config, plan, status = experiment.config, plan or Plan(), status or Status(None)
    name, init_from = plan.share(lambda: [run.draft.name, contract_lib.read(run)["init_from"]])
    draft = run.draft.parent / name
    if not begins_as_mounts(config):
        begins = "warm start" if config.warm_start.steps else "making a random policy"
        status.phase(f"loading {source}" if (source := init_from or config.model.path) else begins)
        if plan.leads:
            places.make_folder(draft.parent)
        made = _make(experiment, init_from, report)
        status.phase("writing the reference policy")
        plan.gather(None)  # the folder above the draft is there
        snapshots.write(draft, made, dtype="float32", together=plan if plan.processes > 1 else None)
    return plan.share(lambda: _adopt(draft, experiment, run, status))


def _adopt(draft: Path, experiment: Experiment, run: layout.RunDir, status: Status) -> str:
    """Makes the draft of the reference policy the run's, in process 0. Returns its id."""
    if begins_as_mounts(experiment.config):
        mounts = experiment.config.replay.mount
        status.phase(f"copying the reference policy of {mounts[0]}")
        places.make_folder(draft.parent)
        _copy_reference(mounts[0], draft)
    else:
        snapshots.commit(draft)
    reference_id = snapshots.fingerprint(draft)
    if places.exists(run.reference(reference_id) / snapshots.COMMIT):  # a process that ended too soon has made the same
        shutil.rmtree(draft)
    else:
        snapshots.adopt(draft, run.reference(reference_id))
    if not isinstance(run.references, Path):
        with contextlib.suppress(OSError):  # another process is making one
            draft.parent.rmdir()  # the workdir has no reference of its own
    layout.create_json(run.initial_reference, {"id": reference_id})
    log.info("reference policy %s: %d parameters", reference_id, parameters.count(experiment.policy.model_specs))
    return layout.reference_id(run)  # another one, where the storage was away when this process looked: it stays the run's


def _make(experiment: Experiment, init_from: str, report: Callable[[int, float], None]) -> Params:
    config, model, mesh = experiment.config, experiment.policy.model, _mesh(experiment.config)
    shardings = experiment.policy.model_shardings(mesh)
    if init_from:
        return load_policy(init_from, experiment.policy, mesh)
    if config.model.path:
        return load.load_params(load.resolve_folder(config.model.path), model, shardings)
    if not config.warm_start.steps:
        return jax.jit(experiment.policy.base.init, out_shardings=shardings)(jax.random.key(config.seed))
    return _warm_start(experiment).train(experiment.task, experiment.tokenizer, report=report)


def _mesh(config: Any, devices: Sequence[jax.Device] | None = None) -> Mesh:
    return sharding.make_mesh(tuple(config.learner.mesh.values()), setting="learner.mesh", devices=devices)


def mend(run: layout.RunDir) -> bool:
    """Writes initial.json again where it is damaged. Needs the lease. Returns whether it was.

    Raises ValueError: it is damaged, and there is not exactly one whole policy that it can have named.
    """
    try:
        layout.reference_id(run)
        return False
    except ValueError as error:
        damage = error
    folders = places.folders_with(run.references, snapshots.COMMIT)
    whole = [name for name in folders if snapshots.fingerprint(run.reference(name)) == name]
    there = f"{run.references} holds {len(whole)} whole ones"
    require(len(whole) == 1, f"{damage}; it names the policy of step 0, and {there}: restore it from a copy")
    layout.write_json(run.initial_reference, {"id": whole[0]})
    log.warning("%s; it is written again: the one whole policy in %s is %s", damage, run.references, whole[0])
    return True


# Other runs

# Fields of the contract that say nothing about rows where the trainer scores them by its own reference: theirs may be of another
# policy, or there is none.
_OF_REFERENCE = ("model", "warm_start", "reference")
# Fields of the contract that say what weights mean.
_OF_WEIGHTS = ("model", "tokenizer", "eos_id", "pad_id")


def _read(workdir: str, *, setting: str) -> tuple[layout.RunDir, dict[str, Any]]:
    run = layout.open_run_dir(workdir)
    return run, contract_lib.read_run(run, called=f"{setting}: {workdir}")


def _reference_id(run: layout.RunDir) -> str | None:
    return layout.reference_id(run) if places.exists(run.initial_reference) else None


def check_mounts(run: layout.RunDir, config: Any, contract: contract_lib.Contract, *, init_from: str) -> None:
    """Checks every run of replay.mount against this one, by its contract, its reference policy and its writers.

    Args: init_from: RUN@STEP that this run begins from, "" if it begins as its config says.

    Raises ValueError: the rows of a mounted run may not be trained on; names the fields or the reference policies that differ.
    """
    if not config.replay.mount:
        return
    as_mounts = begins_as_mounts(config)
    free = contract_lib.FREE_OF_ROWS if as_mounts else (*contract_lib.FREE_OF_ROWS, *_OF_REFERENCE)
    ours: dict[str, Any] = {k: v for k, v in contract.to_json().items() if k not in free}
    if not as_mounts:
        ours["reward_models"] = _without_teacher(ours["reward_models"])
    expected = None
    with contextlib.suppress(ValueError):  # damaged: initial_policy.mend comes first
        expected = _reference_id(run)
    begins_so = as_mounts and not places.exists(run.initial_reference)
    if begins_so:  # from the reference policy of the runs that it mounts
        ours |= {"model.path": config.model.path, "init_from": init_from}
    writers, found = dict.fromkeys(_writers(run), run.replay), Mistakes()
    owner, seen = "this run's", [os.path.realpath(str(run.shared))]

    def check(folder: str) -> None:
        """A run of replay.mount against this one, and against those before it."""
        nonlocal expected, owner
        other = layout.open_run_dir(folder)
        place = os.path.realpath(str(other.shared))
        require(place not in seen, f"replay.mount: {folder} is this run itself, or mounted twice")
        seen.append(place)
        stored = contract_lib.read_run(other, called=f"replay.mount: {folder}")
        _check_rows(folder, other, stored, ours)
        if as_mounts:
            reference = _reference_id(other)
            require(reference, f"replay.mount: {folder} has no reference policy yet: start its trainer first")
            same = ours["reference"] == "none" or expected in (None, reference)
            of_rows = f"rows of {folder} have log-probs of reference {reference}"
            advice = "with searchers.scores_reference=False the trainer of a new run scores them by its own"
            require(same, f"replay.mount: {of_rows}, {owner} is {expected}; {advice}")
            if expected is None:
                expected, owner = reference, f"that of {folder}"
        for writer in _writers(other):
            there = writers.setdefault(writer, other.replay)
            require(there == other.replay, f"replay.mount: writer {writer} has a log in {other.replay} and in {there}")

    for folder in config.replay.mount:
        found.attempt(check, folder)
    found.end()


def _check_rows(folder: str, other: layout.RunDir, stored: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises ValueError where rows of a mounted run are of another contract, or may be removed while this run needs them.

    Args: stored: its config.json; ours: fields that must be equal there.
    """
    model = file_systems.absolute(stored["config"]["model"]["path"], or_hub=True)
    theirs: dict[str, Any] = {"model.path": model, "init_from": stored["init_from"]}
    theirs = {name: value for name, value in (theirs | stored["contract"]).items() if name in ours}
    if "reference" not in ours:  # see _OF_REFERENCE
        theirs["reward_models"] = _without_teacher(theirs["reward_models"])
    rescored, kept = other.rescored_commit(ours["reward_version"]), stored["config"]["replay"]["retention"]
    if places.exists(rescored):
        theirs |= {"reward_version": ours["reward_version"], "reward_parts": layout.read_json(rescored)["reward_parts"]}
    else:
        why = "its trainer may remove rows that this run still needs; it needs replay.retention=all"
        require(kept == "all", f"replay.mount: {folder} has replay.retention={kept}: {why}")
    if different := contract_lib.differences(theirs, ours):
        if (there := theirs.get("init_from")) and there != ours["init_from"]:
            different.append(f"it began from the policy {there}: begin this run with --init_from={there} too")
        if any(name.startswith("reward_version:") for name in different):
            different.append(f"python -m tba_jax rescore --workdir={folder} scores its rows again by the task as it is now")
        told = contract_lib.in_words(different)
        raise ValueError(f"replay.mount: the rows of {folder} belong to a run of another contract; {told}")


def _without_teacher(reward_models: Mapping[str, str]) -> dict[str, str]:
    return {setting: digest for setting, digest in reward_models.items() if setting != contract_lib.TEACHER}


def check_behavior_is_known(run: layout.RunDir, config: Any) -> None:
    """Raises ValueError where the learner reads π_behaviour, and rows come from a file, which does not say it; or where every row
    must be untruncated, and the settings that this run or a mounted one was made with truncate some."""
    if not (reader := behavior_reader(config.learner)):
        return
    for place in (run, *map(layout.open_run_dir, config.replay.mount)):
        if OBJECTIVES[config.learner.objective].as_drawn and places.exists(place.config):  # else it has no rows yet
            sampling = contract_lib.read(place)["config"]["sampling"]
            for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("explore_top_p_probability", 0.0)):
                drawn = f"those of {place.root} are drawn with sampling.{name}={sampling[name]}: begin a run of its own for it"
                require(sampling[name] == off, f"{reader} needs rows that are not truncated, and {drawn}")
        for writer in filter(lambda name: name.startswith(GIVEN), _writers(place)):
            source = layout.read_json(registration(place.replay, writer))["info"].get("responses")
            unknown = f"nobody knows that of writer {writer} in {place.replay}, whose rows are of {source}"
            require(
                not source, f"{reader} reads π_behaviour of every row, and {unknown}; trajectory_balance and others need none"
            )


def _writers(run: layout.RunDir) -> list[str]:
    names = places.names_in(run.replay / REGISTER)
    return [name.removesuffix(".json") for name in names if not name.startswith(".")]


def _copy_reference(mount: str, folder: Path) -> None:
    """Raises ValueError where the hash of the copy is not the id that the mounted run gives."""
    run, _ = _read(mount, setting="replay.mount")
    reference = _reference_id(run)
    assert reference is not None, "check_mounts comes first"
    places.copy_tree(run.reference(reference), folder, last=snapshots.COMMIT)
    if (found := snapshots.fingerprint(folder)) != reference:
        shutil.rmtree(folder)
        raise ValueError(f"replay.mount: {run.reference(reference)} is damaged: its content is {found}")
    log.info("the run begins from the reference policy %s of %s", reference, mount)


def parse_init_from(value: str) -> str:
    """RUN@STEP with an absolute path or a URL; "" stays "". Raises ValueError where `value` has another form."""
    folder, _, step = value.rpartition("@")
    if value and (not folder or not step.isdecimal()):
        raise ValueError(f"--init_from={value!r} must be RUN@STEP: the workdir of a run and the step of a snapshot")
    return f"{places.absolute(folder)}@{int(step)}" if value else ""


def _open_init_from(init_from: str) -> tuple[layout.RunDir, dict[str, Any], int]:
    folder, _, step = init_from.rpartition("@")
    return *_read(folder, setting="--init_from"), int(step)


def check_init_from(run: layout.RunDir, config: Any, contract: contract_lib.Contract, *, init_from: str) -> None:
    """Checks that the policy exists and fits, unless this run has begun.

    Raises ValueError: the policy does not exist (names the steps that do), or does not fit (names the fields that differ).
    """
    if not init_from or places.exists(run.initial_reference):
        return
    steps = config.warm_start.steps
    require(not steps, f"--init_from={init_from} and warm_start.steps={steps} exclude each other: set warm_start.steps=0")
    other, stored, step = _open_init_from(init_from)
    mine, theirs = contract.to_json(), stored["contract"]
    if different := contract_lib.differences({k: theirs[k] for k in _OF_WEIGHTS}, {k: mine[k] for k in _OF_WEIGHTS}):
        raise ValueError(f"--init_from={init_from} is of another model or tokenizer; " + contract_lib.in_words(different))
    steps = [*published.kept(other.policies)]
    if step not in steps:
        there = f"there are {layout.listed(steps)}" if steps else "it holds none"
        raise ValueError(f"--init_from={init_from}: step {step} is not a snapshot of {other.shared}; {there}")
    if theirs["lora"] and _reference_id(other) is None:
        raise ValueError(f"--init_from={init_from}: {other.initial_reference} is gone, which the adapters belong to")


def load_policy(init_from: str, policy: Policy, mesh: Mesh) -> Params:
    """Float32 weights of another run's policy at a step, adapters merged, in this run's sharding."""
    other, stored, step = _open_init_from(init_from)
    lora = stored["contract"]["lora"]
    theirs = Policy(model=policy.model, lora=LoraConfig(**(lora | {"targets": tuple(lora["targets"])})) if lora else None)
    trained = published.Published(other.policies).load(step, theirs.trained_specs, theirs.trained_shardings(mesh))
    if theirs.lora is None:
        return trained
    reference, shardings = _reference_id(other), policy.model_shardings(mesh)
    assert reference is not None, "check_init_from comes first"
    base = snapshots.load(other.reference(reference), policy.model_specs, shardings)
    return jax.jit(theirs.merged, out_shardings=shardings)(trained, base)
