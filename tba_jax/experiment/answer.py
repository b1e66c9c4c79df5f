"""What a dry run answers first: whether each role fits the devices that it would have, by an estimate from shapes."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tba_jax.experiment import disk, estimate, fitting, meshes
from tba_jax.experiment.composition import Experiment
from tba_jax.models.hugging_face import load
from tba_jax.rewards import task_models
from tba_jax.roles import gpus, placement
from tba_jax.run import machine
from tba_jax.storage import layout, places

log = logging.getLogger(__name__)

# (variant, platform, devices, GiB of each): what a machine has at least. The first row is taken whose devices are here; GPUs
# beyond its count are used too, see roles/placement.py.
VARIANTS = (
    ("8x80gb", "gpu", 8, 70),
    ("1x80gb", "gpu", 1, 70),
    ("1x24gb", "gpu", 1, 20),
    ("1x16gb", "gpu", 1, 14),
    ("v5p-8", "tpu", 4, 80),
    ("v5e-8", "tpu", 8, 15),
    ("v5e-1", "tpu", 1, 15),
    ("cpu", "cpu", 1, 0),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """What a role has. count: of devices; limit: bytes that programs may take on each, None: not known; where: in words;
    on_host: whether the memory of the devices is that of the machine, which all roles share."""

    count: int
    limit: int | None
    where: str
    on_host: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a role fits its devices, by the estimate from shapes. who: the role, or "together". fits: None: not known."""

    who: str
    fits: bool | None
    sentence: str

    def __str__(self) -> str:
        return f"{self.who:9}  {self.sentence}"


def describe(experiment: Experiment, run: layout.RunDir | None = None) -> str:
    """The answer of a dry run that compiles nothing: an estimate for this machine, and what was not checked.

    Args: run: not there yet; None, or a run that is there: nothing is said of its disk.
    """
    found, memory = judge(experiment)
    lines = [str(verdict) for verdict in found]
    if run is not None and not places.exists(run.config):
        for demand in disk.demands(experiment, run):
            lines.append(f"{'disk':9}  {'fits' if demand.fits else 'does not fit'}: {demand.numbers}")
    lines += [f"These are estimates from shapes, for this machine: {machine_in_words()}.", ""]
    lines += [estimate.describe_memory(memory), ""]
    unchecked = ["the programs, which --compile and --topology compile", *unchecked_inputs(experiment)]
    return "\n".join([*lines, f"not checked: {'; '.join(unchecked)}", "--dry_run=full prints config and shapes as well"])


def check_fits(experiment: Experiment) -> None:
    """Tells the estimate of what the run takes on this machine. Raises ValueError where a role does not fit by it."""
    found, _ = judge(experiment)
    for verdict in found:
        log.info("%s", verdict)
    if problems := [f"{verdict.who} {verdict.sentence}" for verdict in found if verdict.fits is False]:
        raise ValueError(
            f"the run does not fit this machine ({machine_in_words()}), by estimates from shapes: {'; '.join(problems)}; "
            "take a smaller model, adapters (lora.rank) or less memory for search (searchers.slots, evaluation.batch_size)"
        )


def judge(experiment: Experiment) -> tuple[list[Verdict], dict[str, dict[str, int]]]:
    """The verdict on each role on this machine, and on all together where they share devices; and the estimate of their memory,
    see estimate.memory."""
    there, refused = _here(experiment)
    if trains := there.get("trainer"):
        experiment = meshes.by_need(experiment, devices=trains.count, memory=None if trains.on_host else trains.limit)
    memory = estimate.memory(experiment, {role: devices.count for role, devices in there.items()})
    found = [_verdict(role, devices, memory) for role, devices in there.items()]
    found += [Verdict(who=role, fits=False, sentence=f"does not fit: {sentence}") for role, sentence in refused.items()]
    in_turn = experiment.config.schedule.mode == "interleaved"
    if there and not refused and (in_turn or all(devices.on_host for devices in there.values())):
        found.append(_together(experiment.config, there, memory))
    return found, memory


def _here(experiment: Experiment) -> tuple[dict[str, Devices], dict[str, str]]:
    """Role -> what it has on this machine under --role=all; and role -> why that does not do."""
    if visible := gpus.visible():
        try:
            if experiment.config.schedule.mode == "interleaved":
                gpus.check_free()  # JAX has to find its share of them in this one process
            return by_placement(experiment, visible), {}
        except ValueError as error:
            return {}, {"all roles": str(error)}
    found, refused = {}, {}
    first, count = jax.devices()[0], len(jax.devices())
    on_host = first.platform == "cpu"
    limit, where = (machine.memory(), "the CPU") if on_host else (fitting.device_memory(first), "alone on this host")
    for role in meshes.roles_of(experiment.config):
        own = max(experiment.config.searchers.cpu_devices, count) if on_host and role == "searcher" else count
        try:
            meshes.check(experiment, role=role, devices=own)
            found[role] = Devices(count=own, limit=limit, where=where, on_host=on_host)
        except ValueError as error:
            refused[role] = str(error)
    return found, refused


