"""More searchers, more modes? Real searchers whose rewards take a second a batch, for equal seconds, where p* is known exactly.

    python -m benchmarks.modes --workdir=runs/modes [--searchers=1,2,4,8] [--seconds=60] [--objectives=trajectory_balance,grpo@0]
    python -m benchmarks.modes --workdir=runs/modes --variants=plain,softmax,merged_softmax --objectives=trajectory_balance
    python -m benchmarks.modes --workdir=runs/modes --part=sparse

A response is three letters, and 16 planted texts are worth 1 (benchmarks/slow_tasks.py). The warm start imitates letters of
unequal frequency, so that planted texts have unequal probability, and scoring them gives, with r = 1 for them and 0 for the rest,

    p*(mode) = π_ref(mode) exp(1/β) / Z,  Z = 1 − M + M exp(1/β),  M = Σ π_ref(mode).

`modes` are those found in 1,024 samples, the expectation Σ 1 − (1 − π(mode))^1024; `rare` is the median of π / π_ref over the six
that π_ref draws least; `TV` is the total variation between the policy's and p*'s distribution over the modes and all else, for
objectives that have the β of p*; `mass` is what the policy gives the modes. Nothing of this is sampled.

A searcher decodes a batch while its last one waits for its rewards, so that n searchers make n batches a second as long as the
cores can. Searchers begin together, and a run ends --seconds after its first update; measured is its newest snapshot then. The
trainer has a core of its own and does not wait: half of its updates draw recent rows, half any row, uniformly or, in the variant
softmax, by reward; merged keeps each text once in the window. The first of --objectives is run with every number of searchers and
in every variant, the others with the least and the largest. Each objective has the learning rate of RATES with the least TV, or
where its β is not that of p* the most mass, in the first variant with two searchers and a seed of its own. Rates are chosen by
what is reported, of the same prompt: a bias that is alike for all objectives, and favours the first variant and two searchers.
`not finite` counts the runs that ended early because they met such numbers.

`--part=sparse` plants one text, which π_ref draws about once in 10,000 times, and asks for the seconds until a searcher draws it
and until the policy gives it half of p*. Runs that are done are not made again. Runs have the machine to themselves. It writes
workdir/PART.json and draws the modes by seconds in workdir/PART.png.
"""

import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags

from benchmarks import side_by_side, slow_tasks, summary
from tba_jax import packing, sharding
from tba_jax.experiment import stored_run
from tba_jax.models import scoring
from tba_jax.roles.sampler import Scoring, load_reference, text_columns
from tba_jax.storage import layout
from tba_jax.storage.published import Published
from tba_jax.telemetry import metrics

_BY_REWARD = {"replay.strategy": "softmax", "replay.inverse_temperature": 6.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "merged": {"replay.merge_duplicates": True},
    "softmax": _BY_REWARD,
    "merged_softmax": {"replay.merge_duplicates": True, **_BY_REWARD},
}

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the runs.", required=True)
_PART = flags.DEFINE_enum("part", "modes", ["modes", "sparse"], "16 modes, or one rare target.")
_OBJECTIVES = flags.DEFINE_list("objectives", ["trajectory_balance", "grpo@0", "rloo@0"], "NAME, or NAME@BETA each.")
_SEARCHERS = flags.DEFINE_list("searchers", ["1", "2", "4", "8"], "Numbers of searchers.")
_VARIANTS = flags.DEFINE_list("variants", [], f"Of {', '.join(VARIANTS)}; the first is that of all objectives.")
_SECONDS = flags.DEFINE_float("seconds", 60.0, "Of each run, from its first update.", lower_bound=1.0)
_LATENCY = flags.DEFINE_float("latency", 1.0, "Seconds that the rewards of a batch take.", lower_bound=0.0)
_WARM_STARTS = flags.DEFINE_integer("warm_starts", 3, "Warm starts, of the seeds 1, 2 …", lower_bound=1)
_SEEDS = flags.DEFINE_integer("seeds", 2, "Runs of each arm from each warm start.", lower_bound=1)

RECIPE = "benchmarks/slow_tasks.py:modes"
SAMPLES, ROWS, RARE = 1024, 64, 6
RATES = (1e-4, 3e-4, 1e-3)
# Of each part: the planted texts, the β of p*, and the first variant.
COUNTS, BETAS, FIRST = {"modes": 16, "sparse": 1}, {"modes": 0.2, "sparse": 0.1}, {"modes": "plain", "sparse": "softmax"}
# Seconds between the points of a picture, and the seed of the runs that choose a learning rate.
POINT, RATE_SEED = 5.0, 100


class Arm(NamedTuple):
    """objective: NAME or NAME@BETA; variant: a key of VARIANTS."""

    objective: str
    searchers: int
    variant: str


