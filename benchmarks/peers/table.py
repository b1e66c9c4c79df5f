"""The table, the figures and the picture of a comparison."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers import cases, jobs

NAMES = {
    "trl": "TRL GRPO",
    "trl_async": "TRL asynchronous GRPO",
    "tunix": "Tunix GRPO",
    "bare": "bare JAX update",
    "tba_interleaved": "tba_jax interleaved",
    "tba_async": "tba_jax asynchronous",
}
_PARTS = ("generate", "score", "update")
_HEAD = ("system", "step, s", *(f"{part}, s" for part in _PARTS), "tokens", "updates/s", "rows/s")


class Group(NamedTuple):
    """A case, with a reference policy or without."""

    case: str
    reference: bool


# Group -> system -> records of its runs (see jobs.timed), or why there are none.
Found = dict[Group, dict[str, Any]]


def medians(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median over the runs of each run's median: seconds of a step and of its parts, response tokens of its rows, rates."""
    runs = [jobs.timed(record) for record in records]

    def middle(values: Sequence[Sequence[float]]) -> float:
        return statistics.median(statistics.median(value) for value in values)

    parts = sorted({part for run in runs for part in run["parts"]})
    step = middle([run["seconds"] for run in runs])
    return {
        "runs": len(runs),
        "step": step,
        "parts": {part: middle([run["parts"][part] for run in runs if run["parts"].get(part)]) for part in parts},
        "tokens": middle([run["tokens"] for run in runs]),
        "updates_per_second": 1 / step,
        "rows_per_second": statistics.median(run["rows_per_second"] for run in runs),
    }


def figures(found: Found) -> dict[str, Any]:
    """For JSON: case, reference and system -> medians and the records they are of, or the reason that there are none."""
    told: dict[str, Any] = {}
    for group, outcome in found.items():
        of_group = told.setdefault(f"{group.case}/{_with(group)}", {})
        for system, records in outcome.items():
            failed = isinstance(records, str)
            of_group[system] = {"failed": records} if failed else {"medians": medians(records), "records": records}
    return told


def lines(found: Found) -> list[str]:
    """The markdown tables: one a group."""
    told: list[str] = []
    for group, outcome in found.items():
        summary = {system: medians(records) for system, records in outcome.items() if not isinstance(records, str)}
        told += ["", f"**{group.case}, {_with(group)} a reference**: {cases.CASES[group.case].about}", ""]
        bases = [system for system in ("tba_interleaved", "tba_async") if system in summary]
        head = [*_HEAD, *(f"{figure} / {NAMES[base]}" for base in bases for figure in ("step", "rows"))]
        if summary:
            told += [_row(head), _row(["---"] * len(head))]
            told += [*(_row(_cells(system, summary, bases)) for system in summary), ""]
        for why in dict.fromkeys(records for records in outcome.values() if isinstance(records, str)):
            told.append(f"{', '.join(NAMES[system] for system in outcome if outcome[system] == why)}: no figure. {why}")
    return told + _slow(found)


def _with(group: Group) -> str:
    return "with" if group.reference else "without"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(system: str, summary: Mapping[str, Any], bases: Sequence[str]) -> list[str]:
    mine = summary[system]
    parts = [f"{mine['parts'][part]:.2f}" if part in mine["parts"] else "" for part in _PARTS]
    ratios = []
    for base in bases:
        # How many times as fast the base is: in seconds of a step, and in rows generated per second.
        ratios.append(f"{mine['step'] / summary[base]['step']:.2f}")
        ratios.append(f"{summary[base]['rows_per_second'] / mine['rows_per_second']:.2f}")
    rates = [f"{mine['updates_per_second']:.3f}", f"{mine['rows_per_second']:.1f}"]
    if system == "bare":  # its steps are updates alone
        rates, ratios = [""] * len(rates), [""] * len(ratios)
    return [NAMES[system], f"{mine['step']:.2f}", *parts, f"{mine['tokens']:.0f}", *rates, *ratios]


def _slow(found: Found) -> list[str]:
    """What slow rewards leave of each system's rate."""
    told = []
    for reference in (True, False):
        slow, fixed = (found.get(Group(name, reference), {}) for name in ("slow_rewards", "fixed"))
        both = [system for system in slow if not isinstance(slow[system], str) and isinstance(fixed.get(system), list)]
        for system in both:
            kept = medians(fixed[system])["step"] / medians(slow[system])["step"]
            told.append(
                f"{NAMES[system]}, {_with(Group('', reference))} a reference: slow rewards leave {kept:.2f} of its updates/s"
            )
    return ["", *told] if told else []


def plot(path: Path, found: Found) -> None:
    """Bars of the seconds of a step by system, with their parts, one axis a group."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = [group for group in found if any(not isinstance(records, str) for records in found[group].values())]
    if not groups:
        return
    columns = min(3, len(groups))
    rows = -(-len(groups) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 2.4 * rows), squeeze=False)
    for axis in axes.flat[len(groups) :]:
        axis.axis("off")
    for axis, group in zip(axes.flat, groups, strict=False):
        _bars(axis, group, found[group])
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.4 / (2.4 * rows), 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _bars(axis: Any, group: Group, outcome: Mapping[str, Any]) -> None:
    systems = [system for system in cases.SYSTEMS if isinstance(outcome.get(system), list)][::-1]
    summary = {system: medians(outcome[system]) for system in systems}
    left = dict.fromkeys(systems, 0.0)
    # The parts of an asynchronous run take place side by side: its bar is the step alone.
    in_turn = [system for system in systems if system != "tba_async"]
    for colour, part in enumerate(_PARTS):
        widths = {system: summary[system]["parts"].get(part, 0.0) if system in in_turn else 0.0 for system in systems}
        axis.barh(systems, widths.values(), left=list(left.values()), color=f"C{colour}", label=part)
        left = {system: left[system] + widths[system] for system in systems}
    rest = [max(0.0, summary[system]["step"] - left[system]) for system in systems]
    axis.barh(systems, rest, left=list(left.values()), color="0.6", label="rest, or side by side")
    for i, system in enumerate(systems):
        # Medians of parts may add up to more than that of the step.
        axis.text(max(summary[system]["step"], left[system]), i, f" {summary[system]['step']:.2f} s", va="center", fontsize=7)
    axis.set_yticks(range(len(systems)), [NAMES[system] for system in systems], fontsize=7)
    axis.set_xlim(0, 1.2 * max(figure["step"] for figure in summary.values()))
    axis.set_title(f"{group.case}, {_with(group)} a reference", fontsize=8)
    axis.set_xlabel("seconds of a step", fontsize=7)
    axis.tick_params(axis="x", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
