"""TBA′ with each of its reference policies, and trajectory balance, on the demo's task with its processes."""

from pathlib import Path

from benchmarks import warm_start
from tba_jax.roles import results
from tba_jax.run import layout
from tba_jax.telemetry import metrics

STEPS = 300

RUNS: dict[str, dict[str, str]] = {
    "trajectory_balance, initial": {"objective": "trajectory_balance", "reference.kind": "initial"},
    "tba_prime, initial": {"reference.kind": "initial"},
    "tba_prime, reset every 50 steps": {"reference.kind": "reset", "reference.reset_steps": "50"},
    "tba_prime, ema 0.95": {"reference.kind": "ema", "reference.ema_decay": "0.95"},
}
# Of the last metrics, which are written every 5 steps.
LAST_LINES = 5


def compare(root: Path, *, steps: int = STEPS) -> None:
    """Prints a table of runs under root/references; KL is over responses of the last 25 steps' batches."""
    warm_start.ensure(root)
    columns = "accuracy", "steps", "seconds", "mean staleness", "KL to the initial policy (nats)"
    warm_start.table("objective, reference", *columns, "ratios clipped", "effective sample share")
    for name, changes in RUNS.items():
        workdir = warm_start.begin(root, f"references/{name.replace(', ', '-').replace(' ', '-')}")
        flags = [f"--config.learner.{leaf}={value}" for leaf, value in changes.items()]
        timing = f"--config.learner.steps={steps}", f"--config.evaluation.every_steps={max(1, steps // 3)}"
        seconds = warm_start.call(workdir, *timing, *flags)
        run = layout.RunDir(workdir)
        lines = metrics.read_lines(run.metrics("trainer"))
        kl = [line.get("kl_to_initial", line["kl_to_ref"]) for line in lines[-LAST_LINES:]]
        warm_start.row(
            name,
            warm_start.accuracy(run),
            f"{steps}",
            f"{seconds:.0f}",
            f"{results.figures(run)['mean staleness (steps)']:.1f}",
            f"{sum(kl) / len(kl):.2f}",
            f"{sum(line['ratio_clipped'] for line in lines) / len(lines):.1e}",
            f"{sum(line['effective_sample_share'] for line in lines) / len(lines):.2f}",
        )
