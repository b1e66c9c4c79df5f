"""The dry run that compiles: the programs of each role for its devices, what they take there, and whether it fits."""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tba_jax.experiment import composition, meshes, placing, plan, topologies
from tba_jax.experiment.fitting import Fit, Measure, device_memory
from tba_jax.experiment.joining import Invocation
from tba_jax.programs import Program
from tba_jax.rewards import task_models
from tba_jax.roles import gpus
from tba_jax.run import layout
from tba_jax.text.visible import visible

log = logging.getLogger(__name__)

# The unit of a role's figures: the largest one that its peak reaches.
_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}
ROLES = ("trainer", "searcher", "evaluator")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleFit:
    """role; where: its devices in words; limit: bytes of one device, None: not known; fits: of its programs;
    unchecked: what is not among them, in words."""

    role: str
    where: str
    limit: int | None
    fits: Sequence[Fit]
    unchecked: Sequence[str]

    @property
    def worst(self) -> Fit:
        """The program with the highest peak."""
        return max(self.fits, key=lambda fit: fit.peak)


def programs(
    experiment: composition.Experiment, run: layout.RunDir, *, role: str, devices: Sequence[Any] | None = None
) -> dict[str, Program]:
    """Name -> the programs of a role, by the functions with which the role makes them. Args: devices: None: of this process."""
    from tba_jax.roles import evaluator
    from tba_jax.roles.searcher import searcher
    from tba_jax.roles.trainer import programs as trainer

    e = experiment
    if role == "trainer":
        config = meshes.with_trainer_mesh(e, devices).config
        return trainer.programs(config, e.contract, e.policy, run, devices=devices)
    room: dict[str, Any] = dict(policy=e.policy, tokenizer=e.tokenizer, devices=devices)
    if role == "searcher":
        return searcher.programs(e.config, e.contract, queries=e.queries["train"], **room)
    return evaluator.programs(e.config, e.contract, queries=composition.heldout_queries(e), **room)


def fit(experiment: composition.Experiment, run: layout.RunDir, *, role: str, devices: Sequence[Any], name: str = "") -> RoleFit:
    """Compiles the programs of a role. Args: devices: of the role, and what they are called."""
    config = experiment.config[meshes.SECTIONS[role]]
    own, memory = config.task_devices if role != "trainer" else 0, device_memory(devices[0])
    sizes = meshes.shape(experiment, role=role, devices=len(devices), memory=memory)
    mesh = " × ".join(f"{axis}={size}" for axis, size in zip(("data", "fsdp", "tensor"), sizes, strict=True))
    measure = Measure()
    return RoleFit(
        role=role,
        where=f"{len(devices)} × {devices[0].device_kind}{f' ({name})' if name else ''}, {meshes.SECTIONS[role]}.mesh {mesh}",
        limit=memory,
        fits=[_fit(measure, role, each, made) for each, made in programs(experiment, run, role=role, devices=devices).items()],
        unchecked=_unchecked(experiment, role, own),
    )


def _fit(measure: Measure, role: str, name: str, program: Program) -> Fit:
    begin = time.monotonic()
    found = measure.fit(name, program)
    log.info("%s: %s compiled in %.0f s, peak %s", role, name, time.monotonic() - begin, _in_words(found.peak))
    return found


def _unchecked(experiment: composition.Experiment, role: str, task_devices: int) -> list[str]:
    """What a role computes with programs that are not compiled here."""
    c, found = experiment.config, []
    models = [use.name for use in task_models.uses(experiment.task, role=role)] if role != "trainer" else []
    if models:
        where = "on devices of their own" if task_devices else "on the same devices"
        found.append(f"the models of the task ({', '.join(models)}), {where}")
    if role == "searcher" and c.task.embedding_path:
        found.append("the sentence encoder of task.embedding_path")
    if role == "trainer" and c.warm_start.steps:
        found.append("the warm start")
    return found


def describe(found: Sequence[RoleFit], *, config: Any) -> str:
    """The text that a dry run prints: a line for each role, and then a table for each."""
    width = max(len(each.role) for each in found)
    lines = [f"{each.role:{width}}  {_verdict(each, config)}" for each in found]
    if config.schedule.mode == "interleaved" and len(found) > 1:
        together = sum(each.worst.peak for each in found)
        lines.append(f"together: at most {_in_words(together)}, as schedule.mode=interleaved has all roles on the same devices")
    for each in found:
        unit = _unit(each.worst.peak)
        lines += ["", f"{each.role} on {each.where}; {unit} of one device", *_table(each.fits, _UNITS[unit])]
        lines += [f"  not checked: {what}" for what in each.unchecked]
    return "\n".join(lines)


