"""What several processes of a trainer cost: the host's work around an update, and whole steps of two processes against one.

python -m benchmarks.processes [--rows=512] [--prompt=1024] [--response=3072] [--repeats=9]
python -m benchmarks.processes --log=WORKDIR [--recipe=configs/demo.py] [--pairs=5] [--steps=60]

The first measures, for a batch of so many full rows, what process 0 does on its host for each step: it draws the rows, gathers
them, hands them to another process over a TCP connection of this machine, places them on the devices, and makes the line of the
journal durable. The trainer does all these parts while the devices compute an update. The last row is the time that is not hidden
behind an update: the calls of the other processes, and the line that is handed to the journal's thread.

The second trains on the log of a finished run, by one process with two devices and by two processes with one each, on the same
two cores, in interleaved pairs. It also tells how long the devices take to sum arrays of the shapes of the policy's gradients.
"""

import concurrent.futures
import functools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags

from benchmarks import trainer_update
from configs import base
from tba_jax.commands import recipes, settings_help
from tba_jax.experiment import composition
from tba_jax.models import parameters
from tba_jax.replay import journal
from tba_jax.replay.log import LogWriter
from tba_jax.roles.trainer.buffer import ReplayBuffer
from tba_jax.roles.trainer.update_program import UpdateProgram
from tba_jax.run import layout
from tba_jax.run.lease import EpochLease
from tba_jax.run.process_group import Leader
from tba_jax.run.wire import Wire
from tba_jax.telemetry import metrics
from tba_jax.trajectory import Rows, query_id

_ROWS = flags.DEFINE_integer("rows", 512, "Rows of a batch, of 16 responses to a prompt.", lower_bound=16)
_PROMPT = flags.DEFINE_integer("prompt", 1024, "Tokens of a prompt.", lower_bound=1)
_RESPONSE = flags.DEFINE_integer("response", 3072, "Tokens of a response.", lower_bound=2)
_REPEATS = flags.DEFINE_integer("repeats", 9, "Measurements of each part.", lower_bound=3, allow_override=True)
_LOG = flags.DEFINE_string("log", "", "Workdir of a finished run, whose log is learned from.")
_RECIPE = flags.DEFINE_string("recipe", "configs/demo.py", "The recipe of that run.", allow_override=True)
_PAIRS = flags.DEFINE_integer("pairs", 5, "Interleaved pairs of trainers.", lower_bound=2, allow_override=True)
_STEPS = flags.DEFINE_integer("steps", 60, "Steps of each trainer.", lower_bound=20, allow_override=True)

_COMPLETIONS = 16
_ROOT = Path(__file__).parent.parent

# Another process: it receives messages, and says so.
_RECEIVER = """
import socket, sys
from tba_jax.run.wire import Wire
wire = Wire(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
try:
    while True:
        message = wire.receive()
        if message.arrays:
            wire.send("report", {"name": "taken", "content": {}})
except EOFError:
    pass
"""


# One process of those that sum arrays over two devices, see `_summed`.
_SUM = """
import json, os, statistics, sys, time
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tba_jax import sharding
number, processes, port, shapes = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
if processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=processes, process_id=number, local_device_ids=[0])
mesh = sharding.make_mesh((2, 1, 1), setting="benchmark")
parts = sharding.put([np.ones((2, *shape), np.float32) for shape in shapes], sharding.rows_sharding(mesh))
add = jax.jit(lambda arrays: [array.sum(0) for array in arrays], out_shardings=sharding.replicated(mesh))
taken = []
for _ in range(30):
    begin = time.perf_counter()
    jax.block_until_ready(add(parts))
    taken.append(time.perf_counter() - begin)
print(statistics.median(taken[3:]))
"""


