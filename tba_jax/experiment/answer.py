"""What a dry run answers first: whether each role fits the devices that it would have, and how fast it could be at most."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tba_jax.experiment import bounds, disk, estimate, fitting, meshes, placing, smallest_mesh
from tba_jax.experiment.composition import Experiment
from tba_jax.models.hugging_face import load
from tba_jax.rewards import task_models
from tba_jax.roles import gpus, placement
from tba_jax.run import layout, machine, places
from tba_jax.telemetry.device_peaks import PEAKS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """What a role has. count: of devices; kind: as PEAKS calls it; limit: bytes that programs may take on each, None: not known;
    where: in words; on_host: whether the memory of the devices is that of the machine, which all roles share; placed_on: the GPUs
    that --role=all hands to the role, () where it hands out none."""

    count: int
    kind: str
    limit: int | None
    where: str
    on_host: bool = False
    placed_on: Sequence[gpus.Gpu] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a role fits its devices, by the estimate from shapes. who: the role, or "together". fits: None: not known."""

    who: str
    fits: bool | None
    sentence: str

    def __str__(self) -> str:
        return f"{self.who:9}  {self.sentence}"


def describe(experiment: Experiment, run: layout.RunDir | None = None) -> str:
    """The answer of a dry run that compiles nothing: an estimate for this machine, bounds, and what was not checked.

    Args: run: not there yet; None, or a run that is there: nothing is said of its disk.
    """
    there, refused = _here(experiment)
    experiment, memory = _memory(experiment, there)
    lines = [str(verdict) for verdict in _verdicts(experiment, there, refused, memory)]
    new = run is not None and not places.exists(run.config)
    lines += [f"{'disk':9}  {demand.describe()}" for demand in (disk.demands(experiment, run) if run and new else [])]
    lines += [f"These are estimates from shapes, for this machine: {machine_in_words()}.", ""]
    lines += [*describe_bounds(experiment, there), ""] if there else []
    lines += [estimate.describe_memory(memory), ""]
    unchecked = ["the programs, which --compile and --topology compile", *unchecked_inputs(experiment)]
    return "\n".join([*lines, f"not checked: {'; '.join(unchecked)}", "--dry_run=full prints config and shapes as well"])


def verdicts(experiment: Experiment, *, share: float) -> list[Verdict]:
    """Of each role on the devices that it would have on this machine, and of all together where they share these.

    Args: share: of the memory that a role may take there, up to which it is said to fit.
    """
    there, refused = _here(experiment)
    there = {
        role: dataclasses.replace(each, limit=int(share * each.limit)) if each.limit else each for role, each in there.items()
    }
    experiment, memory = _memory(experiment, there)
    return _verdicts(experiment, there, refused, memory)


def _memory(experiment: Experiment, there: Mapping[str, Devices]) -> tuple[Experiment, dict[str, dict[str, int]]]:
    """The experiment with the mesh that the trainer needs there, and the estimate of each role."""
    if trains := there.get("trainer"):
        experiment = meshes.by_need(experiment, devices=trains.count, memory=None if trains.on_host else trains.limit)
    return experiment, estimate.memory(experiment, {role: devices.count for role, devices in there.items()})


def _verdicts(
    experiment: Experiment, there: Mapping[str, Devices], refused: Mapping[str, str], memory: Mapping[str, Mapping[str, int]]
) -> list[Verdict]:
    """Args: there, refused: see `_here`; memory: see `_memory`."""
    found = [_verdict(experiment, role, devices, memory) for role, devices in there.items()]
    found += [Verdict(who=role, fits=False, sentence=f"does not fit: {sentence}") for role, sentence in refused.items()]
    if there and not refused and (_interleaved(experiment) or all(devices.on_host for devices in there.values())):
        found.append(_together(experiment, there, memory))
    return found


def _here(experiment: Experiment) -> tuple[dict[str, Devices], dict[str, str]]:
    """Role -> what it has on this machine under --role=all; and role -> why that does not do."""
    config, visible = experiment.config, gpus.visible()
    roles = meshes.roles_of(config)
    if visible and not _interleaved(experiment):
        return _placed(experiment, roles, visible)
    if problem := _too_little_free():
        return {}, {"all roles": problem}
    found, refused = {}, {}
    for role, devices in (_in_one_process(roles, visible) if visible else _without_gpus(config, roles)).items():
        try:
            meshes.check(experiment, role=role, devices=devices.count)
            found[role] = devices
        except ValueError as error:
            refused[role] = str(error)
    return found, refused


