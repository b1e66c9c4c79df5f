"""The entry of every role.

python -m tba_jax.main --config=configs/X.py --workdir=DIR [--role=all|reference|trainer|searcher|evaluator] [--dry_run]
python -m tba_jax.main --config=configs/X.py --workdir=DIR --for_this_machine [--dry_run]
python -m tba_jax.main --config=configs/X.py --workdir=DIR --dry_run [--compile|--topology=v5p:2x2x2]
python -m tba_jax.main --workdir=DIR [--role=…] [--trust_task]
python -m tba_jax.main --config=configs/X.py --workdir=DIR --role=trainer --coordinator=HOST:PORT --processes=N --process=I

The second takes the variant of the recipe that is made for this machine, and names it. The third compiles the programs of each
role, and says whether they fit its devices. The fourth joins or resumes the run in DIR with its own config. The fifth is one of
the N processes of a trainer. Flags --config.SETTING=VALUE change settings of this role; the schedule of a run (seed, learner,
replay, publish, schedule) is changed by its trainer alone, with --allow_change.
"""

import functools
import math
import os
import sys
from typing import TYPE_CHECKING, Any

from absl import flags

from tba_jax.commands import command_line, recipes
from tba_jax.run import processes

if TYPE_CHECKING:  # what is slow to import, JAX above all, is imported late: a mistake in the arguments is answered at once
    from ml_collections import config_dict

    from tba_jax.run.world import World
    from tba_jax.storage import layout

# The folder of compiled programs is held under this number in every process: its path is part of the programs' names on GPUs.
_CACHE_DESCRIPTOR = 400

ROLES = ("all", "reference", "trainer", "searcher", "evaluator")
_JOINING = ("reference", "searcher", "evaluator")  # roles that do not decide about the schedule


def add_flags(values: flags.FlagValues) -> recipes.Program:
    recipes.add_flag(
        values, required=False, what="the recipe, a file under configs/; default: the config of the run in --workdir"
    )
    command_line.add_trust(values)
    command_line.add_workdir(values)
    text, truth, number, several = (
        functools.partial(define, flag_values=values)
        for define in (flags.DEFINE_string, flags.DEFINE_bool, flags.DEFINE_integer, flags.DEFINE_list)
    )
    what = "all: supervise one trainer, searchers and an evaluator here; reference: make the initial policy, stop"
    flags.DEFINE_enum("role", "all", ROLES, what, flag_values=values)
    text("name", "", "name of this role's metrics; default: the role (searchers add their writer id)")
    what = "check everything, print what fits, and stop; =full prints config and shapes too"
    parser, shown = _DryRunParser(), flags.ArgumentSerializer[Any]()
    flags.DEFINE_flag(flags.Flag(parser, shown, "dry_run", False, what, boolean=True), flag_values=values)
    what = "with --dry_run: compile the programs of each role for the devices of this machine, and say whether they fit"
    truth("compile", False, what)
    what = "with --dry_run: compile for devices that are not here: v5p:2x2x1, trainer=v5p:2x2x2,searcher=v5p:2x2x1, or H100x8"
    several("topology", [], what)
    what = "a new run takes the recipe's variant for the devices of this machine (configs/machines.py), and says which"
    truth("for_this_machine", False, what)
    text(
        "shared", "", "where searchers and trainer meet, if not in --workdir: a folder, gs://bucket/prefix or s3://bucket/prefix"
    )
    text("init_from", "", "RUN@STEP: a new run begins from another run's policy of that step")
    what = "START:STEPS: trainer, searchers and evaluator trace these steps with jax.profiler, into DIR/profiles"
    text("profile", "", what)
    text(
        "serve",
        "",
        "PORT, or HOST:PORT: a searcher draws what clients of this OpenAI-compatible endpoint ask, see docs/engines.md",
    )
    several("allow_change", [], "A,B: schedule settings that a resumed run may change")
    text("coordinator", "", "HOST:PORT of process 0 of a trainer of several processes; Slurm and TPU pods tell it by themselves")
    number("processes", None, "how many processes the trainer has; Slurm, Open MPI and TPU pods tell it by themselves")
    number("process", None, "which of them this one is, from 0; likewise")
    return recipes.BASE


class _DryRunParser(flags.BooleanParser):
    syntactic_help = "true, false or full"

    def parse(self, argument: Any) -> Any:
        return argument if argument == "full" else super().parse(argument)


