"""What staleness does to each objective: all arms go on from one checkpoint, and each update has rows of a fixed age.

    python -m benchmarks.staleness --workdir=runs/staleness [--arms=trajectory_balance,grpo@16,trajectory_balance@64@0.05,…]
        [--lags=1,64] [--starts=3] [--seeds=2] [--steps=160] [--jobs=0]

An arm is an objective, at each of --lags or at the one behind @, and β behind another @ (0.004 by default).

From each warm start of the demo's sums, 256 updates of RLOO on fresh rows come first. Every arm copies that run and goes on with
its objective and new moments of Adam (RLOO with those that it has): the rows of an update were drawn with the weights of `lag`
updates before, so that from the first update on they are that old, and none is drawn twice. The first `lag` updates thus have
rows of the fork, which learned at FORK_RATE, and the arm's own come after these. No update is clipped by its norm. Each arm takes
the best of --rates, the learning rates, by the mean of the last three accuracies of as many updates from the first warm start,
with a seed of its own. What else an objective reads is as its row of configs/baselines.py says; so is the β of those on whose
scale 0.004 is another quantity.

A run that is done is not made again, so the command resumes where it was stopped. It prints a markdown table of the held-out
greedy accuracy, mean and standard deviation over warm starts × seeds: at the fork, the least after it, and the last; of the
updates that an accuracy of 0.9 took; and the scores of the rates. It writes workdir/staleness.json and draws
workdir/staleness.png.
"""

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks import side_by_side, summary
from configs import baselines
from tba_jax.objectives import OBJECTIVES

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the runs.", required=True)
_ARMS = flags.DEFINE_list(
    "arms", ["trajectory_balance", "tba_prime", "grpo"], f"OBJECTIVE[@LAG[@BETA]], of {', '.join(OBJECTIVES)}."
)
_LAGS = flags.DEFINE_list("lags", ["1", "64"], "Ages of the rows, in updates, of arms that do not say theirs.")
_STARTS = flags.DEFINE_integer("starts", 3, "Warm starts, of the seeds 1, 2 …", lower_bound=1)
_SEEDS = flags.DEFINE_integer("seeds", 2, "Runs of each arm from each warm start.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 160, "Updates of each arm.", lower_bound=24)
_RATES = flags.DEFINE_list("rates", ["2e-6", "1e-5", "5e-5"], "Learning rates, of which each arm takes the best.")

RECIPE = "configs/demo.py"
FORK, FORK_RATE, BETA = 256, 2.5e-6, 0.004
THRESHOLD = 0.9
OTHER_SCALE = ("online_dpo", "gflowrl", "tpo", "pmd_mean")
# The fork has no head of theirs, no log Z, and no turns of an environment.
NO_FORK = ("ppo", "vine_ppo", "learned_log_z", "flowrl_linear_z", "frozen_log_z")
# The seed of the runs that choose a learning rate. No table has these runs.
OTHER_SEED = 100
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
    "learner.clip_norm": 0.0,
    "learner.schedule": "constant",
    "learner.beta_steps": 0,
    "evaluation.batch_size": 128,
    "publish.every_steps": 1,
}


@dataclasses.dataclass(frozen=True)
class Arm:
    objective: str
    lag: int
    beta: float

    @property
    def name(self) -> str:
        return f"{self.objective}-lag{self.lag}-beta{self.beta:g}"


def arms_of(texts: Sequence[str], lags: Sequence[str]) -> list[Arm]:
    """Raises app.UsageError: an arm names no objective, or one that cannot go on from the fork."""
    found = dict[Arm, None]()
    for text in texts:
        objective, *rest = text.split("@")
        if objective not in (fit := [name for name in OBJECTIVES if name not in NO_FORK]):
            raise app.UsageError(f"--arms={text} is not among {', '.join(fit)}")
        own = baselines.BASELINES[objective]["beta_start"] if objective in OTHER_SCALE else BETA
        for lag in rest[:1] or lags:
            found[Arm(objective, int(lag), float(rest[1]) if rest[1:] else own)] = None
    return list(found)


def settings(steps: int, lag: int, beta: float, rate: float | str, seed: int) -> dict[str, Any]:
    betas = {"learner.beta_start": beta, "learner.beta_end": beta}
    every = {"evaluation.every_steps": 16, "publish.keep": 0, "checkpoint.every_steps": FORK}
    return {**ROWS, **side_by_side.in_turn(steps, lag), **betas, **every, "seed": seed, "learner.learning_rate": rate}


def fork(root: Path, start: int) -> side_by_side.Job:
    own = settings(FORK, 0, BETA, FORK_RATE, start) | {"learner.objective": "rloo"}
    return side_by_side.Job(root=root / f"start{start}", name=f"fork{FORK}", recipe=RECIPE, settings=own, warm=True)


