"""The demo under both schedules from the same warm start, side by side: asynchronous and interleaved.

    python -m benchmarks.schedules --workdir=runs/schedules [--steps=400]

Prints a table of wall time (warm start excluded), held-out greedy accuracy, rows generated and draws per row.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from benchmarks import warm_start
from tba_jax.roles import results
from tba_jax.run import layout
from tba_jax.telemetry import metrics

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the runs.", required=True)
_STEPS = flags.DEFINE_integer("steps", 400, "Trainer steps of each run.", lower_bound=20)
_RECIPE = flags.DEFINE_string("recipe", "configs/demo.py", "The recipe.")

SCHEDULES = {
    "asynchronous": ("--config.schedule.mode=asynchronous",),
    "interleaved": ("--config.schedule.mode=interleaved",),
}


def main(argv: Sequence[str]) -> None:
    del argv
    root, recipe = Path(_WORKDIR.value), _RECIPE.value
    steps = (f"--config.learner.steps={_STEPS.value}", f"--config.evaluation.every_steps={_STEPS.value // 4}")
    warm_start.ensure(root, recipe=recipe)
    columns = "seconds", "steps/s", "accuracy", "mean staleness", "rows generated", "draws per row"
    warm_start.table("schedule", *columns)
    for name, arguments in SCHEDULES.items():
        workdir = warm_start.begin(root, name)
        seconds = warm_start.call(workdir, *steps, *arguments, recipe=recipe)
        run = layout.RunDir(workdir)
        figures = results.figures(run)
        warm_start.row(
            name,
            f"{seconds:.0f}",
            f"{metrics.read_lines(run.metrics('trainer'))[-1]['steps_per_second']:.2f}",
            warm_start.accuracy(run),
            f"{figures['mean staleness (steps)']:.1f}",
            f"{figures['rows seen by the trainer']:.0f}",
            f"{figures['draws per row']:.2f}",
        )


if __name__ == "__main__":
    app.run(main)
