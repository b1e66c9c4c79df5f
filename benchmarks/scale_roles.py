"""The two sides of benchmarks.scale: processes that play hundreds of searchers, and a trainer whose step is a draw.

Searchers and trainer use the project's own code for everything that meets storage.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import heapq
import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.random_rows import VOCAB, make_rows
from benchmarks.s3_proxy import slow_down
from tba_jax.replay.log import LogWriter
from tba_jax.replay.reader import LogReader
from tba_jax.roles.backpressure import DemandWriter, Room
from tba_jax.roles.searcher.loop import POLL_SECONDS_OF_STORE
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout, places, published
from tba_jax.telemetry.status import Status
from tba_jax.trajectory import RowShape

SLOW_SECONDS, THREADS, POOL = 0.02, 24, 16
_DRAIN_SECONDS = 1200.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """root: the workdir. shared: where the roles meet, "": there. rate: rows a second of each writer. rows: of an append.
    stalls, dies, leaves: probabilities of each before an append. step_seconds: of the trainer, in which a model would compute.
    close_seconds: after which it closes silent writers. more_steps: that it does when it has all rows."""

    root: str
    shared: str = ""
    is_slow: bool = False
    writers: int = 16
    rate: float = 20.0
    rows: int = 192
    seconds: float = 40.0
    lengths: tuple[int, int] = (16, 16)
    capacity: int = 100_000
    stalls: float = 0.02
    dies: float = 0.01
    leaves: float = 0.005
    step_seconds: float = 0.25
    poll_seconds: float = 0.2
    checkpoints: bool = True
    close_seconds: float = 3600.0
    more_steps: int = 0
    seed: int = 0

    @property
    def run(self) -> layout.RunDir:
        return layout.RunDir(Path(self.root), places.place(self.shared) if self.shared else None)

    @property
    def shape(self) -> RowShape:
        return RowShape(prompt_length=self.lengths[0], response_length=self.lengths[1], reward_parts=("task",))


class Searcher:
    """One searcher's requests. It is called by one thread at a time. Its events: (seconds until it is next due, what is next)."""

    def __init__(self, load: Load, name: str, tell: Callable[[str], None], counts: collections.Counter[str]):
        self._load, self._name, self._tell, self._counts = load, name, tell, counts
        self._rng, self._lives = random.Random(f"{load.seed} {name}"), 0
        self._published, self._status = published.Published(load.run.policies), Status(None)
        self._log: LogWriter | None = None
        self.pause = load.rows / load.rate

    def live(self) -> None:
        """Joins, under a new writer id, as a searcher does that was started again."""
        self._lives += 1
        writer = f"{self._name}-{self._lives}-{os.getpid()}"
        self._log = LogWriter(self._load.run.replay, writer, self._load.shape, info={})
        self._room = Room(self._load.run.demand, writer)
        if self._lives == 1:
            (folder := self._load.run.metrics(self._name)).mkdir(parents=True)
            self._status = Status(folder, process={"name": self._name})

    def poll(self) -> float:
        """What the refreshing thread of a searcher does. Returns the seconds until the next time."""
        self._room.look()
        self._published.kept()
        seconds = places.poll_seconds([self._load.run.shared], self._load.poll_seconds, of_store=POLL_SECONDS_OF_STORE)
        return seconds * self._rng.uniform(0.5, 1.5)

    def append(self, rows: dict[str, np.ndarray]) -> float:
        """What becomes of one batch. Returns the seconds until the next; below 0: it has died, and lives again after so long."""
        assert self._log is not None
        contract_lib.is_finished(self._load.run)
        first = self._log.next_row
        self._counts["held"] += not self._room.allows(first)  # a searcher would wait; a load is to be as large as it is asked
        rows["row"] = np.arange(first, first + self._load.rows)
        try:
            self._log.append(rows)
        except OSError:  # its process would end, and be started again
            self._counts["refused appends"] += 1
            return -1.0
        self._tell(f"{self._log.writer} {first + self._load.rows} {time.monotonic()}\n")
        self._counts["appends"] += 1
        self._status.point({"rows": float(first), "time": time.monotonic()})
        fate = self._rng.random()
        if fate < self._load.dies:
            self._counts["died"] += 1
            return -self._rng.uniform(0.1, 2.0)
        if fate < self._load.dies + self._load.leaves:  # another one joins later
            self._counts["left"] += 1
            return -self._rng.uniform(2.0, 10.0)
        stalls = fate > 1 - self._load.stalls
        self._counts["stalled"] += stalls
        return self.pause * (3 if stalls else 1)


