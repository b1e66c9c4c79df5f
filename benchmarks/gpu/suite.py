"""Runs cases one after the other, each in a process of its own, within the time that the suite has."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# A process that was told to end has so long to do it.
_END_SECONDS = 10.0
ROWS = "rows.jsonl"
# Figures of rows that measured nothing.
FAILED, LEFT_OUT = "failed", "left out"
_NO_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|OutOfMemoryError|out of memory", re.IGNORECASE)
# The line of a traceback that says what happened: jax prints more behind it.
_ERROR = re.compile(r"^(error: |[\w.]+(Error|Exception|Exit)\b)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table. case: its name; figure: what was measured, in words; value: with its unit; beside: what it is compared
    with, and the ratio; device: its kind."""

    case: str
    figure: str
    value: str
    beside: str = ""
    device: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """command: of Python, which writes what `read` takes into the file `answer`. least, most: seconds without which it is not
    begun, and after which it is stopped. otherwise: arguments with which a command that failed is run once more, () for none."""

    name: str
    kind: str
    command: tuple[str, ...]
    answer: Path
    read: Callable[[Path, "Case"], list[Row]]
    least: float
    most: float
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    otherwise: tuple[str, ...] = ()


# The rows that there are, by case.
Rows = dict[str, list[Row]]


def rows(output: Path, device: str = "") -> Rows:
    """The rows that were kept of this kind of device."""
    found: Rows = {}
    for row in _kept(output):
        if row.device == device:
            found.setdefault(row.case, []).append(row)
    return found


def _kept(output: Path) -> list[Row]:
    """The rows of all devices. Lines that a suite left half written, or that are no rows, are ignored."""
    found, file = [], output / ROWS
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []:
        try:
            row = Row(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if all(isinstance(each, str) for each in dataclasses.astuple(row)):
            found.append(row)
    return found


def keep(output: Path, found: Rows, device: str = "") -> None:
    """Writes the rows of this kind of device in place of those that were kept before. A full disk is said: the rows are in the
    table all the same."""
    written = output / f"{ROWS}.new"
    try:
        others = [row for row in _kept(output) if row.device != device]
        with written.open("w", encoding="utf-8") as file:
            for row in (*others, *(row for made in found.values() for row in made)):
                file.write(json.dumps(dataclasses.asdict(row)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        written.replace(output / ROWS)
    except OSError as error:
        print(f"  the rows are not kept: {error}", flush=True)


def is_measured(made: Sequence[Row]) -> bool:
    """Whether a case need not be run again: it has rows, and it did not fail."""
    return bool(made) and all(row.figure != FAILED for row in made)


def run(
    cases: Sequence[Case],
    output: Path,
    found: Rows,
    *,
    until: float,
    device: str = "",
    after_each: Callable[[], None] = lambda: None,
) -> None:
    """Runs the cases that are not measured yet, as long as there is time, and keeps the rows of each as soon as it has ended.

    Args: found: the rows that there are, to which those of the cases are added; until: on the monotonic clock; device: its kind;
      after_each: called when a case has its rows.
    """
    for case in cases:
        left = until - time.monotonic()
        if is_measured(found.get(case.name, [])):
            print(f"{case.name}: kept from before", flush=True)
        elif left < case.least:
            print(f"{case.name}: left out, it takes {case.least:.0f} s and {max(left, 0):.0f} s are left", flush=True)
        else:
            print(f"{case.name} …", flush=True)
            begin = time.monotonic()
            made = _rows_of(case, output, most=min(case.most, left))
            found[case.name] = [dataclasses.replace(row, device=device) for row in made]
            keep(output, found, device)
            after_each()
            for row in made:
                print(f"  {row.figure}: {row.value} {row.beside} [{time.monotonic() - begin:.0f} s]", flush=True)


def _rows_of(case: Case, output: Path, *, most: float) -> list[Row]:
    log, begin = output / f"{case.answer.stem}.log", time.monotonic()
    made = _attempt(case, case.command, log, most=most)
    left = most - (time.monotonic() - begin)
    if case.otherwise and not is_measured(made) and left > case.least:
        log = log.with_suffix(".otherwise.log")
        again = _attempt(case, (*case.command, *case.otherwise), log, most=left)
        if is_measured(again):
            failure = dataclasses.replace(made[-1], figure="failed without " + " ".join(case.otherwise))
            return [*again, failure]
    return made


def _attempt(case: Case, command: Sequence[str], log: Path, *, most: float) -> list[Row]:
    """The rows that the command wrote, and one more where it failed."""
    try:
        case.answer.unlink(missing_ok=True)
        failure = _process(case, command, log, most=most)
        made = case.read(case.answer, case) if case.answer.exists() else []
    except (ValueError, KeyError, TypeError) as error:
        failure, made = f"its figures cannot be read: {error!r}", []
    except OSError as error:
        failure, made = f"its files cannot be written: {error}", []
    if made and not failure:
        return made
    figure = LEFT_OUT if _NO_MEMORY.search(failure) else FAILED
    return [*made, Row(case=case.name, figure=figure, value=failure or "no figures", beside=f"see {log}")]


def _process(case: Case, command: Sequence[str], log: Path, *, most: float) -> str:
    """Runs the process of a case. Returns why it failed, "" where it did not."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(log.parent / "compiled")} | dict(case.environment)
    with log.open("wb") as file:
        # A group of its own, so that its children end with it.
        process = subprocess.Popen([sys.executable, *command], stdout=file, stderr=file, env=environment, start_new_session=True)
        try:
            process.wait(timeout=most)
        except subprocess.TimeoutExpired:
            return f"stopped after {most:.0f} s"
        finally:
            _end(process)
    return _failure(process.returncode, log.read_text(encoding="utf-8", errors="replace")) if process.returncode else ""


def _failure(code: int, printed: str) -> str:
    """What a process printed about its failure: that memory was too little, else the last error, else its last line."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    of_kinds = ([line for line in lines if pattern.search(line)] for pattern in (_NO_MEMORY, _ERROR))
    told = next((found[-1] for found in of_kinds if found), lines[-1] if lines else "")
    return f"exit status {code}: {told[:200]}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process and its children, whatever state they are in."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def read_figures(answer: Path, case: Case) -> list[Row]:
    """The rows of a worker that writes them itself: a JSON list of objects without `case`."""
    made: list[dict[str, Any]] = json.loads(answer.read_text(encoding="utf-8"))
    return [Row(case=case.name, **row) for row in made]