def _summed(processes: int) -> float:
    """Seconds in which two devices of so many processes sum arrays of the shapes of the recipe's gradients."""
    policy = composition.build(recipes.load(_RECIPE.value, [], program=settings_help.BASE)).policy
    shapes = json.dumps([spec.shape for spec in parameters.flatten(policy.trained_specs).values()])
    port = _free_port()
    started = _start(lambda number: [sys.executable, "-c", _SUM, str(number), str(processes), port, shapes], processes)
    return float(_wait(started)[0].splitlines()[-1])


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def _start(command: Callable[[int], list[str]], processes: int) -> list[subprocess.Popen[str]]:
    """Starts processes on two cores and two CPU devices. Args: command: number of a process -> its command line."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    seen = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={2 // processes}"}
    return [
        subprocess.Popen(
            command(number),
            cwd=_ROOT,
            env=seen,
            preexec_fn=functools.partial(os.sched_setaffinity, 0, cores[number::processes]),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]


def _wait(started: list[subprocess.Popen[str]]) -> list[str]:
    """What each printed. Ends this program where one has failed."""
    with concurrent.futures.ThreadPoolExecutor(len(started)) as threads:
        said = list(threads.map(lambda process: process.communicate(), started))
    if any(process.returncode for process in started):
        sys.exit(f"error: one of {len(started)} processes failed: {[errors[-600:] for _, errors in said]}")
    return [printed for printed, _ in said]


def _program(changes: dict[str, Any]) -> tuple[Any, Any, UpdateProgram]:
    """Config, contract, and the update on the first device; nothing is compiled."""
    config = base.get_config()
    config.update_from_flattened_dict(changes)
    built = composition.build(config)
    return config, built.contract, UpdateProgram(config, built.contract, built.policy, devices=jax.devices()[:1])


def _random_rows(contract: Any, program: UpdateProgram, changes: dict[str, Any], begin: int) -> Rows:
    """The rows of one batch: random tokens, full lengths."""
    rng, count, shape = np.random.default_rng(begin), program.rows, contract.row_shape()
    rows = {name: np.zeros((count, *each), dtype) for name, (dtype, each) in shape.columns().items()}
    rows |= trainer_update.random_rows(program, changes, contract.model["vocab"])
    rows["tokens"] = rng.integers(4, contract.model["vocab"], rows["tokens"].shape).astype(np.int32)
    P = shape.prompt_length
    rows["tokens"][:, :P] = rows["tokens"][::_COMPLETIONS, :P].repeat(_COMPLETIONS, axis=0)
    rows["query_id"] = np.array([query_id(each[:P]) for each in rows["tokens"]], np.uint64)
    rows["row"] = np.arange(begin, begin + count)
    rows["temperature"][:], rows["top_p"][:], rows["finished"][:] = 1.0, 1.0, True
    rows["reward_version"][:] = contract.reward_version
    return rows


def _median(function: Callable[[], object]) -> float:
    """Seconds of a call, after one that is not counted."""
    function()
    taken = []
    for _ in range(_REPEATS.value):
        begin = time.perf_counter()
        function()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def parts(workdir: Path) -> dict[str, float]:
    """Name -> seconds for each step, of what process 0 does on its host."""
    queries = _ROWS.value // _COMPLETIONS
    changes: dict[str, Any] = {
        "task.prompt_length": _PROMPT.value,
        "task.response_length": _RESPONSE.value,
        "learner.queries": queries,
        "learner.completions": _COMPLETIONS,
        "learner.micro_batch_tokens": 16 * (_PROMPT.value + _RESPONSE.value),
        "replay.capacity": 8 * _ROWS.value,
        "replay.capacity_per_query": _COMPLETIONS,
        "learner.mesh.data": 1,
        "learner.mesh.fsdp": 1,
    }
    config, contract, program = _program(changes)
    run = layout.RunDir(workdir)
    workdir.mkdir()
    batches = [_random_rows(contract, program, changes, begin) for begin in (0, _ROWS.value)]
    writer = LogWriter(run.replay, "w", contract.row_shape(), rows_per_append=_ROWS.value, segment_appends=4, info={})
    for batch in batches:
        writer.append(batch)
    buffer = ReplayBuffer(config, contract, run, recent_window=1)
    buffer.follow()
    buffer.tail.poll()
    buffer.integrate(step=0)
    lease = EpochLease.acquire(run.journal)
    lines = journal.Journal(run.journal, 1)
    slots = buffer.draw(step=0)
    assert slots is not None, buffer.shortage(step=0)
    rows, ids = buffer.index.gather(slots), buffer.index.ids(slots)
    step = iter(range(1, 1 << 20))

    def line() -> dict[str, Any]:
        return journal.journal_line(step=next(step), visible=[], ids=ids, reward_version=1, key=0, rows=rows)

    found = {
        "draw": _median(lambda: buffer.draw(step=0)),
        "gather": _median(lambda: buffer.index.gather(slots)),
        "place on the devices": _median(lambda: jax.block_until_ready(program.place(rows).batch)),
        "journal, durable": _median(lambda: lines.submit(line).result()),
    }

    def hand_over() -> Any:
        lease.check()
        return lines.submit(line)

    found |= _between_processes(rows, hand_over)
    lines.close()
    lease.release()
    return found


def _between_processes(rows: Rows, submit: Callable[[], Any]) -> dict[str, float]:
    """Name -> seconds, of what process 0 does for another process. Args: submit: hands over the journal's line."""

    with socket.create_server(("127.0.0.1", 0)) as server:
        other = subprocess.Popen([sys.executable, "-c", _RECEIVER, str(server.getsockname()[1])], cwd=_ROOT)
        wire = Wire(server.accept()[0])
    leader = Leader({1: wire}, {1: "here"}, heartbeat_seconds=3600.0)

    def broadcast() -> None:
        leader.call("place", rows)
        leader.reports("taken")

    def around() -> None:
        leader.call("update")
        pending.append(submit())
        leader.call("settle", step=1)

    pending: list[Any] = []
    found = {"broadcast": _median(broadcast), "not hidden: calls, look at the lease, line handed over": _median(around)}
    for each in pending:
        each.result()
    leader._ending.set()
    wire.close()
    other.kill()
    other.wait()
    return found


