"""Runs of tba_jax: the settings of a case, and what the metrics of a run say about its steps."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import cases
from benchmarks.peers.cases import Case
from tba_jax.storage import layout
from tba_jax.telemetry import metrics

RECIPE = "benchmarks/peers/recipe.py"
# The parts of a step, by the names under which a run counts its time.
_PARTS = {"decode": "generate", "reference": "score", "wait_rewards": "score", "update": "update"}


def settings(case: Case, folder: Path, *, interleaved: bool, steps: int, seed: int) -> dict[str, Any]:
    """Leaf of the config -> value: each row is used in one update, and each update is published."""
    return {
        "seed": seed,
        "task.custom.path": folder / "prompts.json",
        "task.custom.reward_seconds": case.reward_seconds,
        "task.prompt_length": case.prompt_length,
        "task.response_length": case.response_length,
        "model.path": folder,
        "schedule.mode": "interleaved" if interleaved else "asynchronous",
        "searchers.count": 1,
        "searchers.queries_per_batch": case.queries,
        "searchers.samples_per_query": case.samples,
        "replay.max_draws_per_row": 1,
        "learner.queries": case.queries,
        "learner.completions": case.samples,
        "learner.steps": steps,
        "learner.learning_rate": cases.LEARNING_RATE,
        "learner.warmup_steps": 0,
        "learner.adam_beta1": cases.ADAM_BETAS[0],
        "learner.adam_beta2": cases.ADAM_BETAS[1],
        "learner.adam_epsilon": cases.ADAM_EPSILON,
        "learner.weight_decay": 0.0,
        "learner.clip_norm": cases.CLIP_NORM,
        "publish.every_steps": 1,
        "evaluation.enabled": False,
        "metrics.every_steps": 1,
    }


def record(workdir: Path, case: Case, *, interleaved: bool, skip: int) -> dict[str, Any]:
    """The record of a run, as recording.Recording writes it, with rows_per_second: those generated in the steps after `skip`.

    In an asynchronous run, `generate` and `score` are of the searcher's batches: their mean, because it decodes ahead of
    the batch that it is about to finish.
    """
    run = layout.RunDir(workdir)
    trainer, searcher = (metrics.read_lines(run.metrics(role)) for role in ("trainer", "searcher-0"))
    parts = _parts(trainer)
    if not interleaved:
        batch = {part: seconds[skip:] for part, seconds in _parts(searcher).items() if part not in parts}
        parts |= {part: [sum(seconds) / len(seconds)] * len(searcher) for part, seconds in batch.items() if seconds}
    times = [line["time"] for line in trainer]
    begin, end = times[skip - 1], times[-1]
    # An interleaved run generates the rows of its updates, an asynchronous one as many as its searcher can.
    batches = [line for line in (trainer if interleaved else searcher) if begin < line["time"] <= end]
    steps = [0.0, *(after - before for before, after in itertools.pairwise(times))]  # nobody counts those of the first
    # A run saves where it ends, however short it is.
    saving = parts.pop("checkpoint", [0.0] * len(steps))
    return {
        "seconds": [seconds - saved for seconds, saved in zip(steps, saving, strict=True)],
        "parts": parts,
        "tokens": [round(case.rows * line["tokens_per_second"] / line["rows_per_second"]) for line in searcher],
        "rows_per_second": case.rows * len(batches) / (end - begin),
    }


def _parts(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Part -> its seconds in each step, by the run's name of it and by that of _PARTS, which may be the sum of several.

    A line has each part's share of the time since the first line; `other` is the share that is of no part.
    """
    begin = lines[0]["time"]
    found: dict[str, list[float]] = {}
    names = sorted({name for line in lines for name in line if name.startswith("time_")})
    for name in names:
        until = [0.0, *(line.get(name, 0.0) * (line["time"] - begin) for line in lines[1:])]
        seconds = [0.0, *(after - before for before, after in itertools.pairwise(until))]
        name = name.removeprefix("time_")
        for part in {name, _PARTS.get(name, name)}:
            found[part] = [x + y for x, y in zip(found.get(part, [0.0] * len(lines)), seconds, strict=True)]
    return found
