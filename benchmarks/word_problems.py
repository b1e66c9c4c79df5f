"""Small models that learn from rewards for real: SFT, then the GSM8K recipe, on word problems of held-out templates.

    python -m benchmarks.word_problems --workdir=runs/words [--starts=3] [--seeds=1] [--steps=80] [--rates=1e-4,3e-4] [--jobs=0]
    python -m benchmarks.word_problems --workdir=runs/words --sweeps=beta,completions,samples,recent,sync,capacity,merging

A start is a model with random weights that supervised training has taught (benchmarks/word_problem_data.py makes problems,
tokenizer and models). From each, configs/gsm8k_rho1b.py trains on the task gsm8k: its objective, schedules, K, S/K, m and k, with
the SIZES and the learning rate of a small model. That is the one of --rates with the best last score, in runs as long from a
start with a seed of its own; a single rate is taken as it is. The rate is chosen on the held-out problems that are reported, with
the recipe's settings, and the sweeps take it over: a bias that is alike for the starts, and favours the recipe over the sweeps.

Search and training take turns in one process, as at the barrier of the paper's code: before every k updates comes a batch of k Q
queries that the policy of k updates ago has made, so rows are k to 2 k − 1 updates old, and recent rows are those of this batch.
Every update draws 120 rows. Sweeps change one thing at a time: beta (constant); completions, K at as many rows made; samples, S
at as many queries, so at more rows made; recent, m; sync, k at as many rows made; capacity, rows of the window, with m = 0.5;
merging=on keeps equal responses to a query once, as the recipe does for long ones.

A run that is done is not made again, so the command resumes where it was stopped. It prints a markdown table, writes
workdir/word_problems.json and draws workdir/word_problems.png.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import app, flags

from benchmarks import side_by_side, summary, word_problem_data

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results.", required=True)
_STARTS = flags.DEFINE_integer("starts", 3, "Models that supervised training makes, of the seeds 1, 2 …", lower_bound=1)
_SEEDS = flags.DEFINE_integer("seeds", 1, "Runs of the recipe from each start.", lower_bound=1)
_SWEEPS = flags.DEFINE_list("sweeps", [], "Settings that are changed one at a time: names of SWEEPS.")
_RATES = flags.DEFINE_list("rates", ["3e-5", "1e-4", "3e-4"], "Learning rates, of which one is chosen.")
_STEPS = flags.DEFINE_integer("steps", 80, "Updates of each run, a multiple of 40.", lower_bound=40)

RECIPE = "configs/gsm8k_rho1b.py"
QUERIES, COMPLETIONS, SAMPLES, EVERY = 6, 20, 24, 2  # Q, K, S and k
SWEEP_RUNS = 2  # of each value of a sweep, from a start each
CHOICE = 0  # the seed of the start and the runs that choose the learning rate
SIZES: dict[str, Any] = {"learner.queries": QUERIES, "learner.micro_batch_tokens": 0, "learner.remat": "none"}
SIZES |= {f"task.{name}_length": size for name, size in word_problem_data.LENGTHS.items()}
SIZES |= {"searchers.slots": QUERIES * SAMPLES, "replay.recent_window": 1, "evaluation.queries": 0}
# Answers are short and often equal. The number of equal ones tells a habit from an accident.
SIZES["replay.merge_duplicates"] = False
SIZES |= {"model.compute_dtype": "float32", "publish.dtype": "float32"}


def synchronised(every: int) -> dict[str, Any]:
    """Settings of k, at equal rows."""
    turns = {"schedule.lag": every, "schedule.updates_per_search": every, "publish.keep": every + 3}
    return turns | {"publish.every_steps": every, "searchers.queries_per_batch": every * QUERIES}


def grouped(completions: int) -> dict[str, Any]:
    """Settings of K, at equal rows and S/K."""
    queries = QUERIES * COMPLETIONS // completions
    batch = {"searchers.samples_per_query": SAMPLES * completions // COMPLETIONS, "searchers.queries_per_batch": EVERY * queries}
    return batch | {"learner.queries": queries, "learner.completions": completions}


# Name -> value -> settings beside those of the recipe's own run.
SWEEPS: dict[str, dict[str, dict[str, Any]]] = {
    "beta": {b: {"learner.beta_start": b, "learner.beta_end": b} for b in ("0.0005", "0.001", "0.002", "0.004", "0.012")},
    "completions": {f"{K}": grouped(K) for K in (10, 40)},
    "samples": {f"{S}": {"searchers.samples_per_query": S} for S in (20, 40)},
    "recent": {f"{m:g}": {"replay.recent_probability": m} for m in (0.25, 0.5, 0.75, 1.0)},
    "sync": {f"{k}": synchronised(k) for k in (1, 5, 10)},
    # The window matters to the rows that are not recent: here they are half.
    "capacity": {f"{rows}": {"replay.capacity": rows, "replay.recent_probability": 0.5} for rows in (500, 2000)},
    "merging": {"on": {"replay.merge_duplicates": True}},
}


class Run(NamedTuple):
    """A run of an arm from a start. arm: "recipe", or the name of a sweep and a value."""

    arm: str
    start: int
    seed: int
    rate: float

    def job(self, root: Path, made: dict[str, Path], settings: dict[str, Any]) -> side_by_side.Job:
        steps = _STEPS.value
        # The shares of the recipe: 5 % of warm-up, decay from the middle on, β at its end there.
        lengths = {"learner.warmup_steps": steps // 20, "learner.decay_steps": steps // 2, "learner.beta_steps": steps // 2}
        paths = {f"task.gsm8k.{split}_path": made[split] for split in word_problem_data.ROWS}
        own = {"seed": self.seed, "model.path": root / f"start{self.start}", "learner.learning_rate": self.rate, **paths}
        given = {**SIZES, **lengths, **side_by_side.in_turn(steps, EVERY), **synchronised(EVERY), **own, **settings}
        name = f"{steps}-updates/{self.arm}-rate{self.rate:g}-start{self.start}-seed{self.seed}"
        return side_by_side.Job(root=root, name=name, recipe=RECIPE, settings=given)


def measured(root: Path, made: dict[str, Path], runs: dict[Run, dict[str, Any]]) -> dict[Run, summary.Curve]:
    """The held-out greedy accuracy of runs by step. Makes what is not there: models, then runs."""
    side_by_side.share_cores(functools.partial(word_problem_data.fine_tune, root, made), sorted({run.start for run in runs}))
    jobs = {run: run.job(root, made, settings) for run, settings in runs.items()}
    side_by_side.run_all(list(jobs.values()))
    return {run: summary.curve(job.workdir) for run, job in jobs.items()}


def chosen_rate(root: Path, made: dict[str, Path]) -> float:
    """Of --rates, the one with the best last score."""
    runs: dict[Run, dict[str, Any]] = {Run("recipe", CHOICE, CHOICE, float(rate)): {} for rate in _RATES.value}
    if len(runs) == 1:
        return float(_RATES.value[0])
    last = {f"{run.rate:g}": curve[max(curve)] for run, curve in measured(root, made, runs).items()}
    print("accuracy by learning rate, of a seed of its own:", last)
    return float(max(last, key=lambda rate: last[rate]))


def main(argv: Sequence[str]) -> None:
    del argv
    if unknown := [name for name in _SWEEPS.value if name not in SWEEPS]:
        raise app.UsageError(f"--sweeps={','.join(unknown)} is not among {', '.join(SWEEPS)}")
    if _STEPS.value % 40:
        raise app.UsageError(f"--steps={_STEPS.value} must be a multiple of 40, since a quarter of it is one of every k")
    root = Path(_WORKDIR.value).absolute()
    rate = chosen_rate(root, made := word_problem_data.make(root / "data"))
    arms: dict[str, Any] = {"recipe": {}} | {f"{name}={of}": own for name in _SWEEPS.value for of, own in SWEEPS[name].items()}
    # Seed by seed, so that a study that is stopped is one of fewer seeds.
    of_recipe = [(start, 1 + seed) for seed in range(_SEEDS.value) for start in range(1, _STARTS.value + 1)]
    runs: dict[Run, dict[str, Any]] = {Run("recipe", *each, rate): {} for each in of_recipe}
    compared = of_recipe[:SWEEP_RUNS]
    runs |= {Run(arm, *each, rate): own for each in compared for arm, own in arms.items()}
    found = measured(root, made, runs)
    curves = {arm: [curve for run, curve in found.items() if run.arm == arm] for arm in arms}
    steps = sorted(set().union(*found.values()))
    last = {run: curve[max(curve)] for run, curve in found.items()}
    summary.table("settings", "runs", *(f"accuracy at {step:g}" for step in steps), "gain", "less the recipe's", "ended early")
    for arm, of_arm in curves.items():
        scores = (summary.spread([curve[step] for curve in of_arm if step in curve] or [float("nan")]) for step in steps)
        gain = summary.spread([curve[max(curve)] - curve[0] for curve in of_arm])
        paired = summary.spread([last[run] - last[run._replace(arm="recipe")] for run in found if run.arm == arm])
        summary.row(arm, f"{len(of_arm)}", *scores, gain, paired, f"{sum(max(curve) < _STEPS.value for curve in of_arm)}")
    print(f"\n{_STEPS.value} updates at a learning rate of {rate:g}; greedy accuracy on problems of held-out templates")
    (root / "word_problems.json").write_text(json.dumps([{**run._asdict(), "accuracy": found[run]} for run in found], indent=1))
    if _SWEEPS.value:  # from the starts that the sweeps have
        curves = {arm: [curve for run, curve in found.items() if run.arm == arm and run[1:3] in compared] for arm in arms}
    panels = {name: {arm: curves[arm] for arm in arms if arm.split("=")[0] in ("recipe", name)} for name in _SWEEPS.value or [""]}
    summary.plot(root / "word_problems.png", panels, across="updates", up="held-out greedy accuracy")


if __name__ == "__main__":
    app.run(main)
