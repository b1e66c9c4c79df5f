"""The rows of the suite as the section for benchmarks/RESULTS.md."""

import datetime
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.device import Device
from benchmarks.gpu.suite import Case, Row, Rows

_COLUMNS = "| case | figure | value | beside it |\n|---|---|---|---|"


def write(device: Device, cases: Sequence[Case], output: Path, rows: Rows, told: Sequence[str] = ()) -> None:
    """Writes OUTPUT/results.md. A full disk is said: the table is printed at the end all the same."""
    try:
        (output / "results.md").write_text(text(device, cases, rows, told), encoding="utf-8")
    except OSError as error:
        print(f"  results.md is not written: {error}", flush=True)


def text(device: Device, cases: Sequence[Case], rows: Rows, told: Sequence[str] = ()) -> str:
    """The section. Args: told: sentences about what the rows lack."""
    versions = ", ".join(f"{name} {version}" for name, version in device.versions.items())
    lines = ["## GPU", "", "`python -m benchmarks.gpu --minutes=9`.", ""]
    if device.platform == "cpu":
        lines += ["The CPU form: tiny sizes stand for the shapes that cases are named after.", ""]
    lines += [f"{_machine(device)}; {versions}; {datetime.date.today().isoformat()}.", ""]
    lines += [*told, ""] if told else []
    lines.append(_COLUMNS)
    for case in cases:
        made = rows.get(case.name, [Row(case=case.name, figure="", value="not measured")])
        for row in made:
            cells = row.case, row.figure, row.value, _beside(case, row, rows)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([*lines, *_fastest(cases, rows)]) + "\n"


def _machine(device: Device) -> str:
    sizes = [f"{device.memory / 2**30:.0f} GiB"] if device.memory else []
    sizes += [f"of which JAX may take {device.bytes / 2**30:.0f}" if sizes else f"{device.bytes / 2**30:.0f} GiB for JAX"]
    driver = [f"driver {device.driver}"] if device.driver else []
    return ", ".join([device.kind, *(sizes if device.bytes else sizes[:-1]), *driver])


def _beside(case: Case, row: Row, rows: Rows) -> str:
    """What a row says beside its value; an update by PyTorch also how much faster that of the same shape is here."""
    if case.kind != "torch" or not (theirs := _milliseconds([row])):
        return row.beside
    if not (ours := _milliseconds(rows.get(case.name.replace("torch: ", "update: "), []))):
        return row.beside
    return f"{row.beside}{', ' if row.beside else ''}ours × {theirs / ours:.2f}"


def _fastest(cases: Sequence[Case], rows: Rows) -> list[str]:
    """A sentence about the settings that were swept on the first of the updates, with the update as it is among them."""
    base = [case for case in cases if case.kind == "update"][:1]
    times = {case.name: _milliseconds(rows.get(case.name, [])) for case in cases if case.kind == "sweep" or case in base}
    measured = {name: time for name, time in times.items() if time}
    if not any(name.startswith("sweep: ") for name in measured):
        return []
    best = min(measured, key=lambda name: measured[name])
    if not best.startswith("sweep: "):
        return ["", f"No setting that was swept had a faster update than the defaults: {measured[best]:.1f} ms."]
    return ["", f"Of the settings swept, {best.removeprefix('sweep: ')} had the fastest update: {measured[best]:.1f} ms."]


def _milliseconds(rows: Sequence[Row]) -> float:
    """Of the first row with a time, 0 without one."""
    return next((float(row.value.split(" ms")[0]) for row in rows if " ms" in row.value), 0.0)
