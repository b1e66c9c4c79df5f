"""The tables of a comparison."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers import cases, jobs

NAMES = {"trl": "TRL GRPO", "tunix": "Tunix GRPO", "tba_interleaved": "tba_jax interleaved", "tba_async": "tba_jax asynchronous"}
_PARTS = ("generate", "score", "update")
_HEAD = ("system", "step, s", *(f"{part}, s" for part in _PARTS), "tokens", "updates/s", "rows/s")


# Case -> system -> records of its runs (see jobs.timed), or why there are none.
Found = dict[str, dict[str, Any]]


def medians(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median over the runs of each run's median: seconds of a step and of its parts, response tokens of its rows, rates."""
    runs = [jobs.timed(record) for record in records]

    def middle(values: Sequence[Sequence[float]]) -> float:
        return statistics.median(statistics.median(value) for value in values)

    parts = sorted({part for run in runs for part in run["parts"]})
    return {
        "step": middle([run["seconds"] for run in runs]),
        "parts": {part: middle([run["parts"][part] for run in runs if run["parts"].get(part)]) for part in parts},
        "tokens": middle([run["tokens"] for run in runs]),
        "rows_per_second": statistics.median(run["rows_per_second"] for run in runs),
    }


def lines(found: Found) -> list[str]:
    """The markdown tables: one a case."""
    told: list[str] = []
    for case, outcome in found.items():
        summary = {system: medians(records) for system, records in outcome.items() if not isinstance(records, str)}
        told += ["", f"**{case}**: {cases.CASES[case].about}", ""]
        bases = [system for system in ("tba_interleaved", "tba_async") if system in summary]
        head = [*_HEAD, *(f"{figure} / {NAMES[base]}" for base in bases for figure in ("step", "rows"))]
        if summary:
            rows = [head, ["---"] * len(head), *(_cells(system, summary, bases) for system in summary)]
            told += [*(f"| {' | '.join(cells)} |" for cells in rows), ""]
        for why in dict.fromkeys(records for records in outcome.values() if isinstance(records, str)):
            told.append(f"{', '.join(NAMES[system] for system in outcome if outcome[system] == why)}: no figure. {why}")
    return told


def _cells(system: str, summary: Mapping[str, Any], bases: Sequence[str]) -> list[str]:
    mine = summary[system]
    parts = [f"{mine['parts'][part]:.2f}" if part in mine["parts"] else "" for part in _PARTS]
    ratios = []
    for base in bases:
        # How many times as fast the base is: in seconds of a step, and in rows generated per second.
        ratios.append(f"{mine['step'] / summary[base]['step']:.2f}")
        ratios.append(f"{summary[base]['rows_per_second'] / mine['rows_per_second']:.2f}")
    rates = f"{1 / mine['step']:.3f}", f"{mine['rows_per_second']:.1f}"
    return [NAMES[system], f"{mine['step']:.2f}", *parts, f"{mine['tokens']:.0f}", *rates, *ratios]