def _world(given: command_line.Given) -> "World":
    """The processes of the trainer that this process is one of."""
    from tba_jax.run import world

    told = dict(coordinator=given.coordinator, processes=given.processes, process=given.process)
    named = [f"--{name}={value}" for name, value in told.items() if value not in ("", None)]
    if given.role not in ("trainer", "reference") or given.dry_run:
        if named:
            what = "--dry_run" if given.dry_run else f"--role={given.role}"
            raise ValueError(
                f"{' '.join(named)} are for the processes of a trainer (--role=trainer or reference), not for {what}"
            )
        return world.ALONE
    return world.find(**told)


def _topologies(given: command_line.Given) -> dict[str, str]:
    """Role -> topology, for which programs are to be compiled; {}: for none."""
    if (given.topology or given.compile) and not given.dry_run:
        raise ValueError(f"--{'topology' if given.topology else 'compile'} needs --dry_run")
    if not given.topology:
        return {}
    from tba_jax.experiment import topologies

    if given.compile:
        raise ValueError("--compile is for the devices of this machine, --topology for others: one of the two is enough")
    topologies.use_no_devices()
    return topologies.parse(given.topology)


def _check_name(name: str, *, role: str) -> None:
    """Raises ValueError for a --name without a role, or that cannot begin a writer id, or that stands for responses of a file."""
    from tba_jax.replay.log import GIVEN, NAME

    if name and role == "all":
        raise ValueError(f"--name={name!r} is of one role, and would not be used: give it with --role")
    if name and not NAME.fullmatch(name):
        limit = "at most 90 lower-case letters, digits and hyphens, and begin with no hyphen"
        raise ValueError(f"--name={name!r} must be {limit}: folders are called by it")
    if f"{name}-".startswith(GIVEN):
        raise ValueError(f"--name={name!r} must not begin with {GIVEN!r}, which stands for responses of a file")


def run(given: command_line.Given) -> int | command_line.Job:
    """Checks everything that a user's mistake can break; the job is the role's."""
    _check_name(given.name, role=given.role)
    if given.serve and given.role != "searcher":
        raise ValueError(f"--serve={given.serve} is for a searcher (--role=searcher), not for --role={given.role}")
    machine = _variant_for_this_machine(given) if given.for_this_machine else ""
    recipe = recipes.load(given.config + machine, given.overrides, program=recipes.BASE) if given.config else None
    from tba_jax.experiment import stored_run
    from tba_jax.storage import contract, layout

    limit = stored_run.DRY_RUN_SECONDS if given.dry_run else math.inf
    stored_run.check_answers([("--workdir", given.workdir)], limit=limit)
    if given.shared.startswith("memory:"):
        raise ValueError(f"--shared={given.shared} ends with its process; it must be a folder, or one of gs://… and s3://…")
    folder = layout.open_run_dir(given.workdir, given.shared)
    if folder.elsewhere is not None:
        stored_run.check_answers([("--shared", folder.elsewhere)], limit=limit)
    folder = contract.known(folder, processes.expected_run())
    with contract.failures_of_storage(folder):
        config = _config_of_run(folder, given) if recipe is None else recipe
        job = _prepare(given, config, folder, machine=machine)

    def run_job() -> int:
        with contract.failures_of_storage(contract.known(folder, folder.id)):
            return job()

    return run_job


def _variant_for_this_machine(given: command_line.Given) -> str:
    """ ":VARIANT", which goes after --config=RECIPE. Raises ValueError where flags exclude it, or none is for this machine."""
    if not given.config or ":" in given.config.rpartition("/")[2]:
        raise ValueError(f"--for_this_machine picks the variant of a recipe: it needs --config=RECIPE.py, not {given.config}")
    if given.role != "all":
        raise ValueError(f"--for_this_machine places all roles of a run on this machine: it is for --role=all, not {given.role}")
    from tba_jax.experiment import topologies

    variant = f":{topologies.variant()}"
    print(f"for this machine: --config={given.config}{variant}", file=sys.stderr)
    return variant


