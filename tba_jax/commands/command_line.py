"""What commands share: parser, flags that open a run, the sentence that answers a mistake, exit codes, the log on stderr.

A command is a module with a docstring, whose first line lists it, and two functions. `add_flags(values)` defines its absl flags,
and returns the program whose settings --config.NAME=VALUE changes, if any. `run(given)` returns an exit code, or the job that is
left to do once no mistake of the user can stop it. A task's code is executed only where
the user names or trusts it.
"""

import contextlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from absl import flags

from tba_jax.commands import recipes
from tba_jax.outputs import visible
from tba_jax.run import processes
from tba_jax.schemas import Refused, hint, nearest
from tba_jax.storage import file_systems

if TYPE_CHECKING:  # what imports JAX or tensorstore is imported late: a mistyped flag is answered at once
    from tba_jax.experiment.composition import Experiment
    from tba_jax.storage import layout

log = logging.getLogger(__name__)

Job = Callable[[], int]
Given = SimpleNamespace  # name of a flag -> its value; overrides: the flags that change settings


class _PathParser(flags.ArgumentParser):
    def parse(self, argument: str) -> Path:
        if not argument:  # an unset variable of the shell; Path("") would be the current folder
            raise ValueError("a path is needed")
        return file_systems.path(argument)


def add_path(values: flags.FlagValues, name: str, text: str, *, required: bool = False) -> None:
    """Defines a flag whose value is an absolute pathlib.Path, None where it is not given."""
    flags.DEFINE(_PathParser(), name, None, text, flag_values=values, required=required)


def _parse(values: flags.FlagValues, arguments: Sequence[str], settings: recipes.Program | None) -> Given:
    """The values of all flags, by absl's parser; `overrides` are the flags --config.NAME=VALUE, in their order."""
    overrides = [each for each in arguments if settings and recipes.OVERRIDE.match(each)]
    values.set_gnu_getopt(True)
    try:
        others = values(["", *(each for each in arguments if each not in overrides)])[1:]
    except flags.UnrecognizedFlagError as error:
        near = settings.flags_like(error.flagname) if settings else []
        near = near or [f"--{each}" for each in [nearest(error.flagname, list(values))] if each]
        refuse(ValueError(f"there is no argument '--{error.flagname}'{hint(*near)}; --help tells which there are"))
    except (flags.Error, ValueError) as error:
        told = str(error).removeprefix("flag ")
        if missing := re.match(r"--(\w+)=None: |Missing value for flag -*(\w+)", told):
            name = missing[1] or missing[2]
            told = f"--{name} needs a value: {values[name].help}"
        elif (wrong := re.match(r"--(\w+)=(.*?): ", told, re.DOTALL)) and wrong[1] in values:  # absl speaks of Python's types
            parser = values[wrong[1]].parser
            kind = "true or false" if type(parser) is flags.BooleanParser else parser.syntactic_help
            told = f"--{wrong[1]}={wrong[2]} must be {kind}" if kind else told
        refuse(ValueError(told))
    if others:
        refuse(ValueError(f"{others[0]!r} is no argument; --help tells which there are"))
    return Given(**values.flag_values_dict(), overrides=overrides)


def execute(command: ModuleType, arguments: Sequence[str]) -> int:
    """Runs a command and returns its exit code; a mistake or a failure ends the process by a code of its own."""
    values = flags.FlagValues()  # its own: who imports a command defines no flag in absl.flags.FLAGS
    settings = command.add_flags(values)
    with contextlib.suppress(StopIteration):
        place = next(i for i, each in enumerate(arguments) if each in ("-h", "--help") or each.startswith("--help="))
        asked = arguments[place].partition("=")[2] or "".join(arguments[place + 1 : place + 2])
        with failures():
            print(_help(command, values, settings, asked), flush=True)
        return 0
    given = _parse(values, arguments, settings)
    log_to_stderr()
    with failures(getattr(given, "workdir", None)):
        with mistakes():
            outcome = command.run(given)
        return outcome if isinstance(outcome, int) else outcome()


def _help(command: ModuleType, values: flags.FlagValues, settings: recipes.Program | None, asked: str) -> str:
    """The docstring and all flags; or the section or setting that is asked for."""
    if settings and asked and not asked.startswith("-"):
        try:
            return settings.describe(asked)
        except ValueError as error:
            refuse(error)
    lines = [(command.__doc__ or "").strip(), "", "flags:"]
    for flag in (each for module in values.flags_by_module_dict().values() for each in module):
        default = f"; default: {flag.default}" if flag.default not in (None, "", False, []) else ""
        lines.append(f"  --{flag.name:13} {flag.help}{default}")
    return "\n".join(lines) + (settings.overview() if settings else "")


