"""How much sooner does an asynchronous run reach an accuracy than one in turn, on the same two cores?

    python -m benchmarks.time_to_accuracy --workdir=runs/time [--digits=3] [--threshold=0.75] [--steps=64] [--every=4] [--arms=…]
        [--set="warm_start.steps=3000"]

The demo's sums. In one regime rewards cost nothing, in the other a batch of them takes seconds (--latencies) and no core
(benchmarks/slow_tasks.py). Arms are of ARMS; "in turn" searches and trains on-policy in one process that has both cores, with no
evaluator, and makes half of --steps, which suffice. "asynchronous" has a searcher beside the trainer and publishes every second
update; its updates draw 95 % of their queries from the newest rows. Both make an update of as many rows. GRPO has no KL term
here, its fastest form, so that its rows are not scored by a reference. RLOO's gradient is that of trajectory balance up to a
factor with the same β, so the two asynchronous arms show what the same thing measured twice may differ by; and so do the seeds of
an arm.

Snapshots every --every updates are evaluated afterwards. A run is timed alone on the machine, by the clock, from when its first
batch asks for rewards until the threshold is crossed, linear between snapshots: with that batch's rewards and with the pauses in
which programs are compiled or loaded. In turn the next batch waits for the snapshot that it samples with, which a run in memory
would neither write nor read. The study subtracts an upper bound of that time (`written`, seconds an update): the shares
`time_publish` and `time_other` of the trainer's metrics, the latter of which holds writing and reading a snapshot, and appending
rows. The asynchronous trainer writes in a thread beside it, and nothing is subtracted there.

The learning rate of an arm is one of --rates: that of the best mean score over the evaluated snapshots of one run of the same
updates, without latency, by a seed of its own. The held-out queries are those of the results, a bias that is alike for all arms.
It prints for each regime and arm the updates and the seconds to the threshold, the rows that were rewarded and the mean age of
those that were drawn until then; the seconds of an update in the second half of a run (`later`), in which little is compiled; and

    speed-up = (seconds per update in turn / asynchronous) × (updates to the threshold in turn / asynchronous)

of the seconds and updates to the threshold, with mean and standard deviation of each factor over warm starts × seeds, paired by
both. Runs that are done are not made again. It writes workdir/time_to_accuracy.json and workdir/time_to_accuracy.png.
"""

import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks import side_by_side, slow_tasks, summary
from configs import baselines
from tba_jax.storage import layout
from tba_jax.telemetry import metrics

# objective, whether in turn. Each asynchronous arm is compared with each arm in turn.
ARMS: dict[str, tuple[str, bool]] = {
    "TB in turn": ("trajectory_balance", True),
    "TB asynchronous": ("trajectory_balance", False),
    "GRPO in turn": ("grpo", True),
    "RLOO asynchronous": ("rloo", False),
    "Proximal RLOO asynchronous": ("proximal_rloo", False),
    "Online DPO asynchronous": ("online_dpo", False),
}

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the runs.", required=True)
_ARMS = flags.DEFINE_list("arms", [*ARMS][:3], f"Of {', '.join(ARMS)}.")
_SET = flags.DEFINE_string("set", "", "Settings of all arms and their warm start, leaf=value between spaces.")
_DIGITS = flags.DEFINE_integer("digits", 3, "Of the numbers that are added.", lower_bound=2)
_THRESHOLD = flags.DEFINE_float("threshold", 0.75, "Held-out greedy accuracy that is to be reached.")
_LATENCIES = flags.DEFINE_list("latencies", ["0", "2"], "Seconds that the rewards of a batch take, one regime each.")
_STEPS = flags.DEFINE_integer("steps", 64, "Updates of an asynchronous run; one in turn has half of them.", lower_bound=20)
_EVERY = flags.DEFINE_integer("every", 4, "Updates between snapshots that are evaluated.", lower_bound=1)
_RATES = flags.DEFINE_list("rates", ["3e-5", "1e-4", "3e-4"], "Learning rates, of which each arm takes the best.")
_WARM_STARTS = flags.DEFINE_integer("warm_starts", 3, "Warm starts, of the seeds 1, 2 …", lower_bound=1)
_SEEDS = flags.DEFINE_integer("seeds", 2, "Runs of each arm from each warm start.", lower_bound=1)

RATE_SEED = 100
FACTORS = ("step_seconds", "updates", "seconds")
# 64 rows an update; in turn all of them are of the batch before it.
ROWS: dict[str, Any] = {
    "learner.queries": 4,
    "learner.completions": 16,
    "searchers.queries_per_batch": 4,
    "searchers.samples_per_query": 16,
    "searchers.slots": 64,
    "searchers.count": 1,
    "replay.recent_fill": "wait",
    "learner.clip_norm": 0.0,
    "learner.schedule": "constant",
    "learner.warmup_steps": 0,
    "evaluation.enabled": False,
    "evaluation.batch_size": 64,
    "metrics.every_steps": 1,
    "metrics.sinks": "()",
    "publish.keep": 5,
}


