"""How a role comes to its run: it makes the run or joins the run that is there, whose contract and schedule it keeps."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

from tba_jax.experiment import checks, composition, estimate, initial_policy, meshes, stored_run
from tba_jax.models import hardware
from tba_jax.replay import journal
from tba_jax.rewards import task_models
from tba_jax.roles import gpus, jax_support
from tba_jax.run import processes as processes_lib
from tba_jax.run.world import ALONE, World
from tba_jax.schemas import Mistakes
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout, places
from tba_jax.tasks.interface import SPLITS
from tba_jax.telemetry.alarms import Alarms
from tba_jax.telemetry.record import Record, Window
from tba_jax.telemetry.trackers import missing
from tba_jax.text.prompts import changed_by

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Invocation:
    """What main was called with. name: of the role's metrics, "": the default. label: the first word of the run's last line.
    arguments: the command line of main, which child processes get too. world: of the trainer's processes, as this one sees it."""

    experiment: composition.Experiment
    run: layout.RunDir
    name: str
    label: str
    allow_change: tuple[str, ...]
    arguments: tuple[str, ...]
    init_from: str = ""
    world: World = ALONE
    profile: Window | None = None

    @property
    def config(self) -> Any:
        return self.experiment.config


def check_devices(experiment: composition.Experiment, *roles: str) -> None:
    """Raises ValueError where JAX misses GPUs of this process, or the meshes of roles that run in it do not fit its devices."""
    devices, found = gpus.jax_devices(), Mistakes()
    found.attempt(hardware.check, experiment.policy.model, hardware.of(devices[0]))
    for role in roles:
        found.attempt(check_role, experiment, role=role, devices=len(devices))
    found.end()


def check_role(experiment: composition.Experiment, *, role: str, devices: int) -> None:
    """Raises ValueError where the mesh of a role does not fit so many devices, or its task's models cannot be had."""
    found = Mistakes()
    found.attempt(meshes.check, experiment, role=role, devices=devices)
    found.attempt(task_models.check, experiment.task, role=role)
    found.end()


def computed_on(s: Invocation, *roles: str, name: str = "") -> Invocation:
    """The invocation as the devices of this process compute it. The first line of a role's log says what they are.

    Args: name: of the role, if not its own.
    """
    devices = gpus.jax_devices()
    if devices[0].platform == "cpu" and (told := jax_support.hidden_gpus()):
        log.warning("%s", told)
    experiment = s.experiment.on_device(devices[0])
    meshed = meshes.of_trainer(s.experiment, devices) if "trainer" in roles else s.experiment
    for role in roles:
        mesh, compute = meshes.in_words(meshed, role=role, devices=len(devices)), experiment.policy.model.compute_dtype
        there = devices[0].platform, len(devices), devices[0].device_kind
        log.info("%s: backend %s, %d × %s, %s, model.compute_dtype=%s", name or role, *there, mesh, compute)
    return dataclasses.replace(s, experiment=experiment)


def check_dry_run(s: Invocation) -> None:
    """The checks of a start, but for those of devices: writes nothing and fetches no weights. Raises ValueError: all mistakes."""
    found = Mistakes()
    for role in meshes.roles_of(s.config):
        found.attempt(task_models.check, s.experiment.task, role=role, fetch=False)
    found.attempt(layout.check_can_be_made, s.run)
    _check_run(s, found, may_change_schedule=True, fetch=False)


def join(s: Invocation, *, may_change_schedule: bool, check: Callable[[], None] = lambda: None) -> None:
    """Makes the run or joins the run that is there. Raises ValueError where it is a run of another config, and writes nothing.

    Args:
      may_change_schedule: whether this role is the one that records a schedule of other settings (--allow_change).
      check: of the role, whose mistakes are told together with those of the run.
    """
    found = Mistakes()
    found.attempt(check)
    if not places.exists(s.run.config):  # a run that goes on has an alarm for its disk
        found.attempt(estimate.check_disk, estimate.demands(s.experiment, s.run, trains=may_change_schedule))
    _check_run(s, found, may_change_schedule=may_change_schedule, fetch=True)
    contract_lib.join(s.run, s.config, s.experiment.contract, init_from=s.init_from)
    if may_change_schedule:
        changes = stored_run.change_schedule(s.run, s.config, allowed=s.allow_change, step=journal.last_step(s.run.journal))
        for name, (there, here) in changes.items():
            log.warning("changed %s from %r to %r", name, there, here)


