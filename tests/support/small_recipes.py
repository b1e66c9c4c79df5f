"""What a run of a recipe's variant `small` has to leave."""

import importlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from configs import small
from tba_jax.commands import export
from tba_jax.models.hugging_face import load
from tba_jax.storage import layout
from tba_jax.telemetry import metrics
from tests.support import tiny_checkpoints, tiny_run

STEPS = small.STEPS
# Files of configs/ that are no recipes: what recipes share, and the defaults of another command.
OTHERS = ("__init__", "base", "baselines", "machines", "small", "supervised")
RECIPES = sorted(path.stem for path in (tiny_run.ROOT / "configs").glob("*.py") if path.stem not in OTHERS)


def config(recipe: str) -> Any:
    """The config of a recipe, written as NAME or NAME:VARIANT."""
    name, _, variant = recipe.partition(":")
    return importlib.import_module(f"configs.{name}").get_config(*([variant] if variant else []))


def check_run(run: layout.RunDir, score_name: str, folder: Path, model: str) -> None:
    """What a finished run left, and that its export is loaded."""
    lines = metrics.read_lines(run.metrics("trainer"))
    assert [line["step"] for line in lines if line.get("finite") == 1] == list(range(1, STEPS + 1))
    assert max(line["advantage_std"] for line in lines if "advantage_std" in line) > 1e-5, "rewards did not differ"
    for step in (0, STEPS):
        report = layout.read_json(run.evaluations / f"{layout.step_name(step)}.json")
        assert report[score_name] == report["greedy_reward"] and np.isfinite(report["sampled_reward"]) and report["unscored"] == 0
    export.export(run.root, folder, step=STEPS, dtype="float32")
    exported, params = tiny_checkpoints.load(folder)
    original, before = tiny_checkpoints.load(Path(model))
    assert exported == original
    moved = jax.tree.map(lambda new, old: float(np.abs(np.asarray(new, np.float32) - old).max()), params, before)
    assert max(jax.tree.leaves(moved)) > 0, "nothing was learned"
    assert load.read_config(folder, compute_dtype="float32").architecture == original.architecture
