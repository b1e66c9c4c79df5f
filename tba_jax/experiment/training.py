"""How a role comes to its run, whose contract and schedule it keeps; and the jobs of the roles trainer and reference."""

import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from tba_jax.experiment import composition, estimate, initial_policy, meshes, stored_run
from tba_jax.models import hardware
from tba_jax.replay import journal
from tba_jax.rewards import task_models
from tba_jax.roles import gpus, rendezvous
from tba_jax.roles.process_group import Group, Member
from tba_jax.run import processes as processes_lib
from tba_jax.run.world import ALONE, World
from tba_jax.schemas import Mistakes, flatten
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout, places
from tba_jax.storage.lease import EpochLease, LeaseHeld
from tba_jax.telemetry import metrics
from tba_jax.telemetry.alarms import Alarms
from tba_jax.telemetry.metrics import missing
from tba_jax.telemetry.status import Record, Window

log = logging.getLogger(__name__)

Job = Callable[[], int]

# Seconds after which Python takes the interpreter from a thread that others wait for. With its default of 5 ms, the dispatch of
# an update waits that long or longer while a thread writes a snapshot.
_SWITCH_SECONDS = 3e-4


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
    """The invocation as the devices of this process compute it, which it logs. Args: name: of the role, if not its own."""
    devices = gpus.jax_devices()
    if devices[0].platform == "cpu" and (told := gpus.hidden_gpus()):
        log.warning("%s", told)
    experiment = s.experiment.on_device(devices[0])
    meshed = meshes.of_trainer(s.experiment, devices) if "trainer" in roles else s.experiment
    first, compute = devices[0], experiment.policy.model.compute_dtype
    there = f"backend {first.platform}, {len(devices)} × {first.device_kind}"
    for role in roles:
        mesh = meshes.in_words(meshed, role=role, devices=len(devices))
        log.info("%s: %s, %s, model.compute_dtype=%s", name or role, there, mesh, compute)
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

    Args: may_change_schedule: whether this role is the one that records a schedule of other settings (--allow_change). check: of
    the role, whose mistakes are told together with those of the run.
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
    """Adds to `found` why a role may not join the run that is there, or make one, and raises it. Args: fetch: whether weights are
    fetched; where not, reward models that are away count as those of the run."""
    found.attempt(initial_policy.check, s.experiment, s.run, init_from=s.init_from, fetch=fetch)
    contract, exists = s.experiment.contract, places.exists(s.run.config)
    if may_change_schedule:
        found.attempt(initial_policy.check_behavior_is_known, s.run, s.config)
    if may_change_schedule or not exists:
        found.attempt(initial_policy.check_init_from, s.run, s.config, contract, init_from=s.init_from)
        found.attempt(initial_policy.check_mounts, s.run, s.config, contract, init_from=s.init_from)
    if exists:
        gone = set() if fetch else {use.setting for use in task_models.away(s.experiment.task)}
        found.attempt(_check_joins, s, gone)
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


def _check_joins(s: Invocation, gone: Collection[str]) -> None:
    """Args: gone: settings of reward models that are away."""
    contract = s.experiment.contract
    there = contract_lib.read_run(s.run, called=f"workdir {str(s.run.shared)!r}")["contract"]["reward_models"]
    known = {setting: there[setting] for setting in gone if setting in there}
    contract = dataclasses.replace(contract, reward_models={**contract.reward_models, **known})
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


# The trainer and its reference policy


def reference(s: Invocation) -> Job:
    """Makes the policy that step 0 starts from, and nothing else."""
    group = _group(s)
    if isinstance(group, Member):
        return lambda: _follow(s, group)
    with group.guard(ValueError):
        join(s, may_change_schedule=False, check=lambda: check_devices(s.experiment, "trainer"))

    def job() -> int:
        here, record = computed_on(s, "trainer", name="reference"), record_of(s, "reference")
        with record.told_failures(), group.guard(ValueError), mistakes_end_the_role():
            group.call("join", run=contract_lib.read(s.run)["id"])
            try:
                layout.reference_id(s.run)
            except (FileNotFoundError, ValueError):  # there is none yet, or its name is damaged
                try:  # a trainer that begins meanwhile would make another policy
                    lease = EpochLease.acquire(s.run.lease)
                except LeaseHeld as error:
                    raise processes_lib.BadInput(f"{error}; it makes the policy itself") from error
                try:
                    _make_reference(here, group, record)
                finally:
                    lease.release()
        record.close("finished")
        group.end(0)
        return 0

    return job


