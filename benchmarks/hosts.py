"""What a trainer of several processes costs: the time of its steps, and what its hosts do to share a batch.

    python -m benchmarks.hosts --workdir=DIR [--other=CHECKOUT] [--pairs=5] [--only=steps,share]

steps: trainers of two processes with a device and a core each, and of one process with both, learn from the finished log of a run
of the demo. They take turns of a few steps, paused meanwhile. With --other those of another checkout do so, on its own log.
share: real processes share batches of 512 rows of 1024 + 3072 by a folder, as a trainer does one step ahead of the update.
"""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks import random_rows, side_by_side, summary
from tba_jax.roles.plan import SharedPlan
from tba_jax.trajectory import RowShape

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for runs.", required=True)
_OTHER = flags.DEFINE_string("other", "", "Folder of another checkout, whose steps are measured as well.")
_PAIRS = flags.DEFINE_integer("pairs", 5, "Turns of each trainer; a batch is shared four times as often.", lower_bound=2)
_ONLY = flags.DEFINE_list("only", ["steps", "share"], "What is measured.")

RECIPE, SETTLED, STEPS = "configs/demo.py", 10, 9  # steps before the first pause, and of a turn
WARM: dict[str, Any] = {"warm_start.steps": 10}  # times do not depend on what it has learned
SOURCE = WARM | side_by_side.in_turn(2, 0) | {"learner.warmup_steps": 0, "evaluation.enabled": False}
OFFLINE = WARM | {
    "searchers.count": 0,
    "evaluation.enabled": False,
    "metrics.every_steps": 1,
    "trainer.heartbeat_seconds": 3600.0,
}
OFFLINE |= dict.fromkeys(["learner.steps", "publish.every_steps", "checkpoint.every_steps"], 100_000)
OFFLINE |= {"learner.logprob_gap_every_steps": 0}


