"""The job of each `--role`: its checks, the objects it builds from an experiment, and the loop that it runs."""

import contextlib
import dataclasses
import functools
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from tba_jax.experiment import checks, composition, dry_run, meshes, stored_run, topologies, training
from tba_jax.experiment.training import Invocation, check_role, join, mistakes_end_the_role, record_of
from tba_jax.rewards import task_models
from tba_jax.roles import gpus, results, supervisor
from tba_jax.roles.searcher.endpoint import Endpoint
from tba_jax.roles.searcher.loop import run_searcher, wait_for_run
from tba_jax.roles.searcher.searcher import Searcher, most_conversations
from tba_jax.roles.searcher.stream import writer_id
from tba_jax.run import processes as processes_lib
from tba_jax.schemas import Mistakes, require
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout, places, published
from tba_jax.storage.lease import EpochLease
from tba_jax.telemetry import status
from tba_jax.telemetry.status import Record, TimeAccount
from tba_jax.telemetry.terminal import Progress

log = logging.getLogger(__name__)

Job = Callable[[], int]
# The environment variable with the key of --serve; without it a random one is told in the log.
SERVE_TOKEN = "TBA_JAX_SERVE_TOKEN"


def make_searcher(
    s: Invocation, *, name: str, account: TimeAccount, writer: str = "", endpoint: Endpoint | None = None
) -> Searcher:
    """Args: name: of the searcher; writer: the id of its log, "" for a new one of this name; endpoint: see Searcher."""
    e = s.experiment
    own: dict[str, Any] = dict(queries=e.queries["train"], writer=writer or writer_id(name), account=account, endpoint=endpoint)
    own |= dict(policy=e.policy, teacher=e.teacher)
    return Searcher(s.config, e.contract, s.run, tokenizer=e.tokenizer, task=e.task, **own)


def searcher(s: Invocation) -> Job:
    if s.config.searchers.engine != "own":
        os.environ["JAX_PLATFORMS"] = "cpu"  # the devices are the server's
        jax.config.update("jax_platforms", "cpu")
    join(s, may_change_schedule=False, check=lambda: training.check_devices(s.experiment, "searcher"))
    stop = processes_lib.StopSignal(patience_seconds=s.config.searchers.stop_seconds)

    def job() -> int:
        here = training.computed_on(s, "searcher")
        if contract_lib.is_finished(s.run):
            steps = contract_lib.steps_of(s.run)
            log.info("the run in %s has finished its %d steps: nothing is left to search", s.run.shared, steps)
            return 0
        writer = writer_id(s.name or "searcher")
        name = s.name or writer
        with _joined(here, "searcher", name=name, stop=stop) as (joined, record):
            if joined is not None:
                account = TimeAccount(record)
                endpoint = _endpoint(joined) if s.serve else None
                made = make_searcher(joined, name=name, account=account, writer=writer, endpoint=endpoint)
                run_searcher(made, joined.config, s.run, name=name, account=account, stop=stop)
        return 0

    return job


def _endpoint(s: Invocation) -> Endpoint:
    """Serves clients, and says where. Raises BadInput: the run's rows have one turn, or the address cannot be served."""
    if not s.experiment.contract.turns:
        raise processes_lib.BadInput(
            f"--serve={s.serve}: rows of task.name={s.config.task.name} have one turn; clients need an environment's"
        )
    tokenizer, contract, seconds = s.experiment.tokenizer, s.experiment.contract, s.config.searchers.serve_seconds
    token = os.environ.get(SERVE_TOKEN, "")
    wanted = {"completions": s.config.learner.completions, "conversations": most_conversations(s.config)}
    try:
        made = Endpoint(tokenizer, contract, address=s.serve, token=token, idle_seconds=seconds, wanted=wanted)
    except ValueError as error:
        raise processes_lib.BadInput(str(error)) from error
    if not made.is_local:
        log.warning("%s is open to whoever reaches this machine and has the key", made.url)
    log.info("serving the policy at %s; the key is %s", made.url, f"that of {SERVE_TOKEN}" if token else made.token)
    return made


@contextlib.contextmanager
def _joined(s: Invocation, role: str, *, name: str, stop: Callable[[], bool]) -> Iterator[tuple[Invocation | None, Record]]:
    """Yields, once the run has its reference policy, the invocation with the run's schedule (None: `stop` came first) and the
    record of the role. The task is started within it."""
    record = record_of(s, name)
    with record.told_failures(), contextlib.ExitStack() as stack:
        record.status.phase("waiting for the reference policy")
        joined = None
        if wait_for_run(s.run, poll_seconds=s.config.searchers.poll_seconds, stop=stop):
            joined = _with_schedule_of_run(s, role=role)
            record.status.phase("loading the reference policy and the task")
            _start_task(s, s.config[meshes.SECTIONS[role]].task_devices, stack)
        yield joined, record
        stack.close()
        record.end(s.run, role=role)


