"""What choosing does: queries by their posterior success rates, and softmax priorities, on the demo's sums and on Countdown.

    python -m benchmarks.choosing --workdir=runs/choosing [--tasks=demo,countdown] [--kinds=…] [--seeds=3] [--steps=200]

A task has few training queries here (--queries), so that a run samples each of them several times: nobody knows the success
rate of a query that was never sampled. Warm starts draw from all problems that are not held out. Search and training take turns
in one process: every update has one new batch, whose policy is 4 updates old. So runs differ in nothing but what they choose,
and in how many tokens their responses have. Accuracies are compared at equal generated tokens: at the fewest that a run of the
task generated in all, and at parts of them, between two evaluations by interpolation. A run that is done is not made again, so
the command resumes where it was stopped. It prints a markdown table a task, mean and standard deviation over seeds, and writes
workdir/choosing.json. --small takes the small variants of the recipes: to try the command out.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks import side_by_side, warm_start
from tba_jax.commands.audit import open_run
from tba_jax.roles import results
from tba_jax.run import layout

RECIPES = {"demo": "configs/demo.py", "countdown": "configs/countdown.py"}
TASKS = {"demo": "arithmetic", "countdown": "countdown"}
_PRIORITY = {"replay.strategy": "softmax", "replay.inverse_temperature": 2.0, "replay.recent_probability": 0.5}
# What differs between runs: name -> settings.
KINDS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "posterior": {"searchers.prompt_selection": "posterior"},
    "priority": _PRIORITY,
}
LAG = 4
EVALUATIONS = 5  # of a run, besides the one before it
SHARES = (0.35, 0.5, 0.7, 1.0)  # of the tokens at which accuracies are compared

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the runs.", required=True)
_TASKS = flags.DEFINE_list("tasks", list(RECIPES), f"Of {', '.join(RECIPES)}.")
_KINDS = flags.DEFINE_multi_enum("kinds", list(KINDS), list(KINDS), "What is compared; may be given several times.")
_SEEDS = flags.DEFINE_integer(
    "seeds", 3, "Runs of each kind; they differ in queries and draws, not in their start.", lower_bound=1
)
_STEPS = flags.DEFINE_integer("steps", 200, "Updates of each run.", lower_bound=EVALUATIONS)
_QUERIES = flags.DEFINE_integer("queries", 100, "Training queries of each task.", lower_bound=1)
_JOBS = flags.DEFINE_integer("jobs", 0, "Runs side by side, each on its share of the cores; 0: one a core.", lower_bound=0)
_SMALL = flags.DEFINE_bool("small", False, "Take the small variants of the recipes.")


def recipe_of(task: str) -> str:
    return RECIPES[task] + (":small" if _SMALL.value else "")


def folder(root: Path, task: str) -> Path:
    return root / f"{task}-{_QUERIES.value}-queries{'-small' if _SMALL.value else ''}"


def training_queries(task: str) -> dict[str, int]:
    return {f"task.{TASKS[task]}.train_queries": _QUERIES.value}


def job(root: Path, task: str, kind: str, seed: int) -> side_by_side.Job:
    settings = {
        **KINDS[kind],
        **training_queries(task),
        "seed": seed,
        "learner.steps": _STEPS.value,
        "learner.warmup_steps": 1,
        "learner.beta_steps": _STEPS.value,
        "schedule.mode": "interleaved",
        "schedule.lag": LAG,
        "evaluation.every_steps": _STEPS.value // EVALUATIONS,
        "checkpoint.every_steps": _STEPS.value,
        "publish.keep": LAG + 3,
    }
    name = f"{_STEPS.value}-updates/{kind.replace(', ', '-').replace(' ', '-')}-seed{seed}"
    return side_by_side.Job(root=folder(root, task), name=name, recipe=recipe_of(task), settings=settings, warm=True)


def generated(workdir: Path, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """(int64[batches], float64[batches]): the tokens that a run generated up to each batch, and the share of each batch's groups
    whose rewards are all equal. Args: samples: rows of a group."""
    run = open_run(workdir)
    ((writer, head),) = run.reader.heads().items()
    rows, size = run.reader.read(writer, 0, head), run.reader.schema(writer).rows_per_append
    rewards = rows["reward"].reshape(-1, size // samples, samples)
    equal = (rewards.max(axis=2) == rewards.min(axis=2)).mean(axis=1)
    return rows["response_length"].reshape(-1, size).sum(axis=1, dtype=np.int64).cumsum(), equal


def measured(made: side_by_side.Job) -> dict[str, Any]:
    """The tokens and the greedy accuracy of a run at each evaluation, and its share of groups with equal rewards."""
    samples = open_run(made.workdir).config.searchers.samples_per_query
    tokens, equal = generated(made.workdir, samples)
    evaluations = results.evaluations(layout.RunDir(made.workdir))
    at = [0 if each["step"] == 0 else int(tokens[min(each["step"], len(tokens)) - 1]) for each in evaluations]
    return {"tokens": at, "accuracy": [each["greedy_reward"] for each in evaluations], "equal_groups": float(equal.mean())}


def at_equal_tokens(found: dict[str, Any], tokens: float) -> float:
    return float(np.interp(tokens, found["tokens"], found["accuracy"]))


def main(argv: Sequence[str]) -> None:
    del argv
    tasks, kinds = _TASKS.value, list(dict.fromkeys(_KINDS.value))
    if unknown := [task for task in tasks if task not in RECIPES]:
        raise app.UsageError(f"--tasks={','.join(unknown)} is not among {', '.join(RECIPES)}")
    root, seeds = Path(_WORKDIR.value).absolute(), range(_SEEDS.value)
    for task in tasks:
        given = (f"--config.{leaf}={value}" for leaf, value in training_queries(task).items())
        warm_start.ensure(folder(root, task), *given, recipe=recipe_of(task))
    # Seed by seed, so that a study that is stopped is one of fewer seeds.
    jobs = {(task, kind, seed): job(root, task, kind, seed) for seed in seeds for task in tasks for kind in kinds}
    side_by_side.run_all(list(jobs.values()), at_a_time=_JOBS.value)
    found = {each: measured(made) for each, made in jobs.items()}
    for task in tasks:
        tokens = min(found[each]["tokens"][-1] for each in jobs if each[0] == task)
        after = (f"after {share * tokens / 1000:.0f} thousand tokens" for share in SHARES)
        print()
        warm_start.table(task, "groups of equal rewards", "accuracy before", *after)
        for kind in kinds:
            runs = [found[task, kind, seed] for seed in seeds]
            warm_start.row(
                kind,
                warm_start.spread([run["equal_groups"] for run in runs]),
                warm_start.spread([run["accuracy"][0] for run in runs]),
                *(warm_start.spread([at_equal_tokens(run, share * tokens) for run in runs]) for share in SHARES),
            )
    print(f"\n{_STEPS.value} updates at most, {_SEEDS.value} seeds")
    (root / "choosing.json").write_text(json.dumps({", ".join(map(str, each)): figures for each, figures in found.items()}))


if __name__ == "__main__":
    app.run(main)
