"""What appends to the replay log and their bytes cost, and drawing a batch. `benchmarks.scale` has many writers and the tail.

python -m benchmarks.replay [--only=append] [--only=…] [--folder=<on the disk to measure>]

An append has 64 rows with tokens from a vocabulary of 50,000, responses of R/2 to R tokens and random log-probs, so that
compression gains no more than it does on real rows. Comparisons are interleaved, their times are medians.
"""

import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags, logging

from benchmarks.random_rows import VOCAB, make_rows
from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.log import LogWriter
from tba_jax.replay.selection import STRATEGIES, Selection, draw_batch
from tba_jax.trajectory import RowShape

_NAMES = ["append", "sampling"]
_ONLY = flags.DEFINE_multi_enum("only", _NAMES, _NAMES, "Which parts to run; may be given several times.")
_FOLDER = flags.DEFINE_string("folder", "", "Where to write; default: the system's temporary folder.")

SHAPES = {f"P={P} R={R}": RowShape(prompt_length=P, response_length=R, reward_parts=("task",)) for P, R in ((16, 32), (512, 512))}
ROWS = 64
# Appends of every writer, repeats of each time, and resident rows for sampling.
APPENDS, REPEATS, WINDOW = 32, 5, 1_000_000


def open_log(root: Path, name: str, shape: RowShape) -> LogWriter:
    return LogWriter(root, name, shape, info={})


def _appender(root: Path, name: str, shape: RowShape, barrier: Any, times: Any) -> None:
    """A writer process: puts [(began, returned), …] in seconds of the system-wide monotonic clock."""
    log, rows = open_log(root, name, shape), make_rows(shape, 0, ROWS, np.random.default_rng())
    log.append(rows)  # makes the folders; not counted
    barrier.wait()
    spans = []
    for _ in range(APPENDS):
        began, first = time.monotonic(), log.next_row
        log.append({**rows, "row": np.arange(first, first + ROWS)})
        spans.append((began, time.monotonic()))
    times.put(spans)


def append(folder: Path) -> None:
    print(f"appends of {ROWS} rows by writer processes, {APPENDS} each (rows/s of all together; bytes of a row, raw and on disk)")
    for name, shape in SHAPES.items():
        raw = sum(np.dtype(dtype).itemsize * int(np.prod(row)) for dtype, row in shape.columns().values())
        for writers in (1, 2, 4, 8):
            root = folder / "append"
            context = multiprocessing.get_context("spawn")
            barrier, times = context.Barrier(writers + 1), context.Queue()
            rest = (shape, barrier, times)
            processes = [context.Process(target=_appender, args=(root, f"w{number}", *rest)) for number in range(writers)]
            for process in processes:
                process.start()
            barrier.wait()
            spans = [span for _ in processes for span in times.get()]
            for process in processes:
                process.join()
            seconds = max(end for _, end in spans) - min(begin for begin, _ in spans)
            stored = sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) / (writers * (APPENDS + 1) * ROWS)
            median = 1e3 * np.median([end - begin for begin, end in spans])
            print(
                f"  {name:12} {writers} writers {writers * APPENDS * ROWS / seconds:8.0f} rows/s   {median:6.1f} ms an append   "
                f"{raw} -> {stored:.0f} bytes ({stored / raw:.2f})"
            )
            shutil.rmtree(root)


def filled_index(shape: RowShape, rows: int, capacity_per_query: int, *, one_query: bool) -> ReplayIndex:
    index = ReplayIndex(shape=shape, capacity=rows, capacity_per_query=capacity_per_query, vocab_size=VOCAB)
    rng, size = np.random.default_rng(0), rows // 100
    for step in range(1, 101):
        part = make_rows(shape, (step - 1) * size, size, rng)
        part["policy_step"] = np.where(part["policy_step"] >= 0, step - 1, -1).astype(np.int32)
        if one_query:
            part["query_id"][:] = 0
        index.add("w", part, step=step)
    return index


def sampling(folder: Path) -> None:
    del folder  # the window is in memory
    shape = SHAPES["P=16 R=32"]
    for rows, Q, K in ((WINDOW, 32, 16), (100_000, 1, 128)):
        begin = time.perf_counter()
        index = filled_index(shape, rows, 100 if Q > 1 else rows, one_query=Q == 1)
        seconds = time.perf_counter() - begin
        print(
            f"sampling Q={Q} K={K} from {len(index)} rows of {int((index.query_rows > 0).sum())} queries "
            f"(made and added in {seconds:.1f} s), medians"
        )
        settings: list[dict[str, Any]] = [
            dict(recent_probability=m, strategy=strategy) for m in (0.0, 0.5, 0.95) for strategy in STRATEGIES
        ]
        settings += [settings[2] | {"max_draws_per_row": 4}, settings[2] | {"max_staleness": 90}]
        for each in settings:
            times = []
            for number in range(5 * REPEATS):
                rng = np.random.default_rng(number)
                fixed: dict[str, Any] = dict(queries=Q, completions=K, recent_window=3, inverse_temperature=1.0)
                selection = Selection(**fixed, **each)
                began = time.perf_counter()
                slots = draw_batch(index, selection, rng=rng, step=100)
                drawn = time.perf_counter()
                assert slots is not None
                index.mark_drawn(slots)
                marked = time.perf_counter()
                index.gather(slots)
                times.append((drawn - began, marked - drawn, time.perf_counter() - marked))
            draw, mark, gather = 1e3 * np.median(times, axis=0)
            print(f"  draw {draw:5.2f} ms   mark {mark:5.2f} ms   gather {gather:5.2f} ms   {each}")


PARTS: dict[str, Callable[[Path], None]] = {"append": append, "sampling": sampling}


def main(argv: Sequence[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    if _FOLDER.value:
        Path(_FOLDER.value).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_FOLDER.value or None) as name:
        for part in _ONLY.value:
            PARTS[part](Path(name).absolute())


if __name__ == "__main__":
    app.run(main)
