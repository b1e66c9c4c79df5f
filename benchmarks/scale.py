"""What a run costs at up to 1,024 searchers, with the project's own code on both sides of the storage and no model at all.

    python -m benchmarks.scale --part=load [--writers=1,16,64,256,1024] [--rates=1,20] [--seconds=40]
    python -m benchmarks.scale --part=equal|dead|rows|faults [--place=folder|slow|no-locks|s3] [--dead=20000,86000]

A few processes play the searchers: each has its LogWriter, polls the pointer and the demand, asks whether the run has finished,
and writes its status; by seed it stalls, leaves, or dies and comes back under a new id. The trainer has its lease, log reader,
tail, index, journal, checkpoints, retention, pointer and demand; its step is a draw. slow: a folder whose requests take 20 ms
longer, polled as an object store. no-locks: a folder of a file system without locks. s3: moto, through a proxy that counts.
faults: one of the generators is killed, S3 throttles while another one takes its place, and is away for three seconds.
"""

import bisect
import collections
import contextlib
import dataclasses
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags, logging

from benchmarks.random_rows import VOCAB, make_rows
from benchmarks.s3_proxy import Proxy
from benchmarks.scale_roles import Load, generate, train
from tba_jax.replay.log import LogWriter
from tba_jax.replay.reader import LogReader
from tba_jax.roles.searcher.loop import POLL_SECONDS_OF_STORE
from tba_jax.storage import contract, layout, places

_PART = flags.DEFINE_enum("part", "load", ["load", "equal", "dead", "rows", "faults"], "What is measured.")
_PLACE = flags.DEFINE_enum("place", "folder", ["folder", "slow", "no-locks", "s3"], "Where the run's roles meet.")
_WRITERS = flags.DEFINE_list("writers", ["1", "16", "64", "256", "1024"], "Numbers of searchers.")
_RATES = flags.DEFINE_list("rates", ["1", "20"], "Rows a second of each searcher.")
_SECONDS = flags.DEFINE_float("seconds", 40.0, "Of the window that is measured.")
_DEAD = flags.DEFINE_list("dead", ["20000", "86000"], "Numbers of writers that put one append and are gone.")
_FOLDER = flags.DEFINE_string("folder", "", "Where to write; default: the system's temporary folder.")

# S3 Standard, us-east-1, public list price of 2026-11, dollars a request. Requests within the region cost no transfer.
PRICES = {"PUT": 0.005 / 1000, "POST": 0.005 / 1000, "LIST": 0.005 / 1000, "GET": 0.0004 / 1000, "HEAD": 0.0004 / 1000}
GENERATORS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """report: of the trainer. visibility: seconds from an acknowledged append until its rows are in the index and the journal.
    counts: of the generators. requests: kind -> of the window, where they are counted. committed: rows in the log. lost:
    acknowledged rows that are not. files: files and folders of the run at the end."""

    report: dict[str, Any]
    visibility: np.ndarray
    counts: collections.Counter[str]
    requests: dict[str, int]
    committed: int
    lost: int
    files: int

    @property
    def balances(self) -> bool:
        """Whether each acknowledged row is committed, and each of those seen or passed over."""
        told = self.report
        return not self.lost and told["seen"] + told["passed_over"] == self.committed


