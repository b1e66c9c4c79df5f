"""The jobs of the roles trainer and reference: what each process of a trainer builds from an experiment, and the loop it runs."""

import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tba_jax.experiment import initial_policy, joining, meshes, stored_run
from tba_jax.experiment.joining import Invocation, join, mistakes_end_the_role
from tba_jax.roles import gpus, rendezvous
from tba_jax.roles.process_group import Alone, Group, Member
from tba_jax.run import processes as processes_lib
from tba_jax.schemas import flatten
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout, places
from tba_jax.storage.lease import EpochLease, LeaseHeld
from tba_jax.telemetry import metrics
from tba_jax.telemetry.alarms import Alarms
from tba_jax.telemetry.record import Record

log = logging.getLogger(__name__)

Job = Callable[[], int]

# Seconds after which Python takes the interpreter from a thread that others wait for. With Python's default of 5 ms, the dispatch
# of an update waits that long or longer while a thread writes a snapshot.
_SWITCH_SECONDS = 3e-4


def reference(s: Invocation) -> Job:
    """Makes the policy that step 0 starts from, and nothing else."""
    group = _group(s)
    if isinstance(group, Member):
        return lambda: _follow(s, group)
    with group.guard(ValueError):
        join(s, may_change_schedule=False, check=lambda: joining.check_devices(s.experiment, "trainer"))

    def job() -> int:
        here, record = joining.computed_on(s, "trainer", name="reference"), joining.record_of(s, "reference")
        with record.told_failures(), group.guard(ValueError), mistakes_end_the_role():
            group.call("join", run=contract_lib.read(s.run)["id"])
            try:
                layout.reference_id(s.run)
            except (FileNotFoundError, ValueError):  # there is none yet, or its name is damaged
                try:  # a trainer that begins meanwhile would make another policy
                    lease = EpochLease.acquire(s.run.journal)
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
        return Alone()
    if s.config.schedule.mode == "interleaved":
        raise ValueError(f"--processes={s.world.processes} and schedule.mode=interleaved exclude each other: it is one process")
    told = {f"config.{name}": value for name, value in flatten(contract_lib.plain(s.config.to_dict())).items()}
    told |= {f"contract.{name}": value for name, value in s.experiment.contract.to_json().items()}
    told |= {"--init_from": s.init_from, "--allow_change": list(s.allow_change), "--shared": str(s.run.elsewhere or "")}
    limits = rendezvous.Limits(**{name: s.config.trainer[name] for name in ("connect_seconds", "heartbeat_seconds")})
    return rendezvous.meet(s.world, workdir=s.run.root, settings=told, visible_gpus=len(gpus.visible()), limits=limits)


def _make_reference(s: Invocation, group: Group, record: Record) -> None:
    """Makes the policy that step 0 starts from, unless the run has one. The caller holds the lease. Before that it tells what is
    wrong with the prompts: nobody is to wait for a warm start in vain."""
    joining.tell_changed_prompts(s.experiment, Alarms(s.run.metrics("trainer")))
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

    group, record = group or Alone(), record or joining.record_of(s, "trainer")
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

    layout.claim_shared(s.run)
    s = _on_mesh(s)
    # What learner.mesh.fsdp=0 means follows from the memory of a device, and must be the same in all processes.
    settings = {**settings, "learner.mesh.fsdp": s.config.learner.mesh.fsdp}
    lease = EpochLease.acquire(s.run.journal)
    try:
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
        EpochLease.refuse_if_held(s.run.journal)
        join(s, may_change_schedule=True, check=lambda: joining.check_devices(s.experiment, "trainer"))
        here = joining.computed_on(s, "trainer")
        record = joining.record_of(s, "trainer")
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
    from tba_jax.roles.trainer.follower import Follower

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
                    s = joining.computed_on(s, "trainer")
                    record = joining.record_of(s, f"trainer-process-{s.world.process}")
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
