"""The dry run that compiles: the programs of each role for its devices, what they take there, and whether it fits."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tba_jax import sharding
from tba_jax.experiment import answer, composition, estimate, initial_policy, meshes, topologies
from tba_jax.experiment.fitting import UNITS, Fit, Measure, device_memory, in_words, unit_of
from tba_jax.experiment.joining import Invocation, check_dry_run, mistakes_end_the_role
from tba_jax.experiment.mistakes import Mistakes
from tba_jax.programs import Program
from tba_jax.rewards import task_models
from tba_jax.rewards import task_models as rewards
from tba_jax.roles import gpus
from tba_jax.run import machine, processes
from tba_jax.schemas import flatten
from tba_jax.storage import layout
from tba_jax.text.visible import visible

log = logging.getLogger(__name__)

ROLES = tuple(meshes.SECTIONS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """What a role is compiled for. devices: of JAX; name: what they are called, "" where JAX' own name says it; limit: bytes that
    the role may take of each, None: what the devices say."""

    devices: Sequence[Any]
    name: str = ""
    limit: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleFit:
    """role; where: its devices in words; limit: bytes of one device, None: not known; fits: of its programs;
    unchecked: what is not among them, in words. on_host: how many devices share the memory of this machine, which is then the
    limit of them all; 0: each has its own."""

    role: str
    where: str
    limit: int | None
    fits: Sequence[Fit]
    unchecked: Sequence[str]
    on_host: int = 0

    @property
    def worst(self) -> Fit:
        """The program with the highest peak."""
        return max(self.fits, key=lambda fit: fit.peak)

    @property
    def takes(self) -> int:
        """Bytes, of what has the limit."""
        return self.worst.peak * max(self.on_host, 1)


def programs(
    experiment: composition.Experiment, run: layout.RunDir, *, role: str, devices: Sequence[Any] | None = None
) -> dict[str, Program]:
    """Name -> the programs of a role, by the functions with which the role makes them. Args: devices: None: of this process."""
    from tba_jax.roles import evaluator
    from tba_jax.roles.searcher import searcher
    from tba_jax.roles.trainer import update_program

    e = experiment
    if role == "trainer":
        e = meshes.of_trainer(e, jax.devices() if devices is None else devices)
        made = update_program.programs(e.config, e.contract, e.policy, run, devices=devices)
        return {**initial_policy.programs(e, run, devices=devices), **made}
    room: dict[str, Any] = dict(policy=e.policy, tokenizer=e.tokenizer, task=e.task, devices=devices)
    if role == "searcher":
        return searcher.programs(e.config, e.contract, queries=e.queries["train"], **room)
    return evaluator.programs(e.config, e.contract, queries=composition.heldout_queries(e), **room)


def fit(experiment: composition.Experiment, run: layout.RunDir, *, role: str, on: Devices) -> RoleFit:
    """Compiles the programs of a role for its devices."""
    experiment = meshes.of_trainer(experiment, on.devices) if role == "trainer" else experiment
    made = programs(experiment, run, role=role, devices=on.devices)
    own = len(on.devices) - meshes.task_devices(experiment, role)
    linear = [use.name for use in task_models.uses(experiment.task, role=role) if use.kind == "linear"]
    return _role_fit(
        made,
        role,
        dataclasses.replace(on, devices=on.devices[:own]),
        where=meshes.in_words(experiment, role=role, devices=len(on.devices)),
        unchecked=[f"the {name} of the task, which is linear and computes in the host's memory" for name in linear],
    )


def fit_task(experiment: composition.Experiment, *, role: str, on: Devices) -> RoleFit | None:
    """Compiles the programs of a task's models on the task_devices of a role; None where they have none. Args: on: the role's."""
    if not (own := meshes.task_devices(experiment, role)):
        return None
    length = experiment.contract.prompt_length + experiment.contract.response_length
    made = rewards.of_task(experiment.task, sharding.task_mesh(own, on.devices), role=role, length=length).alone()
    of_task = dataclasses.replace(on, devices=on.devices[-own:])
    return _role_fit(made, f"{role}, task", of_task, where=f"{meshes.SECTIONS[role]}.task_devices={own}") if made else None


def _role_fit(made: Mapping[str, Program], role: str, on: Devices, *, where: str, unchecked: Sequence[str] = ()) -> RoleFit:
    """Args: on: the devices of the programs; where: the rest of RoleFit.where."""
    first, measure = on.devices[0], Measure()
    on_host = len(on.devices) if first.platform == "cpu" else 0
    fits = []
    for name, program in made.items():
        fits.append(found := measure.fit(name, program))
        log.info("%s: %s compiled in %.0f s, peak %s", role, name, found.seconds, in_words(found.peak))
    return RoleFit(
        role=role,
        where=f"{len(on.devices)} × {first.device_kind}{f' ({on.name})' if on.name else ''}, {where}",
        limit=on.limit or (machine.memory() if on_host else device_memory(first)),
        on_host=on_host,
        fits=fits,
        unchecked=unchecked,
    )


def describe(found: Sequence[RoleFit], *, config: Any) -> str:
    """The text that a dry run prints: a line for each role, and then a table for each role."""
    lines = [f"{each.role:9}  {_verdict(each, config)}" for each in found]
    if len(found) > 1:
        lines += _together(found, config)
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
    searchers = 1 if interleaved else config.searchers.count
    there = [role for role in found if role.on_host or role.role in ROLES]
    size = sum(role.takes * (searchers if role.role.startswith("searcher") else 1) for role in there)
    verdict = "takes at most" if limit is None else "fits: at most" if size <= limit else "may not fit: up to"
    of = "" if limit is None else f" of {in_words(limit)}"
    why = "all roles share this machine's memory"
    if interleaved:
        why = "schedule.mode=interleaved has all roles on the same devices"
    return [f"together   {verdict} {in_words(size)}{of}; {why}"]


def _verdict(role: RoleFit, config: Any) -> str:
    worst, also = role.worst, "; by TPU proxy" if topologies.BY_PROXY in role.where else ""
    also += f"; not checked: {'; '.join(role.unchecked)}" if role.unchecked else ""
    if role.limit is None:
        return f"takes {in_words(role.takes)} ({worst.name}); its devices do not say how much memory they have{also}"
    numbers = f"{in_words(role.takes)} of {in_words(role.limit)} ({worst.name})"
    if role.takes <= role.limit:
        return f"fits: {numbers}{also}"
    part, size = max(worst.parts().items(), key=lambda item: item[1])
    known = flatten(config.to_dict())  # a default of a custom task is not among them
    change = worst.program.room.get("arguments" if part == "outputs" else part, ())  # the settings that make the part less
    values = ", ".join(f"{name}={known[name]}" if name in known else name for name in change)
    return f"does not fit: {numbers}; most of it: {part}, {in_words(size)}; change {values}{also}"


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


def on_topologies(experiment: composition.Experiment, asked: Mapping[str, str], *roles: str) -> dict[str, Devices]:
    """Role -> the devices of its topology, of those roles that have one. Args: asked: see topologies.parse.

    Raises:
      ValueError: a topology cannot be had, or the roles do not fit the machine that they share.
    """
    if machine_of_all := asked.get("all"):
        placed = answer.by_placement(experiment, topologies.gpus(machine_of_all))
        return {role: _proxy(machine_of_all, placed[role].count, placed[role].limit) for role in roles if role in placed}
    found = Mistakes()
    devices = {role: found.attempt(_of_topology, asked[role]) for role in roles if role in asked}
    found.end()
    return {role: on for role, on in devices.items() if on}


def _of_topology(name: str) -> Devices:
    if there := topologies.gpus(name):
        return _proxy(name, len(there), int(there[0].usable_share(1) * (there[0].memory or 0)))
    return Devices(devices=topologies.devices(name), name=name)


def _proxy(name: str, count: int, limit: int | None) -> Devices:
    """TPU chips in the place of `count` GPUs of a machine. Args: limit: bytes that the role may take of each of the GPUs."""
    limit = int(topologies.PROXY_SHARE * (limit or 0))
    return Devices(devices=topologies.stand_ins(count), name=f"{topologies.BY_PROXY} {count} of {name}", limit=limit)


def _here(s: Invocation, wanted: Sequence[str], visible: Sequence[gpus.Gpu], *, role: str) -> dict[str, Devices]:
    """Role -> its devices on this machine. Args: visible: its GPUs, before this process has taken memory of them."""
    there = gpus.jax_devices()
    if role != "all" or there[0].platform != "gpu" or s.config.schedule.mode == "interleaved":
        return dict.fromkeys(wanted, Devices(devices=there))
    placed = answer.by_placement(s.experiment, visible)
    return {each: Devices(devices=there[: placed[each].count], limit=placed[each].limit) for each in wanted}


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
    of_run = meshes.roles_of(s.config)
    wanted = [role] if role != "all" else [each for each in of_run if each in asked or not asked or "all" in asked]
    found = Mistakes()
    if asked:
        there = found.attempt(on_topologies, s.experiment, asked, *wanted)
        named = f"--topology={','.join(asked.values())} names no"
        found.require(wanted, f"{named} role of this run")
        found.require(found or there, f"{named} topology for --role={role}")
    else:
        there = found.attempt(_here, s, wanted, gpus.visible(), role=role)
    processes.stop_at_once()
    for each, on in (there or {}).items():
        found.attempt(meshes.check, s.experiment, role=each, devices=len(on.devices))
    found.attempt(check_dry_run, s)
    found.end()
    where = "" if asked else answer.describe_placement(s.experiment)  # before programs take memory of the devices
    experiments = {each: (s.experiment.on_device(on.devices[0]), on) for each, on in (there or {}).items()}

    def job() -> int:
        fits = []
        for each, (experiment, on) in experiments.items():
            with mistakes_end_the_role():  # slots of a victim that do not divide over the devices, say
                of_task = fit_task(experiment, role=each, on=on)
                fits += [fit(experiment, s.run, role=each, on=on), *([of_task] if of_task else [])]
        unchecked = "; ".join(answer.unchecked_inputs(s.experiment))
        parts = [describe(fits, config=s.config), where, f"not checked: {unchecked}" if unchecked else ""]
        print(visible("\n\n".join([*filter(None, parts), *([estimate.describe(s.experiment)] if full else [])])))
        return 0

    return job