def _group(s: Invocation) -> Group | Member:
    """Meets the other processes of the trainer, if there are any. Returns the group to lead, or the membership to follow."""
    if s.world.processes == 1:
        return Group()
    if s.config.schedule.mode == "interleaved":
        raise ValueError(f"--processes={s.world.processes} and schedule.mode=interleaved exclude each other: it is one process")
    told = {f"config.{name}": value for name, value in flatten(contract_lib.plain(s.config.to_dict())).items()}
    told |= {f"contract.{name}": value for name, value in s.experiment.contract.to_json().items()}
    told |= {"--init_from": s.init_from, "--allow_change": list(s.allow_change), "--shared": str(s.run.elsewhere or "")}
    limits = rendezvous.Limits(**{name: s.config.trainer[name] for name in ("connect_seconds", "heartbeat_seconds")})
    return rendezvous.meet(s.world, workdir=s.run.root, settings=told, visible_gpus=len(gpus.visible()), limits=limits)


def _make_reference(s: Invocation, group: Group, record: Record) -> None:
    """Makes the policy that step 0 starts from, unless the run has one. The caller holds the lease."""
    # First: nobody is to wait for a warm start in vain.
    composition.tell_changed_prompts(s.experiment, Alarms(s.run.metrics("trainer")))
    if places.exists(s.run.initial_reference):
        if initial_policy.mend(s.run):  # until now nobody knew whose rows go with it
            initial_policy.check_mounts(s.run, s.config, s.experiment.contract, init_from=s.init_from)
        return
    writer = metrics.open_writer(s.config, s.run, "reference", role="reference", status=record.status)

    def report(step: int, loss: float) -> None:
        log.info("warm start: step %d, loss %.3f", step, loss)
        writer.write(step, {"loss": loss})
        record.status.phase("warm start", done=step, total=s.config.warm_start.steps)

    initial_policy.ensure(_on_mesh(s).experiment, s.run, report=report, status=record.status, group=group)
    record.status.phase("")
    writer.close()


def make_trainer(
    s: Invocation, *, publish_every_steps: int, group: Group | None = None, record: Record | None = None
) -> tuple[Any, EpochLease]:
    """The trainer, resumed, and its lease.

    Journalled steps after the checkpoint are done again under the schedule that they were done with: for each past schedule a
    trainer of its config resumes, up to the last step of that schedule, and leaves a checkpoint.

    Args: group: of the processes of the trainer, of which this one is the first; None: it is alone.
    """
    from tba_jax.roles.trainer.resume import CheckpointLeftOut

    group, record = group or Group(), record or record_of(s, "trainer")
    while True:
        # Where the newest checkpoint did not count and is gone, the schedules of the steps after the one before are asked again.
        with contextlib.suppress(CheckpointLeftOut):
            newest = max(layout.steps_in(s.run.checkpoints), default=0)
            for step, values in stored_run.past_schedules(s.run, after=newest):
                past = _with_settings(s, values)
                every_steps = 1 if past.config.schedule.mode == "interleaved" else past.config.publish.every_steps
                trainer, lease = _begin_trainer(past, group, values, record=record, publish_every_steps=every_steps, until=step)
                trainer.close()
                lease.release()
            return _begin_trainer(s, group, {}, record=record, publish_every_steps=publish_every_steps)


def _on_mesh(s: Invocation) -> Invocation:
    """The invocation with the mesh of a trainer on the devices of all its processes."""
    return dataclasses.replace(s, experiment=meshes.of_trainer(s.experiment, gpus.jax_devices()))


def _with_settings(s: Invocation, values: Mapping[str, Any]) -> Invocation:
    """The invocation with other values of settings, as stored_run.past_schedules gives them."""
    config = stored_run.with_settings(s.config, values)
    return dataclasses.replace(s, experiment=dataclasses.replace(s.experiment, config=config))


