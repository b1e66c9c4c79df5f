"""Do searchers slow the trainer down? Its step time by the number of writers in the log, and replay's share of its time.

python -m benchmarks.interference --folder=<on the disk to measure> [--part=writers]
  [--writers=0,2,8,32] [--repeats=5] [--steps=40] [--rows_per_second=128]
python -m benchmarks.interference --folder=<on the disk to measure> --part=share [--share_steps=150]

writers: the real trainer on the demo's policy, alone on one core, with a full window of rows that a searcher has made. One other
process, on another core, plays the writers: it appends such rows, each time to other queries, at --rows_per_second a
writer (the default: one batch of the demo in 1.5 s). The numbers of writers take turns while the trainer runs on; a block of
steps is compared with the two blocks without writers around it. "elsewhere" is the most writers in a log that the trainer
does not read: what cores take from one another on this machine, whatever the trainer does.
share: the demo with its processes, and where the trainer's time went.
"""

import dataclasses
import itertools
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags, logging

from tba_jax.replay.log import LogWriter
from tba_jax.run import layout
from tba_jax.telemetry import metrics
from tba_jax.trajectory import RowShape, query_id, response, token_columns

_FOLDER = flags.DEFINE_string("folder", None, "Where runs are made and removed again.", required=True)
_PART = flags.DEFINE_enum("part", "writers", ["writers", "share"], "What to measure.")
_WRITERS = flags.DEFINE_list("writers", ["0", "2", "8", "32"], "Numbers of writers; 0 is always among them.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Blocks of each number of writers.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 40, "Trainer steps of a block.", lower_bound=2)
_ROWS_PER_SECOND = flags.DEFINE_float("rows_per_second", 128.0, "Of each writer.", lower_bound=1e-3)
_SHARE_STEPS = flags.DEFINE_integer("share_steps", 150, "Trainer steps of --part=share.", lower_bound=20)

# How many write, and whether in the log that the trainer reads.
Count = tuple[int, bool]
# Steps between two blocks: rows of the block before have come in by then.
SETTLE_STEPS = 6
# Batches of the searcher that the writers' rows are taken from.
RECORDED_BATCHES = 16
SHARES = ("draw", "journal", "integrate", "update", "publish", "checkpoint", "logprob_gap", "wait_rows", "other")
REPLAY_SHARES = ("draw", "journal", "integrate")


@dataclasses.dataclass(frozen=True)
class Source:
    """What rows are made of. rows: of whole batches, a query's side by side; prompts: token ids of each query."""

    shape: RowShape
    rows: dict[str, np.ndarray]
    rows_per_append: int
    samples_per_query: int
    segment_appends: int
    capacity: int
    prompts: list[Sequence[int]]
    pad_id: int
    query_ids: np.ndarray


@dataclasses.dataclass(frozen=True)
class Block:
    """Steps with a fixed number of writers; seconds of each step, the others for a step on average."""

    count: Count
    step_seconds: np.ndarray
    arrivals: float
    parts: dict[str, float]
    tail_cpu: float
    process_cpu: float


class Writers:
    """Logs whose rows come from one process: a batch of recorded responses, given to the next queries."""

    def __init__(self, root: Path, source: Source, count: int):
        self._source, self._rng = source, np.random.default_rng(0)
        sizes: dict[str, Any] = dict(rows_per_append=source.rows_per_append, segment_appends=source.segment_appends, info={})
        self.logs = [LogWriter(root, f"writer-{number}", source.shape, **sizes) for number in range(count)]
        self._queries = itertools.cycle(self._rng.permutation(len(source.prompts)).tolist())

    def append(self, number: int, *, policy_step: int) -> None:
        source, log = self._source, self.logs[number]
        size, samples = source.rows_per_append, source.samples_per_query
        begin = size * int(self._rng.integers(len(source.rows["row"]) // size))
        rows = {name: column[begin : begin + size] for name, column in source.rows.items()}
        queries = np.repeat([next(self._queries) for _ in range(size // samples)], samples)
        columns = token_columns(
            [source.prompts[query] for query in queries],
            [response(rows, i).tolist() for i in range(size)],
            prompt_length=source.shape.prompt_length,
            response_length=source.shape.response_length,
            pad_id=source.pad_id,
        )
        rows |= {
            "row": np.arange(log.next_row, log.next_row + size),
            "query_id": source.query_ids[queries],
            **columns,
            "key": self._rng.integers(0, 1 << 32, rows["key"].shape, np.uint32),
            "policy_step": np.where(rows["policy_step"] >= 0, policy_step, -1).astype(np.int32),
        }
        log.append(rows)

    def fill(self) -> None:
        """More rows than the window takes, so that every later row displaces one."""
        for append in range(5 * self._source.capacity // (4 * self._source.rows_per_append) + 1):
            self.append(append % len(self.logs), policy_step=0)


def serve(connection: Any, root: Path, count: int, rows_per_second: float) -> list[Block]:
    """Writes as the trainer's process says: first what rows are made of, then how many write, and at the end its blocks."""
    source = connection.recv()
    writers, elsewhere = Writers(root, source, count), Writers(root.parent / "elsewhere", source, count)
    writers.fill()
    connection.send("filled")
    period = source.rows_per_append / rows_per_second
    followed, policy_step, due = True, 0, np.zeros(0)
    while True:
        if connection.poll(max(0.0, due.min() - time.monotonic()) if len(due) else None):
            message = connection.recv()
            if isinstance(message, list):
                return message
            (writing, followed), policy_step = message
            due = time.monotonic() + period * np.arange(writing) / max(writing, 1)
            continue
        number = int(due.argmin())
        (writers if followed else elsewhere).append(number, policy_step=policy_step)
        due[number] += period


def demo_config() -> Any:
    """The demo without what happens once in many steps and would only add noise."""
    from configs import demo

    c = demo.get_config()
    c.warm_start.steps = 100  # enough for rewards that differ
    c.learner.steps = 1_000_000
    c.learner.logprob_gap_every_steps = 0
    c.checkpoint.every_steps = 1_000_000
    c.learner.mesh.fsdp = 1
    c.evaluation.every_steps = 1_000_000
    return c


def make_trainer(workdir: Path) -> tuple[Any, Source]:
    """A trainer with an empty log, and the rows of a searcher, which wrote them elsewhere."""
    from tba_jax.experiment import composition, initial_policy
    from tba_jax.replay.reader import LogReader
    from tba_jax.roles.searcher.searcher import Searcher
    from tba_jax.roles.searcher.stream import writer_id
    from tba_jax.roles.trainer.resume import resume
    from tba_jax.roles.trainer.trainer import Trainer
    from tba_jax.run import contract
    from tba_jax.run.lease import EpochLease
    from tba_jax.telemetry.time_account import TimeAccount

    e = composition.build(demo_config())
    run, c = layout.RunDir(workdir), e.config
    contract.join(run, c, e.contract)
    lease = EpochLease.acquire(run.journal)
    initial_policy.ensure(e, run, report=lambda step, loss: None)
    trainer = Trainer(c, e.contract, run, policy=e.policy, lease=lease, publish_every_steps=c.publish.every_steps)
    resume(trainer)
    trainer.flush_snapshot()
    recorded, queries = layout.RunDir(workdir / "recorded"), e.queries["train"]
    for name in ("reference", "policy"):
        shutil.copytree(workdir / name, recorded.root / name)
    searcher = Searcher(
        c,
        e.contract,
        recorded,
        policy=e.policy,
        tokenizer=e.tokenizer,
        task=e.task,
        queries=queries,
        writer=writer_id("searcher"),
        account=TimeAccount(),
    )
    searcher.load_step(0)
    for _ in range(RECORDED_BATCHES):
        searcher.search()
    reader = LogReader(recorded.replay, e.contract.row_shape())
    rows = reader.read(searcher.writer, 0, reader.heads()[searcher.writer])
    return trainer, Source(
        shape=reader.shape,
        rows=dict(rows),
        rows_per_append=searcher.rows_per_batch,
        samples_per_query=c.searchers.samples_per_query,
        segment_appends=c.replay.segment_appends,
        capacity=c.replay.capacity,
        prompts=[query.prompt for query in queries],
        pad_id=e.contract.pad_id,
        query_ids=np.array([query_id(query.prompt) for query in queries], np.uint64),
    )


def tail_cpu_seconds() -> float:
    """CPU time so far of the thread that reads the log."""
    tail = next(thread for thread in threading.enumerate() if thread.name == "replay-tail")
    assert tail.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(tail.ident))


def measure_block(trainer: Any, count: Count, steps: int) -> Block:
    def rows_seen() -> int:
        return sum(trainer.index.heads.values())

    seconds = np.zeros(steps)
    trainer.account.restart()
    seen, tail, process, begin = rows_seen(), tail_cpu_seconds(), time.process_time(), time.monotonic()
    for step in range(steps):
        began = time.perf_counter()
        assert trainer.step() is not None
        seconds[step] = time.perf_counter() - began
    wall = time.monotonic() - begin
    return Block(
        count=count,
        step_seconds=seconds,
        arrivals=(rows_seen() - seen) / steps,
        parts={name.removeprefix("time_"): share * wall / steps for name, share in trainer.account.shares().items()},
        tail_cpu=(tail_cpu_seconds() - tail) / steps,
        process_cpu=(time.process_time() - process) / steps,
    )


def train(connection: Any, workdir: Path, counts: Sequence[Count], steps: int) -> None:
    """The trainer's process: one block for each of `counts`."""
    logging.set_verbosity(logging.WARNING)
    trainer, source = make_trainer(workdir)
    connection.send(source)
    assert connection.recv() == "filled"
    trainer.start()
    while len(trainer.index) < source.capacity:
        if trainer.step() is None:
            trainer.wait(0.1)
    blocks = []
    for count in counts:
        connection.send((count, trainer.step_number))
        for _ in range(SETTLE_STEPS):
            trainer.step()
        assert len(trainer.index) == source.capacity
        blocks.append(measure_block(trainer, count, steps))
    connection.send(blocks)
    trainer.close()


def writers_part(folder: Path, counts: Sequence[int], repeats: int, steps: int, rows_per_second: float) -> None:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        sys.exit(f"--part=writers runs trainer and writers on different cores; this process may choose among {len(cores)}")
    nobody, most = (0, True), max(counts)
    order = [*([nobody, *((count, True) for count in counts), (most, False)] * repeats), nobody]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    # As the supervisor starts a trainer. Cores and environment count from before JAX begins.
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    os.sched_setaffinity(0, cores[:1])
    process = context.Process(target=train, args=(theirs, folder, order, steps), daemon=True)
    process.start()
    theirs.close()
    os.sched_setaffinity(0, cores[1:])
    load = os.getloadavg()
    blocks = serve(ours, folder / "replay", most, rows_per_second)
    process.join()
    print(
        f"{repeats} blocks of {steps} steps for each number of writers, trainer on core {cores[0]}, writers on the others, "
        f"{rows_per_second:g} rows/s a writer; load average {load[0]:.1f} before, {os.getloadavg()[0]:.1f} after"
    )
    report_blocks(blocks)


def report_blocks(blocks: Sequence[Block]) -> None:
    """Medians over the blocks; milliseconds."""
    steps = np.array([np.median(block.step_seconds) for block in blocks])
    cpu = np.array([block.process_cpu for block in blocks])
    without = np.array([i for i, block in enumerate(blocks) if block.count[0] == 0])

    def ratios(values: np.ndarray) -> np.ndarray:
        # What the machine does besides changes slowly: the blocks without writers before and after stand for the time between.
        return values / np.interp(np.arange(len(blocks)), without, values[without])

    names = sorted({name for block in blocks for name in block.parts})
    print("  writers  rows/step   step ms  of 0  paired (least, most)   CPU ms  paired   tail ms   " + "   ".join(names))
    for count in dict.fromkeys(block.count for block in blocks):
        own = [i for i, block in enumerate(blocks) if block.count == count]
        step, paired = np.median(steps[own]), ratios(steps)[own]
        parts = [1e3 * np.median([blocks[i].parts.get(name, 0.0) for i in own]) for name in names]
        print(
            f"{count[0] if count[1] else 'elsewhere':>9} {np.median([blocks[i].arrivals for i in own]):10.0f} {1e3 * step:9.1f} "
            f"{step / np.median(steps[without]):5.3f}   {np.median(paired):5.3f} ({paired.min():.3f}, {paired.max():.3f}) "
            f"{1e3 * np.median(cpu[own]):10.1f}   {np.median(ratios(cpu)[own]):5.3f} "
            f"{1e3 * np.median([blocks[i].tail_cpu for i in own]):9.2f}   "
            + "   ".join(f"{part:{len(name)}.2f}" for name, part in zip(names, parts, strict=True))
        )


def share_part(folder: Path, steps: int) -> None:
    recipe = ("--config=configs/demo.py", f"--workdir={folder}", f"--config.learner.steps={steps}")
    begin, load = time.monotonic(), os.getloadavg()
    subprocess.run([sys.executable, "-m", "tba_jax.main", *recipe], check=True, stdout=subprocess.DEVNULL)
    last = metrics.read_lines(layout.RunDir(folder).metrics("trainer"))[-1]
    print(
        f"{last['step']} steps at {last['steps_per_second']:.2f} a second, {last['rows_seen']:.0f} rows, in "
        f"{time.monotonic() - begin:.0f} s with the warm start; load average {load[0]:.1f} before, {os.getloadavg()[0]:.1f} after"
    )
    for name in SHARES:
        share = last.get(f"time_{name}", 0.0)
        print(f"  {name:12} {100 * share:6.2f} %   {1e3 * share / last['steps_per_second']:8.2f} ms a step")
    replay = sum(last[f"time_{name}"] for name in REPLAY_SHARES)
    print(f"  {'replay':12} {100 * replay:6.2f} %   ({' + '.join(REPLAY_SHARES)})")


def main(argv: Sequence[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    counts = sorted({int(count) for count in _WRITERS.value} - {0})
    if not counts or counts[0] < 0:
        raise app.UsageError(f"--writers={','.join(_WRITERS.value)} must hold a number above 0 and none below")
    Path(_FOLDER.value).mkdir(parents=True, exist_ok=True)
    if _FOLDER.value:
        Path(_FOLDER.value).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_FOLDER.value) as name:
        folder = Path(name).absolute()
        if _PART.value == "share":
            share_part(folder, _SHARE_STEPS.value)
        else:
            writers_part(folder, counts, _REPEATS.value, _STEPS.value, _ROWS_PER_SECOND.value)


if __name__ == "__main__":
    app.run(main)