def measure(load: Load, *, proxy: Proxy | None = None, faults: bool = False, outage_seconds: float = 3.0) -> Result:
    """Runs a load in new processes. Args: faults: see the module."""
    context, told = multiprocessing.get_context("spawn"), Path(load.root) / "told"
    told.mkdir(parents=True, exist_ok=True)
    if isinstance(load.run.shared, Path):
        load.run.shared.mkdir(exist_ok=True)
        places.make_folder(load.run.replay)
    layout.create_json(load.run.config, {"config": {"learner": {"steps": 10**6}}})
    places.make_folder(load.run.references)
    layout.create_json(load.run.initial_reference, {"id": contract.NO_REFERENCE})
    ready, window, stop, goals, reports = context.Semaphore(0), context.Event(), context.Event(), context.Queue(), context.Queue()
    trainer = context.Process(target=train, args=(load, ready, window, goals, reports))
    trainer.start()
    processes = min(GENERATORS, load.writers) if load.rate else 0

    def start(number: int) -> Any:
        rest = (load, number, processes, ready, stop, str(told / f"{time.time_ns()}-{number}"))
        generator = context.Process(target=generate, args=rest)
        generator.start()
        return generator

    generators = [start(number) for number in range(processes)]
    for _ in range(1 + len(generators)):
        while not ready.acquire(timeout=1.0):
            assert all(each.exitcode is None for each in (trainer, *generators)), "a process has ended"
    before = collections.Counter(proxy.counts) if proxy else collections.Counter[str]()
    window.set()
    if generators:
        time.sleep(load.seconds / 2)
        if faults:
            generators[0].kill()
            if proxy:
                proxy.throttles = True
            generators.append(start(processes))  # other searchers take the place of its
            ready.acquire()
            time.sleep(load.seconds / 4)
            if proxy:
                proxy.throttles, proxy.is_out = False, True
                time.sleep(outage_seconds)
                proxy.is_out = False
        time.sleep(load.seconds / (4 if faults else 2))
    requests = dict(collections.Counter(proxy.counts) - before) if proxy else {}
    stop.set()
    for generator in generators:
        generator.join()
    heads = LogReader(load.run.replay, load.shape).heads()
    goals.put(heads)
    while reports.empty() and trainer.is_alive():
        time.sleep(0.1)
    report, seen = reports.get(timeout=10)
    trainer.join()
    return result(load, told, report, seen, requests, heads)


def result(load: Load, told: Path, report: Any, seen: Any, requests: dict[str, int], heads: dict[str, int]) -> Result:
    saw: dict[str, list[tuple[int, float]]] = collections.defaultdict(list)
    for writer, head, moment in seen:
        saw[writer].append((head, moment))
    counts, waits, lost = collections.Counter[str](), [], 0
    for file in told.iterdir():
        for line in file.read_text().splitlines():
            if line.startswith("{"):
                counts.update(json.loads(line))
                continue
            writer, head, moment = line.split()
            lost += int(head) > heads.get(writer, 0)
            at = bisect.bisect_left(saw[writer], (int(head), 0.0))
            if at < len(saw[writer]):
                waits.append(max(saw[writer][at][1] - float(moment), 0.0))
    files = sum(len(names) + len(folders) for _, folders, names in os.walk(load.root))
    return Result(
        report=report, visibility=np.array(waits or [np.nan]), counts=counts, requests=requests, committed=sum(heads.values()),
        lost=lost, files=files,
    )  # fmt: skip


def dollars(requests: Mapping[str, float], seconds: float) -> float:
    """What a day of such requests costs. Args: seconds: in which they were counted."""
    return 86400 / seconds * sum(count * PRICES.get(kind, 0.0) for kind, count in requests.items())


def computed(writers: int, rate: float, *, rows: int = 192, polls: float = POLL_SECONDS_OF_STORE) -> dict[str, float]:
    """Requests a second by kind, from what one append, one poll and one look of the trainer are counted to be on S3.

    A poll is a GET of the pointer and one of the demand. An append is a PUT, a GET by the trainer, and one of finished.json by
    its searcher. A look lists the appends of the last three minutes, 1,000 a request; the trainer tells the demand and renews
    its lease now and then. Args: polls: seconds between polls of a searcher.
    """
    appends = writers * rate / rows
    return {
        "PUT": appends + 1.0,
        "GET": 2 * appends + 2 * writers / polls + 0.5,
        "LIST": np.ceil(180 * appends / 1000) / places.OBJECT_STORE_POLL_SECONDS,
    }


