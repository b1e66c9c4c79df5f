"""What all commands share: their parser, the sentence that answers a user's mistake, exit codes, the log on stderr.

A command is a module with a docstring, whose first line lists it, and two functions. `add_flags(values)` defines its absl flags,
and returns the settings that --config.NAME=VALUE changes, if the command takes such flags. `run(given)` returns an exit code, or
the job that is left to do once no mistake of the user can stop it.
"""

import contextlib
import difflib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, Protocol

from absl import flags

from tba_jax.experiment.mistakes import Refused
from tba_jax.run import processes
from tba_jax.schemas import hint
from tba_jax.storage import file_systems
from tba_jax.text.visible import visible

Job = Callable[[], int]
Given = SimpleNamespace  # name of a flag -> its value; overrides: the flags that change settings

# A flag that changes a setting: --config.NAME=VALUE, or --noconfig.NAME of a setting that is true or false.
OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]*)")
_NO_DASHES = re.compile(r"(?:no)?config\.\w[\w.]*=")


class SettingsHelp(Protocol):
    """The settings that --config.NAME=VALUE changes, as help tells of them (see settings_help.Program)."""

    def describe(self, asked: str) -> str: ...

    def overview(self) -> str: ...

    def flags_like(self, name: str) -> list[str]: ...


class Command(Protocol):
    """A module that is a command."""

    __name__: str

    def add_flags(self, values: flags.FlagValues) -> SettingsHelp | None: ...

    def run(self, given: Given) -> int | Job: ...


class _PathParser(flags.ArgumentParser):
    def parse(self, argument: str) -> Path:
        if not argument:  # an unset variable of the shell; Path("") would be the current folder
            raise ValueError("a path is needed")
        return file_systems.path(argument)


def add_path(values: flags.FlagValues, name: str, text: str, *, required: bool = False) -> None:
    """Defines a flag whose value is an absolute pathlib.Path, None where it is not given."""
    flags.DEFINE(_PathParser(), name, None, text, flag_values=values, required=required)


def add_workdir(values: flags.FlagValues) -> None:
    add_path(values, "workdir", "the run's folder", required=True)


def execute(command: Command, arguments: Sequence[str]) -> int:
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


def _help(command: Command, values: flags.FlagValues, settings: SettingsHelp | None, asked: str) -> str:
    """The docstring and all flags; or the section or setting that is asked for."""
    if settings is not None and asked and not asked.startswith("-"):
        try:
            return settings.describe(asked)
        except ValueError as error:
            refuse(error)
    lines = [(command.__doc__ or "").strip(), "", "flags:"]
    for flag in (each for module in values.flags_by_module_dict().values() for each in module):
        default = f"; default: {flag.default}" if flag.default not in (None, "", False, []) else ""
        lines.append(f"  --{flag.name:13} {flag.help}{default}")
    return "\n".join(lines) + (settings.overview() if settings is not None else "")


def _parse(values: flags.FlagValues, arguments: Sequence[str], settings: SettingsHelp | None) -> Given:
    """The values of all flags, by absl's parser; `overrides` are the flags --config.NAME=VALUE, in their order."""
    known: list[str] = []
    overrides: list[str] = []
    last: list[str] = []
    for each in arguments:
        name = each.lstrip("-").partition("=")[0]
        if _NO_DASHES.match(each):
            refuse(ValueError(f"{each} is no argument; did you mean --{each}?"))
        if settings is not None and OVERRIDE.match(each):
            last = overrides
        elif each.startswith("-") and (name in values or name.removeprefix("no") in values):
            last = known
        elif last and "=" not in last[-1] and not each.startswith("-"):  # --flag VALUE
            last[-1] += f"={each}"
            continue
        else:
            near = _alike(values, name, cutoff=0.8) or (settings.flags_like(name) if settings is not None else [])
            near = near or _alike(values, name, cutoff=0.6)
            refuse(ValueError(f"there is no argument {each.partition('=')[0]!r}{hint(*near)}; --help tells which there are"))
        last.append(each)
    try:
        values(["", *known])
    except (flags.Error, ValueError) as error:
        refuse(ValueError(_in_words(values, str(error))))
    return Given(**values.flag_values_dict(), overrides=overrides)


def _alike(values: flags.FlagValues, name: str, *, cutoff: float) -> list[str]:
    """The flag whose name is most like `name`, none if none is similar by so much (see difflib)."""
    return [f"--{flag}" for flag in difflib.get_close_matches(name, list(values), n=1, cutoff=cutoff)]


def _in_words(values: flags.FlagValues, told: str) -> str:
    """The sentence about a flag that absl refuses. Args: told: absl's, which speaks of Python's types."""
    if needed := re.search(r"Flag --(\w+) must have a value", told):
        return f"--{needed[1]} is needed: {values[needed[1]].help}"
    if empty := re.fullmatch(r"Missing value for flag --?(\w+)", told):
        return f"--{empty[1]} needs a value: {values[empty[1]].help}"
    if too_many := re.fullmatch(r"--?(no\w+)=.* does not take an argument", told):
        return f"{told.removesuffix(' does not take an argument')}: --{too_many[1]} takes no value"
    if (refused := re.match(r"flag --(\w+)=(.*?): ", told, re.DOTALL)) and (allowed := _allowed(values[refused[1]].parser)):
        return f"--{refused[1]}={refused[2]} must be {allowed}"
    return told.removeprefix("flag ")


def _allowed(parser: flags.ArgumentParser) -> str:
    """The values that a flag may have, in words; "" where the parser says it by itself."""
    if isinstance(parser, flags.BooleanParser):
        return getattr(parser, "allowed", "true or false")
    if isinstance(parser, flags.IntegerParser):
        most = "" if parser.upper_bound is None else f" and at most {parser.upper_bound}"
        return "a whole number" + ("" if parser.lower_bound is None else f" of at least {parser.lower_bound}{most}")
    if isinstance(parser, flags.FloatParser):
        return "a number"
    return f"one of {', '.join(parser.enum_values)}" if isinstance(parser, flags.EnumParser) else ""


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
        sentence = sentence_of(error)
        if processes.is_storage_failure(error):
            with contextlib.suppress(OSError):  # the log may lie there too
                told = "; ".join(filter(None, (sentence, file_systems.no_room(error, workdir))))
                print(f"error: storage failed; what was committed stays readable: {told}", file=sys.stderr, flush=True)
            # At once: threads that wait for that storage (a checkpoint's, say) would keep the process from its end.
            os._exit(processes.exit_code(error))
        if isinstance(error, processes.BadInput):
            refuse(error)
        if missing := processes.missing_package(error):
            refuse(ValueError(missing))
        if isinstance(error, FloatingPointError | processes.NoRewards | processes.PeerLost):
            print(f"error: {sentence}", file=sys.stderr)
            sys.exit(processes.exit_code(error))
        print(visible(traceback.format_exc()), end="", file=sys.stderr)
        print(f"error: {type(error).__name__}: {sentence}", file=sys.stderr)
        sys.exit(1)


def _stopped() -> NoReturn:
    print("stopped", file=sys.stderr)
    sys.exit(processes.STOPPED)


def _is_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error: a library whose import it interrupts says that it cannot be imported."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


class _VisibleFormatter(logging.Formatter):
    """A line of the log may quote a file, or text that a model wrote."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def log_to_stderr() -> None:
    """Shows warnings of all libraries, and the informational lines of tba_jax as well."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_VisibleFormatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("tba_jax").setLevel(logging.INFO)
