"""What S responses to a query cost and bring, of which an update draws K: S/K of 1, 1.2, 2 and 4, on the demo's sums.

    python -m benchmarks.selection --workdir=runs/selection [--seeds=2] [--steps=40] [--jobs=1]

Every run makes the same number of updates, of Q = 12 queries and K = 10 rows each, from one warm start, with one learning rate
and β. Nothing is tuned for any of them. Search and training take turns in one process, so rows made follow from the settings.

`queries`: every update has 12 new queries, as with S = K, and S/K times the rows. `rows`: as many rows are made in all as with
S = K, for K/S of its queries: for S/K = 2 and 4 a batch of 12 queries comes before every second and fourth update, for S/K = 1.2
one of 10 queries before each (and one more before the first, which needs 12). A query is recent until 12 newer ones have come.
`recent` draws as the demo does: 95 % of positions draw uniformly of what is recent. `reward` draws half of them so, and the other
half by reward, of the queries that were drawn least so far.

A run that is done is not made again, so the command resumes where it was stopped. It prints markdown tables and writes
workdir/selection.json.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import app, flags

from benchmarks import side_by_side, summary
from tba_jax.replay import journal, log
from tba_jax.storage import contract, layout
from tba_jax.telemetry import metrics

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the runs.", required=True)
_SEEDS = flags.DEFINE_integer("seeds", 2, "Runs of each arm, from one start.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 40, "Updates of each run, a multiple of 4.", lower_bound=4)

RECIPE = "configs/demo.py"
LAG = 4
QUERIES, COMPLETIONS = 12, 10
SAMPLES = (10, 12, 20, 40)
DRAWS: dict[str, dict[str, Any]] = {
    "recent": {"replay.recent_probability": 0.95},
    "reward": {"replay.recent_probability": 0.5, "replay.strategy": "softmax", "replay.inverse_temperature": 2.0},
}


class Arm(NamedTuple):
    """held: what is as with S = K, queries or rows; samples: S; draws: a key of DRAWS."""

    held: str
    samples: int
    draws: str

    @property
    def cells(self) -> tuple[str, str, str]:
        """The first cells of its row in a table."""
        return "both" if self.samples == COMPLETIONS else self.held, self.draws, f"{self.samples / COMPLETIONS:g}"

    def settings(self) -> dict[str, Any]:
        each, left = divmod(self.samples, COMPLETIONS)
        fewer = self.held == "rows"
        batch = QUERIES * COMPLETIONS // self.samples if fewer and left else QUERIES
        return {
            "learner.queries": QUERIES,
            "learner.completions": COMPLETIONS,
            "searchers.samples_per_query": self.samples,
            "searchers.queries_per_batch": batch,
            "searchers.slots": QUERIES * COMPLETIONS,
            "schedule.updates_per_search": each if fewer else 1,
            "replay.recent_window": math.ceil(QUERIES / batch),
            **DRAWS[self.draws],
        }


def arms() -> Iterator[Arm]:
    """With S = K both comparisons have the same run."""
    for samples in SAMPLES:
        for draws in DRAWS:
            for held in ("rows", "queries")[: 1 if samples == COMPLETIONS else 2]:
                yield Arm(held, samples, draws)


def job(root: Path, arm: Arm, seed: int) -> side_by_side.Job:
    settings = {
        **side_by_side.in_turn(_STEPS.value, LAG),
        "seed": seed,
        "learner.beta_steps": _STEPS.value,
        "metrics.every_steps": 1,
        **arm.settings(),
    }
    name = f"{_STEPS.value}-updates/{arm.held}-S{arm.samples}-{arm.draws}-seed{seed}"
    return side_by_side.Job(root=root, name=name, recipe=RECIPE, settings=settings, warm=True)


def measured(workdir: Path) -> dict[str, Any]:
    """The score by step, and what the rows of a run cost.

    made, resident, never_drawn: rows; queries: with rows in the window at the end; row_bytes: of a row in memory, log_bytes: of a
    row on disk; tokens, seconds: of the searcher, for an update; equal_made, equal_drawn: shares of groups of equal rewards.
    """
    run = layout.RunDir(workdir)
    lines = list(metrics.each_line(run.metrics("trainer")))
    batches = list(metrics.each_line(run.metrics("searcher-0")))
    drawn = {row for line in journal.read_lineage(run.journal) for row in journal.line_ids(line)}
    made = lines[-1]["rows_seen"]
    batches_an_update = made / batches[0]["rows"] / len(lines)
    logs = [file for file in (workdir / "replay").glob("*/*") if file.parent.name != log.REGISTER]
    return {
        "curve": summary.curve(workdir),
        "made": made,
        "resident": lines[-1]["buffer_rows"],
        "queries": lines[-1]["buffer_queries"],
        "never_drawn": 1 - len(drawn) / made,
        "row_bytes": contract.of(contract.read_run(run), called=str(workdir)).row_shape().row_bytes,
        "log_bytes": sum(file.stat().st_size for file in logs) / made,
        "tokens": batches_an_update * float(np.mean([batch["tokens"] for batch in batches])),
        # Some batches hold a compilation, which the median leaves out.
        "seconds": batches_an_update * float(np.median([batch["rows"] / batch["rows_per_second"] for batch in batches])),
        "equal_made": float(np.mean([batch["equal_reward_groups"] for batch in batches])),
        "equal_drawn": float(np.mean([line["equal_reward_groups"] for line in lines])),
    }


def tell(found: dict[Arm, list[dict[str, Any]]]) -> None:
    """Prints the tables of scores, and of what rows cost."""
    steps = list(next(iter(found.values()))[0]["curve"])
    print()
    summary.table("held equal", "draws", "S/K", "rows made", *(f"accuracy at {step}" for step in steps[1:]))
    for arm, runs in found.items():
        made = f"{np.mean([run['made'] for run in runs]):,.0f}"
        scores = (summary.spread([run["curve"].get(step, np.nan) for run in runs]) for step in steps[1:])
        summary.row(*arm.cells, made, *scores)
    print()
    titles = {
        "queries": ("queries", ",.0f"),
        "never_drawn": ("never drawn", ".3f"),
        "log_bytes": ("bytes of log a row", ",.0f"),
        "tokens": ("tokens an update", ",.0f"),
        "seconds": ("searcher seconds an update", ".2f"),
        "equal_made": ("equal groups made", ".3f"),
        "equal_drawn": ("equal groups drawn", ".3f"),
    }
    summary.table("held equal", "draws", "S/K", "resident MB", *(title for title, _ in titles.values()))
    for arm, runs in found.items():
        megabytes = np.mean([run["resident"] * run["row_bytes"] for run in runs]) / 1e6
        means = (f"{np.mean([run[name] for run in runs]):{spec}}" for name, (_, spec) in titles.items())
        summary.row(*arm.cells, f"{megabytes:.2f}", *means)
    first = np.mean([run["curve"][steps[0]] for runs in found.values() for run in runs])
    row_bytes = next(iter(found.values()))[0]["row_bytes"]
    print(f"\nbefore: {first:.3f}; {_STEPS.value} updates, {_SEEDS.value} seeds; a row in memory: {row_bytes} bytes")


def main(argv: Sequence[str]) -> None:
    del argv
    if _STEPS.value % 4:
        raise app.UsageError(f"--steps={_STEPS.value} must be a multiple of 4, the updates of a batch of searchers with S = 4 K")
    root = Path(_WORKDIR.value).absolute()
    side_by_side.ensure_warm_start(root, {}, recipe=RECIPE)
    # Seed by seed, so that a study that is stopped is one of fewer seeds.
    jobs = {(arm, seed): job(root, arm, seed) for seed in range(_SEEDS.value) for arm in arms()}
    side_by_side.run_all(list(jobs.values()))
    found = {arm: [measured(jobs[arm, seed].workdir) for seed in range(_SEEDS.value)] for arm in arms()}
    tell(found)
    told = {f"{arm.held}, S {arm.samples}, {arm.draws}": runs for arm, runs in found.items()}
    (root / "selection.json").write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    app.run(main)