@contextlib.contextmanager
def mistakes() -> Iterator[None]:
    """Takes a ValueError or LeaseHeld for a mistake of the user and refuses it, unless storage is at fault."""
    from tba_jax.storage.lease import LeaseHeld

    try:
        yield
    except (ValueError, LeaseHeld) as error:
        if processes.is_storage_failure(error):
            raise
        refuse(error)


def refuse(error: BaseException) -> NoReturn:
    """Ends the process by one sentence about each of the user's mistakes."""
    sentences = error.sentences if isinstance(error, Refused) else [error]
    if len(sentences) == 1:
        print(f"error: {sentence_of(error)}", file=sys.stderr)
    else:
        listed = "".join(f"\n  {number}. {sentence_of(sentence)}" for number, sentence in enumerate(sentences, 1))
        print(f"error: {len(sentences)} mistakes:{listed}", file=sys.stderr)
    sys.exit(processes.BAD_INPUT)


def sentence_of(error: object) -> str:
    """What an error says, in one line. It may quote a file, or text that a model wrote."""
    return " ".join(visible(str(error)).split())


@contextlib.contextmanager
def failures(workdir: Path | None = None) -> Iterator[None]:
    """Ends the process on a failure: by one sentence if storage refuses, otherwise by the traceback and one sentence.

    Args: workdir: of the run, if there is one: where a disk is full, the sentence says which.
    """
    try:
        yield
    except KeyboardInterrupt:  # before the command asks for signals itself
        _stopped()
    except BrokenPipeError:  # whoever reads our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if _is_interrupted(error):
            _stopped()
        code, sentence = processes.exit_code(error), sentence_of(error)
        if processes.is_storage_failure(error):
            with contextlib.suppress(OSError):  # the log may lie there too
                told = "; ".join(filter(None, (sentence, file_systems.no_room(error, workdir))))
                print(f"error: storage failed; what was committed stays readable: {told}", file=sys.stderr, flush=True)
            # At once: threads that wait for that storage (a checkpoint's, say) would keep the process from its end.
            os._exit(code)
        if code == 1:
            print(visible(traceback.format_exc()), end="", file=sys.stderr)
            sentence = f"{type(error).__name__}: {sentence}"
        print(f"error: {processes.missing_package(error) or sentence}", file=sys.stderr)
        sys.exit(code)


def _stopped() -> NoReturn:
    print("stopped", file=sys.stderr)
    sys.exit(processes.STOPPED)


def _is_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error: a library whose import it interrupts says that it cannot be imported."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def log_to_stderr() -> None:
    """Shows warnings of all libraries, and the informational lines of tba_jax as well. A line may quote what a model wrote."""
    handler, shown = logging.StreamHandler(sys.stderr), logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S")
    handler.format = lambda record: visible(shown.format(record))  # type: ignore[method-assign]
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("tba_jax").setLevel(logging.INFO)


def add_workdir(values: flags.FlagValues) -> None:
    add_path(values, "workdir", "the run's folder", required=True)


class Source(NamedTuple):
    """What the user says of a run's settings.

    recipe: FILE.py[:NAME], whose task is taken; "": the run's. overrides: flags --config.SETTING=VALUE. trust_task: whether the
    task file that config.json names may be executed.
    """

    recipe: str = ""
    overrides: tuple[str, ...] = ()
    trust_task: bool = False


AS_IT_IS = Source()


def add_trust(values: flags.FlagValues) -> None:
    what = "the task file that the run's config.json names may be executed: you trust it"
    flags.DEFINE_bool("trust_task", False, what, flag_values=values)


def add_source(values: flags.FlagValues) -> recipes.Program:
    """The flags of a Source."""
    add_workdir(values)
    what = "your own recipe FILE.py[:NAME], whose task is taken in place of the one that the run names"
    recipes.add_flag(values, required=False, what=what)
    add_trust(values)
    return recipes.BASE


def source(given: Given) -> Source:
    return Source(recipe=given.config or "", overrides=tuple(given.overrides), trust_task=given.trust_task)


