"""Preference tuning in small: the frontier of win rate and KL by objective, on rows that are 15 updates old.

    python -m benchmarks.preference --workdir=runs/preference --data=DATA [--arms=…] [--lag=15] [--starts=3] [--seeds=2]
        [--steps=100] [--jobs=0]

An arm is OBJECTIVE@BETA, or OBJECTIVE@BETA@M: with a replay buffer, of which each query of an update is recent with probability
M and the others are drawn by softmax of the reward. Learning rate, rows and updates are the same for all.

The shape of the paper's TL;DR study (its Table 1 and Figure 4) at a size for two cores: TinyStories-656K continues openings of
stories, a proxy reward model trains it, a gold one says how often it prefers a continuation to the story's own. Both models learn
preferences by sentiment (benchmarks/preference_data.py), for each start from stories in another order. The recipe is
configs/tldr_pythia.py:410m but for SIZES and β; nothing is tuned for an objective. Finished runs are kept, so the command resumes
where it was stopped.

It prints markdown tables: what each arm ends at, and the win rates at a KL of 2, 5, 7 and 10 nats, on the line through the ends
of an objective's βs (of a run that `never` is there no end has less KL, or none more), also less those of the first objective on
the same starts and seeds. It draws workdir/preference.png, these lines where all starts and seeds have one, and
workdir/overoptimisation.png: the gold reward against the proxy's, along the runs.
"""

import itertools
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import app, flags

from benchmarks import preference_data, side_by_side, summary
from tba_jax.objectives import OBJECTIVES

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results.", required=True)
# It holds models/TinyStories-656K and tinystories/tinystories_1000.json, a JSON list of texts.
_DATA = flags.DEFINE_string("data", None, "Folder of the model and the stories.", required=True)
_ARMS = flags.DEFINE_list(
    "arms",
    [f"trajectory_balance@{beta}" for beta in (0.03, 0.1, 0.4, 1.6)] + [f"online_dpo@{beta}" for beta in (0.1, 0.4, 6.0)],
    "OBJECTIVE@BETA[@M].",
)
_LAG = flags.DEFINE_integer("lag", 15, "Age of the rows, in updates.", lower_bound=0)
_STARTS = flags.DEFINE_integer("starts", 3, "Pairs of reward models, each with training and held-out openings.", lower_bound=1)
_SEEDS = flags.DEFINE_integer("seeds", 2, "Runs of each arm from each start; they differ in queries and draws.", lower_bound=1)
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
    "replay.strategy": "uniform",
    "replay.min_rows": 0,
    "replay.merge_duplicates": False,
    "learner.queries": 8,
    "learner.completions": 8,
    "learner.micro_batch_tokens": 0,
    "learner.remat": "none",
    "learner.learning_rate": 1e-3,
    "publish.dtype": "float32",
    "evaluation.queries": preference_data.HELDOUT_QUERIES,
    "evaluation.batch_size": 128,
    "evaluation.samples_per_query": 1,
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

NATS = (2.0, 5.0, 7.0, 10.0)


class Arm(NamedTuple):
    """recent: share of recent queries; None: every batch has the newest rows, and there is no buffer."""

    objective: str
    beta: float
    recent: float | None = None

    @property
    def name(self) -> str:
        return f"{self.objective}-beta{self.beta:g}" + (f"-m{self.recent:g}" if self.recent is not None else "")

    @property
    def line(self) -> str:
        """What its βs are joined by."""
        return self.objective + (f", m {self.recent:g}" if self.recent is not None else "")


def arm_of(text: str) -> Arm:
    """Raises app.UsageError: it names no objective."""
    objective, *numbers = text.split("@")
    if objective not in OBJECTIVES or not 1 <= len(numbers) <= 2:
        raise app.UsageError(f"--arms={text} must be OBJECTIVE@BETA or OBJECTIVE@BETA@M, of {', '.join(OBJECTIVES)}")
    return Arm(objective, *map(float, numbers))


def job(root: Path, arm: Arm, seed: int, *, model: Path, made: preference_data.Made) -> side_by_side.Job:
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
        "learner.objective": arm.objective,
        "learner.beta_start": arm.beta,
        "learner.beta_end": arm.beta,
    }
    if arm.recent is not None:
        settings |= {"replay.recent_probability": arm.recent, "replay.strategy": "softmax"}
    name = f"{_STEPS.value}-updates-lag{_LAG.value}/{arm.name}-seed{seed}"
    return side_by_side.Job(root=root, name=name, recipe=RECIPE, settings=settings)


def rate_at(nats: float, ends: Sequence[dict[str, Any]], rate: str) -> float:
    """The win rate at a KL, on the line through these evaluations of trained policies of a line, a start and a seed; nan below
    their least KL and beyond the largest, and where there are none."""
    return summary.on_line(nats, [(each["kl_to_initial"], each[rate]) for each in ends]) if ends else math.nan