def job(root: Path, arm: Arm, start: int, seed: int, rate: str) -> side_by_side.Job:
    own = settings(FORK + _STEPS.value, arm.lag, arm.beta, rate, seed) | {"learner.objective": arm.objective}
    of_row = baselines.BASELINES.get(arm.objective, {}).items()
    own |= {f"learner.{name}": value for name, value in of_row if not name.startswith("beta")}
    own["publish.keep"] = arm.lag + 3
    name = f"{_STEPS.value}-updates/{arm.name}-rate{rate}-seed{seed}"
    before = fork(root, start).workdir
    return side_by_side.Job(root=root / f"start{start}", name=name, recipe=RECIPE, settings=own, fork=before)


def after(job: side_by_side.Job) -> summary.Curve:
    """The accuracies from the fork on, by update."""
    return {step: value for step, value in summary.curve(job.workdir).items() if step >= FORK}


def score(job: side_by_side.Job) -> float:
    """The mean of the last three accuracies; of a run that ended by numbers that are not finite 0."""
    return 0.0 if job.stopped.exists() else float(np.mean(list(after(job).values())[-3:]))


def main(argv: Sequence[str]) -> None:
    del argv
    arms, root, begin = arms_of(_ARMS.value, _LAGS.value), Path(_WORKDIR.value).absolute(), time.monotonic()
    starts = range(1, _STARTS.value + 1)
    for number in starts:
        side_by_side.ensure_warm_start(root / f"start{number}", {"seed": number}, recipe=RECIPE)
    side_by_side.run_all([fork(root, number) for number in starts])
    tries = {(arm, rate): job(root, arm, 1, OTHER_SEED, rate) for arm in arms for rate in _RATES.value}
    side_by_side.run_all(list(tries.values()))
    tried = {arm: {rate: score(tries[arm, rate]) for rate in _RATES.value} for arm in arms}
    rates = {arm: max(of_arm.items(), key=lambda each: each[1])[0] for arm, of_arm in tried.items()}
    # Seed by seed, so that a study that is stopped is one of fewer seeds.
    jobs = {
        (arm, number, seed): job(root, arm, number, seed, rates[arm])
        for seed in range(_SEEDS.value)
        for number in starts
        for arm in arms
    }
    side_by_side.run_all(list(jobs.values()))
    columns = ("at the fork", "least", "last", "the same by warm start", f"updates to {THRESHOLD}")
    summary.table("objective", "lag", "β", "learning rate", *columns, "scores of the rates")
    found, panels = dict[str, Any](), dict[str, dict[str, list[summary.Curve]]]()
    for arm in arms:
        runs = {(number, seed): after(made) for (of, number, seed), made in jobs.items() if of == arm}
        least, last = ([of(list(run.values())[1:]) for run in runs.values()] for of in (min, lambda values: values[-1]))
        by_start = (summary.spread([run[max(run)] for (of, _), run in runs.items() if of == number]) for number in starts)
        early = sum(made.stopped.exists() for (of, *_), made in jobs.items() if of == arm)
        summary.row(
            arm.objective, f"{arm.lag}", f"{arm.beta:g}", rates[arm], summary.spread([run[FORK] for run in runs.values()]),
            summary.spread(least), summary.spread(last) + f" ({early} ended early)" * bool(early), ", ".join(by_start),
            summary.spread_of_finite([summary.crossing(run, THRESHOLD) - FORK for run in runs.values()], ".0f"),
            ", ".join(f"{rate}: {value:.3f}" for rate, value in tried[arm].items()),
        )  # fmt: skip
        of_runs = {f"start {number}, seed {seed}": run for (number, seed), run in runs.items()}
        found[arm.name] = {"rate": rates[arm], "rates": tried[arm], "runs": of_runs}
        label = f"{arm.objective}, β {arm.beta:g}"
        panels.setdefault(f"rows {arm.lag} updates old", {})[label] = list(runs.values())
    ends = {each: list(after(made).values())[-1] for each, made in jobs.items()}
    apart = [ends[arm, number, 1] - ends[arm, number, 0] for arm in arms for number in starts if _SEEDS.value > 1]
    print(
        f"\n{_STEPS.value} updates after {FORK}, {len(starts)} warm starts × {_SEEDS.value} seeds. Two seeds of an arm and a ",
        end="",
    )
    print(f"warm start end {np.mean(np.square(apart or [np.nan])) ** 0.5:.3f} apart (root mean square). ", end="")
    print(f"This call took {time.monotonic() - begin:.0f} s.")
    (root / "staleness.json").write_text(json.dumps(found, indent=1))
    summary.plot(root / "staleness.png", panels, across="updates", up="held-out greedy accuracy")


if __name__ == "__main__":
    app.run(main)
