"""What a trainer of several processes costs: the time of its steps, and what its hosts do to share a batch.

    python -m benchmarks.hosts --workdir=DIR [--other=CHECKOUT] [--pairs=5] [--only=steps,share]

steps: trainers of two processes with a device and a core each, and of one process with both, learn from the finished log of a run
of the demo. They take turns of a few seconds, paused meanwhile; with --other so do those of another checkout, on a log of its own. share: real processes share
batches of 512 rows of 1024 + 3072 by a folder, as a trainer does one step ahead of the update.
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

RECIPE, SETTLED, SECONDS = "configs/demo.py", 10, 8.0  # steps before the first pause; seconds between two pauses
WARM: dict[str, Any] = {"warm_start.steps": 10}  # times do not depend on what it has learned
OFFLINE: dict[str, Any] = {"searchers.count": 0, "evaluation.enabled": False, "learner.steps": 100_000, "metrics.every_steps": 1}
OFFLINE |= {"publish.every_steps": 100_000, "checkpoint.every_steps": 100_000, "learner.logprob_gap_every_steps": 0}
OFFLINE |= {"trainer.heartbeat_seconds": 3600.0}
SHAPE, ROWS = RowShape(prompt_length=1024, response_length=3072, reward_parts=()), 512


def make_source(root: Path, checkout: Path) -> Path:
    """The workdir of a finished run, whose log is of the checkout's layout."""
    side_by_side.ensure_warm_start(root, WARM, recipe=RECIPE, checkout=checkout)
    settings = WARM | side_by_side.in_turn(2, 0) | {"learner.warmup_steps": 0, "evaluation.enabled": False}
    job = side_by_side.Job(root=root, name="source", recipe=RECIPE, settings=settings, warm=True, checkout=checkout)
    side_by_side.run_all([job])
    return job.workdir