def by_placement(experiment: Experiment, there: Sequence[gpus.Gpu]) -> dict[str, Devices]:
    """Role -> its part of these GPUs and what it may take of them under --role=all.

    Raises:
      ValueError: the meshes of the roles do not fit them.
    """
    if experiment.config.schedule.mode == "interleaved":  # one process has all GPUs
        whole = placement.Placement(cpus=(), gpus=tuple(gpu.name for gpu in there), memory_fraction=gpus.DEFAULT_SHARE)
        placed = dict.fromkeys(meshes.roles_of(experiment.config), whole)
    else:
        placed = place(experiment, there)
    found: dict[str, Devices] = {}
    # Of several searchers, the one with the least memory decides, which is the last to be noted.
    for name, its in sorted(placed.items(), key=lambda item: -item[1].memory_fraction):
        role, mine = name.split("-")[0], [gpu for gpu in there if gpu.name in its.gpus]
        meshes.check(experiment, role=role, devices=len(mine))
        limit = min((int(gpu.memory * its.memory_fraction) for gpu in mine if gpu.memory), default=None)
        where = f"GPU{'s' if len(mine) > 1 else ''} {', '.join(its.gpus)}, {its.memory_fraction:.1%} of the memory"
        found[role] = Devices(count=len(mine), limit=limit, where=where + gpus.filled(mine))
    return {role: found[role] for role in meshes.SECTIONS if role in found}


def place(experiment: Experiment, there: Sequence[gpus.Gpu]) -> dict[str, placement.Placement]:
    """Role name -> where --role=all runs it on this machine with these GPUs. Raises ValueError, see placement.place."""

    def check(devices: int) -> None:
        meshes.check(experiment, role="trainer", devices=devices)

    return placement.place(experiment.config, cpus=placement.available_cpus(), gpus=there, check=check)


def describe_placement(experiment: Experiment) -> str:
    """The lines of a dry run about where --role=all runs the roles on this machine, or why it cannot."""
    if experiment.config.schedule.mode == "interleaved":
        return "schedule.mode=interleaved: all roles run in turn in one process, on all of its devices"
    try:
        return placement.describe(place(experiment, gpus.visible()))
    except ValueError as error:
        return f"--role=all cannot place the roles on this machine: {error}"


def machine_in_words() -> str:
    """The accelerators of this machine, or its cores and memory where it has none."""
    kinds = [gpu.kind for gpu in gpus.visible()] or [device.device_kind for device in jax.devices() if device.platform != "cpu"]
    if kinds:
        return ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))
    return f"{len(placement.available_cpus())} cores, {fitting.in_words(machine.memory())} of memory"


def variant() -> str:
    """--for_this_machine: the variant of a recipe (configs/machines.py) for the devices that are here, by nvidia-smi or by JAX.

    Raises:
      ValueError: there are accelerators of which none is large enough; or see gpus.jax_devices.
    """
    if visible := gpus.visible():
        platform, count, memory = "gpu", len(visible), min(gpu.memory or 0 for gpu in visible)
    else:
        devices = gpus.jax_devices()
        platform, count, memory = devices[0].platform, len(devices), fitting.device_memory(devices[0]) or 0
    rows = [row for row in VARIANTS if row[1] == platform]
    for name, _, least, gib in rows:
        if count >= least and memory >= gib * (1 << 30):
            return name
    raise ValueError(
        f"--for_this_machine has no variant for {machine_in_words()} of {fitting.in_words(memory)}: the smallest has "
        f"{min((gib for *_, gib in rows), default=0)} GiB; JAX_PLATFORMS=cpu takes the variant for a CPU"
    )


def _verdict(role: str, devices: Devices, memory: Mapping[str, Mapping[str, int]]) -> Verdict:
    """Says whether the role fits, by its own devices or those of its task, whichever hold more."""
    parts = max((memory[name] for name in (role, f"{role}, task") if name in memory), key=estimate.on_device)
    size = _on_host(parts, devices.count) if devices.on_host else estimate.on_device(parts)
    if devices.limit is None:
        told = f"takes about {fitting.in_words(size)} of each device ({devices.where}), whose memory is not known"
        return Verdict(who=role, fits=None, sentence=told)
    numbers = f"about {fitting.in_words(size)} of {fitting.in_words(devices.limit)} ({devices.where})"
    if size <= devices.limit:
        return Verdict(who=role, fits=True, sentence=f"fits: {numbers}")
    name, most = max(parts.items(), key=lambda part: part[1])
    sentence = f"does not fit: {numbers}; most of it: {name}, {fitting.in_words(most)}"
    return Verdict(who=role, fits=False, sentence=sentence)


def _on_host(parts: Mapping[str, int], count: int) -> int:
    """Bytes of a process whose devices share the memory of the machine."""
    return estimate.on_device(parts) * (count - 1) + sum(parts.values())


def _together(config: Any, there: Mapping[str, Devices], memory: Mapping[str, Mapping[str, int]]) -> Verdict:
    """Of all processes on a machine without accelerators, or of all roles on the devices that one process has."""
    first = next(iter(there.values()))
    if first.limit is None:
        return Verdict(who="together", fits=None, sentence="not known: the devices do not say how much memory they have")
    size, several = sum(estimate.on_device(memory[role]) for role in there), " of each device"
    if first.on_host:
        searchers = config.searchers.count if config.schedule.mode == "asynchronous" else 1
        several = f", with {searchers} searchers" if searchers > 1 else ""
        size = sum(
            (searchers if name.startswith("searcher") else 1) * _on_host(parts, there[name].count if name in there else 1)
            for name, parts in memory.items()
            if name.split(",")[0] in there
        )
    fits = size <= first.limit
    numbers = f"about {fitting.in_words(size)} of {fitting.in_words(first.limit)}{several}"
    return Verdict(who="together", fits=fits, sentence=f"{'fits' if fits else 'does not fit'}: {numbers}")


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
