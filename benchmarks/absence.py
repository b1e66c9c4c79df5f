"""What a trainer pays for its absence, and for writers that have ended: memory, polls, open files, requests.

python -m benchmarks.absence [--only=behind,dead,bucket] [--rows=10000000] [--window=50000] [--dead=10000] [--folder=DIR]

behind: a process follows a log while four writers write ten windows of rows to it, 20,000 a second; another one comes when
  so many rows are there, and so is far behind. Each prints the peak of its resident memory, as the kernel counts it, and that
  less what it had before it read.
dead: a folder in which so many writers have ended, and one writes: how long a poll takes, what the process keeps open, and how
  many files it looks at in a minute once the writers have been quiet for an hour.
bucket: the same on an S3 server of this machine (moto, of the extra dev), in requests a minute.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.log import LogWriter
from tba_jax.replay.reader import LogReader
from tba_jax.replay.tail import Tail
from tba_jax.run import places, requests
from tba_jax.run.places import Place
from tba_jax.trajectory import RowShape

_PARTS = ["behind", "dead", "bucket"]
_ONLY = flags.DEFINE_list("only", _PARTS, "Which parts to run.", allow_override=True)
_ROWS = flags.DEFINE_integer("rows", 10_000_000, "Of the log.", lower_bound=100_000, allow_override=True)
_WINDOW = flags.DEFINE_integer("window", 50_000, "replay.capacity.", lower_bound=1000, allow_override=True)
_DEAD = flags.DEFINE_integer("dead", 10_000, "Writers that have ended.", lower_bound=10)
_FOLDER = flags.DEFINE_string("folder", "", "Where to write; default: the system's temporary folder.", allow_override=True)
_FOLLOW = flags.DEFINE_string("follow", "", "Of a process that follows: its settings, JSON.")

SHAPE = RowShape(prompt_length=16, response_length=32, reward_parts=())
_APPEND, _SEGMENT_APPENDS, _WRITERS, _VOCAB = 4096, 64, 4, 1000
_ROWS_PER_SECOND = 20_000


def make_rows(count: int) -> dict[str, np.ndarray]:
    """Rows whose responses differ; `numbered` tells them apart from those of other appends."""
    rows = {name: np.zeros((count, *row), dtype) for name, (dtype, row) in SHAPE.columns().items()}
    rows["prompt_length"][:], rows["response_length"][:] = 16, 32
    rows["tokens"][:, 20:] = np.random.default_rng(0).integers(0, _VOCAB, (count, 28))
    return rows


def numbered(rows: dict[str, np.ndarray], first: int, writer: int) -> dict[str, np.ndarray]:
    """As rows `first` and following of a writer, 16 of a query."""
    rows["row"] = np.arange(first, first + len(rows["row"]))
    rows["query_id"] = (rows["row"] // 16 % 5000).astype(np.uint64)
    rows["tokens"][:, 16], rows["tokens"][:, 17] = rows["row"] // 4096 % _VOCAB, writer
    rows["tokens"][:, 18] = rows["row"] // 4096 // _VOCAB
    return rows


def _status(name: str) -> int:
    """A line of /proc/self/status, in KiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


def follow(settings: dict) -> None:
    """Follows a log until `rows` of it are taken up, and prints what that took."""
    import jax  # as a trainer has it

    jax.devices()
    index = ReplayIndex(
        shape=SHAPE, capacity=settings["window"], capacity_per_query=100, vocab_size=_VOCAB, merge_keep=settings["keep"]
    )
    before = _status("VmRSS")
    most_behind = 2 * settings["window"] if settings["keep"] == "newest" else 0
    reader = LogReader(Path(settings["root"]), SHAPE)
    tail = Tail(reader, {}, poll_seconds=0.2, most_behind=most_behind)
    begin = time.monotonic()
    tail.start()
    print("follows", flush=True)
    while sum(index.heads.values()) < settings["rows"]:
        tail.wait(0.2)
        tail.integrate(index, step=1)
    tail.close()
    read = sum(entry["seen"] for entry in index.ledger().values())
    told = {"peak": _status("VmHWM"), "more": _status("VmHWM") - before, "read": read, "resident": len(index)}
    print(json.dumps(told | {"seconds": time.monotonic() - begin}), flush=True)


