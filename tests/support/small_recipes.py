"""Recipes of pretrained models, made small, and what a run of one has to leave."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tba_jax.commands import export
from tba_jax.models.hugging_face import load
from tba_jax.run import layout, metrics
from tests.support import tiny_checkpoints

PRETRAINED = (
    *("countdown_qwen2_5.py", "gsm8k_rho1b.py", "math_qwen2_5_7b.py", "own_task.py", "tldr_pythia.py"),
    *("red_team_gpt2.py", "red_team_llama3_2_1b.py"),
)


STEPS = 2
# What makes a recipe small; everything else is its own.
SMALL: dict[str, Any] = {
    "learner.steps": STEPS,
    "learner.queries": 2,
    "learner.completions": 4,
    "learner.warmup_steps": 0,
    "learner.decay_steps": 0,
    "searchers.count": 1,
    "searchers.queries_per_batch": 2,
    "searchers.samples_per_query": 4,
    "searchers.slots": 8,
    "searchers.max_rows_per_snapshot": 8,
    "replay.min_rows": 0,
    "evaluation.queries": 4,
    "evaluation.batch_size": 4,
    "evaluation.every_steps": STEPS,
    "evaluation.samples_per_query": 2,
    "metrics.every_steps": 1,
    "task.response_length": 8,
    "model.compute_dtype": "float32",  # bfloat16 is slow on CPUs
    # Random weights are never right: rewards that differ come from which responses end, about half of them (P_END).
    "task.missing_eos_reward": -1.0,
}


P_END = 1 / 12


def problems(folder: Path) -> dict[str, str]:
    """MATH's rows, written by hand."""
    rows = [{"problem": f"What is ${i} + {i}$?", "solution": f"It is $\\boxed{{{2 * i}}}$."} for i in range(12)]
    for name in ("train", "heldout"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        rows = [{"problem": row["problem"], "answer": str(i)} for i, row in enumerate(rows)]
    return {f"task.math.{name}_path": str(folder / f"{name}.jsonl") for name in ("train", "heldout")}


def check_run(run: layout.RunDir, score_name: str, folder: Path, model: str) -> None:
    """What a finished run left, and that its export is loaded."""
    lines = metrics.read_lines(run.metrics("trainer"))
    assert [line["step"] for line in lines if line.get("finite") == 1] == list(range(1, STEPS + 1))
    assert max(line["advantage_std"] for line in lines if "advantage_std" in line) > 1e-3, "rewards did not differ"
    for step in (0, STEPS):
        report = layout.read_json(run.evaluations / f"{layout.step_name(step)}.json")
        assert report[score_name] == report["greedy_reward"] and np.isfinite(report["sampled_reward"]) and report["unscored"] == 0
    export.export(run.root, folder, step=STEPS, dtype=None)
    exported, params = tiny_checkpoints.load(folder)
    original, before = tiny_checkpoints.load(Path(model))
    assert exported == original
    moved = jax.tree.map(lambda new, old: float(np.abs(np.asarray(new, np.float32) - old).max()), params, before)
    assert max(jax.tree.leaves(moved)) > 0, "nothing was learned"
    assert load.read_config(folder, compute_dtype="float32").architecture == original.architecture