_COLUMNS = (
    "place", "writers", "rows/s each", "rows/s in all", "late appends", "visible: median", "p99", "trainer's CPU a row",
    "waits in all", "slowest of a step", "requests a minute", "$ a day", "files", "memory", "checkpoint", "balances",
)  # fmt: skip
HEADER = f"| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|"


def told(name: str, load: Load, found: Result) -> str:
    """A row of the table."""
    report, p = found.report, np.percentile(found.visibility, [50, 99])
    rows, seconds = max(report["rows"], 1), report["seconds"]
    asked = {kind: found.requests[kind] for kind in sorted(found.requests) if kind != "all"}
    rates = " ".join(f"{kind} {60 * count / load.seconds:.0f}" for kind, count in asked.items()) or "–"
    cpu = 1e6 * (report["tail_seconds"] + report["integrate_seconds"]) / rows
    slowest = ", ".join(f"{what} {longest} s" for what, longest in report["slowest"].items())
    cells = [
        name, load.writers, f"{load.rate:g}", f"{rows / seconds:.0f}",
        f"{found.counts['late']} of {found.counts['appends']}", f"{p[0]:.2f} s", f"{p[1]:.2f} s", f"{cpu:.0f} µs",
        f"{report['integrate_waits']:.1f} s", slowest, rates,
        f"{dollars(asked, load.seconds):.2f}" if asked else "–", found.files,
        f"{report['gigabytes']:.2f} GB", f"{report['host_bytes'] / 1e6:.1f} MB", "yes" if found.balances else "NO",
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


@contextlib.contextmanager
def placed(place: str, folder: Path, **settings: Any) -> Iterator[tuple[Load, Proxy | None]]:
    """A load whose roles meet at a place of a kind, see --place, and the proxy before it."""
    root = Path(tempfile.mkdtemp(dir=folder))
    try:
        if place != "s3":
            # orbax locks files. A run whose roles meet where there are no locks has the trainer's workdir elsewhere.
            yield Load(root=str(root), is_slow=place == "slow", checkpoints=place != "no-locks", **settings), None
            return
        from tests.support import moto_server

        with moto_server.serving() as environment:
            proxy = Proxy(environment["AWS_ENDPOINT_URL"])
            os.environ["AWS_ENDPOINT_URL"] = proxy.url
            yield Load(root=str(root), shared=f"s3://{moto_server.BUCKET}/run", **settings), proxy
            proxy.shutdown()
    finally:
        shutil.rmtree(root)


def load(folder: Path) -> None:
    print(HEADER)
    for rate in map(float, _RATES.value):
        for writers in map(int, _WRITERS.value):
            # Of a folder, many searchers ask less often than they do by default: see docs/scale.md.
            polls = max(0.2, 0.002 * writers)
            fixed: dict[str, Any] = dict(writers=writers, rate=rate, seconds=_SECONDS.value, poll_seconds=polls)
            with placed(_PLACE.value, folder, **fixed) as (asked, proxy):
                print(told(_PLACE.value, asked, measure(asked, proxy=proxy)), flush=True)
    print("\ncomputed, for S3:\n\n| writers | rows/s each | PUT, GET, LIST a minute | $ a day |\n|---|---|---|---|")
    for rate in (1.0, 20.0):
        for writers in (64, 256, 1024, 10_000):
            a_second = computed(writers, rate)
            rates = ", ".join(f"{60 * count:.0f}" for count in a_second.values())
            print(f"| {writers} | {rate:g} | {rates} | {dollars(a_second, 1.0):.2f} |")


def equal(folder: Path) -> None:
    """The trainer's CPU a row where one writer, and where 1,024 write as many rows in all."""
    print(HEADER)
    for writers in 2 * (1, 1024):
        # One writer is slower than 1,024 are, so it puts larger appends in no case.
        fixed: dict[str, Any] = dict(writers=writers, rate=4096 / writers, seconds=_SECONDS.value, poll_seconds=2.0)
        with placed(_PLACE.value, folder, stalls=0.0, dies=0.0, leaves=0.0, **fixed) as (asked, proxy):
            print(told(_PLACE.value, asked, measure(asked, proxy=proxy)), flush=True)


def _bury(root: str, numbers: range) -> None:
    load = Load(root=root)
    rows = make_rows(load.shape, 0, 16, np.random.default_rng(numbers.start))
    for number in numbers:
        rows["query_id"][:], rows["tokens"][:, 16] = number, number % VOCAB
        LogWriter(load.run.replay, f"d{number}", load.shape, info={}).append(rows)


def dead(folder: Path) -> None:
    """What writers cost that put one append of 16 rows and are gone, and the resume from a checkpoint that knows them: where all
    of their rows are resident, and where a window of 100,000 rows has few of them and silent writers are closed."""
    print("| dead writers | first look | resume | open, closed | memory | checkpoint | files | balances |\n" + "|---" * 8 + "|")
    for count in map(int, _DEAD.value):
        closing: dict[str, Any] = dict(capacity=100_000, close_seconds=1.0, step_seconds=0.05, more_steps=160)
        settings = dict(writers=0, rate=0.0)
        with (
            placed("folder", folder, capacity=2 * 16 * count, **settings) as (resident, _),
            placed("folder", folder, **settings, **closing) as (closed, _),
        ):
            places.make_folder(resident.run.replay)
            context = multiprocessing.get_context("spawn")
            buries = [context.Process(target=_bury, args=(resident.root, range(begin, count, 2))) for begin in range(2)]
            for each in buries:
                each.start()
            for each in buries:
                each.join()
            for rows, asked in (("resident", resident), ("closed", closed)):
                for what in ("first", "resumed"):
                    found = measure(asked)
                    report = found.report
                    is_whole = report["seen"] + report["passed_over"] == 16 * count  # retention removes what is closed
                    cells = [
                        f"{count} ({rows}, {what})", f"{report['first_look']:.2f} s", f"{report['resume']:.2f} s",
                        f"{report['open']}, {report['closed']}", f"{report['gigabytes']:.2f} GB",
                        f"{report['host_bytes'] / 1e6:.2f} MB", found.files, "yes" if is_whole else "NO",
                    ]  # fmt: skip
                    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
                if rows == "resident":
                    os.rename(Path(resident.root) / "replay", Path(closed.root) / "replay")


def rows(folder: Path) -> None:
    """Ten million small rows in all."""
    print(HEADER)
    fixed: dict[str, Any] = dict(writers=16, rate=2500.0, rows=10_000, lengths=(4, 4), seconds=250.0, capacity=500_000)
    with placed("folder", folder, stalls=0.0, dies=0.0, leaves=0.0, **fixed) as (asked, _):
        print(told("folder", asked, measure(asked)))
        print(told("folder, resumed", asked, measure(dataclasses.replace(asked, rate=0.0))))


def faults(folder: Path) -> None:
    """A generator is killed; S3 throttles, and is away."""
    print(HEADER)
    with placed(_PLACE.value, folder, writers=16, rate=40.0, rows=128, seconds=_SECONDS.value) as (asked, proxy):
        print(told(_PLACE.value, asked, found := measure(asked, proxy=proxy, faults=True)), dict(found.counts))


PARTS: dict[str, Callable[[Path], None]] = {"load": load, "equal": equal, "dead": dead, "rows": rows, "faults": faults}


def main(argv: Sequence[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    if _PLACE.value == "no-locks" and "LD_PRELOAD" not in os.environ:
        from tests.support import without_locks

        with tempfile.TemporaryDirectory() as name:
            environment = {**os.environ, "LD_PRELOAD": str(without_locks.built(Path(name)))}
            sys.exit(subprocess.call([sys.executable, "-m", "benchmarks.scale", *sys.argv[1:]], env=environment))
    with tempfile.TemporaryDirectory(dir=_FOLDER.value or None) as name:
        PARTS[_PART.value](Path(name).absolute())


if __name__ == "__main__":
    app.run(main)