def given() -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in _SET.value.split())


def of_reference(objective: str) -> dict[str, Any]:
    """Settings of an arm without a reference, and of its warm start: GRPO's. The others have trajectory balance's β."""
    none = {"learner.objective": objective, "learner.reference.kind": "none", "learner.beta_start": 0, "learner.beta_end": 0}
    return none if objective == "grpo" else {}


def start_of(root: Path, start: int, objective: str) -> Path:
    """The folder of a warm start. Whether rows are scored by it is part of a run's contract, so there may be two of each."""
    return root / f"{_DIGITS.value}-digits" / f"start{start}{'-unscored' * bool(of_reference(objective))}"


def job(root: Path, arm: str, latency: float, start: int, seed: int, rate: float) -> side_by_side.Job:
    objective, in_turn = ARMS[arm]
    of_paper = baselines.BASELINES.get(objective, {})
    clip = {f"learner.{name}": value for name, value in of_paper.items() if name.startswith("clip_")}
    how: dict[str, Any] = {"schedule.mode": "interleaved", "replay.recent_probability": 1.0, "replay.recent_window": 1}
    place, name = start_of(root, start, objective), f"{_STEPS.value}-{arm.replace(' ', '-')}-{latency:g}s-seed{seed}-rate{rate:g}"
    steps = _STEPS.value // 2 if in_turn else _STEPS.value
    settings = {
        **ROWS,
        "task.custom.url": f"sleep:{latency:g}",
        "task.custom.meeting_path": place / name / "searchers",
        "learner.steps": steps,
        "learner.beta_steps": _STEPS.value,
        "evaluation.every_steps": _EVERY.value,
        "checkpoint.every_steps": steps,
        "publish.every_steps": 1 if in_turn else 2,
        **(how if in_turn else {}),
        **clip,
        "learner.objective": objective,
        **of_reference(objective),
        "learner.learning_rate": rate,
        "seed": seed,
        **given(),
    }
    recipe = f"benchmarks/slow_tasks.py:sums{_DIGITS.value}"
    return side_by_side.Job(root=place, name=name, recipe=recipe, settings=settings, warm=True)


def measured(made: side_by_side.Job, *, in_turn: bool) -> dict[str, Any]:
    """curve: seconds -> held-out greedy accuracy; updates, seconds, rows, staleness: until the threshold, the last two until the
    end where the run never gets there; step_seconds: of these updates; later: of an update in the second half of the run. Rows
    are all that were rewarded. Raises ValueError: it is there at step 0."""
    run, curve = layout.RunDir(made.workdir), summary.curve(made.workdir)
    if curve[0] >= _THRESHOLD.value:
        told = f"{made.workdir} begins with an accuracy of {curve[0]:g}, which reaches --threshold={_THRESHOLD.value:g}"
        raise ValueError(f"{told}: take a higher threshold, or a shorter warm start (warm_start.steps in --set)")
    lines = list(metrics.each_line(run.metrics("trainer")))
    steps = np.array([0, *(line["step"] for line in lines)])
    share = sum(lines[-1].get(name, 0.0) for name in ("time_publish", "time_other"))
    written = share / lines[-1]["steps_per_second"] if in_turn else 0.0
    begin = min(slow_tasks.left(made.workdir / "searchers", "asks"))
    times = np.array([0.0, *(line["time"] - begin for line in lines)]) - written * steps
    updates, half = summary.crossing(curve, _THRESHOLD.value), len(steps) // 2
    until = min(updates, float(steps[-1]))
    seconds = float(np.interp(until, steps, times)) if math.isfinite(updates) else math.inf
    return {
        "curve": {float(np.interp(step, steps, times)): score for step, score in curve.items()},
        "updates": updates,
        "seconds": seconds,
        "step_seconds": seconds / updates,
        "later": float(times[-1] - times[half]) / float(steps[-1] - steps[half]),
        "written": written,
        "staleness": float(np.mean([line["staleness_mean"] for line in lines if line["step"] <= max(until, 1)])),
        "rows": float(np.interp(until, steps[1:], [line["rows_seen"] for line in lines])),
        "not_finite": made.not_finite,
    }


def sampled(curve: Mapping[float, float], beside: Sequence[Mapping[str, Any]]) -> summary.Curve:
    """The curve at 20 moments until the first of the runs beside it ends, linear between its points."""
    at = np.linspace(0.0, min(max(run["curve"]) for run in beside), 20)
    return dict(zip(at.tolist(), np.interp(at, [*curve], [*curve.values()]).tolist(), strict=True))