def main(argv: Sequence[str]) -> None:
    del argv
    arms = [arm_of(text) for text in _ARMS.value]
    data = Path(_DATA.value).absolute()
    model, stories = data / "models" / "TinyStories-656K", data / "tinystories" / "tinystories_1000.json"
    if missing := [str(path) for path in (model, stories) if not path.exists()]:
        raise app.UsageError(f"--data={_DATA.value} lacks {', '.join(missing)}")
    root, begin = Path(_WORKDIR.value).absolute(), time.monotonic()
    roots = [root / f"start{number}" for number in range(_STARTS.value)]
    made = {of: preference_data.make(of / "data", model=model, stories=stories, seed=seed) for seed, of in enumerate(roots)}
    # Seed by seed, so that a study that is stopped is one of fewer seeds.
    kinds = list(itertools.product(range(_SEEDS.value), roots))
    jobs = {(arm, of, seed): job(of, arm, seed, model=model, made=made[of]) for seed, of in kinds for arm in arms}
    side_by_side.run_all(list(jobs.values()))
    runs = {each: summary.evaluations(job.workdir) for each, job in jobs.items()}
    summary.table("objective", "β", *(title for title, _ in FIGURES.values()))
    first = [run[0] for run in runs.values()]
    summary.row("before", "", *(f"{np.mean([r[name] for r in first]):{spec}}" for name, (_, spec) in FIGURES.items()))
    for arm in arms:
        of_arm = [run for (name, *_), run in runs.items() if name == arm]
        early = sum(run[-1]["step"] < _STEPS.value for run in of_arm)
        scores = (summary.spread([run[-1][name] for run in of_arm], spec) for name, (_, spec) in FIGURES.items())
        summary.row(arm.line + f" ({early} ended early)" * bool(early), f"{arm.beta:g}", *scores)
    print()
    lines = list(dict.fromkeys(arm.line for arm in arms))
    less = f"less {lines[0]}'s"
    summary.table("win rate of samples", *(f"at {nats:g} nats" for nats in NATS), *(f"{less}, {nats:g}" for nats in NATS))
    panels: dict[str, dict[str, list[summary.Curve]]] = {"greedy": {}, "sampled": {}}
    rates = dict[str, np.ndarray]()  # of a line: float[NATS, runs], paired by start and seed
    for line in lines:
        of_line = [[run for (arm, *where), run in runs.items() if arm.line == line and where == [of, seed]] for seed, of in kinds]
        ends = [[run[-1] for run in found if run[-1]["step"]] for found in of_line]
        rates[line] = np.array([[rate_at(nats, each, "sampled_win_rate_ties_half") for each in ends] for nats in NATS])
        cells = [*rates[line], *(rates[line] - rates[lines[0]])]
        summary.row(line, *(summary.spread_of_finite(found.tolist()) for found in cells))
        kls = [[end["kl_to_initial"] for end in each] for each in ends]
        if not all(kls) or (least := max(map(min, kls))) > (largest := min(map(max, kls))):
            continue
        for kind, drawn in panels.items():
            nats = np.linspace(least, largest, 12).tolist()
            drawn[line] = [{at: rate_at(at, each, f"{kind}_win_rate_ties_half") for at in nats} for each in ends]
    print(f"\n{_STEPS.value} updates of rows that are {_LAG.value} updates old, {len(roots)} starts × {_SEEDS.value} seeds")
    if _SEEDS.value > 1:
        by_seed = np.stack(list(rates.values()), 1).reshape(len(NATS), len(lines), _SEEDS.value, len(roots))
        apart = np.nanmean(np.square(np.diff(by_seed, axis=2)), axis=(1, 2, 3)) ** 0.5
        told = ", ".join(f"{found:.3f} at {nats:g} nats" for nats, found in zip(NATS, apart, strict=True))
        print(f"two seeds of a line and a start are apart by {told} (root mean square)")
    print(f"this call took {time.monotonic() - begin:.0f} s")
    for of, name in itertools.product(roots, preference_data.REWARD_MODELS):
        print(f"{of.name}, {name}: {made[of].pairs[name]} pairs, held-out pair accuracy {made[of].pair_accuracy[name]:.3f}")
    found = {f"{arm.name} {of.name} seed{seed}": run for (arm, of, seed), run in runs.items()}
    (root / "preference.json").write_text(json.dumps(found, indent=1))
    summary.plot(root / "preference.png", panels, across="KL, nats", up="win rate under the gold model")
    rewards = {
        arm.name: [
            {each["sampled_reward"]: each["sampled_gold_reward"] for each in run}
            for (name, *_), run in runs.items() if name == arm
        ]
        for arm in arms
    }  # fmt: skip
    summary.scatter(root / "overoptimisation.png", rewards, across="proxy reward", up="gold reward")


if __name__ == "__main__":
    app.run(main)
