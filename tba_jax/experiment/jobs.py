"""The job of each `--role`: its checks, the objects it builds from an experiment, and the loop that it runs."""

import contextlib
import dataclasses
import logging
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tba_jax import sharding
from tba_jax.experiment import compiling, composition, initial_policy, meshes, placing, plan, schedule_changes
from tba_jax.experiment.fitting import device_memory
from tba_jax.experiment.joining import Invocation, check_run, join, mistakes_end_the_role, with_schedule_of_run
from tba_jax.models import hardware
from tba_jax.replay.journal import read_lineage
from tba_jax.rewards import task_models
from tba_jax.roles import gpus, placement, supervisor
from tba_jax.roles import progress as progress_lib
from tba_jax.roles.searcher.loop import run_searcher, wait_for_run
from tba_jax.roles.searcher.searcher import Searcher
from tba_jax.run import contract as contract_lib
from tba_jax.run import layout, places
from tba_jax.run import processes as processes_lib
from tba_jax.run.lease import EpochLease
from tba_jax.run.metrics import MetricWriter, TimeAccount
from tba_jax.text.visible import visible

log = logging.getLogger(__name__)

Job = Callable[[], int]


def _check_devices(experiment: composition.Experiment, *roles: str) -> None:
    """Raises ValueError where JAX misses GPUs of this process, or the meshes of roles that run in it do not fit its devices."""
    devices = gpus.jax_devices()
    hardware.check(experiment.policy.model, hardware.of(devices[0]))
    for role in roles:
        meshes.check(experiment, role=role, devices=len(devices), memory=device_memory(devices[0]))
        task_models.check(experiment.task, role=role)


def _say_devices(experiment: composition.Experiment, *roles: str, name: str = "") -> None:
    """The first line of a role's log: what the role computes on. Args: name: of the role, if not its own."""
    devices = gpus.jax_devices()
    for role in roles:
        sizes = meshes.shape(experiment, role=role, devices=len(devices), memory=device_memory(devices[0]))
        mesh = " × ".join(f"{axis}={size}" for axis, size in zip(sharding.MESH_AXES, sizes, strict=True))
        compute = experiment.policy.model.compute_dtype
        log.info(
            "%s: backend %s, %d × %s, %s.mesh %s, model.compute_dtype=%s",
            *(name or role, devices[0].platform, len(devices), devices[0].device_kind, meshes.SECTIONS[role], mesh, compute),
        )


def dry_run(s: Invocation) -> Job:
    """Makes the checks of a start, but for those of devices, and writes nothing; the job prints what would run."""
    for role in compiling.roles_of(s.config):
        meshes.check(s.experiment, role=role, devices=None)
        task_models.check(s.experiment.task, role=role)
    check_run(s, may_change_schedule=True)
    layout.check_can_be_made(s.run)
    if places.exists(s.run.config):
        contract_lib.check_joins(s.run, s.config, s.experiment.contract, init_from=s.init_from)
        schedule_changes.check(s.run, s.config, allowed=s.allow_change, step=len(read_lineage(s.run.journal)))

    def job() -> int:
        print(visible(f"{plan.describe(s.experiment)}\n\n{placing.describe(s.experiment)}"))
        return 0

    return job


def _make_reference(s: Invocation) -> None:
    """Makes the policy that step 0 starts from, unless the run has one."""
    if places.exists(s.run.initial_reference):
        return
    writer = MetricWriter(s.run.metrics("reference"))

    def record(step: int, loss: float) -> None:
        log.info("warm start: step %d, loss %.3f", step, loss)
        writer.write(step, {"loss": loss})

    initial_policy.ensure(meshes.with_trainer_mesh(s.experiment), s.run, report=record)
    writer.close()


def reference(s: Invocation) -> Job:
    _check_devices(s.experiment, "trainer")
    join(s, may_change_schedule=False)

    def job() -> int:
        _say_devices(s.experiment, "trainer", name="reference")
        with mistakes_end_the_role():
            _make_reference(s)
        return 0

    return job


def make_trainer(s: Invocation, *, publish_every_steps: int) -> tuple[Any, EpochLease]:
    """The trainer, resumed, and its lease.

    Journalled steps after the checkpoint are done again under the schedule that they were done with: for each past schedule a
    trainer of its config resumes, up to the last step of that schedule, and leaves a checkpoint.
    """
    newest = max(layout.steps_in(s.run.checkpoints), default=0)
    for step, values in schedule_changes.past(s.run, after=newest):
        config = s.config.copy_and_resolve_references()
        config.update_from_flattened_dict(values)
        every_steps = 1 if config.schedule.mode == "interleaved" else config.publish.every_steps
        past = dataclasses.replace(s, experiment=dataclasses.replace(s.experiment, config=config))
        trainer, lease = _begin_trainer(past, publish_every_steps=every_steps, until=step)
        trainer.close()
        lease.release()
    return _begin_trainer(s, publish_every_steps=publish_every_steps)


