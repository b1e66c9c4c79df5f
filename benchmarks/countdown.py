"""How many completions a query should have, at equal batches: Countdown, asynchronous, all from one warm start.

    python -m benchmarks.countdown --workdir=runs/countdown [--completions=10,20,40] [--rows=120] [--seeds=2] [--steps=…]

Every run draws `rows` rows an update, rows / K queries with K completions each, and makes the same number of updates; searchers
sample 1.2 K responses to a query, as in the paper (24 for K = 20). All else is the recipe's. Runs are made one by one, since each
takes the whole machine. A run that is done is not made again, so the command resumes where it was stopped. It prints a markdown
table of held-out accuracy, greedy and of samples, mean and standard deviation over seeds, and draws workdir/countdown.png.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks import warm_start
from tba_jax.roles import results
from tba_jax.run import layout

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the runs.", required=True)
_COMPLETIONS = flags.DEFINE_list("completions", ["10", "20", "40"], "K: completions of a query; multiple of 5, divisor of rows.")
_ROWS = flags.DEFINE_integer("rows", 120, "Rows of an update.", lower_bound=5)
_SEEDS = flags.DEFINE_integer("seeds", 2, "Runs of each kind; they differ in draws, not in their start.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 200, "Updates of each run.", lower_bound=8)

RECIPE = "configs/countdown.py"
# What is measured of a policy -> its title.
SCORES = {"greedy_reward": "greedy", "sampled_reward": "of samples"}


def name_of(completions: int, seed: int) -> str:
    return f"{_STEPS.value}-updates/{_ROWS.value // completions}x{completions}-seed{seed}"


def train(root: Path, completions: int, seed: int) -> None:
    """One run, unless it is done. Its seconds go to <run>.seconds."""
    workdir = root / name_of(completions, seed)
    done = Path(f"{workdir}.seconds")
    if done.exists():
        return
    warm_start.begin(root, name_of(completions, seed))
    settings = {
        "seed": seed,
        "learner.queries": _ROWS.value // completions,
        "learner.completions": completions,
        "searchers.queries_per_batch": _ROWS.value // completions,
        "searchers.samples_per_query": completions * 6 // 5,
        "learner.steps": _STEPS.value,
        "learner.beta_steps": _STEPS.value,
        "evaluation.every_steps": _STEPS.value // 4,
    }
    seconds = warm_start.call(workdir, *(f"--config.{leaf}={value}" for leaf, value in settings.items()), recipe=RECIPE)
    done.write_text(f"{seconds:.0f}\n")
    print(f"{name_of(completions, seed)}: {seconds:.0f} s", file=sys.stderr, flush=True)


# Of a K: the evaluations of each seed's run, by step.
Runs = dict[int, list[list[dict[str, Any]]]]


def plot(path: Path, runs: Runs) -> None:
    """Accuracy over updates, a panel for each score; lines are means over seeds, bands from the least to the largest."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(SCORES), figsize=(4.4 * len(SCORES), 3.6), sharey=True)
    for axis, (score, title) in zip(axes, SCORES.items(), strict=True):
        for i, (completions, seeds) in enumerate(runs.items()):
            steps = [evaluation["step"] for evaluation in seeds[0]]
            values = np.array([[evaluation[score] for evaluation in run] for run in seeds])
            label = f"K {completions}, Q {_ROWS.value // completions}"
            axis.plot(steps, values.mean(axis=0), marker="o", markersize=3, color=f"C{i}", label=label)
            axis.fill_between(steps, values.min(axis=0), values.max(axis=0), color=f"C{i}", alpha=0.15, linewidth=0)
        axis.set_title(f"held-out accuracy, {title}")
        axis.set_xlabel(f"updates of {_ROWS.value} rows")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str]) -> None:
    del argv
    kinds = [int(completions) for completions in _COMPLETIONS.value]
    if bad := [completions for completions in kinds if completions < 5 or completions % 5 or _ROWS.value % completions]:
        raise app.UsageError(f"--completions={bad[0]} is not a multiple of 5 that divides --rows={_ROWS.value}")
    root = Path(_WORKDIR.value).absolute()
    # Runs of the same K compile the same programs.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(root / "compilation_cache")
    warm_start.ensure(root, recipe=RECIPE)
    # Seed by seed, so that a study that is stopped is one of fewer seeds.
    for seed in range(_SEEDS.value):
        for completions in kinds:
            train(root, completions, seed)
    runs: Runs = {}
    columns = [f"{title}, {when}" for title in SCORES.values() for when in ("before", "after")]
    warm_start.table("K", "Q", *columns, "staleness", "seconds")
    for completions in kinds:
        folders = [root / name_of(completions, seed) for seed in range(_SEEDS.value)]
        runs[completions] = [results.evaluations(layout.RunDir(folder)) for folder in folders]
        figures = [results.figures(layout.RunDir(folder)) for folder in folders]
        warm_start.row(
            f"{completions}",
            f"{_ROWS.value // completions}",
            *(warm_start.spread([run[when][score] for run in runs[completions]]) for score in SCORES for when in (0, -1)),
            f"{np.mean([figure['mean staleness (steps)'] for figure in figures]):.1f}",
            ", ".join(Path(f"{folder}.seconds").read_text().strip() for folder in folders),
        )
    print(f"\n{_STEPS.value} updates of {_ROWS.value} rows, {_SEEDS.value} seeds")
    curves = {k: [{e["step"]: [e[score] for score in SCORES] for e in run} for run in seeds] for k, seeds in runs.items()}
    (root / "countdown.json").write_text(json.dumps(curves, indent=1))
    plot(root / "countdown.png", runs)


if __name__ == "__main__":
    app.run(main)