def ratios(slow: Sequence[Mapping[str, Any]], fast: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """slow / fast of a figure, pair by pair; NaN where either never got there."""
    pairs = [(a[name], b[name]) for a, b in zip(slow, fast, strict=True)]
    return [a / b if math.isfinite(a) and math.isfinite(b) and b else math.nan for a, b in pairs]


def tell(found: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], rates: Mapping[str, float]) -> None:
    """Prints the table of arms, that of speed-ups, and that of what seeds alone do."""
    columns = {"later": ".3f", "written": ".3f", "updates": ".1f", "step_seconds": ".3f", "seconds": ".1f"}
    columns |= {"rows": ",.0f", "staleness": ".1f"}
    titles = ["later", "written", "updates", "seconds an update", "seconds", "rows", "staleness", "accuracy first", "last"]
    summary.table("rewards take", "arm", "learning rate", *titles, "not finite")
    for (latency, arm), runs in found.items():
        cells = [summary.spread_of_finite([run[name] for run in runs], spec) for name, spec in columns.items()]
        ends = [summary.spread([run["curve"][end(run["curve"])] for run in runs]) for end in (min, max)]
        summary.row(f"{latency} s", arm, f"{rates[arm]:g}", *cells, *ends, f"{sum(run['not_finite'] for run in runs)}")
    print()
    summary.table("rewards take", "slower", "faster", "seconds an update, ratio", "× updates, ratio", "= speed-up")
    of_pairs = [(slow, fast) for fast in _ARMS.value for slow in _ARMS.value if ARMS[slow][1] and not ARMS[fast][1]]
    for latency in _LATENCIES.value:
        both = {f"{slow} | {fast}": (found[latency, slow], found[latency, fast]) for slow, fast in of_pairs}
        # Runs come seed by seed, of the same warm starts each.
        half = _WARM_STARTS.value
        seeds = {arm: (found[latency, arm][:half], found[latency, arm][half : 2 * half]) for arm in _ARMS.value}
        both |= {f"{arm}, a seed | another": of for arm, of in seeds.items() if of[1]}
        for called, (slow, fast) in both.items():
            factors = (summary.spread_of_finite(ratios(slow, fast, name), ".2f") for name in FACTORS)
            summary.row(f"{latency} s", called, *factors)
    print(f"\nthreshold {_THRESHOLD.value:g}, {_STEPS.value} updates, {_WARM_STARTS.value} warm starts × {_SEEDS.value} seeds")


def main(argv: Sequence[str]) -> None:
    del argv
    root = Path(_WORKDIR.value).absolute()
    if unknown := [arm for arm in _ARMS.value if arm not in ARMS]:
        raise app.UsageError(f"--arms={','.join(unknown)} is not among {', '.join(ARMS)}")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(root / "compilation_cache"))
    recipe, starts = f"benchmarks/slow_tasks.py:sums{_DIGITS.value}", range(1, _WARM_STARTS.value + 1)
    for objective in dict.fromkeys(ARMS[arm][0] for arm in _ARMS.value):
        for start in starts:
            settings = {"seed": start} | of_reference(objective) | given()
            side_by_side.ensure_warm_start(start_of(root, start, objective), settings, recipe=recipe)
    rates = {}
    for arm in _ARMS.value:
        make = functools.partial(job, root, arm, 0.0, 1, RATE_SEED)
        rates[arm] = side_by_side.chosen_rate(make, [float(rate) for rate in _RATES.value], at_a_time=1)
    # Seed by seed, so that a study that is stopped is one of fewer seeds.
    jobs = {
        (latency, arm, start, seed): job(root, arm, float(latency), start, seed, rates[arm])
        for seed in range(_SEEDS.value)
        for start in starts
        for latency in _LATENCIES.value
        for arm in _ARMS.value
    }
    side_by_side.run_all(list(jobs.values()), at_a_time=1)
    side_by_side.evaluate_afterwards(list(jobs.values()), {"task.custom.url": "sleep:0"})
    each = {key: measured(made, in_turn=ARMS[key[1]][1]) for key, made in jobs.items()}
    found = {
        (latency, arm): [run for key, run in each.items() if key[:2] == (latency, arm)]
        for latency in _LATENCIES.value
        for arm in _ARMS.value
    }
    tell(found, rates)
    told = {", ".join(map(str, key)): run for key, run in each.items()}
    (root / "time_to_accuracy.json").write_text(json.dumps(told, indent=1))
    panels = {
        f"rewards take {latency} s": {
            arm: [sampled(run["curve"], found[latency, arm]) for run in found[latency, arm]] for arm in _ARMS.value
        }
        for latency in _LATENCIES.value
    }
    summary.plot(
        root / "time_to_accuracy.png",
        panels,
        across="seconds since the first rewards were asked for",
        up="held-out greedy accuracy",
    )


if __name__ == "__main__":
    app.run(main)