def _with_schedule_of_run(s: Invocation, *, role: str) -> Invocation:
    """The invocation of a joining role with the schedule that the run has now."""
    config, changes = stored_run.with_schedule_of(s.run, s.config)
    if not changes:
        return s
    told = stored_run.changes_in_words(changes)
    log.info("the %s takes the schedule of the run in %s, not that of its command; %s", role, s.run.shared, told)
    with mistakes_end_the_role():  # its own settings may not go with that schedule
        checks.check(config)
    return dataclasses.replace(s, experiment=dataclasses.replace(s.experiment, config=config))


def _start_task(s: Invocation, task_devices: int, stack: contextlib.ExitStack) -> None:
    with mistakes_end_the_role():  # slots that do not divide over the devices, say
        stack.enter_context(task_models.started(s.experiment.task, task_devices, date=s.experiment.contract.date))


def make_evaluator(e: composition.Experiment, run: layout.RunDir, record: Record | None = None) -> Any:
    """Args: record: of this process; None: nothing is recorded."""
    from tba_jax.roles.evaluator import Evaluator

    queries = composition.heldout_queries(e)
    world: dict[str, Any] = dict(policy=e.policy, tokenizer=e.tokenizer, task=e.task)
    return Evaluator(e.config, e.contract, run, **world, queries=queries, record=record)


def evaluator(s: Invocation) -> Job:
    from tba_jax.roles.evaluator import run_evaluator

    join(s, may_change_schedule=False, check=lambda: training.check_devices(s.experiment, "evaluator"))
    stop = processes_lib.StopSignal()

    def job() -> int:
        here = training.computed_on(s, "evaluator")
        with _joined(here, "evaluator", name="evaluator", stop=stop) as (joined, record):
            if joined is not None:
                made = make_evaluator(joined.experiment, s.run, record)
                run_evaluator(made, joined.config, s.run, account=TimeAccount(record), stop=stop)
        # Beside finished.json, code 0 says that the evaluator is done: one that is stopped before is started again.
        return processes_lib.STOPPED if stop() and contract_lib.is_finished(s.run) and _awaits_evaluation(s) else 0

    return job


def _awaits_evaluation(s: Invocation) -> bool:
    """Whether snapshots of the run, which has done all its steps, are yet to be evaluated."""
    from tba_jax.roles.evaluator import PendingSteps

    evaluation = s.config.evaluation
    pending = PendingSteps(s.run, every_steps=evaluation.every_steps, final_step=contract_lib.steps_of(s.run))
    return bool(evaluation.enabled and pending())


def _is_complete(s: Invocation) -> bool:
    """Whether the run has done all its steps and evaluated what it would: then its result is told once more."""
    steps = s.config.learner.steps
    if not contract_lib.is_finished(s.run):
        return False
    last = published.kept(s.run.policies).get(steps)
    if last is None or not places.names_in(last) or _awaits_evaluation(s):  # a trainer publishes one again that was lost
        return False
    results.tell(s.run, label=f"{s.label}: already finished", score_name=s.experiment.task.score_name, outcome="")
    more = "--config.learner.steps=N --allow_change=learner.steps"
    print(f"nothing is left to do of its {steps} steps; {more}, with N > {steps}, goes on", file=sys.stderr)
    return True


def _conclude(s: Invocation, spent: str, code: int) -> None:
    """Args: spent: the time that this start of the run took, see Progress.spent."""
    tell = functools.partial(results.tell, s.run, label=s.label, score_name=s.experiment.task.score_name)
    if code == 0:
        tell(outcome=f"in {spent}")
        return
    try:
        tell()
    except (OSError, ValueError, KeyError) as error:  # the run has ended already, and the next line says how to go on
        log.warning("no tables and no picture of the run: %s: %s", type(error).__name__, error)
    step = status.read(s.run.metrics("trainer")).step
    stopped = f"stopped after {spent}, at step {step} of {s.config.learner.steps}"
    if code in processes_lib.FINAL_CODES:
        print(f"{stopped}; the run is in {s.run.root}", file=sys.stderr)
    else:
        command = shlex.join([sys.executable, "-m", "tba_jax.main", *s.arguments])
        print(f"{stopped}; this resumes the run: {command}", file=sys.stderr)


def everything(s: Invocation) -> Job:
    """`--role=all`: processes under a supervisor, or search, training and evaluation in turn in this process (schedule.mode)."""
    return _in_turn(s) if s.config.schedule.mode == "interleaved" else _as_processes(s)


