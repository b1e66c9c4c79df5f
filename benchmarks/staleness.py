"""What staleness does to each objective: equal updates on rows of a fixed age, the demo's sums, all from one warm start.

    python -m benchmarks.staleness --workdir=runs/staleness [--objectives=…] [--lags=1,16,64] [--seeds=3] [--steps=200] [--jobs=0]
    python -m benchmarks.staleness --workdir=runs/staleness --objectives=siblings
    python -m benchmarks.staleness --workdir=runs/staleness --asynchronous --objectives=trajectory_balance --lags=2,10 --jobs=1

Search and training take turns in one process: the rows of an update were drawn with the weights of `lag` updates before (the
first ones: with those of the start), and none is drawn twice. Every objective has the same learning rate, β, rows and updates;
nothing is tuned for any of them. `siblings` stands for the siblings of trajectory balance (docs/objectives.md), each with the
numbers of its row in configs/baselines.py, since its β or its baseline may mean another quantity. A run that is done is not made
again, so the command resumes where it was stopped. It draws workdir/staleness.png.

`--asynchronous` asks how old rows are under searchers.lag: search and training at once, a snapshot each update, two searchers
without backpressure. Each cell then also has the mean and the largest staleness of the rows drawn, and the rows made for each row
of an update.
"""

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks import side_by_side, summary
from configs import baselines
from tba_jax.objectives import OBJECTIVES
from tba_jax.roles import results
from tba_jax.storage import layout

SIBLINGS = ("oapl", "pmd_mean", "flowrl_linear_z", "a_star_po", "asymre", "topr")

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the runs.", required=True)
_OBJECTIVES = flags.DEFINE_list(
    "objectives",
    ["trajectory_balance", "tba_prime", "rloo", "proximal_rloo", "grpo", "dr_grpo", "online_dpo"],
    f"Of {', '.join(OBJECTIVES)}; siblings: {', '.join(SIBLINGS)}.",
)
_LAGS = flags.DEFINE_list("lags", ["1", "16", "64"], "Ages of the rows, in updates.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each kind, from one start.", lower_bound=1)
_ASYNCHRONOUS = flags.DEFINE_boolean("asynchronous", False, "Search and train at once; the lags are those of searchers.lag.")
_STEPS = flags.DEFINE_integer("steps", 200, "Updates of each run.", lower_bound=1)

RECIPE = "configs/demo.py"
# 64 rows an update, all of them from the batch that the searcher has just appended.
ROWS: dict[str, Any] = {
    "learner.queries": 4,
    "learner.completions": 16,
    "searchers.queries_per_batch": 4,
    "searchers.samples_per_query": 16,
    "searchers.slots": 64,
    "replay.recent_probability": 1.0,
    "replay.recent_window": 1,
    "replay.merge_duplicates": False,
    "replay.recent_fill": "wait",
}


def name_of(objective: str, lag: int, seed: int) -> str:
    return f"{_STEPS.value}-updates/{objective}-lag{lag}-seed{seed}" + "-asynchronous" * _ASYNCHRONOUS.value


def job(root: Path, objective: str, lag: int, seed: int) -> side_by_side.Job:
    settings = {
        **ROWS,
        **side_by_side.in_turn(_STEPS.value, lag),
        "seed": seed,
        "learner.objective": objective,
        "learner.beta_steps": _STEPS.value,
        "evaluation.batch_size": 64,
    }
    if _ASYNCHRONOUS.value:
        unbounded = {"searchers.count": 2, "searchers.max_updates_ahead": 0}
        at_once = {"schedule.mode": "asynchronous", "schedule.lag": 0, "searchers.lag": lag}
        settings |= at_once | {"publish.every_steps": 1, "metrics.every_steps": 1} | unbounded
    if objective in SIBLINGS:
        settings |= {f"learner.{name}": value for name, value in baselines.BASELINES[objective].items()}
    return side_by_side.Job(root=root, name=name_of(objective, lag, seed), recipe=RECIPE, settings=settings, warm=True)


def ages(root: Path, objective: str, lag: int) -> str:
    """What the runs of all seeds tell of the rows that they drew."""
    told = [results.figures(layout.RunDir(root / name_of(objective, lag, seed))) for seed in range(_SEEDS.value)]
    rows = ROWS["learner.queries"] * ROWS["learner.completions"] * _STEPS.value
    mean = np.mean([each["mean staleness (steps)"] for each in told])
    largest = max(each["largest staleness (steps)"] for each in told)
    made = np.mean([each["rows seen by the trainer"] for each in told]) / rows
    return f"; {mean:.1f} old, at most {largest:.0f}; {made:.1f} rows made a row"


def main(argv: Sequence[str]) -> None:
    del argv
    named = [SIBLINGS if name == "siblings" else (name,) for name in _OBJECTIVES.value]
    objectives, lags = list(dict.fromkeys(itertools.chain(*named))), [int(lag) for lag in _LAGS.value]
    if unknown := [name for name in objectives if name not in OBJECTIVES]:
        raise app.UsageError(f"--objectives={','.join(unknown)} is not among {', '.join(OBJECTIVES)}")
    root = Path(_WORKDIR.value).absolute()
    begin = time.monotonic()
    side_by_side.ensure_warm_start(root, {}, recipe=RECIPE)
    seeds = range(_SEEDS.value)
    # Seed by seed, so that a study that is stopped is one of fewer seeds.
    jobs = [job(root, objective, lag, seed) for seed in seeds for objective in objectives for lag in lags]
    side_by_side.run_all(jobs)
    curves = {
        (objective, lag): [summary.curve(root / name_of(objective, lag, seed)) for seed in seeds]
        for objective in objectives
        for lag in lags
    }
    summary.table("objective", *(f"rows {lag} updates old" for lag in lags))
    for objective in objectives:
        cells = []
        for lag in lags:
            last = [curve[max(curve)] for curve in curves[objective, lag]]
            early = sum(max(curve) < _STEPS.value for curve in curves[objective, lag])
            cells.append(
                summary.spread(last)
                + (f" ({early} ended early)" if early else "")
                + (ages(root, objective, lag) if _ASYNCHRONOUS.value else "")
            )
        summary.row(objective, *cells)
    first = np.mean([curve[min(curve)] for runs in curves.values() for curve in runs])
    print(f"\nbefore: {first:.3f}; {_STEPS.value} updates, {_SEEDS.value} seeds; this call took {time.monotonic() - begin:.0f} s")
    panels = {f"rows {lag} update{'s' * (lag > 1)} old": {name: curves[name, lag] for name in objectives} for lag in lags}
    summary.plot(root / "staleness.png", panels, across="updates", up="held-out greedy accuracy")


if __name__ == "__main__":
    app.run(main)