def _begin_trainer(
    s: Invocation,
    group: Group,
    settings: Mapping[str, Any],
    *,
    record: Record,
    publish_every_steps: int,
    until: int | None = None,
) -> tuple[Any, EpochLease]:
    """Args: settings: in which `s` differs from the invocation of the other processes."""
    from tba_jax.roles.trainer.resume import CheckpointLeftOut, resume
    from tba_jax.roles.trainer.trainer import Trainer

    s = _on_mesh(s)
    # What learner.mesh.fsdp=0 means follows from the memory of a device, and must be the same in all processes.
    settings = {**settings, "learner.mesh.fsdp": s.config.learner.mesh.fsdp}
    journals = journal.epoch_files(s.run.journal)
    lease = EpochLease.acquire(s.run.lease, after=max(journals, default=0))
    try:
        if (of := lease.journal) and of["epoch"] not in journals:
            raise ValueError(
                f"the run that meets in {s.run.shared} went on in {of['workdir']} on host {of['host']}, where its journal and "
                f"checkpoints are; {s.run.journal} lacks the file of epoch {of['epoch']}: start it there, restore the folders "
                f"from a copy of that workdir, or begin a new run by --init_from={s.run.shared}@STEP"
            )
        places.make_folder(s.run.journal)
        _make_reference(s, group, record)
        group.call("begin trainer", settings=settings)
        record.status.phase("loading")
        world: dict[str, Any] = dict(policy=s.experiment.policy, lease=lease, group=group, record=record)
        trainer = Trainer(s.config, s.experiment.contract, s.run, **world, publish_every_steps=publish_every_steps)
        # Where a trainer of a past schedule was before this one, the others have let go of it, and take no snapshot for its.
        group.reports("begun")
        try:
            resume(trainer, until=until)
        except CheckpointLeftOut:
            trainer.close()
            raise
    except BaseException:
        lease.release()
        raise
    return trainer, lease


def trainer(s: Invocation) -> Job:
    """One process of a trainer: the first one runs it, and the others follow."""
    from tba_jax.roles.trainer.loop import run_trainer

    group = _group(s)
    if isinstance(group, Member):
        return lambda: _follow(s, group)
    with group.guard(ValueError, LeaseHeld):
        EpochLease.refuse_if_held(s.run.lease)
        join(s, may_change_schedule=True, check=lambda: check_devices(s.experiment, "trainer"))
        here = computed_on(s, "trainer")
        record = record_of(s, "trainer")
        group.call("join", run=contract_lib.read(s.run)["id"])
        with record.told_failures():
            made, lease = make_trainer(here, publish_every_steps=s.config.publish.every_steps, group=group, record=record)
        group.call("go live")
    stop = processes_lib.StopSignal()

    def job() -> int:
        sys.setswitchinterval(_SWITCH_SECONDS)
        with group.guard(), record.told_failures(), contextlib.closing(lease):
            finished = run_trainer(made, s.run, stop=lambda: stop() or group.is_asked_to_stop())
            lease.release()
        how = "all of them are done" if finished else "stopped; the same command goes on from here"
        log.info("step %d of %d: %s", made.step_number, made.config.learner.steps, how)
        code = 0 if finished else processes_lib.STOPPED
        group.end(code)
        return code

    return job


def _follow(s: Invocation, member: Member) -> int:
    """Does what process 0 calls for, until it ends the group. Returns the exit code of process 0."""
    from tba_jax.roles.trainer.loop import Follower

    member.tell_signals(processes_lib.StopSignal())
    follower: Follower | None = None
    record = Record()
    is_live = False
    log.info("process %d of the trainer, pid %d, follows process 0", s.world.process, os.getpid())
    for name, content, arrays in member.calls():
        mistakes = contextlib.nullcontext() if is_live else mistakes_end_the_role()
        with record.told_failures(), member.guard(), mistakes:
            match name:
                case "join":
                    s = dataclasses.replace(s, run=contract_lib.wait_for(s.run, content["run"]))
                    s = computed_on(s, "trainer")
                    record = record_of(s, f"trainer-process-{s.world.process}")
                case "make reference":
                    e = _with_settings(s, content["settings"]).experiment
                    initial_policy.follow(e, s.run, member, init_from=content["init_from"])
                case "begin trainer":
                    e = _with_settings(s, content["settings"]).experiment
                    follower = Follower(e.config, e.contract, s.run, policy=e.policy, member=member, record=record)
                    member.report("begun")
                case "go live":
                    is_live = True
                    sys.setswitchinterval(_SWITCH_SECONDS)
                case "close":
                    assert follower is not None, "nothing has begun"
                    follower.close()
                    follower = None
                case _:
                    assert follower is not None, "nothing has begun"
                    follower.do(name, content, arrays)
        del arrays
    record.close("finished" if member.code == 0 else "stopped")
    member.end()
    return member.code