def _verdict(role: RoleFit, config: Any) -> str:
    worst, also = role.worst, f"; not checked: {'; '.join(role.unchecked)}" if role.unchecked else ""
    if role.limit is None:
        return f"takes {_in_words(worst.peak)} ({worst.name}); its devices do not say how much memory they have{also}"
    numbers = f"{_in_words(worst.peak)} of {_in_words(role.limit)} ({worst.name})"
    if worst.peak <= role.limit:
        return f"fits: {numbers}{also}"
    part, size = max(worst.parts().items(), key=lambda item: item[1])
    settings = worst.program.room.get("arguments" if part == "outputs" else part, ())
    values = ", ".join(f"{name}={_value(config, name)}" for name in settings)
    return f"does not fit: {numbers}; most of it: {part}, {_in_words(size)}; change {values}{also}"


def _value(config: Any, name: str) -> Any:
    for key in name.split("."):
        config = config[key]
    return config


def _unit(size: int) -> str:
    return next((unit for unit, bytes_of in _UNITS.items() if size >= bytes_of), "KiB")


def _in_words(size: int) -> str:
    return f"{size / _UNITS[_unit(size)]:.2f} {_unit(size)}"


def _table(fits: Sequence[Fit], unit: int) -> list[str]:
    width = max(len(fit.name) for fit in fits)
    columns = ("arguments", "temporaries", "outputs", "aliased", "beside", "peak")
    rows = [f"  {'program':{width}}" + "".join(f"{column:>13}" for column in columns)]
    for fit in fits:
        values = (fit.arguments, fit.temporaries, fit.outputs, fit.aliased, sum(fit.beside.values()), fit.peak)
        refused = "  (too large by itself: refused by the compiler)" if fit.refused else ""
        rows.append(f"  {fit.name:{width}}" + "".join(f"{value / unit:13.2f}" for value in values) + refused)
    worst = max(fits, key=lambda fit: fit.peak)
    beside = ", ".join(f"{part} {size / unit:.2f}" for part, size in worst.beside.items())
    return [*rows, f"  beside {worst.name}: {beside or 'nothing'}"]


def dry_run(s: Invocation, *, asked: Mapping[str, str], role: str, full: bool) -> Callable[[], int]:
    """Checks the run's settings against the devices of each role, and writes nothing; the job compiles and prints what fits.

    Args:
      asked: role -> topology (topologies.parse); {}: the roles have the devices of this process.
      role: the only one that is compiled; "all": all roles of the run.
      full: prints the config and the shapes as well.

    Raises:
      ValueError: a topology cannot be had, or the mesh of a role does not fit its devices; names the numbers.
    """
    if role not in ("all", *ROLES):
        raise ValueError(f"--role={role} computes nothing of its own; roles that compute: {', '.join(ROLES)}")
    wanted = [role] if role != "all" else [each for each in roles_of(s.config) if each in asked or not asked]
    if missing := [each for each in wanted if asked and each not in asked]:
        raise ValueError(f"--topology names no topology for --role={missing[0]}")
    devices = {each: topologies.devices(asked[each]) if asked else gpus.jax_devices() for each in wanted}
    experiments = {each: s.experiment.on_device(its[0]) for each, its in devices.items()}
    for each, its in devices.items():
        meshes.check(experiments[each], role=each, devices=len(its), memory=device_memory(its[0]))
    layout.check_can_be_made(s.run)

    def job() -> int:
        found = [fit(experiments[each], s.run, role=each, devices=its, name=asked.get(each, "")) for each, its in devices.items()]
        text = describe(found, config=s.config) + ("" if asked else f"\n\n{placing.describe(s.experiment)}")
        print(visible(text + ("\n\n" + plan.describe(s.experiment) if full else "")))
        return 0

    return job


def roles_of(config: Any) -> list[str]:
    """The roles of a run that compute."""
    searches = config.searchers.count or config.schedule.mode == "interleaved"
    there = {"trainer": True, "searcher": searches, "evaluator": config.evaluation.enabled}
    return [role for role in ROLES if there[role]]
