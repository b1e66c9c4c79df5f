"""Every objective in an asynchronous run with real processes: it learns from rows of searchers, and no number is not finite."""

import math

import pytest

from tba_jax.objectives import OBJECTIVES
from tba_jax.storage import layout
from tba_jax.telemetry import metrics
from tests.support import tiny_run

STEPS = 20
# What the tiny run lacks.
NEEDED = {"vine_ppo": ("--config.task.step_ends=(',', '#')", "--config.searchers.value_samples=2")}


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_trains_with_real_processes(name, tmp_path):
    # Rewards that differ between the rows of a query: a policy of random weights gets no sum right.
    flags = (
        f"--config.learner.objective={name}",
        f"--config.learner.steps={STEPS}",
        "--config.task.missing_eos_reward=-1.0",
        # As few processes as an asynchronous run has: none of the others knows of objectives.
        "--config.searchers.count=1",
        "--config.evaluation.enabled=False",
        *NEEDED.get(name, ()),
    )
    done = tiny_run.call(tiny_run.command(tmp_path / "run", *flags), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    run = layout.RunDir(tmp_path / "run")
    assert layout.read_json(run.finished)["step"] == STEPS
    lines = metrics.read_lines(run.metrics("trainer"))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), "one life of the trainer, every step measured"
    assert all(line["finite"] == 1 for line in lines)
    # A number that is not finite is left out of its line.
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in lines)
    assert max(line["grad_norm"] for line in lines) > 0, "nothing was learned"
    if OBJECTIVES[name].state_values:
        searching = metrics.read_lines(run.metrics("searcher-0"))
        assert max(line["value_tokens_per_second"] for line in searching) > 0, "no state was valued"
