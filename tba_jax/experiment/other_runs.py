"""What a run takes from other runs: their rows (replay.mount), and a policy to begin with (--init_from=RUN@STEP)."""

import contextlib
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from tba_jax.experiment.mistakes import Mistakes
from tba_jax.models.parameters import Params
from tba_jax.models.policy import LoraConfig, Policy
from tba_jax.objectives import OBJECTIVES
from tba_jax.replay.log import GIVEN, REGISTER, registration
from tba_jax.roles.trainer.buffer import behavior_reader
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import file_systems, layout, snapshots
from tba_jax.storage import places as places_lib
from tba_jax.storage.places import Place

log = logging.getLogger(__name__)

# Fields of the contract that say nothing about rows.
_FREE_OF_ROWS = ("lora", "private_files", "date")
# Fields of the contract that say what weights mean.
_OF_WEIGHTS = ("model", "tokenizer", "eos_id", "pad_id")


def _read(workdir: str, *, setting: str) -> tuple[layout.RunDir, dict[str, Any]]:
    run = layout.open_run_dir(workdir)
    return run, contract_lib.read_run(run, called=f"{setting}: {workdir}")


def _reference_id(run: layout.RunDir) -> str | None:
    return layout.reference_id(run) if places_lib.exists(run.initial_reference) else None


# Mounts


def check_mounts(run: layout.RunDir, config: Any, contract: contract_lib.Contract, *, init_from: str) -> None:
    """Checks every run of replay.mount against this one, by its contract, its reference policy and its writers.

    Args:
      init_from: RUN@STEP that this run begins from, "" if it begins as its config says.

    Raises:
      ValueError: the rows of a mounted run may not be trained on; names the fields or the reference policies that differ.
    """
    if not config.replay.mount:
        return
    ours: dict[str, Any] = {k: v for k, v in contract.to_json().items() if k not in _FREE_OF_ROWS}
    expected = None
    with contextlib.suppress(ValueError):  # damaged: initial_policy.mend comes first
        expected = _reference_id(run)
    if not places_lib.exists(run.initial_reference):  # this run will begin from the reference policy of the runs that it mounts
        ours |= {"model.path": config.model.path, "init_from": init_from}
    writers, seen, found = dict.fromkeys(_writers(run), run.replay), {_identity(run)}, Mistakes()
    owner = "this run's"

    def check(folder: str) -> None:
        """A run of replay.mount against this one, and against those before it."""
        nonlocal expected, owner
        if _identity(layout.open_run_dir(folder)) in seen:
            raise ValueError(f"replay.mount: {folder} is this run itself, or mounted twice")
        other, stored = _read(folder, setting="replay.mount")
        seen.add(_identity(other))
        _check_rows(folder, other, stored, ours)
        reference = _reference_id(other)
        if reference is None:
            raise ValueError(f"replay.mount: {folder} has no reference policy yet: start its trainer first")
        if ours["reference"] != "none" and expected not in (None, reference):
            of = f"{owner} is {expected}"
            raise ValueError(f"replay.mount: rows of {folder} have log-probs of reference {reference}, {of}")
        if expected is None:
            expected, owner = reference, f"that of {folder}"
        for writer in _writers(other):
            if writer in writers:
                raise ValueError(f"replay.mount: writer {writer} has a log in {other.replay} and in {writers[writer]}")
            writers[writer] = other.replay

    for folder in config.replay.mount:
        found.attempt(check, folder)
    found.end()


