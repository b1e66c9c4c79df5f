"""The demo under both schedules from the same warm start, side by side: asynchronous and interleaved.

    python -m benchmarks.schedules --workdir=runs/schedules [--steps=400]

Prints a table of wall time (warm start excluded), held-out greedy accuracy, rows generated and draws per row.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from tba_jax import metrics, report, run_dir

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the runs.", required=True)
_STEPS = flags.DEFINE_integer("steps", 400, "Trainer steps of each run.", lower_bound=20)
_RECIPE = flags.DEFINE_string("recipe", "configs/demo.py", "The recipe.")

SCHEDULES = {
    "asynchronous": ("--config.schedule.mode=asynchronous",),
    "interleaved": ("--config.schedule.mode=interleaved",),
}


def call(workdir: Path, *arguments: str) -> float:
    """Runs main and returns the seconds it took."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "tba_jax.main", f"--config={_RECIPE.value}", f"--workdir={workdir}", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - begin


def main(argv: Sequence[str]) -> None:
    del argv
    root = Path(_WORKDIR.value)
    steps = (f"--config.learner.steps={_STEPS.value}", f"--config.evaluation.every_steps={_STEPS.value // 4}")
    warm = call(root / "warm", *steps, "--role=reference")
    print(f"warm start: {warm:.0f} s\n")
    print("| schedule | seconds | steps/s | accuracy before → after | mean staleness | rows generated | draws per row |")
    print("|---|---|---|---|---|---|---|")
    for name, arguments in SCHEDULES.items():
        workdir = root / name.replace(", ", "-").replace(" ", "-")
        shutil.rmtree(workdir, ignore_errors=True)
        shutil.copytree(root / "warm" / "reference", workdir / "reference")
        seconds = call(workdir, *steps, *arguments)
        run = run_dir.RunDir(workdir)
        figures, reports = report.summary(run), report.evaluations(run)
        speed = metrics.read_lines(run.metrics("trainer"))[-1]["steps_per_second"]
        print(
            f"| {name} | {seconds:.0f} | {speed:.2f} | {reports[0]['greedy_reward']:.2f} → {reports[-1]['greedy_reward']:.2f} "
            f"| {figures['mean staleness (steps)']:.1f} | {figures['rows generated']:.0f} | {figures['draws per row']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    app.run(main)
