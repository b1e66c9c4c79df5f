"""The dry run: whether each role fits its devices, by an estimate from shapes, or by compiling the role's programs."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from tba_jax import sharding
from tba_jax.experiment import composition, initial_policy, meshes, sizes, topologies
from tba_jax.experiment.topologies import Devices
from tba_jax.experiment.training import Invocation, check_dry_run, mistakes_end_the_role
from tba_jax.models.hugging_face import load
from tba_jax.outputs import visible
from tba_jax.programs import UNITS, Fit, Measure, Program, in_words, unit_of
from tba_jax.rewards import task_models
from tba_jax.roles import gpus
from tba_jax.run import processes
from tba_jax.schemas import Mistakes, flatten, require
from tba_jax.storage import layout, places

log = logging.getLogger(__name__)

ROLES = tuple(meshes.SECTIONS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
    """What a role takes of its devices. who: the role, or "ROLE, task" for devices of its task; parts: as in sizes.memory;
    of: whose bytes these are, the devices or a program; change: part -> the settings that make it less; end: of the sentence."""

    who: str
    devices: Devices
    parts: Mapping[str, int]
    of: str
    change: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    end: str = ""

    @property
    def size(self) -> int:
        """Bytes, of what has the limit: a device, or the machine."""
        on_device = sizes.on_device(self.parts)
        return on_device * (self.devices.count - 1) + sum(self.parts.values()) if self.devices.on_host else on_device


class Verdict(NamedTuple):
    """Whether a role fits its devices. who: the role, or "together". fits: None: not known."""

    who: str
    fits: bool | None
    sentence: str

    def __str__(self) -> str:
        return f"{self.who:9}  {self.sentence}"


def _verdict(taken: Taken, config: Any, about: str) -> Verdict:
    size, limit = f"{about}{in_words(taken.size)}", taken.devices.limit
    if limit is None:
        return Verdict(taken.who, None, f"takes {size} of each device ({taken.of}), whose memory is not known{taken.end}")
    fits, numbers = taken.size <= limit, f"{size} of {in_words(limit)} ({taken.of})"
    if not fits:
        part, most = max(taken.parts.items(), key=lambda item: item[1])
        known = flatten(config.to_dict())  # a default of a custom task is not among them
        change = [f"{name}={known[name]}" if name in known else name for name in taken.change.get(part, ())]
        numbers += f"; most of it: {part}, {in_words(most)}" + ("; change " + ", ".join(change) if change else "")
    return Verdict(taken.who, fits, f"{'fits' if fits else 'does not fit'}: {numbers}{taken.end}")


def verdicts(found: Sequence[Taken], config: Any, *, about: str = "") -> list[Verdict]:
    """The verdict on each role, and on all together where they share their memory. Args: about: "about " for estimates."""
    told, interleaved = [_verdict(each, config, about) for each in found], config.schedule.mode == "interleaved"
    shared = all(each.devices.on_host for each in found)
    if len(found) < 2 or not (interleaved or shared):
        return told
    why, limit = "schedule.mode=interleaved has all roles on the same devices", found[0].devices.limit
    there, searchers = [each for each in found if each.who in ROLES], 1
    if shared:
        there, searchers = [*found], 1 if interleaved else config.searchers.count
        why = "all roles share this machine's memory" + (f", with {searchers} searchers" if searchers > 1 else "")
    size = sum((searchers if each.who.startswith("searcher") else 1) * each.size for each in there)
    fits = None if limit is None else size <= limit
    numbers = f"{about or 'at most '}{in_words(size)}{'' if limit is None else f' of {in_words(limit)}'}; {why}"
    answer = {None: "takes ", True: "fits: ", False: "does not fit: " if about else "may not fit: "}[fits]
    return [*told, Verdict("together", fits, answer + numbers)]


# By an estimate


def judge(experiment: composition.Experiment) -> tuple[list[Verdict], dict[str, dict[str, int]]]:
    """The verdicts on the roles on this machine by an estimate, and the estimate of their memory, see sizes.memory."""
    there, refused = topologies.here(experiment)
    if trains := there.get("trainer"):
        experiment = meshes.by_need(experiment, devices=trains.count, memory=None if trains.on_host else trains.limit)
    memory = sizes.memory(experiment, {role: devices.count for role, devices in there.items()})
    found = []
    for who, parts in memory.items():
        role, _, task = who.partition(", ")
        if devices := there.get(role):
            own = meshes.task_devices(experiment, role)
            devices = dataclasses.replace(devices, count=own if task else devices.count - own)
            found.append(Taken(who=who, devices=devices, parts=parts, of=devices.where))
    config = experiment.config
    told = [_verdict(each, config, "about ") for each in found] if refused else verdicts(found, config, about="about ")
    return told + [Verdict(who, False, f"does not fit: {why}") for who, why in refused.items()], memory


def describe(experiment: composition.Experiment, run: layout.RunDir | None = None) -> str:
    """The answer of a dry run that compiles nothing: an estimate for this machine, and what was not checked.

    Args: run: not there yet; None, or a run that is there: nothing is said of its disk.
    """
    found, memory = judge(experiment)
    lines = [str(verdict) for verdict in found]
    if run is not None and not places.exists(run.config):
        for demand in sizes.demands(experiment, run):
            lines.append(f"{'disk':9}  {'fits' if demand.size <= demand.free else 'does not fit'}: {demand.numbers}")
    lines += [f"These are estimates from shapes, for this machine: {topologies.in_short()}.", ""]
    lines += [sizes.describe_memory(memory), ""]
    unchecked = ["the programs, which --compile and --topology compile", *unchecked_inputs(experiment)]
    return "\n".join([*lines, f"not checked: {'; '.join(unchecked)}", "--dry_run=full prints config and shapes as well"])


def check_fits(experiment: composition.Experiment) -> None:
    """Tells the estimate of what the run takes on this machine. Raises ValueError where a role does not fit by it."""
    found, _ = judge(experiment)
    for verdict in found:
        log.info("%s", verdict)
    problems = [f"{verdict.who} {verdict.sentence}" for verdict in found if verdict.fits is False]
    less = "take a smaller model, adapters (lora.rank) or less memory for search (searchers.slots, evaluation.batch_size)"
    told = f"this machine ({topologies.in_short()}), by estimates from shapes: {'; '.join(problems)}; {less}"
    require(not problems, f"the run does not fit {told}")


def unchecked_inputs(experiment: composition.Experiment) -> list[str]:
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


# By compiling


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleFit:
    """The figures of a role's programs. who, devices: see Taken; mesh: in words."""

    who: str
    devices: Devices
    mesh: str
    fits: Sequence[Fit]

    @property
    def worst(self) -> Fit:
        """The program with the highest peak."""
        return max(self.fits, key=lambda fit: fit.peak)

    def taken(self) -> Taken:
        worst, end = self.worst, "; by TPU proxy" if topologies.BY_PROXY in self.devices.where else ""
        change = {"outputs": worst.program.room.get("arguments", ()), **worst.program.room}
        return Taken(who=self.who, devices=self.devices, parts=worst.parts(), of=worst.name, change=change, end=end)


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
    world: dict[str, Any] = dict(policy=e.policy, tokenizer=e.tokenizer, task=e.task, devices=devices)
    if role == "searcher":
        return searcher.programs(e.config, e.contract, queries=e.queries["train"], teacher=e.teacher, **world)
    return evaluator.programs(e.config, e.contract, queries=composition.heldout_queries(e), **world)