def _check_rows(folder: str, other: layout.RunDir, stored: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises ValueError where rows of another run are of another contract, or may be removed while this run needs them.

    Args: folder: as in replay.mount; stored: its config.json; ours: fields that must be equal there.
    """
    model = file_systems.absolute(stored["config"]["model"]["path"], or_hub=True)
    theirs: dict[str, Any] = {"model.path": model, "init_from": stored["init_from"]}
    theirs = {name: value for name, value in (theirs | stored["contract"]).items() if name in ours}
    rescored, kept = other.rescored_commit(ours["reward_version"]), stored["config"]["replay"]["retention"]
    if places_lib.exists(rescored):
        theirs |= {"reward_version": ours["reward_version"], "reward_parts": layout.read_json(rescored)["reward_parts"]}
    elif kept != "all":
        raise ValueError(
            f"replay.mount: {folder} has replay.retention={kept}: its trainer may remove rows that this run still needs; "
            "only runs with replay.retention=all can be mounted"
        )
    if different := contract_lib.differences(theirs, ours):
        if (there := theirs.get("init_from")) and there != ours["init_from"]:
            different.append(f"it began from the policy {there}: begin this run with --init_from={there} too")
        if any(name.startswith("reward_version:") for name in different):
            different.append(f"python -m tba_jax rescore --workdir={folder} scores its rows again by the task as it is now")
        told = contract_lib.in_words(different)
        raise ValueError(f"replay.mount: the rows of {folder} belong to a run of another contract; {told}")


def check_behavior_is_known(run: layout.RunDir, config: Any) -> None:
    """Raises ValueError where the learner reads π_behaviour, and rows come from a file, which does not say it; or where every row
    must be untruncated, and the settings that this run or a mounted one was made with truncate some."""
    if not (reader := behavior_reader(config.learner)):
        return
    for place in (run, *map(layout.open_run_dir, config.replay.mount)):
        if OBJECTIVES[config.learner.objective].as_drawn and places_lib.exists(place.config):  # else it has no rows yet
            sampling = contract_lib.read(place)["config"]["sampling"]
            for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("explore_top_p_probability", 0.0)):
                if sampling[name] != off:
                    raise ValueError(
                        f"{reader} needs rows that are not truncated, and those of {place.root} are drawn with sampling.{name}="
                        f"{sampling[name]}: begin a run of its own for it"
                    )
        for writer in _writers(place):
            if not writer.startswith(GIVEN):
                continue
            if source := layout.read_json(registration(place.replay, writer))["info"].get("responses"):
                raise ValueError(
                    f"{reader} reads π_behaviour of every row, and nobody knows that of writer {writer} in {place.replay}, "
                    f"whose rows are of {source}; trajectory_balance and others need none"
                )


def _identity(run: layout.RunDir) -> Place:
    """The place that tells whether two folders are the same run."""
    return run.shared.resolve() if isinstance(run.shared, Path) else run.shared


def _writers(run: layout.RunDir) -> list[str]:
    names = places_lib.names_in(run.replay / REGISTER)
    return [name.removesuffix(".json") for name in names if not name.startswith(".")]


def copy_reference(mount: str, folder: Path) -> None:
    """Copies the reference policy of a mounted run to `folder`.

    Raises:
      ValueError: the hash of the copy is not the id that the mounted run gives.
    """
    run, _ = _read(mount, setting="replay.mount")
    reference = _reference_id(run)
    assert reference is not None, "check_mounts comes first"
    places_lib.copy_tree(run.reference(reference), folder, last=snapshots.COMMIT)
    if (found := snapshots.fingerprint(folder)) != reference:
        shutil.rmtree(folder)
        raise ValueError(f"replay.mount: {run.reference(reference)} is damaged: its content is {found}")
    log.info("the run begins from the reference policy %s of %s", reference, mount)


# A policy to begin with


def parse_init_from(value: str) -> str:
    """RUN@STEP with an absolute path or a URL; "" stays "". Raises ValueError where `value` has another form."""
    folder, _, step = value.rpartition("@")
    if value and (not folder or not step.isdecimal()):
        raise ValueError(f"--init_from={value!r} must be RUN@STEP: the workdir of a run and the step of a snapshot")
    return f"{places_lib.absolute(folder)}@{int(step)}" if value else ""


def _open_init_from(init_from: str) -> tuple[layout.RunDir, dict[str, Any], int]:
    folder, _, step = init_from.rpartition("@")
    return *_read(folder, setting="--init_from"), int(step)


def check_init_from(run: layout.RunDir, config: Any, contract: contract_lib.Contract, *, init_from: str) -> None:
    """Checks that the policy exists and fits, unless this run has begun.

    Raises:
      ValueError: the policy does not exist (names the steps that do), or does not fit (names the fields that differ).
    """
    if not init_from or places_lib.exists(run.initial_reference):
        return
    if config.warm_start.steps:
        raise ValueError(
            f"--init_from={init_from} and warm_start.steps={config.warm_start.steps} exclude each other: set warm_start.steps=0"
        )
    other, stored, step = _open_init_from(init_from)
    mine, theirs = contract.to_json(), stored["contract"]
    if different := contract_lib.differences({k: theirs[k] for k in _OF_WEIGHTS}, {k: mine[k] for k in _OF_WEIGHTS}):
        raise ValueError(f"--init_from={init_from} is of another model or tokenizer; " + contract_lib.in_words(different))
    steps = snapshots.committed_steps(other.policies)
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
    trained = snapshots.load_step(other.policies, step, theirs.trained_specs, theirs.trained_shardings(mesh))
    if theirs.lora is None:
        return trained
    reference, shardings = _reference_id(other), policy.model_shardings(mesh)
    assert reference is not None, "check_init_from comes first"
    base = snapshots.load(other.reference(reference), policy.model_specs, shardings)
    return jax.jit(theirs.merged, out_shardings=shardings)(trained, base)