def _prepare(given: command_line.Given, config: Any, folder: "layout.RunDir", *, machine: str) -> command_line.Job:
    import jax

    from tba_jax.experiment import composition, dry_run, initial_policy, jobs, stored_run
    from tba_jax.roles import gpus
    from tba_jax.schemas import Mistakes
    from tba_jax.storage import contract, places
    from tba_jax.telemetry import status

    if given.role == "searcher" and config.searchers.cpu_devices > 1:  # one is what there is, or as many as XLA_FLAGS says
        jax.config.update("jax_num_cpu_devices", config.searchers.cpu_devices)  # before JAX has looked for devices
    if (contract.is_private(folder) or composition.keeps_private(config.task.name)) and not given.dry_run:
        contract.keep_private(folder)
    _hold_compilation_cache(folder)
    world = _world(given)
    found = Mistakes()
    init_from = found.attempt(initial_policy.parse_init_from, given.init_from)
    profile = found.attempt(status.parse_window, given.profile, steps=config.learner.steps)
    asked = found.attempt(_topologies, given)
    found.end()
    limit = stored_run.DRY_RUN_SECONDS if given.dry_run else math.inf
    stored_run.check_answers(stored_run.named_places(config, init_from=init_from or ""), limit=limit)
    is_there = places.exists(folder.config)
    if machine and is_there:
        raise ValueError(
            f"--for_this_machine is for a new run, and workdir {str(folder.shared)!r} holds one: leave it out to go on"
        )
    # The supervisor has looked at the GPUs of its children, and a child that it starts again may find memory of the last one.
    in_one_process = given.role != "all" or config.schedule.mode == "interleaved"
    computes = given.compile or not given.dry_run
    if in_one_process and computes and not processes.expected_run() and world.local_processes == 1:
        gpus.check_free()
    known: dict[str, Any] = {}
    if is_there:  # a role that scores nothing does without the reward models
        there = contract.read_run(folder, called=f"workdir {str(folder.shared)!r}")["contract"]
        known = {"date": there.get("date", "")}
        known |= {"reward_models": there["reward_models"]} if given.role in ("trainer", "reference") else {}
    new = bool(given.dry_run) or not is_there
    experiment = composition.build(config, **known, weights=not given.dry_run, new=new)
    if machine and not given.dry_run:
        dry_run.check_fits(experiment)
    if not given.dry_run:
        processes.keep_bounded(folder.logs, megabytes=config.logs.megabytes, keep=config.logs.keep)
    arguments = tuple(each for each in sys.argv[1:] if each.lstrip("-").partition("=")[0] != "for_this_machine")
    settings = jobs.Invocation(
        experiment=experiment,
        run=folder,
        name=given.name,
        label=recipes.label_of(given.config + machine) if given.config else folder.root.name,
        allow_change=tuple(given.allow_change),
        arguments=(*arguments, f"--config={given.config}{machine}") if machine else arguments,
        init_from=init_from or "",
        world=world,
        profile=profile,
        serve=given.serve,
    )
    full = given.dry_run == "full"
    if asked or given.compile:
        return dry_run.compiled(settings, asked=asked or {}, role=given.role, full=full)
    return dry_run.estimated(settings, full=full) if given.dry_run else jobs.ROLES[given.role](settings)


def _config_of_run(run: "layout.RunDir", given: command_line.Given) -> "config_dict.ConfigDict":
    """The config of the run that is there, with the settings that flags change.
    Raises ValueError: there is no run, nobody trusts its task, or a role that joins it asks for another schedule."""
    from tba_jax.experiment import stored_run
    from tba_jax.storage import contract, places

    called = f"workdir {str(run.shared)!r}"
    if not places.exists(run.config):
        raise ValueError(f"{called} holds no run yet: --config=RECIPE says what a new one is")
    config = command_line.config_of(contract.read_run(run, called=called), command_line.source(given), called=called)
    if given.role in _JOINING:
        stored_run.check_no_changes(run, config, role=given.role)
    return config


def _hold_compilation_cache(run: "layout.RunDir") -> None:
    """Has JAX reach the cache of this type of CPU by an open folder: by its path it would make a workdir anew that was moved away
    meanwhile."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR") != str(run.compilation_cache):
        return
    import jax

    from tba_jax.storage import file_systems, places

    folder = run.compilation_cache / processes.cpu_type()
    places.make_folder(folder, below=2)
    jax.config.update("jax_compilation_cache_dir", str(file_systems.hold(folder, number=_CACHE_DESCRIPTOR)))


if __name__ == "__main__":
    processes.hold()
    with processes.to_the_end():
        sys.exit(command_line.execute(sys.modules[__name__], sys.argv[1:]))