def _check_run(s: Invocation, found: Mistakes, *, may_change_schedule: bool, fetch: bool) -> None:
    """Adds to `found` why a role may not join the run that is there, or make one, and raises it; writes nothing.

    Args: fetch: see initial_policy.check; where not, reward models that are away count as those of the run.
    """
    found.attempt(initial_policy.check, s.experiment, s.run, init_from=s.init_from, fetch=fetch)
    contract, exists = s.experiment.contract, places.exists(s.run.config)
    if may_change_schedule:
        found.attempt(initial_policy.check_behavior_is_known, s.run, s.config)
    if may_change_schedule or not exists:
        found.attempt(initial_policy.check_init_from, s.run, s.config, contract, init_from=s.init_from)
        found.attempt(initial_policy.check_mounts, s.run, s.config, contract, init_from=s.init_from)
    if exists:
        found.attempt(_check_joins, s, fetch=fetch)
    if exists and may_change_schedule:
        step = journal.last_step(s.run.journal)
        found.attempt(stored_run.check_changes, s.run, s.config, allowed=s.allow_change, step=step)
    found.end()
    if processes_lib.expected_run():  # the supervisor of this process has said the same
        return
    for split, count in s.experiment.skipped.items():
        if count:
            log.warning("%d %s prompts are longer than task.prompt_length and left out", count, split)
    for sink in dict.fromkeys(s.config.metrics.sinks):
        if sentence := missing(sink):
            log.warning("%s", sentence)


def _check_joins(s: Invocation, *, fetch: bool) -> None:
    contract = s.experiment.contract
    if not fetch:  # reward models whose weights are not on this machine count as those of the run
        gone = {use.setting for use in task_models.away(s.experiment.task)}
        there = contract_lib.read_run(s.run, called=f"workdir {str(s.run.shared)!r}")["contract"]["reward_models"]
        known = {setting: digest for setting, digest in there.items() if setting in gone}
        contract = dataclasses.replace(contract, reward_models=dict(contract.reward_models) | known)
    contract_lib.check_joins(s.run, s.config, contract, init_from=s.init_from)


def record_of(s: Invocation, name: str) -> Record:
    """The record of the role of this process, which begins. Args: name: of the role's metrics."""
    return Record(s.run.metrics(name), traces=s.run.profiles(name), profile=s.profile, devices=gpus.jax_devices())


@contextlib.contextmanager
def mistakes_end_the_role() -> Iterator[None]:
    """Makes a ValueError a mistake of the user, after which starting the role again would not help; storage may recover."""
    try:
        yield
    except ValueError as error:
        if processes_lib.is_storage_failure(error):
            raise
        raise processes_lib.BadInput(str(error)) from error


def with_schedule_of_run(s: Invocation, *, role: str) -> Invocation:
    """The invocation of a joining role with the schedule that the run has now."""
    config, changes = stored_run.with_schedule_of(s.run, s.config)
    if not changes:
        return s
    told = stored_run.changes_in_words(changes)
    log.info("the %s takes the schedule of the run in %s, not that of its command; %s", role, s.run.shared, told)
    with mistakes_end_the_role():  # its own settings may not go with that schedule
        checks.check(config)
    return dataclasses.replace(s, experiment=dataclasses.replace(s.experiment, config=config))


KIND = "prompts_change"
PROMPTS = 256  # of each split, evenly spread: decoding a large data set takes minutes
_ADVICE = "take a model whose tokenizer has these characters, or write prompts without them (the task's prompt setting)"


def tell_changed_prompts(e: composition.Experiment, alarms: Alarms | None = None) -> None:
    """Tells of prompts whose text the tokenizer changes: by an alarm once a run, or without `alarms` by a warning."""
    if alarms is not None and alarms.is_told(KIND):
        return
    changes = []
    for split in SPLITS:
        queries = e.queries[split]
        chosen = range(0, len(queries), -(-len(queries) // PROMPTS))
        count, text, read = changed_by(e.tokenizer, [queries[i].query.prompt for i in chosen])
        if count:
            of = f"{len(chosen)} {split} prompts" + (f" (of {len(queries):,})" if len(chosen) < len(queries) else "")
            changes.append(f"{count} of {of}, such as '{text}', which the policy reads as '{read}'")
    sentence = f"the tokenizer changes the text of {', and '.join(changes)}"
    if changes and alarms is None:
        log.warning("%s; what to do: %s", sentence, _ADVICE)
    elif changes and alarms:
        alarms.tell(kind=KIND, sentence=sentence, advice=_ADVICE, step=0)