@contextlib.contextmanager
def paused(root: Path, checkout: Path, processes: int) -> Iterator[tuple[list[subprocess.Popen[bytes]], Path]]:
    """A trainer that has compiled, paused, and its metrics. Raises RuntimeError: it has ended."""
    workdir, cores = root / f"{processes}-processes", sorted(os.sched_getaffinity(0))
    shutil.rmtree(workdir, ignore_errors=True)
    side_by_side.begin(root / "warm", workdir)
    settings = OFFLINE | {"replay.mount": f"('{root / 'source'}',)"}
    command = [sys.executable, "-m", "tba_jax.main", f"--config={RECIPE}", f"--workdir={workdir}", "--role=trainer"]
    command += [f"--config.{leaf}={value}" for leaf, value in settings.items()]
    with socket.create_server(("127.0.0.1", 0)) as server:
        world = [f"--coordinator=127.0.0.1:{server.getsockname()[1]}", f"--processes={processes}"]
    seen = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={2 // processes}"}
    started: list[subprocess.Popen[bytes]] = []
    metrics = workdir / "metrics" / "trainer" / "metrics.jsonl"
    try:
        for process in range(processes):
            words = ["taskset", "--cpu-list", ",".join(map(str, cores[process:2:processes])), *command]
            words += [*world, f"--process={process}"] if processes > 1 else []
            with open(f"{workdir}.out", "a") as file:
                started.append(subprocess.Popen(words, cwd=checkout, env=seen, stdout=file, stderr=subprocess.STDOUT))
        turn(started, metrics, SETTLED)
        yield started, metrics
    finally:
        for each in started:
            each.kill()
            each.wait()


def turn(started: Sequence[subprocess.Popen[bytes]], metrics: Path, steps: int) -> float:
    """Lets a trainer make so many steps. Returns the milliseconds of one, the median: a step may compile. Raises as `paused`."""

    def done() -> list[float]:
        whole = metrics.read_text().rpartition("\n")[0] if metrics.exists() else ""
        return [json.loads(line)["time"] for line in whole.splitlines()]

    before = len(done())
    for each in started:
        each.send_signal(signal.SIGCONT)
    while len(done()) < before + steps:
        if any(each.poll() is not None for each in started):
            raise RuntimeError(f"a trainer has ended; see {metrics.parents[2]}.out")
        time.sleep(0.1)
    for each in started:
        each.send_signal(signal.SIGSTOP)
    return 1e3 * float(np.median(np.diff(done()[before:])))


def quartiles(found: Any, spec: str = ".2f") -> str:
    lower, median, upper = np.percentile(found, [25, 50, 75])
    return f"{median:{spec}} ({lower:{spec}} to {upper:{spec}})"


def compare_steps(root: Path) -> None:
    checkouts = {"this": Path().resolve()} | ({"other": Path(_OTHER.value).resolve()} if _OTHER.value else {})
    cases, found = [(name, processes) for name in checkouts for processes in (2, 1)], dict[tuple[str, int], list[float]]()
    with contextlib.ExitStack() as stack:
        trainers = {}
        for name, processes in cases:
            source: dict[str, Any] = dict(root=root / name, recipe=RECIPE, checkout=checkouts[name])
            side_by_side.ensure_warm_start(source["root"], WARM, recipe=RECIPE, checkout=checkouts[name])
            side_by_side.run_all([side_by_side.Job(**source, name="source", settings=SOURCE, warm=True)])
            trainers[name, processes] = stack.enter_context(paused(root / name, checkouts[name], processes))
        for pair in range(_PAIRS.value):
            for case in cases if pair % 2 == 0 else cases[::-1]:
                found.setdefault(case, []).append(turn(*trainers[case], STEPS))
    summary.table("processes", "a step, ms", *([] if len(checkouts) == 1 else ["of --other", "this / other"]))
    for processes in (2, 1):
        told = [found[name, processes] for name in checkouts]
        ratio = [quartiles(np.divide(told[0], told[1]))] if len(told) > 1 else []
        summary.row(str(processes), *(quartiles(each, ".0f") for each in told), *ratio)
    summary.row("2 / 1", *(quartiles(np.divide(found[name, 2], found[name, 1])) for name in checkouts))


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds, of the clock and of the processor."""
    begin = time.perf_counter(), time.process_time()
    work()
    return (time.perf_counter() - begin[0]) * 1e3, (time.process_time() - begin[1]) * 1e3


def share(folder: str, process: int, processes: int, repeats: int, there: Any, told: Any) -> None:
    """One process of those that share: each but process 0 begins to look when the file is there."""
    plan, shape = (
        SharedPlan(Path(folder), process=process, processes=processes),
        RowShape(prompt_length=1024, response_length=3072, reward_parts=()),
    )
    rows = random_rows.make_rows(shape, 0, 512, np.random.default_rng(0)) if plan.leads else {}
    for _ in range(repeats):
        if plan.leads:
            told.put((True, timed(lambda: plan.share(lambda: {"do": "update", "rows": rows, "takes_gap": False}))))
        there.wait()
        if not plan.leads:
            told.put((False, timed(lambda: plan.share(dict))))
        there.wait()
        plan.is_updated()


def share_batches(root: Path) -> None:
    context, repeats = multiprocessing.get_context("spawn"), 4 * _PAIRS.value
    summary.table("processes", "process 0, ms", "its processor, ms", "each other, ms", "its processor, ms")
    for processes in (2, 4):
        with tempfile.TemporaryDirectory(dir=root) as folder:
            there, told = context.Barrier(processes), context.Queue()
            for process in range(processes):
                context.Process(target=share, args=(folder, process, processes, repeats, there, told), daemon=True).start()
            found = [told.get(timeout=300) for _ in range(repeats * processes)]
        cells = [quartiles([took[i] for leads, took in found if leads is who], ".0f") for who in (True, False) for i in (0, 1)]
        summary.row(str(processes), *cells)


def main(argv: Sequence[str]) -> None:
    del argv
    root = Path(_WORKDIR.value).resolve()
    root.mkdir(parents=True, exist_ok=True)
    for name in _ONLY.value:
        {"steps": compare_steps, "share": share_batches}[name](root)


if __name__ == "__main__":
    app.run(main)
