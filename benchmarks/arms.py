"""One recipe in several arms, such as settings, checkouts or objectives, over warm starts and seeds, at equal rows an update.

    python -m benchmarks.arms --workdir=runs/clipping --recipe=configs/demo.py --other=../before --seeds=3
    python -m benchmarks.arms --workdir=runs/noise --recipe=configs/demo.py --warm_starts=3 --seeds=2 --set="learner.clip_norm=0"
        --arm="trajectory_balance learner.objective=trajectory_balance" --arm="rloo learner.objective=rloo"

An arm is a name and settings; --set holds settings of all arms and of their warm start (another --set needs another --workdir).
With --other, every arm is also run by the code of another checkout, from a warm start of its own. Search and training take turns
in one process, so every arm has as many new rows for each update, of a policy that is 4 updates old. A run that is done is not
made again, so the command resumes where it was stopped. It prints a markdown table of the recipe's held-out greedy score, mean
and standard deviation over warm starts and seeds, and of the trainer's metrics that --columns names, mean over the recorded
updates (metrics.every_steps), and of `clipped`: the share of these whose gradient norm is above learner.clip_norm. It writes
workdir/arms.json.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks import side_by_side, summary
from tba_jax.storage import layout
from tba_jax.telemetry import metrics

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the runs.", required=True)
_RECIPE = flags.DEFINE_string("recipe", "configs/demo.py", "A recipe with a warm start.")
_ARMS = flags.DEFINE_multi_string("arm", ["recipe"], "A name, and settings of the form leaf=value between spaces.")
_SET = flags.DEFINE_string("set", "", "Settings of all arms, leaf=value between spaces.")
_OTHER = flags.DEFINE_string("other", "", "Folder of a checkout that this one is compared with.")
_WARM_STARTS = flags.DEFINE_integer("warm_starts", 1, "Warm starts, of the seeds 1, 2 …", lower_bound=1)
_SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each arm from each warm start.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 200, "Updates of each run.", lower_bound=4)
_COLUMNS = flags.DEFINE_list("columns", ["grad_norm", "advantage_std", "equal_reward_groups"], "Metrics of the trainer.")

LAG = 4


def settings_of(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in text.split())


def job(root: Path, arm: str, own: str, checkout: Path, seed: int) -> side_by_side.Job:
    settings: dict[str, Any] = {
        **side_by_side.in_turn(_STEPS.value, LAG),
        "seed": seed,
        "learner.beta_steps": _STEPS.value,
        **settings_of(_SET.value),
        **settings_of(own),
    }
    name = f"{_STEPS.value}-updates/{arm}-seed{seed}"
    return side_by_side.Job(root=root, name=name, recipe=_RECIPE.value, settings=settings, warm=True, checkout=checkout)


def measured(workdir: Path) -> dict[str, Any]:
    """The held-out greedy score by step, and the means of the trainer's metrics."""
    run = layout.RunDir(workdir)
    lines = list(metrics.each_line(run.metrics("trainer")))
    limit = layout.read_json(run.config)["config"]["learner"]["clip_norm"]
    found = {name: float(np.mean([line[name] for line in lines if name in line] or [np.nan])) for name in _COLUMNS.value}
    return {
        "curve": summary.curve(workdir),
        "clipped": float(np.mean([0 < limit < line["grad_norm"] for line in lines])),
        **found,
    }


def main(argv: Sequence[str]) -> None:
    del argv
    root = Path(_WORKDIR.value).absolute()
    checkouts = {"": Path.cwd()} | ({"-other": Path(_OTHER.value).absolute()} if _OTHER.value else {})
    starts = range(1, _WARM_STARTS.value + 1)
    for number, (of, path) in itertools.product(starts, checkouts.items()):
        settings = {"seed": number} | settings_of(_SET.value)
        side_by_side.ensure_warm_start(root / f"start{number}{of}", settings, recipe=_RECIPE.value, checkout=path)
    arms = {f"{name}{of}": (own, of) for name, _, own in (arm.partition(" ") for arm in _ARMS.value) for of in checkouts}
    # Seed by seed, so that a study that is stopped is one of fewer seeds.
    jobs = {
        (arm, number, seed): job(root / f"start{number}{of}", arm, own, checkouts[of], seed)
        for seed in range(_SEEDS.value)
        for number in starts
        for arm, (own, of) in arms.items()
    }
    side_by_side.run_all(list(jobs.values()))
    found = {each: measured(made.workdir) for each, made in jobs.items()}
    steps = list(next(iter(found.values()))["curve"])
    summary.table("arm", *(f"score at {step}" for step in steps), "clipped", *_COLUMNS.value)
    for arm in arms:
        runs = [figures for (name, _, _), figures in found.items() if name == arm]
        scores = (summary.spread([run["curve"].get(step, np.nan) for run in runs]) for step in steps)
        means = (summary.spread([run[name] for run in runs], ".3g") for name in ("clipped", *_COLUMNS.value))
        summary.row(arm, *scores, *means)
    print(f"\n{_STEPS.value} updates, {_WARM_STARTS.value} warm starts × {_SEEDS.value} seeds")
    (root / "arms.json").write_text(json.dumps({", ".join(map(str, each)): figures for each, figures in found.items()}, indent=1))


if __name__ == "__main__":
    app.run(main)
