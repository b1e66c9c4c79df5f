"""What a run is: its settings against the defaults and a recipe, its contract, versions, hosts, devices and state."""

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tba_jax.experiment.schema import SCHEMA
from tba_jax.reporting.series import is_moment
from tba_jax.run import contract as contract_lib
from tba_jax.run.secrets_of_config import without_secrets
from tba_jax.schemas import flatten

# A run that wrote nothing for so long is not called live.
QUIET_SECONDS = 60.0
_LONGEST = 300  # characters of a value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """value, default, recipe: as text; recipe: "" where no recipe was named."""

    name: str
    value: str
    default: str
    recipe: str


def settings(config: Mapping[str, Any], recipe: Mapping[str, Any] | None) -> list[Setting]:
    """The settings that differ from the defaults, or from the recipe where there is one, without secrets.

    Args: config: of config.json; recipe: the config of a recipe.
    """
    here, defaults = flatten(without_secrets(config)), flatten(contract_lib.plain(SCHEMA.defaults().to_dict()))
    of_recipe = flatten(without_secrets(contract_lib.plain(recipe))) if recipe is not None else {}
    found = []
    for name, value in here.items():
        default = defaults.get(name, _ABSENT)
        theirs = of_recipe.get(name, _ABSENT) if recipe is not None else default
        if value != default or value != theirs:
            told = in_words(theirs) if recipe is not None else ""
            found.append(Setting(name=name, value=in_words(value), default=in_words(default), recipe=told))
    return found


_ABSENT = object()


def in_words(value: Any) -> str:
    """A value as JSON, cut where it is long."""
    if value is _ABSENT:
        return "(there is none)"
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters)"


def contract(stored: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The contract's fields as text."""
    return [(name, in_words(value)) for name, value in flatten(without_secrets(stored)).items()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Process:
    """The newest process of a role, as text; started: unix seconds, NaN where it is not known; starts: how often it started."""

    role: str
    host: str
    devices: str
    code: str
    started: float
    starts: int


def processes(starts: Sequence[Mapping[str, Any]], writers: Mapping[str, Mapping[str, Any]]) -> list[Process]:
    """From the start events of all roles; without any, from the registrations of the writers.

    Args: starts: see marks.Marks; writers: name -> info.
    """
    newest: dict[str, Mapping[str, Any]] = {str(start["role"]): start for start in starts}
    count = {role: sum(start["role"] == role for start in starts) for role in newest}
    if not newest:
        newest = {name: {"time": info.get("started"), **info} for name, info in writers.items()}
    found = []
    for role, start in newest.items():
        at = start.get("time")
        found.append(
            Process(
                role=role,
                host=in_words(start.get("host", "")).strip('"'),
                devices=in_words(start.get("devices", "")).strip('"'),
                code=_code(start.get("code")),
                started=float(at) if is_moment(at) else math.nan,
                starts=count.get(role, 1),
            )
        )
    return found


def _code(code: Any) -> str:
    """Version and commit, if the event tells them."""
    if isinstance(code, dict):
        return ", ".join(f"{name} {in_words(value)}" for name, value in code.items() if value)
    return in_words(code).strip('"') if code else ""


def versions(starts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Package -> its versions over all processes, the newest last."""
    found: dict[str, dict[str, None]] = {}
    for start in starts:
        told = start.get("versions")
        for name, version in told.items() if isinstance(told, dict) else ():
            found.setdefault(str(name), {})[in_words(version)] = None
    return {name: " → ".join(of_name) for name, of_name in sorted(found.items())}


def state(*, step: int, steps: int, finished: bool, ended: bool, newest: float, now: float | None = None) -> str:
    """Whether the run is finished, stopped, live or silent, in one sentence.

    Args: ended: whether all its processes have; newest: unix seconds of the last sign of life, 0: none.
    """
    now = time.time() if now is None else now
    of = f"step {step:,} of {steps:,}" if steps else f"step {step:,}"
    if finished:
        return f"Finished: {of}."
    if ended:
        return f"Stopped: {of}."
    if not newest:
        return f"No role has written anything yet: {of}."
    quiet = now - newest
    if quiet < QUIET_SECONDS:
        return f"At work: {of}; the last sign of life is {max(0.0, quiet):.0f} s old."
    return f"Not finished, and silent for {duration(quiet)}: {of}."


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"