def _too_little_free() -> str:
    """Why JAX cannot take its share of the GPUs in one process; "" where it can."""
    try:
        gpus.check_free()
    except ValueError as error:
        return str(error)
    return ""


def _interleaved(experiment: Experiment) -> bool:
    """Whether all roles run in one process, on the same devices."""
    return bool(experiment.config.schedule.mode == "interleaved")


def _placed(
    experiment: Experiment, roles: Sequence[str], visible: Sequence[gpus.Gpu]
) -> tuple[dict[str, Devices], dict[str, str]]:
    """Of roles that are processes of their own, by the shares of GPUs that they are given."""
    try:
        return by_placement(experiment, visible), {}
    except ValueError as error:
        refused = {"all roles": str(error)}
        told = {role: _too_large(experiment, role, visible) for role in roles if all(gpu.memory for gpu in visible)}
        return {}, refused | {role: sentence for role, sentence in told.items() if sentence}


def by_placement(experiment: Experiment, visible: Sequence[gpus.Gpu]) -> dict[str, Devices]:
    """Role -> its GPUs and what it may take of them under --role=all. Raises ValueError, see placing.place."""
    found: dict[str, Devices] = {}
    for name, placed in placing.place(experiment).items():
        mine = [gpu for gpu in visible if gpu.name in placed.gpus]
        limit = min((int(gpu.memory * placed.memory_fraction) for gpu in mine if gpu.memory), default=None)
        where = f"GPU{'s' if len(mine) > 1 else ''} {', '.join(placed.gpus)}, {placed.memory_fraction:.1%} of the memory"
        role, made = name.split("-")[0], Devices(count=len(mine), kind=mine[0].kind, limit=limit, where=where, placed_on=mine)
        # Of several searchers, the one with the least memory decides.
        found[role] = min(found.get(role, made), made, key=lambda each: each.limit or 0)
    return found


def _too_large(experiment: Experiment, role: str, visible: Sequence[gpus.Gpu]) -> str:
    """About a role whose mesh has too little memory even on GPUs of its own; "" where it has enough."""
    size, limit = estimate.on_device(estimate.memory(experiment)[role]), _least_memory(visible)
    if size <= limit:
        return ""
    numbers = f"about {fitting.in_words(size)} of {fitting.in_words(limit)}, on GPUs of its own"
    return numbers + advice(experiment, role, size=size, limit=limit, devices=len(visible), of=visible)


def _least_memory(visible: Sequence[gpus.Gpu]) -> int:
    """Bytes that one role may take of each of these GPUs."""
    return min(int((gpu.memory or 0) * gpu.usable_share(1)) for gpu in visible)


def advice(
    experiment: Experiment, role: str, *, size: int, limit: int, devices: int, of: Sequence[gpus.Gpu], scale: float = 1.0
) -> str:
    """What to do about a role that does not fit: empty the GPUs that others have filled; another mesh, where that is not enough.

    Args: size: bytes that the role takes of a device; limit: bytes that it may take; of: the GPUs, () where it has others; scale:
      see smallest_mesh.advice.
    """
    told, fixed = gpus.filled(of), experiment.config[meshes.SECTIONS[role]].memory_fraction
    if told and not fixed:  # the role's share grows with what is free
        limit = limit * _least_memory([gpu.emptied() for gpu in of]) // max(_least_memory(of), 1)
    if told and size <= limit:
        return told
    return told + smallest_mesh.advice(experiment, role=role, devices=devices, limit=limit, scale=scale)


def _in_one_process(roles: Sequence[str], visible: Sequence[gpus.Gpu]) -> dict[str, Devices]:
    limit = min((int(gpu.memory * gpus.DEFAULT_SHARE) for gpu in visible if gpu.memory), default=None)
    where = f"all GPUs, {gpus.DEFAULT_SHARE:.0%} of the memory, which the roles share"
    return {role: Devices(count=len(visible), kind=visible[0].kind, limit=limit, where=where) for role in roles}


def _without_gpus(config: Any, roles: Sequence[str]) -> dict[str, Devices]:
    first, count = jax.devices()[0], len(jax.devices())
    if first.platform != "cpu":
        limit = fitting.device_memory(first)
        return {role: Devices(count=count, kind=first.device_kind, limit=limit, where="alone on this host") for role in roles}
    counts = {role: max(config.searchers.cpu_devices, count) if role == "searcher" else count for role in roles}
    limit = machine.memory()
    return {role: Devices(count=counts[role], kind="cpu", limit=limit, where="the CPU", on_host=True) for role in roles}


