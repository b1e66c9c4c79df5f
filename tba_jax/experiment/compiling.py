"""The dry run that compiles: the programs of each role for its devices, what they take there, and whether it fits."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tba_jax import sharding
from tba_jax.experiment import answer, composition, estimate, initial_policy, meshes, placing, topologies
from tba_jax.experiment.fitting import UNITS, Fit, Measure, device_memory, in_words, unit_of
from tba_jax.experiment.joining import Invocation, check_dry_run, mistakes_end_the_role
from tba_jax.experiment.mistakes import Mistakes
from tba_jax.programs import Program
from tba_jax.rewards import programs as rewards
from tba_jax.rewards import task_models
from tba_jax.roles import gpus
from tba_jax.run import layout, machine, processes
from tba_jax.schemas import flatten
from tba_jax.text.visible import visible

log = logging.getLogger(__name__)

ROLES = tuple(meshes.SECTIONS)
# Devices of a role; bytes that it may take of each, None: what the devices say; which GPUs of this machine they are.
_OnMachine = tuple[Sequence[Any], int | None, Sequence[gpus.Gpu]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleFit:
    """role; where: its devices in words; limit: bytes of one device, None: not known; fits: of its programs;
    unchecked: what is not among them, in words; mesh: where it does not fit: which mesh would do, as the end of a sentence.
    on_host: how many devices share the memory of this machine, which is then the limit of them all; 0: each has its own."""

    role: str
    where: str
    limit: int | None
    fits: Sequence[Fit]
    unchecked: Sequence[str]
    mesh: str = ""
    on_host: int = 0

    @property
    def worst(self) -> Fit:
        """The program with the highest peak."""
        return max(self.fits, key=lambda fit: fit.peak)

    @property
    def takes(self) -> int:
        """Bytes, of what has the limit."""
        return self.worst.peak * max(self.on_host, 1)


def of_trainer(experiment: composition.Experiment, devices: Sequence[Any]) -> composition.Experiment:
    """The experiment with the mesh of a trainer on these devices, see meshes.by_need."""
    here = next((device for device in devices if device.process_index == jax.process_index()), devices[0])
    made: composition.Experiment = meshes.by_need(experiment, devices=len(devices), memory=device_memory(here))
    return made


def programs(
    experiment: composition.Experiment, run: layout.RunDir, *, role: str, devices: Sequence[Any] | None = None
) -> dict[str, Program]:
    """Name -> the programs of a role, by the functions with which the role makes them. Args: devices: None: of this process."""
    from tba_jax.roles import evaluator
    from tba_jax.roles.searcher import searcher
    from tba_jax.roles.trainer import programs as trainer

    e = experiment
    if role == "trainer":
        e = of_trainer(e, jax.devices() if devices is None else devices)
        made = trainer.programs(e.config, e.contract, e.policy, run, devices=devices)
        return {**initial_policy.programs(e, run, devices=devices), **made}
    room: dict[str, Any] = dict(policy=e.policy, tokenizer=e.tokenizer, task=e.task, devices=devices)
    if role == "searcher":
        return searcher.programs(e.config, e.contract, queries=e.queries["train"], **room)
    return evaluator.programs(e.config, e.contract, queries=composition.heldout_queries(e), **room)


def fit(
    experiment: composition.Experiment,
    run: layout.RunDir,
    *,
    role: str,
    devices: Sequence[Any],
    name: str = "",
    limit: int | None = None,
    measure: Measure | None = None,
    only: str = "",
    of: Sequence[gpus.Gpu] = (),
) -> RoleFit:
    """Compiles the programs of a role.

    Args:
      devices: of the role. name: what they are called.
      limit: bytes of each device that the role may take; None: all that programs may take on it.
      measure: of earlier calls with these devices, whose programs need not be compiled again.
      only: the program of this name is compiled alone, if the role has it; "": all are.
      of: the GPUs that the devices are, for advice where other processes hold a part of them; (): they are no GPUs.
    """
    experiment = of_trainer(experiment, devices) if role == "trainer" else experiment
    own = _task_devices(experiment, role)
    sizes = dict(zip(("data", "fsdp", "tensor"), meshes.shape(experiment, role=role, devices=len(devices)), strict=True))
    mesh = " × ".join(f"{axis}={size}" for axis, size in sizes.items())
    made = programs(experiment, run, role=role, devices=devices)
    made = {only: made[only]} if only in made else made
    found = _role_fit(
        made,
        role,
        devices[: len(devices) - own],
        name=name,
        where=f"{meshes.SECTIONS[role]}.mesh {mesh}",
        limit=limit,
        measure=measure or Measure(),
        unchecked=_unchecked(experiment, role),
    )
    if found.on_host or found.limit is None or found.takes <= found.limit:
        return found
    guess = estimate.on_device(estimate.memory(experiment, {role: len(devices)})[role])
    numbers = dict(size=found.worst.peak, limit=found.limit, devices=len(devices) - own)
    advice = answer.advice(experiment, role, **numbers, of=of, scale=found.worst.peak / guess)
    return dataclasses.replace(found, mesh=advice)


def fit_task(
    experiment: composition.Experiment,
    *,
    role: str,
    devices: Sequence[Any],
    name: str = "",
    limit: int | None = None,
    measure: Measure | None = None,
) -> RoleFit | None:
    """Compiles the programs of a task's models on the task_devices of a role; None where they have none. Args: see `fit`."""
    own = _task_devices(experiment, role)
    length = experiment.contract.prompt_length + experiment.contract.response_length
    made = rewards.of_task(experiment.task, sharding.task_mesh(own, devices), role=role, length=length).alone() if own else {}
    if not made:
        return None
    setting = f"{meshes.SECTIONS[role]}.task_devices={own}"
    return _role_fit(made, f"{role}, task", devices[-own:], name=name, where=setting, limit=limit, measure=measure or Measure())


