"""A run small enough for tests: a one-layer policy with random weights on two-digit sums."""

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from configs import base
from tba_jax.experiment import composition, jobs
from tba_jax.storage import layout

ROOT = Path(__file__).parent.parent.parent
SETTINGS: dict[str, Any] = {"task.prompt_length": 7, "task.response_length": 6}
SETTINGS |= {"task.arithmetic.digits": 2, "task.arithmetic.train_queries": 40, "task.arithmetic.heldout_queries": 8}
SETTINGS |= {"model.layers": 1, "model.width": 16, "model.heads": 2, "model.kv_heads": 1, "model.head_size": 8, "model.ffn": 16}
SETTINGS |= {"searchers.queries_per_batch": 4, "searchers.samples_per_query": 4, "searchers.max_updates_ahead": 4}
SETTINGS |= {"replay.poll_seconds": 0.05, "searchers.poll_seconds": 0.05}
SETTINGS |= {"learner.steps": 12, "learner.queries": 3, "learner.completions": 4, "learner.warmup_steps": 1}
SETTINGS |= {"learner.learning_rate": 1e-3, "learner.logprob_gap_every_steps": 4, "checkpoint.every_steps": 5}
SETTINGS |= {"evaluation.every_steps": 100, "evaluation.queries": 8, "evaluation.batch_size": 4, "evaluation.samples": 2}
SETTINGS |= {"metrics.every_steps": 1}


def config(**changes: Any) -> Any:
    """The base config with SETTINGS and then `changes` (dots in a name are written as double underscores)."""
    c = base.get_config()
    changed = {name.replace("__", "."): value for name, value in changes.items()}
    c.update_from_flattened_dict(SETTINGS | changed)
    return c


def config_with(overrides: dict[str, object], source: Any = base) -> Any:
    """The config of a recipe (a module) with other values; dots in their names are written."""
    config = source.get_config()
    config.update_from_flattened_dict(overrides)
    return config


def settings(workdir: Path, c: Any, *, init_from: str = "") -> jobs.Invocation:
    """What main would hand to a role."""
    built = composition.build(c)
    run = layout.RunDir(workdir)
    return jobs.Invocation(experiment=built, run=run, name="", label="tiny", allow_change=(), arguments=(), init_from=init_from)


def command(workdir: Path, *flags: str, recipe: str = "configs/base.py", tiny: bool = True) -> list[str]:
    """The command line of the tiny run."""
    overrides = [f"--config.{name}={value}" for name, value in SETTINGS.items()] if tiny else []
    return [sys.executable, "-m", "tba_jax.main", f"--config={recipe}", f"--workdir={workdir}", *overrides, *flags]


def environment() -> dict[str, str]:
    """One device a process, unlike the tests' own eight; programs compiled as quickly as in `conftest.py`."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    return os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": " ".join(flags)}


def call(arguments: list[str], timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout, check=False)


def start(arguments: list[str], *, devices: int = 1) -> subprocess.Popen[str]:
    seen = environment()
    seen["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(arguments, cwd=ROOT, env=seen, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def processes(workdir: Path) -> dict[int, str]:
    """pid -> command line of every process of the run (Linux)."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if f"--workdir={workdir}" in line and (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                    found[int(entry.name)] = line
    return found


def everything_gone(workdir: Path, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while processes(workdir) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not processes(workdir)


def has(package: str) -> bool:
    """Whether a package is installed."""
    return importlib.util.find_spec(package) is not None