def fit(experiment: composition.Experiment, run: layout.RunDir, *, role: str, on: Devices) -> RoleFit:
    """Compiles the programs of a role for its devices."""
    experiment = meshes.of_trainer(experiment, on.of_jax) if role == "trainer" else experiment
    made = programs(experiment, run, role=role, devices=on.of_jax)
    mesh = meshes.in_words(experiment, role=role, devices=on.count)
    own = on.count - meshes.task_devices(experiment, role)
    return RoleFit(who=role, devices=_some(on, 0, own), mesh=mesh, fits=_fits(made, role))


def fit_task(experiment: composition.Experiment, *, role: str, on: Devices) -> RoleFit | None:
    """Compiles the programs of a task's models on the task_devices of a role; None where they have none. Args: on: the role's."""
    if not (own := meshes.task_devices(experiment, role)):
        return None
    length, mesh = experiment.contract.prompt_length + experiment.contract.response_length, sharding.task_mesh(own, on.of_jax)
    made, who = task_models.of_task(experiment.task, mesh, role=role, length=length).alone(), f"{role}, task"
    told = f"{meshes.SECTIONS[role]}.task_devices={own}"
    devices = _some(on, on.count - own, on.count)
    return RoleFit(who=who, devices=devices, mesh=told, fits=_fits(made, who)) if made else None


def _some(on: Devices, first: int, last: int) -> Devices:
    where = on.where.replace(f"{on.count} × ", f"{last - first} × ", 1)
    return dataclasses.replace(on, count=last - first, where=where, of_jax=on.of_jax[first:last])


def _fits(made: Mapping[str, Program], who: str) -> list[Fit]:
    measure, fits = Measure(), []
    for name, program in made.items():
        fits.append(found := measure.fit(name, program))
        log.info("%s: %s compiled in %.0f s, peak %s", who, name, found.seconds, in_words(found.peak))
    return fits