def _train(workdir: Path, processes: int) -> float:
    """The median seconds of a step of an offline trainer on two devices."""
    with_log = [f"--config.replay.mount=('{Path(_LOG.value).absolute()}',)", "--config.searchers.count=0"]
    settings = {"learner.steps": _STEPS.value, "metrics.every_steps": 1, "evaluation.enabled": False}
    command = [sys.executable, "-m", "tba_jax.main", f"--config={_RECIPE.value}", f"--workdir={workdir}", "--role=trainer"]
    command += [*with_log, *(f"--config.{name}={value}" for name, value in settings.items())]
    world = [f"--coordinator=127.0.0.1:{_free_port()}", f"--processes={processes}"] if processes > 1 else []
    _wait(_start(lambda number: [*command, *world, *([f"--process={number}"] if world else [])], processes))
    times = [point["time"] for point in metrics.read_lines(workdir / "metrics" / "trainer")]
    shutil.rmtree(workdir)
    return statistics.median(np.diff(times[len(times) // 4 :]).tolist())


def main(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if not _LOG.value:
            found = parts(Path(folder) / "run")
            print(f"{_ROWS.value} rows of {_PROMPT.value} + {_RESPONSE.value} tokens, median of {_REPEATS.value}:")
            for name, seconds in found.items():
                print(f"  {name:50} {seconds * 1e3:8.2f} ms")
            return
        ratios = []
        for pair in range(_PAIRS.value):
            order = (1, 2) if pair % 2 == 0 else (2, 1)
            taken = {processes: _train(Path(folder) / f"{pair}-{processes}", processes) for processes in order}
            ratios.append(taken[2] / taken[1])
            print(f"pair {pair}: one process {taken[1]:.3f} s a step, two {taken[2]:.3f} s, ratio {ratios[-1]:.3f}", flush=True)
        sums = {processes: statistics.median(_summed(processes) for _ in range(3)) for processes in (1, 2)}
        print(f"to sum the gradients: one process {sums[1] * 1e3:.1f} ms, two {sums[2] * 1e3:.1f} ms")
        print(f"two processes / one: median {statistics.median(ratios):.3f} of {_PAIRS.value} pairs")


if __name__ == "__main__":
    app.run(main)