def _follower(root: Path, keep: str, *, rows: int) -> subprocess.Popen:
    settings = dict(root=str(root), rows=rows, window=_WINDOW.value, keep=keep)
    command = [sys.executable, "-m", "benchmarks.absence", f"--follow={json.dumps(settings)}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "follows\n"
    return process


def _tell(name: str, process: subprocess.Popen) -> dict:
    output, _ = process.communicate()
    told = json.loads(output)
    print(
        f"{name}: peak {told['peak'] / 1024:.0f} MiB, {told['more'] / 1024:.0f} MiB more than before it read; "
        f"{told['read']:,} rows read, {told['resident']:,} resident, {told['seconds']:.0f} s",
        flush=True,
    )
    return told


def behind(root: Path) -> None:
    rounds, calm = _ROWS.value // _APPEND // _WRITERS, 10 * _WINDOW.value // _APPEND // _WRITERS
    keeps = ("newest", "best")
    live = {keep: _follower(root, keep, rows=calm * _WRITERS * _APPEND) for keep in keeps}
    names = [f"w{number}" for number in range(_WRITERS)]
    logs = [LogWriter(root, name, SHAPE, rows_per_append=_APPEND, segment_appends=_SEGMENT_APPENDS, info={}) for name in names]
    rows, never, begin = make_rows(_APPEND), {}, time.monotonic()
    for written in range(1, rounds + 1):
        for number, log in enumerate(logs):
            log.append(numbered(rows, log.next_row, number))
        if written <= calm:
            time.sleep(max(0.0, begin + written * _WRITERS * _APPEND / _ROWS_PER_SECOND - time.monotonic()))
        if written == calm:
            never = {keep: _tell(f"never away, merge_keep={keep}", process) for keep, process in live.items()}
    print(f"{sum(log.next_row for log in logs):,} rows are there", flush=True)
    for keep in keeps:
        away = _tell(f"away, merge_keep={keep}", _follower(root, keep, rows=rounds * _WRITERS * _APPEND))
        shares = [away[name] / never[keep][name] for name in ("peak", "more")]
        print(f"  {shares[0]:.2f} of the peak, {shares[1]:.2f} of what reading took", flush=True)


def make_dead(root: Place, count: int) -> None:
    """Writers that have ended, each a copy of one that made an append."""
    rows = numbered(make_rows(64), 0, 0)
    LogWriter(root, "dead", SHAPE, rows_per_append=64, segment_appends=8, info={"started": 1.0}).append(rows)
    files = {name: places.read_bytes(root / "dead" / name) for name in places.files_in(root / "dead")}
    described = places.read_bytes(root / "writers" / "dead.json")
    for number in range(count - 1):
        for name, content in files.items():
            target = root / f"dead-{number}" / name
            if isinstance(target, Path):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            else:
                target.store.write(target.path, content)  # many at a time
        register = root / "writers" / f"dead-{number}.json"
        register.write_bytes(described) if isinstance(register, Path) else places.write_bytes(register, described)


def _followed(root: Place, name: str, **settings: Any) -> tuple[Tail, LogWriter]:
    """A tail of a trainer that begins now, and a writer that is at work."""
    tail = Tail(LogReader(root, SHAPE, **settings), {}, poll_seconds=0.2)
    begin = time.perf_counter()
    tail.poll(spare_quiet=True)
    tail.integrate(ReplayIndex(shape=SHAPE, capacity=50_000, capacity_per_query=100, vocab_size=_VOCAB), step=0)
    print(f"  the first look opens every log: {time.perf_counter() - begin:.1f} s", flush=True)
    return tail, LogWriter(root, name, SHAPE, rows_per_append=64, segment_appends=1000, info={})


def _polls(tail: Tail, live: LogWriter, *, seconds: float, pause: float) -> list[float]:
    rows, taken, end = make_rows(64), [], time.monotonic() + seconds
    index = ReplayIndex(shape=SHAPE, capacity=50_000, capacity_per_query=100, vocab_size=_VOCAB)
    while time.monotonic() < end:
        live.append(numbered(rows, live.next_row, 1))
        begin = time.perf_counter()
        tail.poll(spare_quiet=True)
        taken.append(time.perf_counter() - begin)
        tail.integrate(index, step=0)
        time.sleep(pause)
    return taken


def dead(root: Path) -> None:
    for count in (10, _DEAD.value):
        print(f"{count:,} writers that have ended", flush=True)
        (root / str(count)).mkdir(parents=True)
        make_dead(root / str(count), count)
        old = time.time() - 3600
        for folder in (root / str(count)).glob("dead*/000000"):
            os.utime(folder, (old, old))
        tail, live = _followed(root / str(count), "live")
        asked, changed = [0], places.changed

        def counted(files, asked=asked, changed=changed):
            asked[0] += len(files)
            return changed(files)

        places.changed = counted
        begin, taken = time.monotonic(), _polls(tail, live, seconds=20, pause=0.2)
        minutes = (time.monotonic() - begin) / 60
        places.changed = changed
        print(
            f"  a poll takes {1e3 * statistics.median(taken):.1f} ms (the longest {1e3 * max(taken):.0f}), "
            f"{asked[0] / minutes:.0f} files looked at a minute, {len(os.listdir('/proc/self/fd'))} open files, "
            f"{_status('VmRSS') / 1024:.0f} MiB",
            flush=True,
        )


def bucket() -> None:
    from tests.support import moto_server

    with moto_server.serving():
        for count in (10, min(_DEAD.value, 2000)):
            root = places.place(f"s3://{moto_server.BUCKET}/{count}")
            print(f"{count:,} writers that have ended, on S3", flush=True)
            make_dead(root, count)
            for limit in (300, 1200):
                tail, live = _followed(root, f"live-{limit}", requests_per_minute=limit)
                rate = requests.RequestRate([root])
                taken = _polls(tail, live, seconds=30, pause=places.OBJECT_STORE_POLL_SECONDS)
                told = rate.scalars()["storage_requests_per_minute"]
                print(
                    f"  replay.requests_per_minute={limit}: {told:.0f} requests a minute in all, a poll takes "
                    f"{1e3 * statistics.median(taken):.0f} ms",
                    flush=True,
                )


def main(_: list[str]) -> None:
    if _FOLLOW.value:
        follow(json.loads(_FOLLOW.value))
        return
    if unknown := sorted(set(_ONLY.value) - set(_PARTS)):
        raise app.UsageError(f"--only={','.join(unknown)} names no part; there are {', '.join(_PARTS)}")
    folder = Path(tempfile.mkdtemp(dir=_FOLDER.value or None))
    try:
        if "behind" in _ONLY.value:
            behind(folder / "behind")
        if "dead" in _ONLY.value:
            dead(folder / "dead")
        if "bucket" in _ONLY.value:
            bucket()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    app.run(main)
