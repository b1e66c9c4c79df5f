"""What a starved trainer draws, and what it learns: four updates on each append of one searcher, the demo's sums.

    python -m benchmarks.starved --workdir=runs/starved [--other=../before] [--updates=4] [--seeds=3] [--steps=200] [--jobs=2]

Search and training take turns in one process: after a batch of the searcher come so many updates. All runs begin from one warm
start. With --other the same runs are made by the code of another checkout, too. A run that is done is not made again, so the
command resumes where it was stopped. It prints a markdown table, mean and standard deviation over seeds: of how many different
queries 100 groups in a row are, and held-out greedy accuracy.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

from benchmarks import side_by_side, warm_start
from tba_jax.replay import journal
from tba_jax.replay.reader import LogReader
from tba_jax.roles import results
from tba_jax.run import contract, layout

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the runs.", required=True)
_OTHER = flags.DEFINE_string("other", "", "Folder of a checkout that this one is compared with.")
_UPDATES = flags.DEFINE_integer("updates", 4, "Updates on each append.", lower_bound=1)
_SEEDS = flags.DEFINE_integer(
    "seeds", 3, "Runs of each kind; they differ in queries and draws, not in their start.", lower_bound=1
)
_STEPS = flags.DEFINE_integer("steps", 200, "Updates of each run.", lower_bound=15)  # 100 groups and more
_JOBS = flags.DEFINE_integer("jobs", 0, "Runs side by side, each on its share of the cores; 0: one a core.", lower_bound=0)

RECIPE = "configs/demo.py"
GROUPS = 100


def job(root: Path, name: str, checkout: Path, seed: int) -> side_by_side.Job:
    settings = {
        "seed": seed,
        "learner.steps": _STEPS.value,
        "learner.beta_steps": _STEPS.value,
        "schedule.mode": "interleaved",
        "schedule.updates_per_search": _UPDATES.value,
        # One append brings the queries that its updates draw, and the window is that of the asynchronous recipe.
        "searchers.queries_per_batch": 7 * _UPDATES.value,
        "searchers.samples_per_query": 20,
        "searchers.slots": 140 * _UPDATES.value,
        "replay.recent_window": 2,
        "evaluation.every_steps": _STEPS.value // 2,
        "evaluation.batch_size": 64,
        "checkpoint.every_steps": _STEPS.value,
    }
    name = f"{_UPDATES.value}-an-append-{_STEPS.value}-updates/{name}-{checkout.name}-seed{seed}"
    return side_by_side.Job(root=root, name=name, recipe=RECIPE, settings=settings, warm=True, checkout=checkout)


def distinct_queries(run: layout.RunDir) -> float:
    """Different queries among 100 groups that were drawn in a row, the mean over the run."""
    reader = LogReader(run.replay, contract.of(contract.read(run), called=str(run.root)).row_shape())
    reader.heads()
    lines = journal.read_lineage(run.journal, must_exist=True)
    ids = [(line["writers"][writer], row) for line in lines for writer, row in line["rows"]]
    completions = layout.read_json(run.config)["config"]["learner"]["completions"]
    groups = reader.read_ids(ids[::completions])["query_id"]
    windows = np.lib.stride_tricks.sliding_window_view(groups, GROUPS)[::GROUPS]
    return float(np.mean([len(np.unique(window)) for window in windows]))


def main(argv: Sequence[str]) -> None:
    del argv
    root, seeds = Path(_WORKDIR.value).absolute(), range(_SEEDS.value)
    begin = time.monotonic()
    checkouts = {"here": Path.cwd()} | ({"other": Path(_OTHER.value).absolute()} if _OTHER.value else {})
    warm_start.ensure(root, recipe=RECIPE)
    jobs = {(name, seed): job(root, name, checkout, seed) for seed in seeds for name, checkout in checkouts.items()}
    side_by_side.run_all(list(jobs.values()), at_a_time=_JOBS.value)
    warm_start.table("checkout", f"different queries of {GROUPS} groups", "accuracy before", "after half", "at the end")
    figures = {}
    for name in checkouts:
        runs = [layout.RunDir(jobs[name, seed].workdir) for seed in seeds]
        curves = np.array([[report["greedy_reward"] for report in results.evaluations(run)] for run in runs])
        distinct = [distinct_queries(run) for run in runs]
        figures[name] = {"distinct_queries": distinct, "accuracy": curves.tolist()}
        warm_start.row(name, warm_start.spread(distinct, ".1f"), *(warm_start.spread(list(curves[:, at])) for at in (0, 1, -1)))
    print(f"\n{_UPDATES.value} updates an append, {_STEPS.value} in all, {len(seeds)} seeds; {time.monotonic() - begin:.0f} s")
    (root / "starved.json").write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    app.run(main)