def generate(load: Load, number: int, of: int, ready: Any, stop: Any, told: str) -> None:
    """A process that plays every `of`-th searcher until `stop` is set. told: a file that gets each acknowledged append, and last
    the counts."""
    if load.is_slow:
        slow_down(SLOW_SECONDS)
    rng, counts = np.random.default_rng([load.seed, number]), collections.Counter[str]()
    pool = [make_rows(load.shape, 192 * each, load.rows, rng) for each in range(POOL)]
    writing = threading.Lock()

    def tell(line: str) -> None:
        with writing, open(told, "a") as acks:
            acks.write(line)

    searchers = [Searcher(load, f"s{index}-g{number}", tell, counts) for index in range(number % of, load.writers, of)]
    events: list[tuple[float, int, str]] = []
    changed = threading.Condition()

    def put(due: float, index: int, kind: str) -> None:
        with changed:
            heapq.heappush(events, (due, index, kind))
            changed.notify()

    def do(due: float, index: int, kind: str) -> None:
        searcher, late = searchers[index], time.monotonic() - due
        try:
            if kind == "poll":
                put(time.monotonic() + searcher.poll(), index, kind)
                return
            if kind == "live":
                searcher.live()
                put(due + random.uniform(0, searcher.pause), index, "append")
                return
            counts["late"] += late > 1.0
            counts["late seconds"] += max(late, 0.0)  # type: ignore[assignment]
            with writing:
                serial = counts["serial"] = counts["serial"] + 1
            rows = dict(pool[serial % POOL])
            tokens = rows["tokens"] = rows["tokens"].copy()
            tokens[:, load.lengths[0]] = (serial * 7919 + number * 104729) % VOCAB  # no response is there twice
            tokens[:, load.lengths[0] + 1] = np.arange(load.rows) % VOCAB
            rows["query_id"] = rows["query_id"] + np.uint64(12 * (serial * of + number) % 100_000)
            seconds = searcher.append(rows)
            put(max(due, time.monotonic() - 1.0) + abs(seconds), index, "live" if seconds < 0 else "append")
        except OSError:
            counts["refused requests"] += 1
            put(time.monotonic() + 1.0, index, kind)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        for each in [threads.submit(searcher.live) for searcher in searchers]:
            each.result()
        ready.release()
        now = time.monotonic()
        for index, searcher in enumerate(searchers):
            put(now + random.uniform(0, searcher.pause), index, "append")
            put(now + random.uniform(0, load.poll_seconds), index, "poll")
        while not stop.is_set():
            with changed:
                wait = events[0][0] - time.monotonic() if events else 0.1
                if wait > 0:
                    changed.wait(min(wait, 0.1))
                    continue
                event = heapq.heappop(events)
            threads.submit(do, *event)
        stop_at = time.monotonic()
    counts["drained seconds"] = round(time.monotonic() - stop_at)
    tell(json.dumps(counts) + "\n")


def settings(load: Load) -> tuple[Any, Any]:
    """Config and contract of a run whose rows these are."""
    from configs import base
    from tba_jax.experiment import composition

    c = base.get_config()
    c.update_from_flattened_dict(
        {"task.prompt_length": 16, "task.response_length": 16, "replay.capacity": load.capacity, "learner.queries": 8}
        | {"learner.completions": 8, "searchers.max_updates_ahead": 4, "replay.retention": "checkpoints", "publish.keep": 3}
        | {"checkpoint.every_steps": 40, "learner.steps": 10**6, "replay.min_rows": 1, "replay.poll_seconds": 0.2}
        | {"replay.close_seconds": load.close_seconds}
    )
    contract = composition.build(c).contract
    model = {**contract.model, "vocab": VOCAB}
    P, R = load.lengths
    return c, dataclasses.replace(contract, model=model, prompt_length=P, response_length=R, reward_parts=("task",))


class Slowest(dict[str, float]):
    """What a trainer's step waits for -> the longest time, seconds."""

    def note(self, what: str, began: float) -> None:
        self[what] = max(self.get(what, 0.0), round(time.monotonic() - began, 2))


