"""Runs cases one after the other, each in a process of its own, within the time that the suite has."""

import dataclasses
import json
import os
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table. case: its name; figure: what was measured, in words; value: with its unit; beside: what it is compared
    with, and the ratio."""

    case: str
    figure: str
    value: str
    beside: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """command: of Python, which writes what `read` takes into the file `answer`. least, most: seconds without which it is not
    begun, and after which it is stopped."""

    name: str
    kind: str
    command: tuple[str, ...]
    answer: Path
    read: Callable[[Path, "Case"], list[Row]]
    least: float
    most: float
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def rows(output: Path) -> dict[str, list[Row]]:
    """The rows that are kept, by case."""
    found: dict[str, list[Row]] = {}
    file = output / ROWS
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        try:
            row = Row(**json.loads(line))
        except (ValueError, TypeError):
            continue  # the last line of a suite that was killed
        found.setdefault(row.case, []).append(row)
    return found


def run(cases: Sequence[Case], output: Path, *, seconds: float) -> None:
    """Runs the cases that have no rows yet, as long as there is time, and keeps the rows of each as soon as it has ended."""
    end, have = time.monotonic() + seconds, rows(output)
    for case in cases:
        left = end - time.monotonic()
        if case.name in have:
            print(f"{case.name}: kept from before", flush=True)
        elif left < case.least:
            print(f"{case.name}: left out, it takes {case.least:.0f} s and {max(left, 0):.0f} s are left", flush=True)
        else:
            print(f"{case.name} …", flush=True)
            begin = time.monotonic()
            made = _rows_of(case, output, most=min(case.most, left))
            with (output / ROWS).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(dataclasses.asdict(row)) + "\n" for row in made)
                file.flush()
                os.fsync(file.fileno())
            for row in made:
                print(f"  {row.figure}: {row.value} {row.beside} [{time.monotonic() - begin:.0f} s]", flush=True)


def _rows_of(case: Case, output: Path, *, most: float) -> list[Row]:
    case.answer.unlink(missing_ok=True)
    log = output / f"{case.answer.stem}.log"
    failure = _process(case, log, most=most)
    if case.answer.exists():
        try:
            return case.read(case.answer, case)
        except (ValueError, KeyError, TypeError) as error:
            failure = f"its figures cannot be read: {error!r}"
    return [Row(case=case.name, figure="failed", value=failure or "no figures", beside=f"see {log}")]


def _process(case: Case, log: Path, *, most: float) -> str:
    """Runs the process of a case. Returns why it failed, "" where it did not."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(log.parent / "compiled")} | dict(case.environment)
    with log.open("wb") as file:
        # A group of its own, so that its children end with it.
        process = subprocess.Popen(
            [sys.executable, *case.command], stdout=file, stderr=file, env=environment, start_new_session=True
        )
        try:
            process.wait(timeout=most)
        except subprocess.TimeoutExpired:
            return f"stopped after {most:.0f} s"
        finally:
            _end(process)
    if not process.returncode:
        return ""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    told = next((line for line in reversed(lines) if "RESOURCE_EXHAUSTED" in line), lines[-1] if lines else "")
    return f"exit status {process.returncode}: {told.strip()[:200]}"


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