def machine_in_words() -> str:
    """The accelerators of this machine, or its cores and memory where it has none."""
    kinds = [gpu.kind for gpu in gpus.visible()] or [device.device_kind for device in jax.devices() if device.platform != "cpu"]
    if kinds:
        return ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))
    return f"{len(placement.available_cpus())} cores, {fitting.in_words(machine.memory())} of memory"


def _verdict(experiment: Experiment, role: str, devices: Devices, memory: Mapping[str, Mapping[str, int]]) -> Verdict:
    """Says whether the role fits, by its own devices or those of its task, whichever hold more."""
    make = functools.partial(Verdict, who=role)
    parts = max((memory[name] for name in (role, f"{role}, task") if name in memory), key=estimate.on_device)
    size = _on_host(parts, devices.count) if devices.on_host else estimate.on_device(parts)
    if devices.limit is None:
        told = f"takes about {fitting.in_words(size)} of each device ({devices.where}), whose memory is not known"
        return make(fits=None, sentence=told)
    numbers = f"about {fitting.in_words(size)} of {fitting.in_words(devices.limit)} ({devices.where})"
    if size <= devices.limit:
        return make(fits=True, sentence=f"fits: {numbers}")
    name, most = max(parts.items(), key=lambda part: part[1])
    told = f"does not fit: {numbers}; most of it: {name}, {fitting.in_words(most)}"
    if not devices.on_host:
        told += advice(experiment, role, size=size, limit=devices.limit, devices=devices.count, of=devices.placed_on)
    return make(fits=False, sentence=told)


def _on_host(parts: Mapping[str, int], count: int) -> int:
    """Bytes of a process whose devices share the memory of the machine."""
    on_device = estimate.on_device(parts)
    return on_device * count + sum(parts.values()) - on_device


def _together(experiment: Experiment, there: Mapping[str, Devices], memory: Mapping[str, Mapping[str, int]]) -> Verdict:
    """Of all processes on a machine without accelerators, or of all roles on the devices that one process has."""
    config, make = experiment.config, functools.partial(Verdict, who="together")
    if (first := next(iter(there.values()))).limit is None:
        return make(fits=None, sentence="not known: the devices do not say how much memory they have")
    if not first.on_host:
        size = sum(estimate.on_device(memory[role]) for role in there)
        told = f"about {fitting.in_words(size)} of {fitting.in_words(first.limit)} of each device"
    else:
        processes = {"searcher": config.searchers.count if config.schedule.mode == "asynchronous" else 1}
        size = sum(
            processes.get(role, 1) * _on_host(parts, there[role].count if name == role else 1)
            for name, parts in memory.items()
            if (role := name.split(",")[0]) in there
        )
        several = f", with {processes['searcher']} searchers" if processes["searcher"] > 1 else ""
        told = f"about {fitting.in_words(size)} of {fitting.in_words(first.limit)}{several}"
    fits = size <= first.limit
    return make(fits=fits, sentence=f"{'fits' if fits else 'does not fit'}: {told}")


def describe_bounds(experiment: Experiment, there: Mapping[str, Devices]) -> list[str]:
    """A line for each work of each role."""
    lines = ["bounds, from the operations and bytes that the work needs and the peaks of the devices; a run reaches less:"]
    unknown = sorted({devices.kind for devices in there.values() if devices.kind not in PEAKS})
    lines += [f"  the peaks of {kind} are not known" for kind in unknown]
    for role, devices in there.items():
        if (peaks := PEAKS.get(devices.kind)) is None:
            continue
        for bound in bounds.bounds(experiment, role=role, devices=devices.count, peaks=peaks):
            lines.append(
                f"  {role:9}  {bound.work:8}  at most {_rounded(bound.rows)} rows/s, {_rounded(bound.tokens)} tokens/s, by the "
                f"{bound.by} of {devices.count} × {devices.kind}"
            )
    return lines


def _rounded(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def unchecked_inputs(experiment: Experiment) -> list[str]:
    """What a dry run does not read of the inputs of a run."""
    model, embedder = experiment.config.model, experiment.config.task.embedding_path
    found = []
    if model.preset:
        found.append(f"weights of the policy, whose shape is that of model.preset={model.preset}")
    elif model.path and not load.holds_weights(model.path):
        found.append(f"weights of model.path={model.path}, which are not on this machine")
    gone = [f"{use.setting}={use.path}" for use in task_models.away(experiment.task)]
    if embedder and not load.holds_weights(embedder):
        gone.append(f"task.embedding_path={embedder}")
    if gone:
        found.append(f"weights, tokenizers and templates of {', '.join(gone)}, whose weights are not on this machine")
    return found
