"""The schedule of a run, which a resumed trainer may change if it is told to, and what it was at earlier steps.

The schedule is what decides about an update: the sections learner, replay, publish and schedule, and the seed. Settings with
free=True in the schema are left out of it, because they only say how the same numbers are computed or stored. The schedule in
config.json is that of all roles; the run's trainer alone may change it.
"""

import datetime
from collections.abc import Sequence
from typing import Any

from tba_jax.experiment import stored_run
from tba_jax.experiment.schema import SCHEMA
from tba_jax.learner.settings import HELD_REFERENCES
from tba_jax.objectives import OBJECTIVES
from tba_jax.schemas import flatten, hint, nearest, require
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout

Changes = dict[str, tuple[Any, Any]]  # setting -> (there, here): its value in config.json, and in the config of this process

_SECTIONS = ("seed", "learner", "replay", "publish", "schedule")
_SCHEDULE = [name for name, rule in SCHEMA.rules.items() if name.split(".")[0] in _SECTIONS and not rule.free]

# Settings that decide which state a checkpoint holds: setting -> value -> that state. A log Z is of the objective that learned
# it: in nats, or in nats per token.
_STATEFUL: dict[str, dict[str, object]] = {
    "learner.objective": {name: (name if made.log_z_head else "", made.value_head) for name, made in OBJECTIVES.items()},
    "learner.reference.kind": dict.fromkeys(HELD_REFERENCES, "reference"),
}


def changed(run: layout.RunDir, config: Any) -> Changes:
    """Settings of the schedule that differ between the run and `config`."""
    theirs, ours = flatten(contract_lib.read(run)["config"]), flatten(contract_lib.plain(config.to_dict()))
    return {name: (theirs[name], ours[name]) for name in _SCHEDULE if theirs[name] != ours[name]}


def in_words(changes: Changes) -> str:
    return "; ".join(f"{name}: {there!r} there, {here!r} here" for name, (there, here) in changes.items())


def taken_over(run: layout.RunDir, config: Any) -> tuple[Any, Changes]:
    """A config with the schedule of the run, for a role that does not decide about it; and what `config` says otherwise."""
    changes = changed(run, config)
    return stored_run.with_settings(config, {name: there for name, (there, _) in changes.items()}), changes


def check_none_given(run: layout.RunDir, config: Any, *, role: str) -> None:
    """Raises ValueError where flags of a joining role ask for another schedule. Args: config: the run's, changed by flags."""
    if changes := changed(run, config):
        raise ValueError(
            f"--role={role} takes the schedule of the run in {run.shared}, which only its trainer may change; {in_words(changes)}"
        )


def change(run: layout.RunDir, config: Any, *, allowed: Sequence[str], step: int) -> Changes:
    """Makes the schedule of `config` that of the run from `step` on, and records in config.json what changed. Raises: as `check`.

    At step 0 every change is allowed: nothing is trained yet, and a searcher may have come first with another schedule.
    """
    changes = check(run, config, allowed=allowed, step=step)
    if changes:
        stored = contract_lib.read(run)
        now = datetime.datetime.now(datetime.UTC).isoformat()
        entry = {"step": step, "time": now, "settings": contract_lib.plain(changes)}
        stored |= {"config": contract_lib.plain(config.to_dict()), "changes": [*stored["changes"], entry]}
        layout.write_json(run.config, stored)
    return changes


def check(run: layout.RunDir, config: Any, *, allowed: Sequence[str], step: int) -> Changes:
    """The changes that `change` would make; writes nothing.

    Raises:
      ValueError: a setting differs that is not in `allowed`, or that no run can change, or `allowed` names no setting.
    """
    settings = flatten(config.to_dict())
    if unknown := sorted(set(allowed) - settings.keys()):
        told = hint(nearest(unknown[0], settings))
        raise ValueError(f"--allow_change={','.join(allowed)}: there is no setting {unknown[0]}{told}")
    changes = changed(run, config)
    require(
        config.learner.steps >= step, f"learner.steps={config.learner.steps} is less than the {step} steps that the run has done"
    )
    if step or (run.checkpoints.is_dir() and any(run.checkpoints.iterdir())):
        _check_checkpointed(changes)
    refused = {name: values for name, values in changes.items() if name not in allowed}
    if "none" in refused.get("learner.reference.kind", ()):
        del refused["learner.reference.kind"]  # the contract refuses it, and nothing can allow it
    if step and refused:
        allow = f"to change it, add --allow_change={','.join(sorted(refused))}"
        raise ValueError(f"the run has another schedule; {in_words(refused)}; {allow}")
    return changes


def past(run: layout.RunDir, *, after: int) -> list[tuple[int, dict[str, Any]]]:
    """Settings that had other values in steps after `after`: (last step with these values, setting -> value then), in order.

    learner.non_finite is left out, because the journal says whether the run went on after a step.
    """
    changes = contract_lib.read(run)["changes"]
    found = []
    for step in sorted({entry["step"] for entry in changes if entry["step"] > after}):
        values: dict[str, Any] = {}
        for entry in reversed([entry for entry in changes if entry["step"] >= step]):
            values |= {name: there for name, (there, _) in entry["settings"].items()}
        values.pop("learner.non_finite", None)
        if values:
            found.append((step, stored_run.with_tuples(values)))
    return found


def _check_checkpointed(changes: Changes) -> None:
    """Refuses changes that the state or the replay index of a checkpoint does not go with."""
    for name, state in _STATEFUL.items():
        there, here = changes.get(name, ("", ""))
        if state.get(there) != state.get(here):
            raise ValueError(
                f"{name} of a run cannot change from {there!r} to {here!r}: its checkpoints hold another state; "
                "begin a new run from this one's policy with --init_from"
            )
    there, here = changes.get("replay.mount", ((), ()))
    if gone := sorted(set(there) - set(here)):
        raise ValueError(f"replay.mount of a run can only grow: its journal names rows of {gone[0]!r}, which is not among {here}")
    for name, (there, here) in changes.items():
        if SCHEMA.rules[name].fixed:
            raise ValueError(f"{name} of a run cannot change: {there!r} there, {here!r} here")
