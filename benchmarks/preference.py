"""Preference tuning in small: win rate against perplexity of π_ref by objective and β, on rows that are 15 updates old.

    python -m benchmarks.preference --workdir=runs/preference --data=DATA [--objectives=…] [--betas=…] [--lag=15] \\
        [--seeds=2] [--steps=100] [--jobs=0]

The shape of the paper's TL;DR study (its Table 1 and Figure 4) at a size for two cores: TinyStories-656K continues openings of
stories, a proxy reward model trains it, a gold one says how often it prefers a continuation to the story's own, and perplexity of
π_ref what that costs. Both models learn preferences by sentiment (benchmarks/preference_data.py). The recipe is
configs/tldr_pythia.py:410m but for SIZES and β; objectives share learning rate, β, rows and updates; nothing is tuned for
one of them. Finished runs are kept, so the command resumes where it was stopped. It draws workdir/preference.png.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks import preference_data, side_by_side, summary
from tba_jax.objectives import OBJECTIVES

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results.", required=True)
# It holds models/TinyStories-656K and tinystories/tinystories_1000.json, a JSON list of texts.
_DATA = flags.DEFINE_string("data", None, "Folder of the model and the stories.", required=True)
_OBJECTIVES = flags.DEFINE_list("objectives", ["trajectory_balance", "online_dpo", "rloo"], f"Of {', '.join(OBJECTIVES)}.")
_BETAS = flags.DEFINE_list("betas", ["0.1", "0.4", "1.6"], "KL coefficients, constant in a run.")
_LAG = flags.DEFINE_integer("lag", 15, "Age of the rows, in updates.", lower_bound=0)
_SEEDS = flags.DEFINE_integer("seeds", 2, "Runs of each kind; they differ in queries and draws.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 100, "Updates of each run.", lower_bound=20)

RECIPE = "configs/tldr_pythia.py:410m"
# The recipe's sizes and precision are a GPU's. 64 rows an update, all of them from the batch that the searcher has just appended.
SIZES = {
    "task.prompt_length": preference_data.PROMPT_LENGTH,
    "task.response_length": preference_data.RESPONSE_LENGTH,
    "task.stop_strings": preference_data.STOP_STRINGS,
    "task.tldr.compute_dtype": "float32",
    "task.tldr.batch_rows": 64,
    "model.compute_dtype": "float32",
    "searchers.queries_per_batch": 8,
    "searchers.samples_per_query": 8,
    "replay.recent_probability": 1.0,
    "replay.recent_window": 1,
    "replay.min_rows": 0,
    "replay.merge_duplicates": False,
    "learner.queries": 8,
    "learner.completions": 8,
    "learner.micro_batch_tokens": 0,
    "learner.remat": "none",
    "learner.learning_rate": 1e-3,
    "publish.dtype": "float32",
    "evaluation.queries": preference_data.HELDOUT_QUERIES,
    "evaluation.batch_size": preference_data.HELDOUT_QUERIES,
    "evaluation.samples_per_query": 4,
    "evaluation.greedy_temperature": 0.0,
}
# What is measured of a policy -> its title and format.
FIGURES = {
    "greedy_win_rate_ties_half": ("greedy win rate", ".3f"),
    "sampled_win_rate_ties_half": ("win rate of samples", ".3f"),
    "greedy_ref_perplexity_per_response_token": ("perplexity, greedy", ".3f"),
    "sampled_ref_perplexity_per_response_token": ("perplexity, samples", ".3f"),
    "kl_to_initial": ("KL, nats", ".2f"),
    "sampled_gold_reward": ("gold reward, samples", ".2f"),
    "sampled_reward": ("proxy reward, samples", ".2f"),
}

# Of an objective at a β: the evaluations of each seed's run, by step.
Runs = dict[tuple[str, float], list[list[dict[str, Any]]]]


def job(root: Path, objective: str, beta: float, seed: int, *, model: Path, made: preference_data.Made) -> side_by_side.Job:
    settings = {
        **SIZES,
        **side_by_side.in_turn(_STEPS.value, _LAG.value),
        "seed": seed,
        "model.path": model,
        "task.tldr.train_path": made.queries["train"],
        "task.tldr.heldout_path": made.queries["heldout"],
        "task.tldr.reward_path": made.models["proxy"],
        "task.tldr.gold_path": made.models["gold"],
        "task.missing_eos_reward": made.missing_eos_reward,
        "learner.objective": objective,
        "learner.beta_start": beta,
        "learner.beta_end": beta,
    }
    name = f"{_STEPS.value}-updates-lag{_LAG.value}/{objective}-beta{beta:g}-seed{seed}"
    return side_by_side.Job(root=root, name=name, recipe=RECIPE, settings=settings)


def plot(path: Path, runs: Runs) -> None:
    """Win rate over perplexity of π_ref, greedy and sampled: a line for each objective, a mark for each β, means over seeds."""
    panels: dict[str, dict[str, list[summary.Curve]]] = {}
    for kind in ("greedy", "sampled"):
        across, up = f"{kind}_ref_perplexity_per_response_token", f"{kind}_win_rate_ties_half"
        reports = {("before", 0.0): [run[0] for of in runs.values() for run in of]}
        reports |= {name: [run[-1] for run in of] for name, of in runs.items()}
        lines: dict[str, dict[float, float]] = {}
        for (label, _), of in reports.items():
            x, y = (float(np.mean([report[name] for report in of])) for name in (across, up))
            lines.setdefault(label, {})[x] = y
        panels[kind] = {label: [line] for label, line in lines.items()}
    summary.plot(path, panels, across=r"perplexity of $\pi_{ref}$", up="win rate under the gold model")


def main(argv: Sequence[str]) -> None:
    del argv
    objectives, betas = _OBJECTIVES.value, [float(beta) for beta in _BETAS.value]
    if unknown := [name for name in objectives if name not in OBJECTIVES]:
        raise app.UsageError(f"--objectives={','.join(unknown)} is not among {', '.join(OBJECTIVES)}")
    data = Path(_DATA.value).absolute()
    model, stories = data / "models" / "TinyStories-656K", data / "tinystories" / "tinystories_1000.json"
    if missing := [str(path) for path in (model, stories) if not path.exists()]:
        raise app.UsageError(f"--data={_DATA.value} lacks {', '.join(missing)}")
    root = Path(_WORKDIR.value).absolute()
    begin = time.monotonic()
    made = preference_data.make(root / "data", model=model, stories=stories)
    # Seed by seed, so that a study that is stopped is one of fewer seeds.
    kinds = [(objective, beta) for objective in objectives for beta in betas]
    jobs = {(*kind, seed): job(root, *kind, seed, model=model, made=made) for seed in range(_SEEDS.value) for kind in kinds}
    side_by_side.run_all(list(jobs.values()))
    runs: Runs = {kind: [summary.evaluations(jobs[*kind, seed].workdir) for seed in range(_SEEDS.value)] for kind in kinds}
    summary.table("objective", "β", *(title for title, _ in FIGURES.values()))
    first = [run[0] for of_kind in runs.values() for run in of_kind]
    summary.row("before", "", *(f"{np.mean([r[name] for r in first]):{spec}}" for name, (_, spec) in FIGURES.items()))
    for (objective, beta), of_kind in runs.items():
        early = sum(run[-1]["step"] < _STEPS.value for run in of_kind)
        scores = (summary.spread([run[-1][name] for run in of_kind], spec) for name, (_, spec) in FIGURES.items())
        summary.row(objective + (f" ({early} ended early)" if early else ""), f"{beta:g}", *scores)
    made_of = f"{_STEPS.value} updates of rows that are {_LAG.value} updates old, seeds: {_SEEDS.value}"
    print(f"\n{made_of}; this call took {time.monotonic() - begin:.0f} s")
    for name in made.models:
        print(f"{name} reward model: {made.pairs[name]} pairs, held-out pair accuracy {made.pair_accuracy[name]:.3f}")
    plot(root / "preference.png", runs)


if __name__ == "__main__":
    app.run(main)
