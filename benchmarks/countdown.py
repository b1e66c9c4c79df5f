"""How many completions a query should have, at equal batches: Countdown, asynchronous, all from one warm start.

    python -m benchmarks.countdown --workdir=runs/countdown [--completions=10,20,40] [--rows=120] [--seeds=2] [--steps=…]

Every run draws `rows` rows an update, rows / K queries with K completions each, and makes the same number of updates; searchers
sample 1.2 K responses to a query, as in the paper (24 for K = 20). All else is the recipe's. Runs are made one by one, since each
takes the whole machine. A run that is done is not made again, so the command resumes where it was stopped. It prints a markdown
table of held-out accuracy, greedy and of samples, mean and standard deviation over seeds, and draws workdir/countdown.png.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

from benchmarks import side_by_side, summary, warm_start
from tba_jax.roles import results
from tba_jax.storage import layout

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the runs.", required=True)
_COMPLETIONS = flags.DEFINE_list("completions", ["10", "20", "40"], "K: completions of a query; multiple of 5, divisor of rows.")
_ROWS = flags.DEFINE_integer("rows", 120, "Rows of an update.", lower_bound=5)
_SEEDS = flags.DEFINE_integer("seeds", 2, "Runs of each kind; they differ in draws, not in their start.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 200, "Updates of each run.", lower_bound=8)

RECIPE = "configs/countdown.py"
# What is measured of a policy -> its title.
SCORES = {"greedy_reward": "greedy", "sampled_reward": "of samples"}


def job(root: Path, completions: int, seed: int) -> side_by_side.Job:
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
    name = f"{_STEPS.value}-updates/{_ROWS.value // completions}x{completions}-seed{seed}"
    return side_by_side.Job(root=root, name=name, recipe=RECIPE, settings=settings, warm=True)


def main(argv: Sequence[str]) -> None:
    del argv
    kinds = [int(completions) for completions in _COMPLETIONS.value]
    if bad := [completions for completions in kinds if completions < 5 or completions % 5 or _ROWS.value % completions]:
        raise app.UsageError(f"--completions={bad[0]} is not a multiple of 5 that divides --rows={_ROWS.value}")
    root, seeds = Path(_WORKDIR.value).absolute(), range(_SEEDS.value)
    warm_start.ensure(root, recipe=RECIPE)
    # Seed by seed, so that a study that is stopped is one of fewer seeds.
    jobs = {(completions, seed): job(root, completions, seed) for seed in seeds for completions in kinds}
    side_by_side.run_all(list(jobs.values()), at_a_time=1)
    runs = {each: summary.evaluations(made.workdir) for each, made in jobs.items()}
    columns = [f"{title}, {when}" for title in SCORES.values() for when in ("before", "after")]
    summary.table("K", "Q", *columns, "staleness")
    for completions in kinds:
        figures = [results.figures(layout.RunDir(jobs[completions, seed].workdir)) for seed in seeds]
        scores = ([runs[completions, seed][when][score] for seed in seeds] for score in SCORES for when in (0, -1))
        staleness = np.mean([figure["mean staleness (steps)"] for figure in figures])
        summary.row(f"{completions}", f"{_ROWS.value // completions}", *map(summary.spread, scores), f"{staleness:.1f}")
    print(f"\n{_STEPS.value} updates of {_ROWS.value} rows, {_SEEDS.value} seeds")
    panels: dict[str, dict[str, list[summary.Curve]]] = {}
    for score, title in SCORES.items():
        panels[f"held-out accuracy, {title}"] = {
            f"K {k}, Q {_ROWS.value // k}": [{each["step"]: each[score] for each in runs[k, seed]} for seed in seeds]
            for k in kinds
        }
    summary.plot(root / "countdown.png", panels, across=f"updates of {_ROWS.value} rows", up="accuracy")


if __name__ == "__main__":
    app.run(main)