def _in_turn(s: Invocation) -> Job:
    from tba_jax.roles.interleaved import run_interleaved

    EpochLease.refuse_if_held(s.run.lease)
    join(s, may_change_schedule=True, check=lambda: training.check_devices(s.experiment, *meshes.roles_of(s.config)))

    def job() -> int:
        if _is_complete(s):
            return 0
        with Progress(s.run, steps=s.config.learner.steps, tells_alarms=False) as progress:  # this process logs them
            finished = train()
        code = 0 if finished else processes_lib.STOPPED
        _conclude(s, progress.spent, code)
        return code

    def train() -> bool:
        here = training.computed_on(s, *meshes.roles_of(s.config))
        record = record_of(here, "trainer")
        with record.told_failures(), mistakes_end_the_role():
            made = training.make_trainer(here, publish_every_steps=1, record=record)
        # From here on a signal waits for the end of a step. Before, it ends the process at once: a warm start may take minutes.
        stop = processes_lib.StopSignal()
        with record.told_failures(), contextlib.closing(made.lease), contextlib.ExitStack() as stack:
            _start_task(here, s.config.searchers.task_devices, stack)
            search = make_searcher(here, name="searcher-0", account=made.account)
            evaluate = make_evaluator(here.experiment, s.run, record) if s.config.evaluation.enabled else None
            finished = run_interleaved(made, search, evaluate, s.run, stop=stop)
            made.lease.release()
        return finished

    return job


def _check_placements(s: Invocation, placements: Mapping[str, gpus.Placement]) -> None:
    """Raises ValueError where the meshes of roles do not fit the devices that their processes will have."""
    found = Mistakes()
    for name, placed in placements.items():
        if placed.gpus:
            found.attempt(check_role, s.experiment, role=name.split("-")[0], devices=len(placed.gpus))
    if not any(placed.gpus for placed in placements.values()):
        devices = gpus.jax_devices()
        ways = "start each role on a host of its own, or set schedule.mode=interleaved"
        require(devices[0].platform != "tpu", f"--role=all cannot divide a host's TPU between processes: {ways}")
        found.attempt(training.check_devices, s.experiment)
        # Each process of the trainer has all of these devices, and a searcher's splits the CPU.
        counts = {"trainer": len(devices) * s.config.trainer.processes}
        counts["searcher"] = max(s.config.searchers.cpu_devices, len(devices))
        for role in dict.fromkeys(name.split("-")[0] for name in placements):
            found.attempt(check_role, s.experiment, role=role, devices=counts.get(role, len(devices)))
    found.end()


def _as_processes(s: Invocation) -> Job:
    """Each role as a process of its own, under a supervisor in this process."""
    placements: dict[str, gpus.Placement] = {}

    def check() -> None:
        placements.update(topologies.place(s.experiment, gpus.visible()))
        _check_placements(s, placements)
        for verdict in dry_run.judge(s.experiment)[0]:
            if verdict.fits is False:
                log.warning("by an estimate from shapes, %s", verdict)

    EpochLease.refuse_if_held(s.run.lease)
    join(s, may_change_schedule=True, check=check)

    def arguments(role: str, name: str) -> tuple[str, ...]:
        return (*s.arguments, f"--role={role}", f"--name={name}")

    commands = {name: (arguments(name.split("-")[0], name), placed) for name, placed in placements.items()}
    until = [name for name in ("trainer", "evaluator") if name in commands]
    stop = processes_lib.StopSignal()

    def job() -> int:
        if _is_complete(s):
            return 0
        run = dataclasses.replace(s.run, id=contract_lib.read(s.run)["id"])
        processes = supervisor.Supervisor(
            run, max_restarts=s.config.supervisor.max_restarts, stop_seconds=s.config.supervisor.stop_seconds
        )
        with Progress(s.run, steps=s.config.learner.steps) as progress:
            try:
                code = 0
                if not places.exists(s.run.initial_reference):
                    trained = placements["trainer"]
                    whole = gpus.Placement(cpus=gpus.available_cpus(), gpus=trained.gpus, processes=trained.processes)
                    first = {"reference": (arguments("reference", "reference"), whole)}
                    code = processes.run(first, until=list(first), stop=stop, proof=s.run.initial_reference)
                code = code or processes.run(commands, until=until, stop=stop)
            finally:
                processes.close()
        _conclude(s, progress.spent, code)
        return code

    return job


ROLES: dict[str, Callable[[Invocation], Job]] = {
    "all": everything,
    "reference": training.reference,
    "trainer": training.trainer,
    "searcher": searcher,
    "evaluator": evaluator,
}
