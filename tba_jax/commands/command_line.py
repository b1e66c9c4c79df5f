"""What all commands share: their parser, the sentence that answers a user's mistake, exit codes, the log on stderr.

A command is a module with a docstring, whose first line lists it, and two functions. `add_flags(values)` defines its absl flags,
and returns the program whose settings --config.NAME=VALUE changes, if any. `run(given)` returns an exit code, or the job that is
left to do once no mistake of the user can stop it.
"""

import contextlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NoReturn

from absl import flags

from tba_jax.commands.recipes import OVERRIDE, Program
from tba_jax.run import processes
from tba_jax.schemas import Refused, hint, nearest
from tba_jax.storage import file_systems
from tba_jax.text.visible import visible

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


def _parse(values: flags.FlagValues, arguments: Sequence[str], settings: Program | None) -> Given:
    """The values of all flags, by absl's parser; `overrides` are the flags --config.NAME=VALUE, in their order."""
    overrides = [each for each in arguments if settings and OVERRIDE.match(each)]
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
        elif wrong := re.match(r"--(\w+)=(.*?): ", told, re.DOTALL):  # absl's reason speaks of Python's types
            parser = values[wrong[1]].parser
            kind = "true or false" if type(parser) is flags.BooleanParser else parser.syntactic_help
            told = f"--{wrong[1]}={wrong[2]} must be {kind}" if kind else told
        refuse(ValueError(told))
    if others:
        refuse(ValueError(f"{others[0]!r} is no argument; --help tells which there are"))
    return Given(**values.flag_values_dict(), overrides=overrides)


def add_workdir(values: flags.FlagValues) -> None:
    add_path(values, "workdir", "the run's folder", required=True)


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


def _help(command: ModuleType, values: flags.FlagValues, settings: Program | None, asked: str) -> str:
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