def _begin_trainer(s: Invocation, *, publish_every_steps: int, until: int | None = None) -> tuple[Any, EpochLease]:
    from tba_jax.roles.trainer.resume import resume
    from tba_jax.roles.trainer.trainer import Trainer

    layout.claim_shared(s.run)
    lease = EpochLease.acquire(s.run.journal)
    try:
        _make_reference(s)
        trainer = Trainer(
            meshes.with_trainer_mesh(s.experiment).config,
            s.experiment.contract,
            s.run,
            policy=s.experiment.policy,
            lease=lease,
            publish_every_steps=publish_every_steps,
        )
        resume(trainer, until=until)
    except BaseException:
        lease.release()
        raise
    return trainer, lease


def trainer(s: Invocation) -> Job:
    from tba_jax.roles.trainer.loop import run_trainer

    _check_devices(s.experiment, "trainer")
    EpochLease.refuse_if_held(s.run.journal)
    join(s, may_change_schedule=True)
    _say_devices(s.experiment, "trainer")
    made, lease = make_trainer(s, publish_every_steps=s.config.publish.every_steps)
    stop = processes_lib.StopSignal()

    def job() -> int:
        finished = run_trainer(made, s.run, stop=stop)
        lease.release()
        return 0 if finished else processes_lib.STOPPED

    return job


def make_searcher(s: Invocation, *, name: str, account: TimeAccount) -> Searcher:
    e = s.experiment
    return Searcher(
        s.config,
        e.contract,
        s.run,
        policy=e.policy,
        tokenizer=e.tokenizer,
        task=e.task,
        queries=e.queries["train"],
        name=name,
        account=account,
    )


def searcher(s: Invocation) -> Job:
    _check_devices(s.experiment, "searcher")
    join(s, may_change_schedule=False)
    stop = processes_lib.StopSignal(patience_seconds=s.config.searchers.stop_seconds)

    def job() -> int:
        _say_devices(s.experiment, "searcher")
        if contract_lib.is_finished(s.run):
            log.info(
                "the run in %s has finished its %d steps: nothing is left to search", s.run.shared, contract_lib.steps_of(s.run)
            )
            return 0
        if not wait_for_run(s.run, poll_seconds=s.config.searchers.poll_seconds, stop=stop):
            return 0
        joined, account = with_schedule_of_run(s, role="searcher"), TimeAccount()
        with _started_task(s, s.config.searchers.task_devices):
            made = make_searcher(joined, name=s.name or "searcher", account=account)
            run_searcher(made, joined.config, s.run, name=s.name or made.writer, account=account, stop=stop)
        return 0

    return job