def check_task_fits(experiment: composition.Experiment, *, role: str, devices: Sequence[Any], name: str, limit: int) -> None:
    """Raises ValueError where the models of the task do not fit the role's task_devices, of which each holds whole models.

    Args: see `fit`.
    """
    found = fit_task(experiment, role=role, devices=devices, name=name, limit=limit)
    if found is not None and found.worst.peak > limit:
        taken, change = f"{in_words(found.worst.peak)} of {in_words(limit)}", ", ".join(_settings_of_most(found.worst))
        raise ValueError(f"{found.worst.name} takes {taken} on {found.where}; change {change}")


def _settings_of_most(fit: Fit) -> Sequence[str]:
    """The settings that make the largest part of a program's memory less."""
    part, _ = max(fit.parts().items(), key=lambda item: item[1])
    return fit.program.room.get("arguments" if part == "outputs" else part, ())


def _task_devices(experiment: composition.Experiment, role: str) -> int:
    return int(experiment.config[meshes.SECTIONS[role]].task_devices) if role != "trainer" else 0


def _role_fit(
    made: Mapping[str, Program],
    role: str,
    devices: Sequence[Any],
    *,
    name: str,
    where: str,
    limit: int | None,
    measure: Measure,
    unchecked: Sequence[str] = (),
) -> RoleFit:
    """Args: where: the rest of RoleFit.where; others: see `fit`."""
    on_host = len(devices) if devices[0].platform == "cpu" else 0
    if limit is None:
        limit = machine.memory() if on_host else device_memory(devices[0])
    return RoleFit(
        role=role,
        where=f"{len(devices)} × {devices[0].device_kind}{f' ({name})' if name else ''}, {where}",
        limit=limit,
        on_host=on_host,
        fits=[_fit(measure, role, each, program) for each, program in made.items()],
        unchecked=unchecked,
    )


def _fit(measure: Measure, role: str, name: str, program: Program) -> Fit:
    found = measure.fit(name, program)
    log.info("%s: %s compiled in %.0f s, peak %s", role, name, found.seconds, in_words(found.peak))
    return found


def _unchecked(experiment: composition.Experiment, role: str) -> list[str]:
    """What a role computes without programs."""
    linear = [use for use in task_models.uses(experiment.task, role=role) if use.kind == "linear"]
    return [f"the {use.name} of the task, which is linear and computes in the host's memory" for use in linear]


def describe(found: Sequence[RoleFit], *, config: Any, bounds: Sequence[str] = ()) -> str:
    """The text that a dry run prints: a line for each role, lines on bounds, and then a table for each role."""
    lines = [f"{each.role:9}  {_verdict(each, config)}" for each in found]
    if len(found) > 1:
        lines += _together(found, config)
    lines += ["", *bounds] if bounds else []
    for each in found:
        unit = unit_of(each.worst.peak)
        compiled = f"{len(each.fits)} programs compiled in {sum(fit.seconds for fit in each.fits):.0f} s"
        lines += ["", f"{each.role} on {each.where}; {unit} of one device; {compiled}", *_table(each.fits, UNITS[unit])]
        lines += [f"  not checked: {what}" for what in each.unchecked]
    return "\n".join(lines)