def train(load: Load, ready: Any, window: Any, goals: Any, reports: Any) -> None:
    """A trainer without a model, until it has all rows of the heads that `goals` gives: its report, and when it saw each row."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    import jax

    from tba_jax.replay import journal
    from tba_jax.roles.plan import Plan
    from tba_jax.roles.trainer.buffer import ReplayBuffer
    from tba_jax.roles.trainer.publishing import Checkpointing, Publisher
    from tba_jax.storage.lease import EpochLease

    if load.is_slow:
        slow_down(SLOW_SECONDS)
    (config, contract), run = settings(load), load.run
    trees = {"state": {"x": jax.numpy.zeros(4)}}
    reader = LogReader(run.replay, load.shape)
    began = time.monotonic()
    reader.heads()
    first_look = time.monotonic() - began
    del reader
    began = time.monotonic()
    lease = EpochLease.acquire(run.lease)
    buffer = ReplayBuffer(config, contract, run, recent_window=4)
    checkpoints = Checkpointing(config, run, lease, buffer, Plan())
    step = checkpoints.stored.latest_step() or 0
    lineage = journal.read_lineage(run.journal, after=step)
    buffer.expect(lineage)
    if step:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trees)
        checkpoints.take(step, checkpoints.stored.restore(step, shapes)[1])
    for line in lineage:
        buffer.index.mark_drawn(buffer.replay(line)[0])
        step += 1
    buffer.note_losses(since=0)
    rule: dict[str, Any] = dict(every_steps=20, keep=3, keep_every=10**6, final_step=-1)
    publisher = Publisher(run.policies, epoch=lease.epoch, dtype="float32", **rule)
    lines = journal.Journal(run.journal, lease.epoch)
    lease.journals(step, workdir=run.root)
    buffer.follow()
    resumed = time.monotonic() - began
    demand = DemandWriter(run.demand, seconds=load.poll_seconds)
    buffer.tail.start()
    ready.release()
    window.wait()
    tail = next(each for each in threading.enumerate() if each.name == "replay-tail")
    tail_clock = time.pthread_getcpuclockid(tail.ident or 0)
    before = time.clock_gettime(tail_clock), time.process_time(), buffer.index.totals["seen"], places.sent(), time.monotonic()
    seen: list[tuple[str, int, float]] = []
    taking = waiting = deadline = 0.0
    slowest = Slowest()
    steps = has_all = 0
    goal: dict[str, int] | None = None
    while True:
        wall, cpu = time.monotonic(), time.thread_time()
        buffer.integrate(step=step)
        taking += (spent := time.thread_time() - cpu)
        waiting += max(time.monotonic() - wall - spent, 0.0)
        slowest.note("integrate", wall)
        slots = buffer.draw(step=step)
        demand.tell(buffer.demand(step=step, waits=slots is None))
        if goal is None and not goals.empty():
            goal, deadline = goals.get(), time.monotonic() + _DRAIN_SECONDS
        if slots is not None:
            rows, ids, visible = buffer.index.gather(slots), buffer.index.ids(slots), buffer.take_visible()
            facts: dict[str, Any] = dict(step=step + 1, visible=visible, ids=ids, reward_version=0, key=step, rows=rows)
            durable = lines.submit(functools.partial(journal.journal_line, **facts))
            buffer.index.mark_drawn(slots)
            step, steps = step + 1, steps + 1
            if publisher.is_due(step):  # a small snapshot: searchers only find it
                began = time.monotonic()
                publisher.publish(trees["state"], step)
                slowest.note("publish", began)
            if load.checkpoints and checkpoints.is_due(step):
                began = time.monotonic()
                checkpoints.save(trees, step)
                slowest.note("checkpoint", began)
            began = time.monotonic()
            durable.result()
            slowest.note("journal", began)
            now = time.monotonic()
            seen += [(writer, head, now) for record in visible for writer, head in record.get("heads", {}).items()]
        if goal is not None:
            heads = {**buffer.index.closed.heads, **buffer.index.heads}
            if not has_all and all(heads.get(writer, 0) >= head for writer, head in goal.items()):
                has_all = steps + 1
            if (has_all and steps + 1 >= has_all + load.more_steps) or time.monotonic() > deadline:
                break
        time.sleep(max(load.step_seconds - (time.monotonic() - wall), 0.0))
    came = buffer.index.totals["seen"] - before[2]
    cpu = time.clock_gettime(tail_clock) - before[0]
    host_bytes = len(json.dumps(buffer.state()))
    counted = dict.fromkeys(("seen", "damaged", "passed_over", "pending"), 0)
    for told in (*buffer.index.ledger().values(), buffer.index.closed_ledger()):
        for kind in counted:
            counted[kind] += told[kind]
    report: dict[str, Any] = dict(
        counted, rows=came, steps=steps, tail_seconds=cpu, integrate_seconds=taking, integrate_waits=waiting,
        process_seconds=time.process_time() - before[1], seconds=time.monotonic() - before[4], requests=places.sent() - before[3],
        open=len(buffer.index.heads), closed=len(buffer.index.closed.heads),
        first_look=first_look, resume=resumed, host_bytes=host_bytes, problems=buffer.tail.problems()[:3], slowest=dict(slowest),
    )  # fmt: skip
    if load.checkpoints:
        checkpoints.save(trees, step)
        checkpoints.stored.wait()
    report["gigabytes"] = _peak_bytes() / 1e9
    buffer.close()
    demand.close()
    checkpoints.close()
    lines.close()
    publisher.close()
    lease.release()
    reports.put((report, seen))


def _peak_bytes() -> int:
    """The most memory that this process has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
