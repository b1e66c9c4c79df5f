"""Runs of one recipe that begin from the same warm start, so that they differ in nothing else."""

import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.experiment import composition, jobs
from tba_jax.roles import results
from tba_jax.run import layout

RECIPE = "configs/demo_tba_prime.py"


def call(workdir: Path, *arguments: str, recipe: str = RECIPE, checkout: Path = Path()) -> float:
    """Runs tba_jax.main of that checkout on the recipe and returns the seconds it took. Its output goes to workdir.out."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "tba_jax.main", f"--config={recipe}", f"--workdir={workdir}", *arguments]
    workdir.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{workdir}.out", "w") as output:
        subprocess.run(command, check=True, stdout=output, stderr=subprocess.STDOUT, cwd=checkout)
    return time.monotonic() - begin


def ensure(root: Path, *arguments: str, recipe: str = RECIPE, checkout: Path = Path()) -> None:
    """Makes root/warm/reference, unless it is there. arguments: further ones of tba_jax.main; checkout: whose code makes it."""
    if not (root / "warm" / "reference" / "initial.json").exists():
        print(f"warm start begins, its output is in {root / 'warm.out'}", file=sys.stderr, flush=True)
        seconds = call(root / "warm", "--role=reference", *arguments, recipe=recipe, checkout=checkout)
        print(f"warm start: {seconds:.0f} s\n", file=sys.stderr)


def begin(root: Path, name: str) -> Path:
    """A fresh workdir root/name that holds the warm start and nothing else."""
    workdir = clear(root, name)
    shutil.copytree(root / "warm" / "reference", workdir / "reference")
    # A workdir with folders of a run needs its config.json. At step 0 every setting of the schedule may change.
    stored = layout.read_json(root / "warm" / "config.json")
    layout.write_json(workdir / "config.json", stored | {"id": uuid.uuid4().hex})
    return workdir


def clear(root: Path, name: str) -> Path:
    """The workdir root/name, which does not exist; the folder that it will be in does."""
    workdir = root / name
    shutil.rmtree(workdir, ignore_errors=True)
    workdir.parent.mkdir(parents=True, exist_ok=True)
    return workdir


def settings(workdir: Path, config: Any) -> jobs.Invocation:
    """What main would hand to a role of this process."""
    return jobs.Invocation(
        experiment=composition.build(config),
        run=layout.RunDir(workdir),
        name="",
        label=workdir.name,
        allow_change=(),
        arguments=(),
    )


def accuracy(run: layout.RunDir) -> str:
    """Held-out greedy accuracy at the first and the last step."""
    reports = results.evaluations(run)
    return f"{reports[0]['greedy_reward']:.2f} -> {reports[-1]['greedy_reward']:.2f}"


def table(*columns: str) -> None:
    """Prints the head of a markdown table."""
    row(*columns)
    row(*["---"] * len(columns))


def row(*cells: str) -> None:
    """Prints a row of a markdown table."""
    print(f"| {' | '.join(cells)} |", flush=True)


def spread(values: Sequence[float], spec: str = ".3f") -> str:
    """Mean and standard deviation, of one value that alone."""
    return f"{np.mean(values):z{spec}}" + (f" ± {np.std(values, ddof=1):{spec}}" if len(values) > 1 else "")
