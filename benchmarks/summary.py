"""What studies print and draw of runs side by side: markdown tables, and curves with their spread over seeds."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tba_jax.roles import results
from tba_jax.storage import layout

# step -> value, of one run.
Curve = Mapping[float, float]


def evaluations(workdir: Path) -> list[dict]:
    """The evaluations of a run, as far as it went. Raises RuntimeError: it ended before the first."""
    found = results.evaluations(layout.RunDir(workdir))
    if not found:
        raise RuntimeError(f"{workdir} ended before its first evaluation; see {workdir}.out")
    return found


def curve(workdir: Path) -> Curve:
    """The held-out greedy score of a run, by step."""
    return {each["step"]: each["greedy_reward"] for each in evaluations(workdir)}


def crossing(curve: Curve, threshold: float) -> float:
    """Where a curve first reaches the threshold, linear between its points; infinite where it never does."""
    points = sorted(curve.items())
    if points[0][1] >= threshold:
        return points[0][0]
    for (x, low), (after, high) in itertools.pairwise(points):
        if high >= threshold:
            return x + (after - x) * (threshold - low) / (high - low)
    return math.inf


def table(*columns: str) -> None:
    """Prints the head of a markdown table."""
    row(*columns)
    row(*["---"] * len(columns))


def row(*cells: str) -> None:
    """Prints a row of a markdown table."""
    print(f"| {' | '.join(cells)} |", flush=True)


def spread(values: Sequence[float], spec: str = ".3f") -> str:
    """Mean and standard deviation, of one value that alone."""
    return f"{np.mean(values):z{spec}}" + (f" ± {np.std(values, ddof=1):{spec}}" if len(values) > 1 else "")


def on_line(x: float, points: Sequence[tuple[float, float]]) -> float:
    """y at x, on the line through points (x, y) in the order of their x; nan outside of it."""
    across, up = np.array(sorted(points)).T
    return float(np.interp(x, across, up, left=np.nan, right=np.nan))


def spread_of_finite(values: Sequence[float], spec: str = ".3f") -> str:
    """The spread of the finite values, and how many are not."""
    finite = [value for value in values if math.isfinite(value)]
    missing = len(values) - len(finite)
    return (spread(finite, spec) if finite else "–") + (f" ({missing} of {len(values)} never)" if missing else "")


def plot(path: Path, panels: Mapping[str, Mapping[str, Sequence[Curve]]], *, across: str, up: str, log: bool = False) -> None:
    """Draws a panel for each title: label -> the curves of its runs. Lines are means, bands go from the least to the largest."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.8), sharey=True, squeeze=False)
    for axis, (title, labels) in zip(axes[0], panels.items(), strict=True):
        for i, (label, runs) in enumerate(labels.items()):
            steps = sorted(set.intersection(*(set(run) for run in runs)))
            values = np.array([[run[step] for step in steps] for run in runs])
            axis.plot(steps, values.mean(axis=0), marker="o", markersize=3, color=f"C{i}", label=label)
            axis.fill_between(steps, values.min(axis=0), values.max(axis=0), color=f"C{i}", alpha=0.12, linewidth=0)
        axis.set_title(title)
        axis.set_xlabel(across)
        axis.grid(alpha=0.3)
        axis.set_yscale("log" if log else "linear")
        if axis is axes[0][0] or list(labels) != list(next(iter(panels.values()))):
            axis.legend(fontsize=7)
    axes[0][0].set_ylabel(up)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def scatter(path: Path, labels: Mapping[str, Sequence[Curve]], *, across: str, up: str) -> None:
    """Draws a line for each run, of one colour for each label: {x: y} in the order in which they came."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.0, 4.2))
    for i, (label, runs) in enumerate(labels.items()):
        for number, run in enumerate(runs):
            points = dict(marker="o", markersize=2, linewidth=0.8, color=f"C{i % 10}", linestyle="--" if i > 9 else "-")
            axis.plot(list(run), list(run.values()), label="" if number else label, **points)
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