def masses_of(workdir: Path) -> dict[int, np.ndarray]:
    """π(mode) of each kept snapshot, by its step, and of π_ref as step -1: float64[modes] each. Kept in workdir/masses.json."""
    file = workdir / "masses.json"
    if not file.exists():
        run = layout.RunDir(workdir)
        stored = stored_run.read(run, called=str(workdir))
        mesh = sharding.make_mesh((1, 1, 1), setting="modes")
        policy, tokenizer = stored.policy, stored.tokenizer
        how = Scoring(contract=stored.contract, policy=policy, mesh=mesh, logit_megabytes=128, score_tokens=4096)
        texts = slow_tasks.planted(stored.config.task.custom.count)
        responses = [[*ids, tokenizer.eos_id] for ids in tokenizer.encode_all(texts, begin=False)]
        rows = text_columns([tokenizer.encode(">")] * len(texts), responses, stored.contract)
        columns = (rows[name] for name in ("tokens", "prompt_length", "response_length"))
        packed, _ = packing.of_rows(*columns, limits=how.limits(len(texts)))
        packed, score = jax.device_put(packed, scoring.packed_shardings(mesh)), how.program(stored.contract.scoring_temperature)
        snapshots, shardings = Published(run.policies), policy.trained_shardings(mesh)
        told = {-1: score(load_reference(how, run), packed)}
        told |= {step: score(snapshots.load(step, policy.trained_specs, shardings), packed) for step in snapshots.whole()}
        layout.write_json(file, {step: np.exp(np.asarray(each, np.float64).sum(axis=1)).tolist() for step, each in told.items()})
    return {int(step): np.array(values) for step, values in layout.read_json(file).items()}


def beta_of(objective: str) -> float:
    return float(objective.partition("@")[2] or BETAS[_PART.value])


def aims_at_optimum(objective: str) -> bool:
    """Whether p* is the optimum of an objective: it has its β."""
    return beta_of(objective) == BETAS[_PART.value]


def job(root: Path, arm: Arm, start: int, seed: int, rate: float, *, called: str = "") -> side_by_side.Job:
    of_run = f"{_LATENCY.value:g}of{_SECONDS.value:g}s-{seed}-rate{rate:g}"
    name = f"{called}{arm.variant}-{arm.objective}-x{arm.searchers}-{of_run}"
    place = root / f"start{start}"
    settings = {
        "seed": seed,
        "task.custom.count": COUNTS[_PART.value],
        "task.custom.url": f"sleep:{_LATENCY.value:g}",
        "task.custom.concurrency": arm.searchers,
        "task.custom.meeting_path": place / name / "searchers",
        "searchers.count": arm.searchers,
        "replay.min_rows": slow_tasks.FREE * ROWS * arm.searchers + 1,  # the first update follows when searchers have met
        "learner.objective": arm.objective.partition("@")[0],
        "learner.beta_start": beta_of(arm.objective),
        "learner.beta_end": beta_of(arm.objective),
        "learner.learning_rate": rate,
        **VARIANTS[arm.variant],
    }
    return side_by_side.Job(root=place, name=name, recipe=RECIPE, settings=settings, warm=True, seconds=_SECONDS.value)


def measured(workdir: Path) -> dict[str, Any]:
    """What a run came to within its seconds. curve: seconds since the first update -> TV; found: -> modes."""
    run, masses = layout.RunDir(workdir), masses_of(workdir)
    lines = {int(line["step"]): line for line in metrics.each_line(run.metrics("trainer"))}
    first, optimum = min(line["time"] for line in lines.values()), slow_tasks.target(masses[-1], BETAS[_PART.value])
    begin = max(slow_tasks.left(workdir / "searchers", "asks"))
    taken = [step for step in masses if step in lines and lines[step]["time"] <= first + _SECONDS.value]
    last = masses[max(taken)]
    shares = {0.0: masses[-1].sum() / optimum.sum()}
    shares |= {lines[step]["time"] - begin: masses[step].sum() / optimum.sum() for step in taken}
    return {
        "modes": slow_tasks.found(last, SAMPLES),
        "tv": slow_tasks.total_variation(last, optimum),
        "rare": float(np.median((last / masses[-1])[np.argsort(masses[-1])[:RARE]])),
        "mass": float(last.sum()),
        "updates": max(taken),
        "rows": lines[max(taken)]["rows_seen"],
        "first hit": min(slow_tasks.left(workdir / "searchers", "hits"), default=math.inf) - begin,
        "half of p*": summary.crossing(shares, 0.5),
        "curve": {0.0: slow_tasks.total_variation(masses[-1], optimum)}
        | {lines[step]["time"] - first: slow_tasks.total_variation(masses[step], optimum) for step in taken},
        "found": {0.0: slow_tasks.found(masses[-1], SAMPLES)}
        | {lines[step]["time"] - first: slow_tasks.found(masses[step], SAMPLES) for step in taken},
        "optimum": dict(modes=slow_tasks.found(optimum, SAMPLES), mass=float(optimum.sum()), reference=float(masses[-1].sum())),
    }


