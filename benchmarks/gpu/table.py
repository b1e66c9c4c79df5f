"""The rows of the suite as the section for benchmarks/RESULTS.md."""

import datetime
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import suite
from benchmarks.gpu.device import Device
from benchmarks.gpu.suite import Case, Row

_COLUMNS = "| case | figure | value | beside it |\n|---|---|---|---|"


def write(device: Device, cases: Sequence[Case], output: Path) -> Path:
    """Writes OUTPUT/results.md and returns it."""
    file = output / "results.md"
    file.write_text(text(device, cases, suite.rows(output)), encoding="utf-8")
    return file


def text(device: Device, cases: Sequence[Case], rows: dict[str, list[Row]]) -> str:
    memory = f", {device.bytes / 2**30:.0f} GiB" if device.bytes else ""
    driver = f", driver {device.driver}" if device.driver else ""
    versions = ", ".join(f"{name} {version}" for name, version in device.versions.items())
    lines = [
        "## GPU",
        "",
        "`python -m benchmarks.gpu --minutes=9`.",
        "",
        f"{device.kind}{memory}{driver}; {versions}; {datetime.date.today().isoformat()}.",
        "",
        _COLUMNS,
    ]
    if device.platform == "cpu":
        lines[4:4] = ["The CPU form: tiny sizes stand for the shapes that cases are named after.", ""]
    for case in cases:
        made = rows.get(case.name, [Row(case=case.name, figure="", value="not measured")])
        lines += [f"| {row.case} | {row.figure} | {row.value} | {row.beside} |" for row in made]
    times = {case.name: _milliseconds(rows.get(case.name, [])) for case in cases if case.kind == "sweep"}
    if measured := {name: time for name, time in times.items() if time}:
        best = min(measured, key=lambda name: measured[name])
        lines += ["", f"Of the settings swept, {best.removeprefix('sweep: ')} had the fastest update: {measured[best]:.1f} ms."]
    return "\n".join(lines) + "\n"


def _milliseconds(rows: Sequence[Row]) -> float:
    """Of the first row with a time, 0 without one."""
    return next((float(row.value.split(" ms")[0]) for row in rows if " ms" in row.value), 0.0)
