"""How a role comes to its run, whose contract and schedule it keeps; and the jobs of the roles trainer and reference."""

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from tba_jax import trajectory
from tba_jax.experiment import composition, initial_policy, meshes, sizes, stored_run
from tba_jax.models import hardware
from tba_jax.objectives import OBJECTIVES
from tba_jax.replay import journal
from tba_jax.replay.log_z import FrozenLogZ
from tba_jax.rewards import task_models
from tba_jax.roles import gpus
from tba_jax.roles import plan as plan_lib
from tba_jax.roles.plan import Plan
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
    arguments: the command line of main, which child processes get too. world: of the trainer's processes, as this one sees it.
    serve: PORT or HOST:PORT at which a searcher serves clients, "": at none."""

    experiment: composition.Experiment
    run: layout.RunDir
    name: str
    label: str
    allow_change: tuple[str, ...]
    arguments: tuple[str, ...]
    init_from: str = ""
    world: World = ALONE
    profile: Window | None = None
    serve: str = ""

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
        found.attempt(sizes.check_disk, sizes.demands(s.experiment, s.run, trains=may_change_schedule))
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
        found.attempt(_check_log_z, s.experiment)
    if may_change_schedule or not exists:
        found.attempt(initial_policy.check_init_from, s.run, s.config, contract, init_from=s.init_from)
        found.attempt(initial_policy.check_mounts, s.run, s.config, contract, init_from=s.init_from)
    if exists:
        gone = set() if fetch else {use.setting for use in task_models.away(s.experiment.task)}
        gone |= {contract_lib.TEACHER} - contract.reward_models.keys()
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


def _check_log_z(experiment: composition.Experiment) -> None:
    """Raises ValueError where the objective is given log Z, and not of this p̃ and of all queries."""
    c = experiment.config.learner
    if OBJECTIVES[c.objective].given_log_z:
        queries = (trajectory.query_id(query.prompt) for query in experiment.queries["train"])
        FrozenLogZ.read(c.log_z_path).check(c, queries, contract=experiment.contract)


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
    plan = _plan(s)
    with plan.guard(ValueError):
        joined = _join_together(s, plan, may_change_schedule=False)

    def job() -> int:
        here, record = computed_on(joined, "trainer", name="reference"), record_of(joined, _named("reference", plan))
        with record.told_failures(), plan.guard(ValueError), mistakes_end_the_role():
            lease = _lease_for_reference(joined) if plan.leads else None
            try:
                _make_reference(here, plan, record)
            finally:
                if lease is not None:
                    lease.release()
        record.close("finished")
        plan.end()
        return 0

    return job


def _lease_for_reference(s: Invocation) -> EpochLease | None:
    """None where the run has its reference policy already."""
    try:
        layout.reference_id(s.run)
        return None
    except (FileNotFoundError, ValueError):  # there is none yet, or its name is damaged
        try:  # a trainer that begins meanwhile would make another policy
            return EpochLease.acquire(s.run.lease)
        except LeaseHeld as error:
            raise processes_lib.BadInput(f"{error}; it makes the policy itself") from error


def _named(role: str, plan: Plan) -> str:
    """The name of the records of this process."""
    return role if plan.leads else f"trainer-process-{plan.process}"


def _join_together(s: Invocation, plan: Plan, *, may_change_schedule: bool) -> Invocation:
    """Process 0 makes or joins the run, which the others then find. Returns the invocation in that run."""
    if plan.leads:
        join(s, may_change_schedule=may_change_schedule, check=lambda: check_devices(s.experiment, "trainer"))
    run_id = plan.share(lambda: contract_lib.read(s.run)["id"])
    return s if plan.leads else dataclasses.replace(s, run=contract_lib.wait_for(s.run, run_id))


def _plan(s: Invocation) -> Plan:
    """Meets the other processes of the trainer, if there are any."""
    if s.world.processes == 1:
        return Plan()
    if s.config.schedule.mode == "interleaved":
        raise ValueError(f"--processes={s.world.processes} and schedule.mode=interleaved exclude each other: it is one process")
    told = {f"config.{name}": value for name, value in flatten(contract_lib.plain(s.config.to_dict())).items()}
    told |= {f"contract.{name}": value for name, value in s.experiment.contract.to_json().items()}
    told |= {"--init_from": s.init_from, "--allow_change": list(s.allow_change), "--shared": str(s.run.elsewhere or "")}
    told |= {"--processes": s.world.processes}  # JAX goes by what process 0 says
    limits = {name: s.config.trainer[name] for name in ("connect_seconds", "heartbeat_seconds")}
    devices = s.world.local_devices(len(gpus.visible()))
    return plan_lib.start(s.world, workdir=s.run.root, settings=told, devices=devices, **limits)


def _make_reference(s: Invocation, plan: Plan, record: Record) -> None:
    """Makes the policy that step 0 starts from, unless the run has one. The caller holds the lease, in process 0."""
    if plan.share(lambda: _has_reference(s)):
        return
    # What learner.mesh.fsdp=0 means follows from the memory of a device, and must be the same in all processes.
    fsdp = plan.share(lambda: _on_mesh(s).config.learner.mesh.fsdp)
    experiment = _with_settings(s, {"learner.mesh.fsdp": fsdp}).experiment
    if not plan.leads:
        initial_policy.make(experiment, s.run, report=lambda step, loss: None, plan=plan)
        return
    writer = metrics.open_writer(s.config, s.run, "reference", role="reference", status=record.status)

    def report(step: int, loss: float) -> None:
        log.info("warm start: step %d, loss %.3f", step, loss)
        writer.write(step, {"loss": loss})
        record.status.phase("warm start", done=step, total=s.config.warm_start.steps)

    initial_policy.make(experiment, s.run, report=report, status=record.status, plan=plan)
    record.status.phase("")
    writer.close()


def _has_reference(s: Invocation) -> bool:
    # First: nobody is to wait for a warm start in vain.
    composition.tell_changed_prompts(s.experiment, Alarms(s.run.metrics("trainer")))
    if not places.exists(s.run.initial_reference):
        return False
    if initial_policy.mend(s.run):  # until now nobody knew whose rows go with it
        initial_policy.check_mounts(s.run, s.config, s.experiment.contract, init_from=s.init_from)
    return True


def make_trainer(s: Invocation, *, publish_every_steps: int, plan: Plan | None = None, record: Record | None = None) -> Any:
    """The trainer, resumed. Process 0 holds its lease.

    Journalled steps after the checkpoint are done again under the schedule that they were done with: for each past schedule a
    trainer of its config resumes, up to the last step of that schedule, and leaves a checkpoint.

    Args: plan: of the processes of the trainer, all of which call this; None: this one is alone.
    """
    from tba_jax.roles.trainer.resume import CheckpointLeftOut

    plan, record = plan or Plan(), record or record_of(s, "trainer")

    def past_schedules() -> list[Any]:
        return [*stored_run.past_schedules(s.run, after=max(layout.steps_in(s.run.checkpoints), default=0))]

    while True:
        # Where the newest checkpoint did not count and is gone, the schedules of the steps after the one before are asked again.
        with contextlib.suppress(CheckpointLeftOut):
            for step, values in plan.share(past_schedules):
                past = _with_settings(s, values)
                every_steps = 1 if past.config.schedule.mode == "interleaved" else past.config.publish.every_steps
                trainer = _begin_trainer(past, plan, record=record, publish_every_steps=every_steps, until=step)
                trainer.close()
                if plan.leads:
                    trainer.lease.release()
            return _begin_trainer(s, plan, record=record, publish_every_steps=publish_every_steps)


def _on_mesh(s: Invocation) -> Invocation:
    """The invocation with the mesh of a trainer on the devices of all its processes."""
    return dataclasses.replace(s, experiment=meshes.of_trainer(s.experiment, gpus.jax_devices()))


def _with_settings(s: Invocation, values: Mapping[str, Any]) -> Invocation:
    """The invocation with other values of settings, as stored_run.past_schedules gives them."""
    config = stored_run.with_settings(s.config, values)
    return dataclasses.replace(s, experiment=dataclasses.replace(s.experiment, config=config))


def _begin_trainer(s: Invocation, plan: Plan, *, record: Record, publish_every_steps: int, until: int | None = None) -> Any:
    from tba_jax.roles.trainer.resume import CheckpointLeftOut, resume
    from tba_jax.roles.trainer.trainer import Trainer

    s = _with_settings(s, {"learner.mesh.fsdp": plan.share(lambda: _on_mesh(s).config.learner.mesh.fsdp)})
    lease = _acquire(s) if plan.leads else None
    try:
        _make_reference(s, plan, record)
        record.status.phase("loading")
        world: dict[str, Any] = dict(policy=s.experiment.policy, lease=lease, plan=plan, record=record)
        trainer = Trainer(s.config, s.experiment.contract, s.run, **world, publish_every_steps=publish_every_steps)
        try:
            resume(trainer, until=until)
        except CheckpointLeftOut:
            trainer.close()
            raise
    except BaseException:
        if lease is not None:
            lease.release()
        raise
    return trainer


def _acquire(s: Invocation) -> EpochLease:
    """The lease of the run, whose journal is in this workdir."""
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
    except BaseException:
        lease.release()
        raise
    return lease


def trainer(s: Invocation) -> Job:
    """One process of a trainer."""
    from tba_jax.roles.trainer.loop import run_trainer

    plan = _plan(s)
    with plan.guard(ValueError, LeaseHeld):
        if plan.leads:
            EpochLease.refuse_if_held(s.run.lease)
        here = computed_on(_join_together(s, plan, may_change_schedule=True), "trainer")
        record = record_of(here, _named("trainer", plan))
        with record.told_failures():
            made = make_trainer(here, publish_every_steps=s.config.publish.every_steps, plan=plan, record=record)
    stop = processes_lib.StopSignal()
    plan.on_stop(stop)

    def job() -> int:
        sys.setswitchinterval(_SWITCH_SECONDS)
        held = contextlib.closing(made.lease) if plan.leads else contextlib.nullcontext()
        with plan.guard(), record.told_failures(), held:
            finished = run_trainer(made, here.run, stop=stop)
            if plan.leads:
                made.lease.release()
        how = "all of them are done" if finished else "stopped; the same command goes on from here"
        log.info("step %d of %d: %s", made.step_number, made.config.learner.steps, how)
        plan.end()
        return 0 if finished else processes_lib.STOPPED

    return job
