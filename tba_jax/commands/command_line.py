"""What all commands share: their parser, the sentence that answers a user's mistake, exit codes, the log on stderr.

A command is a module with a docstring, whose first line lists it, and two functions: `add_arguments(parser)`, and `run(given)`,
which returns an exit code, or the job that is left to do once no mistake of the user can stop it.
"""

import argparse
import contextlib
import difflib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from tba_jax.run import processes

Job = Callable[[], int]

# A flag that changes a setting: --config.NAME=VALUE, or --noconfig.NAME of a setting that is true or false.
OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]*)")


class Command(Protocol):
    """A module that is a command."""

    __name__: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, given: argparse.Namespace) -> int | Job: ...


class Parser(argparse.ArgumentParser):
    """A parser that answers a mistake by one sentence. It collects flags --config.X=Y in `overrides`, if that has a default."""

    def error(self, message: str) -> NoReturn:
        refuse(ValueError(message.removeprefix("argument ")))

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        given, rest = self.parse_known_args(args, namespace)
        overrides: list[str] = []
        for each in rest:
            if hasattr(given, "overrides") and OVERRIDE.match(each):
                overrides.append(each)
            elif overrides and "=" not in overrides[-1] and not each.startswith("--"):
                overrides[-1] += f"={each}"
            else:
                self._refuse_unknown(each)
        if hasattr(given, "overrides"):
            given.overrides = overrides
        return given

    def _refuse_unknown(self, argument: str) -> NoReturn:
        name = argument.partition("=")[0]
        near = difflib.get_close_matches(name, self._option_string_actions, n=1)
        self.error(f"there is no argument {name!r}{hint(near[0] if near else '')}; --help tells which there are")


def add_workdir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdir", type=Path, required=True, metavar="DIR", help="the run's folder")


def execute(command: Command, arguments: Sequence[str], *, prog: str = "") -> int:
    """Runs a command and returns its exit code. A mistake or a failure ends the process with a code of its own."""
    prog = prog or f"python -m tba_jax {command.__name__.rpartition('.')[2]}"
    parser = Parser(
        prog=prog,
        usage=argparse.SUPPRESS,  # the docstring tells it
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        conflict_handler="resolve",  # --help may be --help=SECTION
    )
    command.add_arguments(parser)
    given = parser.parse_args(arguments)
    log_to_stderr()
    with failures():
        with mistakes():
            outcome = command.run(given)
        return outcome if isinstance(outcome, int) else outcome()


@contextlib.contextmanager
def mistakes() -> Iterator[None]:
    """Takes a ValueError or LeaseHeld for a mistake of the user and refuses it, unless storage is at fault."""
    from tba_jax.run.lease import LeaseHeld

    try:
        yield
    except (ValueError, LeaseHeld) as error:
        if processes.is_storage_failure(error):
            raise
        refuse(error)


def refuse(error: BaseException) -> NoReturn:
    """Ends the process by one sentence about the user's mistake."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(processes.BAD_INPUT)


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """Ends the process on a failure: by one sentence if storage refuses, otherwise by the traceback and one sentence."""
    try:
        yield
    except KeyboardInterrupt:  # before the command asks for signals itself
        print("stopped", file=sys.stderr)
        sys.exit(processes.STOPPED)
    except Exception as error:
        sentence = " ".join(str(error).split())
        if processes.is_storage_failure(error):
            with contextlib.suppress(OSError):  # the log may lie there too
                print(f"error: storage failed; what was committed stays readable: {sentence}", file=sys.stderr, flush=True)
            # At once: threads that wait for that storage (a checkpoint's, say) would keep the process from its end.
            os._exit(processes.STORAGE_FAILED)
        if isinstance(error, processes.BadInput):
            refuse(error)
        if isinstance(error, FloatingPointError):
            print(f"error: {sentence}", file=sys.stderr)
            sys.exit(processes.NOT_FINITE)
        traceback.print_exc()
        print(f"error: {type(error).__name__}: {sentence}", file=sys.stderr)
        sys.exit(1)


def log_to_stderr() -> None:
    """Shows warnings of all libraries, and the informational lines of tba_jax as well."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", force=True
    )
    logging.getLogger("tba_jax").setLevel(logging.INFO)


def nearest(name: str, names: Collection[str]) -> str:
    """The dotted name that is most like `name`, "" if no name has a similar last part."""
    section, _, leaf = name.rpartition(".")

    def likeness(other: str) -> float:
        of_section, _, of_leaf = other.rpartition(".")
        same = difflib.SequenceMatcher(None, leaf, of_leaf).ratio()
        return (2 * same + difflib.SequenceMatcher(None, section, of_section).ratio()) if same >= 0.6 else 0.0

    best = max(names, key=likeness, default="")
    return best if best and likeness(best) else ""


def hint(near: str) -> str:
    """The part of a sentence that offers the nearest name, if there is one."""
    return f"; did you mean {near!r}?" if near else ""