def score(objective: str, workdir: Path) -> float:
    """What a learning rate is chosen by: an objective that does not aim at p* would lose TV by doing well."""
    found = measured(workdir)
    return -found["tv"] if aims_at_optimum(objective) else found["mass"]


def tell(figures: Mapping[Arm, Sequence[Mapping[str, Any]]], rates: Mapping[str, float]) -> None:
    columns = {"updates": ",.0f", "rows": ",.0f"}
    of_modes, of_target = {"modes": ".1f", "rare": ".2f", "tv": ".3f", "mass": ".3f"}, {"first hit": ".1f", "half of p*": ".1f"}
    columns |= of_modes if _PART.value == "modes" else of_target
    summary.table("objective", "learning rate", "variant", "searchers", *columns, "not finite")
    for arm, runs in figures.items():
        cells = {name: summary.spread_of_finite([run[name] for run in runs], spec) for name, spec in columns.items()}
        if "tv" in cells and not aims_at_optimum(arm.objective):
            cells["tv"] = "–"
        ended = f"{sum(run['not finite'] for run in runs)}"
        summary.row(arm.objective, f"{rates[arm.objective]:g}", arm.variant, f"{arm.searchers}", *cells.values(), ended)
    optima = [run["optimum"] for run in next(iter(figures.values()))]
    told = {name: summary.spread([optimum[name] for optimum in optima], ".3g") for name in optima[0]}
    print(f"\np*: mass {told['mass']}, {told['modes']} modes in {SAMPLES:,} samples; π_ref: mass {told['reference']}")
    print(f"{_SECONDS.value:g} s, rewards of {_LATENCY.value:g} s, {_WARM_STARTS.value} warm starts × {_SEEDS.value} seeds")


def sampled(curve: Mapping[float, float]) -> summary.Curve:
    """The curve every POINT seconds, linear between its points."""
    at = np.arange(0.0, _SECONDS.value + 1e-9, POINT)
    return dict(zip(at.tolist(), np.interp(at, sorted(curve), [curve[x] for x in sorted(curve)]).tolist(), strict=True))


def main(argv: Sequence[str]) -> None:
    del argv
    root, numbers = Path(_WORKDIR.value).absolute() / _PART.value, sorted(int(number) for number in _SEARCHERS.value)
    variants = _VARIANTS.value or [FIRST[_PART.value]]
    if unknown := [name for name in variants if name not in VARIANTS]:
        raise app.UsageError(f"--variants={','.join(unknown)} is not among {', '.join(VARIANTS)}")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(root / "compilation_cache"))
    starts = range(1, _WARM_STARTS.value + 1)
    for start in starts:
        settings = {"seed": start, "task.custom.count": COUNTS[_PART.value]}
        side_by_side.ensure_warm_start(root / f"start{start}", settings, recipe=RECIPE)
    rates = {}
    for objective in _OBJECTIVES.value:
        make = functools.partial(job, root, Arm(objective, 2, variants[0]), 1, RATE_SEED, called="rates-")
        by = functools.partial(score, objective)
        rates[objective] = side_by_side.chosen_rate(make, RATES, at_a_time=1, score=by, evaluates=False)
    main_objective, *others = _OBJECTIVES.value
    arms = [Arm(main_objective, number, variant) for variant in variants for number in numbers]
    arms += [Arm(objective, number, variants[0]) for objective in others for number in sorted({numbers[0], numbers[-1]})]
    # Seed by seed, so that a study that is stopped is one of fewer seeds.
    jobs = {
        (arm, start, seed): job(root, arm, start, seed, rates[arm.objective])
        for seed in range(_SEEDS.value)
        for start in starts
        for arm in arms
    }
    side_by_side.run_all(list(jobs.values()), at_a_time=1)
    each = {key: measured(made.workdir) | {"not finite": made.not_finite} for key, made in jobs.items()}
    figures = {arm: [run for (of, _, _), run in each.items() if of == arm] for arm in arms}
    tell(figures, rates)
    (root.parent / f"{_PART.value}.json").write_text(json.dumps({", ".join(map(str, key)): run for key, run in each.items()}))
    panels: dict[str, dict[str, list[summary.Curve]]] = {}
    for arm, runs in figures.items():
        panel = panels.setdefault(arm.objective + f", {arm.variant}" * (len(variants) > 1), {})
        panel[f"{arm.searchers} searchers"] = [sampled(run["found"]) for run in runs]
    summary.plot(root.parent / f"{_PART.value}.png", panels, across="seconds", up=f"modes in {SAMPLES:,} samples")


if __name__ == "__main__":
    app.run(main)