def _together(found: Sequence[RoleFit], config: Any) -> list[str]:
    """A line about roles that have the same memory; none where each has its own."""
    limit, interleaved = found[0].limit, config.schedule.mode == "interleaved"
    if not interleaved and not all(role.on_host for role in found):
        return []
    counts = {"searcher": 1 if interleaved else config.searchers.count}
    there = [role for role in found if role.on_host or role.role in ROLES]
    size = sum(role.takes * counts.get(role.role.split(",")[0], 1) for role in there)
    verdict = "takes at most" if limit is None else "fits: at most" if size <= limit else "may not fit: up to"
    of = "" if limit is None else f" of {in_words(limit)}"
    why = (
        "schedule.mode=interleaved has all roles on the same devices" if interleaved else "all roles share this machine's memory"
    )
    return [f"together   {verdict} {in_words(size)}{of}; {why}"]


def _verdict(role: RoleFit, config: Any) -> str:
    worst, also = role.worst, f"; not checked: {'; '.join(role.unchecked)}" if role.unchecked else ""
    if role.limit is None:
        return f"takes {in_words(role.takes)} ({worst.name}); its devices do not say how much memory they have{also}"
    numbers = f"{in_words(role.takes)} of {in_words(role.limit)} ({worst.name})"
    if role.takes <= role.limit:
        return f"fits: {numbers}{also}"
    part, size = max(worst.parts().items(), key=lambda item: item[1])
    known = flatten(config.to_dict())  # a default of a custom task is not among them
    values = ", ".join(f"{name}={known[name]}" if name in known else name for name in _settings_of_most(worst))
    return f"does not fit: {numbers}; most of it: {part}, {in_words(size)}; change {values}{role.mesh}{also}"


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


def _on_topologies(wanted: Sequence[str], asked: Mapping[str, str], *, role: str) -> dict[str, _OnMachine]:
    """Role -> the devices of its topology. Raises ValueError: a sentence about each role that has none."""
    found, devices = Mistakes(), dict[str, _OnMachine]()
    found.require(wanted, f"--topology={','.join(asked)} names no role of this run")
    for each in wanted:
        found.require(each in asked, f"--topology names no topology for --role={role}")
        if each in asked:
            devices[each] = (found.attempt(topologies.devices, asked[each]) or [], None, ())
    found.end()
    return devices


def _here(s: Invocation, wanted: Sequence[str], visible: Sequence[gpus.Gpu], *, role: str) -> dict[str, _OnMachine]:
    """Role -> its devices on this machine. Args: visible: its GPUs, before this process has taken memory of them."""
    there = gpus.jax_devices()
    if role != "all" or there[0].platform != "gpu" or s.config.schedule.mode == "interleaved":
        return dict.fromkeys(wanted, (there, None, visible))
    placed = answer.by_placement(s.experiment, visible)
    return {each: (there[: placed[each].count], placed[each].limit, placed[each].placed_on) for each in wanted}


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
    wanted = [role] if role != "all" else [each for each in meshes.roles_of(s.config) if each in asked or not asked]
    found = s.mistakes.copy()
    there: dict[str, _OnMachine] | None = None
    if asked:
        there = found.attempt(_on_topologies, wanted, asked, role=role)
    elif not s.mistakes:  # after one, JAX takes no memory of this machine's devices: a GPU may have been refused as filled
        there = found.attempt(_here, s, wanted, gpus.visible(), role=role)
    devices = {each: its for each, (its, *_) in (there or {}).items()}
    processes.stop_at_once()
    for each, its in devices.items():
        found.attempt(meshes.check, s.experiment, role=each, devices=len(its))
    found.attempt(check_dry_run, s)
    found.end()
    where = "" if asked else placing.describe(s.experiment)  # before programs take memory of the devices
    experiments = {each: s.experiment.on_device(its[0]) for each, its in devices.items()}

    def job() -> int:
        found = []
        for each, (its, limit, of) in (there or {}).items():
            room: dict[str, Any] = dict(role=each, devices=its, name=asked.get(each, ""), limit=limit)
            with mistakes_end_the_role():  # slots of a victim that do not divide over the devices, say
                of_task = fit_task(experiments[each], **room)
                found += [fit(experiments[each], s.run, **room, of=of), *([of_task] if of_task else [])]
        kinds = {
            each: answer.Devices(count=len(its), kind=its[0].device_kind, limit=None, where="") for each, its in devices.items()
        }
        meshed = of_trainer(s.experiment, devices["trainer"]) if "trainer" in devices else s.experiment
        parts = [describe(found, config=s.config, bounds=answer.describe_bounds(meshed, kinds)), *([where] if where else [])]
        if unchecked := answer.unchecked_inputs(s.experiment):
            parts.append(f"not checked: {'; '.join(unchecked)}")
        print(visible("\n\n".join([*parts, *([estimate.describe(s.experiment)] if full else [])])))
        return 0

    return job