def describe_programs(found: Sequence[RoleFit], *, config: Any) -> str:
    """The text that a dry run prints: a line for each role, and then a table for each role."""
    lines = [str(verdict) for verdict in verdicts([each.taken() for each in found], config)]
    for each in found:
        unit = unit_of(each.worst.peak)
        compiled = f"{len(each.fits)} programs compiled in {sum(fit.seconds for fit in each.fits):.0f} s"
        where = f"{each.who} on {each.devices.where}, {each.mesh}; {unit} of one device; {compiled}"
        lines += ["", where, *_table(each, UNITS[unit])]
    return "\n".join(lines)


def _table(role: RoleFit, unit: int) -> list[str]:
    width = max(len(fit.name) for fit in role.fits)
    columns = ("arguments", "temporaries", "outputs", "aliased", "beside", "peak")
    rows = [f"  {'program':{width}}" + "".join(f"{column:>13}" for column in columns)]
    for fit in role.fits:
        values = (fit.arguments, fit.temporaries, fit.outputs, fit.aliased, sum(fit.beside.values()), fit.peak)
        refused = "  (too large by itself: refused by the compiler)" if fit.refused else ""
        rows.append(f"  {fit.name:{width}}" + "".join(f"{value / unit:13.2f}" for value in values) + refused)
    beside = ", ".join(f"{part} {size / unit:.2f}" for part, size in role.worst.beside.items())
    return [*rows, f"  beside {role.worst.name}: {beside or 'nothing'}"]


def _here(s: Invocation, wanted: Sequence[str], visible: Sequence[gpus.Gpu], *, role: str) -> dict[str, Devices]:
    """Role -> its devices on this machine. Args: visible: its GPUs, before this process has taken memory of them."""
    there = gpus.jax_devices()
    if role != "all" or there[0].platform != "gpu" or s.config.schedule.mode == "interleaved":
        return dict.fromkeys(wanted, topologies.of_jax(there))
    placed = topologies.by_placement(s.experiment, visible)
    return {each: topologies.of_jax(there[: placed[each].count], limit=placed[each].limit) for each in wanted}


# What --dry_run does: the checks of a start at once, and the job that prints what fits. Nothing is written.


def estimated(s: Invocation, *, full: bool) -> Callable[[], int]:
    """Args: full: prints the config and the shapes as well."""
    check_dry_run(s)
    composition.tell_changed_prompts(s.experiment)

    def job() -> int:
        _print(s, describe(s.experiment, s.run), full=full)
        return 0

    return job


def compiled(s: Invocation, *, asked: Mapping[str, str], role: str, full: bool) -> Callable[[], int]:
    """Raises ValueError where a topology cannot be had, or the mesh of a role does not fit its devices.

    Args: asked: role -> topology (topologies.parse); {}: the roles have the devices of this process. role: the only one that is
    compiled; "all": all roles of the run.
    """
    if role not in ("all", *ROLES):
        raise ValueError(f"--role={role} computes nothing of its own; roles that compute: {', '.join(ROLES)}")
    of_run = meshes.roles_of(s.config)
    wanted = [role] if role != "all" else [each for each in of_run if each in asked or not asked or "all" in asked]
    found = Mistakes()
    if asked:
        there = found.attempt(topologies.of_roles, s.experiment, asked, *wanted)
        if not there and not found:
            what = f"topology for --role={role}" if wanted else "role of this run"
            found.add([f"--topology={','.join(asked.values())} names no {what}"])
    else:
        there = found.attempt(_here, s, wanted, gpus.visible(), role=role)
    processes.stop_at_once()
    for each, on in (there or {}).items():
        found.attempt(meshes.check, s.experiment, role=each, devices=on.count)
    found.attempt(check_dry_run, s)
    found.end()
    experiments = {each: (s.experiment.on_device(on.of_jax[0]), on) for each, on in (there or {}).items()}

    def job() -> int:
        fits = []
        for each, (experiment, on) in experiments.items():
            with mistakes_end_the_role():  # slots of a victim that do not divide over the devices, say
                of_task = fit_task(experiment, role=each, on=on)
                fits += [fit(experiment, s.run, role=each, on=on), *([of_task] if of_task else [])]
        unchecked = "; ".join(unchecked_inputs(s.experiment))
        _print(s, describe_programs(fits, config=s.config), f"not checked: {unchecked}" if unchecked else "", full=full)
        return 0

    return job


def _print(s: Invocation, *parts: str, full: bool) -> None:
    print(visible("\n\n".join([*filter(None, parts), *([sizes.describe(s.experiment)] if full else [])])))