@contextlib.contextmanager
def _started_task(s: Invocation, task_devices: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        with mistakes_end_the_role():  # slots that do not divide over the devices, say
            stack.enter_context(task_models.started(s.experiment.task, task_devices))
        yield


def make_evaluator(e: composition.Experiment, run: layout.RunDir) -> Any:
    from tba_jax.roles.evaluator import Evaluator

    queries = composition.heldout_queries(e)
    return Evaluator(e.config, e.contract, run, policy=e.policy, tokenizer=e.tokenizer, task=e.task, queries=queries)


def evaluator(s: Invocation) -> Job:
    from tba_jax.roles.evaluator import run_evaluator

    _check_devices(s.experiment, "evaluator")
    join(s, may_change_schedule=False)
    stop = processes_lib.StopSignal()

    def job() -> int:
        _say_devices(s.experiment, "evaluator")
        if wait_for_run(s.run, poll_seconds=s.config.searchers.poll_seconds, stop=stop):
            joined = with_schedule_of_run(s, role="evaluator")
            with _started_task(s, s.config.evaluation.task_devices):
                run_evaluator(make_evaluator(joined.experiment, s.run), joined.config, s.run, account=TimeAccount(), stop=stop)
        return 0

    return job


def _progress(s: Invocation, *, searchers: int) -> progress_lib.Progress:
    return progress_lib.Progress(
        s.run, steps=s.config.learner.steps, searchers=searchers, warm_start_steps=s.config.warm_start.steps
    )


def _conclude(s: Invocation, progress: progress_lib.Progress, code: int) -> None:
    seconds = progress.done()
    if code == 0:
        progress_lib.finish(s.run, label=s.label, score_name=s.experiment.task.score_name, seconds=seconds)
    elif code in processes_lib.FINAL_CODES:
        print(f"stopped after {seconds:.0f} s; the run is in {s.run.root}", file=sys.stderr)
    else:
        command = shlex.join([sys.executable, "-m", "tba_jax.main", *s.arguments])
        print(f"stopped after {seconds:.0f} s; this resumes the run: {command}", file=sys.stderr)


def everything(s: Invocation) -> Job:
    """`--role=all`: processes under a supervisor, or all roles in turn in this process, as schedule.mode says."""
    return _here(_in_turn)(s) if s.config.schedule.mode == "interleaved" else _as_processes(s)


def _here(job: Callable[[Invocation], Job]) -> Callable[[Invocation], Job]:
    """The job of a role that computes in this process, as its devices can."""

    def on_these_devices(s: Invocation) -> Job:
        return job(dataclasses.replace(s, experiment=s.experiment.on_device(gpus.jax_devices()[0])))

    return on_these_devices


def _in_turn(s: Invocation) -> Job:
    """Search, training and evaluation in turn in this process."""
    from tba_jax.roles.interleaved import run_interleaved

    roles = ("trainer", "searcher", *(("evaluator",) if s.config.evaluation.enabled else ()))
    _check_devices(s.experiment, *roles)
    EpochLease.refuse_if_held(s.run.journal)
    join(s, may_change_schedule=True)
    progress = _progress(s, searchers=1)

    def job() -> int:
        _say_devices(s.experiment, *roles)
        with mistakes_end_the_role():
            made, lease = make_trainer(s, publish_every_steps=1)
        # From here on a signal waits for the end of a step. Before, it ends the process at once: a warm start may take minutes.
        stop = processes_lib.StopSignal()
        with _started_task(s, s.config.searchers.task_devices):
            search = make_searcher(s, name="searcher-0", account=made.account)
            evaluate = make_evaluator(s.experiment, s.run) if s.config.evaluation.enabled else None
            finished = run_interleaved(made, search, evaluate, s.run, stop=stop, progress=progress)
            lease.release()
        code = 0 if finished else processes_lib.STOPPED
        _conclude(s, progress, code)
        return code

    return job


def _devices_for_all() -> int:
    """How many JAX devices each process sees where there are no GPUs to share. Raises ValueError where they are a TPU's."""
    devices = gpus.jax_devices()
    if devices[0].platform == "tpu":
        raise ValueError(
            "--role=all cannot divide a host's TPU between processes: start each role on a host of its own, "
            "or set schedule.mode=interleaved"
        )
    return len(devices)


def _as_processes(s: Invocation) -> Job:
    """Each role as a process of its own, under a supervisor in this process."""
    placements = placing.place(s.experiment)
    if not placements["trainer"].gpus:
        devices = _devices_for_all()
        _check_devices(s.experiment, *{name.split("-")[0] for name in placements} - {"searcher"})
        if s.config.searchers.count:
            # The process of a searcher splits the CPU into searchers.cpu_devices.
            meshes.check(s.experiment, role="searcher", devices=max(s.config.searchers.cpu_devices, devices))
            task_models.check(s.experiment.task, role="searcher")
    EpochLease.refuse_if_held(s.run.journal)
    join(s, may_change_schedule=True)

    def arguments(role: str, name: str) -> tuple[str, ...]:
        return (*s.arguments, f"--role={role}", f"--name={name}")

    commands = {name: (arguments(name.split("-")[0], name), placed) for name, placed in placements.items()}
    until = [name for name in ("trainer", "evaluator") if name in commands]
    stop = processes_lib.StopSignal()

    def job() -> int:
        progress = _progress(s, searchers=sum(name.startswith("searcher-") for name in placements))
        run = dataclasses.replace(s.run, id=contract_lib.read(s.run)["id"])
        processes = supervisor.Supervisor(
            run, max_restarts=s.config.supervisor.max_restarts, stop_seconds=s.config.supervisor.stop_seconds
        )
        try:
            code = 0
            if not places.exists(s.run.initial_reference):
                whole = placement.Placement(cpus=placement.available_cpus(), gpus=placements["trainer"].gpus)
                first = {"reference": (arguments("reference", "reference"), whole)}
                code = processes.run(first, until=list(first), progress=progress, stop=stop, proof=s.run.initial_reference)
            code = code or processes.run(commands, until=until, progress=progress, stop=stop)
        finally:
            processes.close()
        _conclude(s, progress, code)
        return code

    return job


ROLES: dict[str, Callable[[Invocation], Job]] = {
    "all": everything,
    "reference": _here(reference),
    "trainer": _here(trainer),
    "searcher": _here(searcher),
    "evaluator": _here(evaluator),
}