def config_of(stored: Mapping[str, Any], source: Source, *, called: str) -> Any:
    """The config of a run with what the user says of it. Args: stored: config.json; called: what messages call the run.

    Raises ValueError where the recipe or a flag is wrong, config.json is damaged, or it names a task file that nobody trusts.
    """
    from tba_jax.experiment import stored_run
    from tba_jax.tasks.interface import is_custom, short_name

    config = stored_run.config_of(stored, called=called)
    theirs = config.task.name
    if source.recipe:
        config.task = recipes.load(source.recipe, (), program=recipes.BASE).task
    config = recipes.override(config, source.overrides)
    if short_name(config.task.name) != short_name(theirs):  # a file may lie elsewhere on another machine
        by = f"--config={source.recipe} has" if source.recipe else "--config.task.name asks for"
        told = f"{called} is a run of task.name={theirs!r}, and {by} task.name={config.task.name!r}"
        raise ValueError(f"{told}: a run keeps its task; another task needs another run, in a new --workdir")
    named_by_user = source.recipe or config.task.name != theirs
    if is_custom(config.task.name) and not (named_by_user or source.trust_task):
        raise ValueError(
            f"{called}: its config.json names the task {theirs!r}, a file that would be executed here; --config=RECIPE gives "
            "your own recipe, whose task is taken instead, and --trust_task says that you trust this file"
        )
    return config


def rebuilt(workdir: Path, source: Source) -> "tuple[layout.RunDir, Experiment]":
    """The run in a folder, and its experiment. Raises: see composition.rebuild."""
    from tba_jax.experiment import composition
    from tba_jax.storage import contract, layout

    run, called = layout.open_run_dir(workdir), str(workdir)
    stored = contract.read_run(run, called=called)
    return run, composition.rebuild(stored, config_of(stored, source, called=called), called=called)


BEST, LAST = "best", "last"
# What --step asks for: BEST, LAST, or a trainer step. None: BEST, or LAST where no step after 0 has a held-out score.
AskedStep = int | str | None


class _StepParser(flags.ArgumentParser):
    def parse(self, argument: str) -> AskedStep:
        if argument in (BEST, LAST):
            return argument
        if not re.fullmatch(r"[0-9]{1,18}", argument):
            raise ValueError(f"it is {BEST} (by held-out score), {LAST} (the newest snapshot) or the number of a trainer step")
        return int(argument)


def add_step(values: flags.FlagValues) -> None:
    told = f"of the snapshot: {BEST} (by held-out score), {LAST}, or a number; default: {BEST}, or {LAST} without scores"
    flags.DEFINE(_StepParser(), "step", None, told, flag_values=values)


def chosen_step(run: "layout.RunDir", asked: AskedStep, *, called: str) -> int:
    """The step that --step asks for. The log says which it is, and why, where no number was given.

    Args: called: what messages call the run. Raises ValueError where the step has no snapshot.
    """
    from tba_jax.roles import results
    from tba_jax.storage import layout, published

    steps = [*published.kept(run.policies)]
    if not steps:
        raise ValueError(f"{run.policies} holds no snapshot yet")
    newest = steps[-1]
    if isinstance(asked, int):
        if asked not in steps:
            near = min(steps, key=lambda step: abs(step - asked))
            there = f"the nearest snapshot is of step {near}; there are {layout.listed(steps)}"
            raise ValueError(f"--step={asked} is not a snapshot of {called}: {there}")
        return asked
    scores = results.Scores(run.evaluations)()
    evaluated = {step: scores[step] for step in steps if step in scores}
    found = results.best(evaluated.items())
    without = f"no snapshot{' but that of step 0' if evaluated else ''} of {called} has a held-out score in {run.evaluations}"
    if found is None and asked == BEST:
        raise ValueError(f"--step={BEST}: {without}; --step={LAST} takes the newest, of step {newest}")
    if asked == LAST or found is None or (asked is None and [*evaluated] == [0]):  # no policy that was trained has a score
        level, why = (logging.INFO, "") if asked == LAST else (logging.WARNING, f"{without}: ")
        log.log(level, "%sthe newest snapshot, of step %d, is taken", why, newest)
        return newest
    told = f"step {found.step} has the best held-out score, {found.score:.3f}, of {len(evaluated)} evaluated snapshots"
    told += "" if newest == found.step else f"; the newest is of step {newest} (--step={LAST})"
    if (whole := results.best(scores.items())) and whole.score > found.score:
        told += f"; step {whole.step} had {whole.score:.3f}, and its snapshot is gone"
    log.info("%s: %s", called, told)
    return found.step