@contextlib.contextmanager
def trainer(root: Path, checkout: Path, processes: int) -> Iterator[tuple[list[subprocess.Popen[bytes]], Path]]:
    """A trainer that has compiled, paused, and the file of its metrics. Raises RuntimeError: it has ended."""
    workdir, cores = root / f"{processes}-processes", sorted(os.sched_getaffinity(0))
    shutil.rmtree(workdir, ignore_errors=True)
    side_by_side.begin(root / "warm", workdir)
    settings = WARM | OFFLINE | {"replay.mount": f"('{root / 'source'}',)"}
    command = [sys.executable, "-m", "tba_jax.main", f"--config={RECIPE}", f"--workdir={workdir}", "--role=trainer"]
    command += [f"--config.{leaf}={value}" for leaf, value in settings.items()]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world = [f"--coordinator=127.0.0.1:{port}", f"--processes={processes}"] if processes > 1 else []
    seen = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={2 // processes}"}
    metrics, output, started = workdir / "metrics" / "trainer" / "metrics.jsonl", Path(f"{workdir}.out"), []
    try:
        for process in range(processes):
            own = ["taskset", "--cpu-list", ",".join(map(str, cores[process:2:processes])), *command, *world]
            own += [f"--process={process}"] if world else []
            with open(output, "a") as file:
                started.append(subprocess.Popen(own, cwd=checkout, env=seen, stdout=file, stderr=subprocess.STDOUT))
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < SETTLED:
            if any(each.poll() is not None for each in started):
                raise RuntimeError(f"a trainer has ended; see {output}")
            time.sleep(0.1)
        send(started, signal.SIGSTOP)
        yield started, metrics
    finally:
        for each in started:
            each.kill()
            each.wait()


def send(started: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for each in started:
        each.send_signal(number)


def step_seconds(metrics: Path, window: tuple[float, float]) -> float:
    """Seconds of a step in a window of time: the median."""
    times = np.array([json.loads(line)["time"] for line in metrics.read_text().splitlines()])
    return float(np.median(np.diff(times[(times > window[0]) & (times < window[1])])))


def quartiles(found: Sequence[float], spec: str = ".2f") -> str:
    lower, median, upper = np.percentile(found, [25, 50, 75])
    return f"{median:{spec}} ({lower:{spec}} to {upper:{spec}})"


def compare_steps(root: Path) -> None:
    checkouts = {"this": Path()} | ({"other": Path(_OTHER.value)} if _OTHER.value else {})
    for name, checkout in checkouts.items():
        make_source(root / name, checkout.resolve())
    cases = [(name, processes) for name in checkouts for processes in (2, 1)]
    windows: dict[tuple[str, int], list[tuple[float, float]]] = {case: [] for case in cases}
    with contextlib.ExitStack() as stack:
        trainers = {case: stack.enter_context(trainer(root / case[0], checkouts[case[0]].resolve(), case[1])) for case in cases}
        for pair in range(_PAIRS.value):
            for case in cases if pair % 2 == 0 else cases[::-1]:
                begin = time.time()
                send(trainers[case][0], signal.SIGCONT)
                time.sleep(SECONDS)
                send(trainers[case][0], signal.SIGSTOP)
                windows[case].append((begin, time.time()))
        seconds = {case: [step_seconds(trainers[case][1], each) for each in windows[case]] for case in cases}
    summary.table("a step of the demo's update", "ms or ratio, median (quartiles)")
    for (name, processes), found in seconds.items():
        summary.row(f"{name}, {processes} processes", quartiles(np.multiply(found, 1e3), ".0f"))
    for name in checkouts:
        summary.row(f"{name}, two processes / one", quartiles(np.divide(seconds[name, 2], seconds[name, 1])))
    for processes in (2, 1) if _OTHER.value else ():
        summary.row(
            f"this / other, {processes} processes", quartiles(np.divide(seconds["this", processes], seconds["other", processes]))
        )


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds, of the clock and of the processor."""
    begin = time.perf_counter(), time.process_time()
    work()
    return (time.perf_counter() - begin[0]) * 1e3, (time.process_time() - begin[1]) * 1e3


def share(folder: str, process: int, processes: int, repeats: int, there: Any, told: Any) -> None:
    """One process: of others, `share` begins when the file is there, as it finds one that was shared while it had to wait."""
    plan = SharedPlan(Path(folder), process=process, processes=processes)
    rows = random_rows.make_rows(SHAPE, 0, ROWS, np.random.default_rng(0)) if plan.leads else {}
    for _ in range(repeats):
        if plan.leads:
            told.put((True, timed(lambda: plan.share(lambda: {"do": "update", "rows": rows, "takes_gap": False}))))
        there.wait()
        if not plan.leads:
            told.put((False, timed(lambda: plan.share(dict))))
        there.wait()
        plan.is_updated()


def share_batches(root: Path) -> None:
    context, size = multiprocessing.get_context("spawn"), SHAPE.row_bytes * ROWS / 1e6
    summary.table(
        "processes", "process 0, ms", "of its processor", "each other, ms", "of its processor", "MB written", "MB read in all"
    )
    for processes in (2, 4):
        with tempfile.TemporaryDirectory(dir=root) as folder:
            repeats, there, told = 4 * _PAIRS.value, context.Barrier(processes), context.Queue()
            arguments = [(folder, process, processes, repeats, there, told) for process in range(processes)]
            started = [context.Process(target=share, args=each, daemon=True) for each in arguments]
            for each in started:
                each.start()
            found = [told.get(timeout=300) for _ in range(repeats * processes)]
            for each in started:
                each.join()
        cells = [quartiles([took[i] for leads, took in found if leads is who], ".0f") for who in (True, False) for i in (0, 1)]
        summary.row(str(processes), *cells, f"{size:.1f}", f"{size * (processes - 1):.1f}")


def main(argv: Sequence[str]) -> None:
    del argv
    root = Path(_WORKDIR.value).resolve()
    root.mkdir(parents=True, exist_ok=True)
    for name in _ONLY.value:
        {"steps": compare_steps, "share": share_batches}[name](root)


if __name__ == "__main__":
    app.run(main)
