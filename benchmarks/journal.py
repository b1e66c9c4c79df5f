"""What a long journal costs a trainer that resumes: peak memory and seconds, and those of a pass over every line.

python -m benchmarks.journal [--steps=1000000] [--rows=64] [--epochs=5] [--after=100,10000] [--repeats=3] [--folder=DIR]
  [--other=CHECKOUT] [--other_steps=100000]

The lines are those of `journal_line`, of rows of four writers, in as many files as there were epochs. A process of its own reads
them as `resume` does: the lines after a checkpoint that is --after steps before the end, one at a time. They are read three
times: to check them, for the rows that they left out, and to do their steps again. The memory of the process is the growth
of the peak (VmHWM) since its imports. --other is a checkout whose `read_lineage` returns a list of all lines: both read a journal
of --other_steps steps, in turn.
"""

import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

from tba_jax.replay import gaps
from tba_jax.replay.journal import journal_line

_STEPS = flags.DEFINE_integer("steps", 1_000_000, "Of the journal.", lower_bound=1000)
_ROWS = flags.DEFINE_integer("rows", 64, "Of a batch.", lower_bound=1)
_EPOCHS = flags.DEFINE_integer("epochs", 5, "Trainers that wrote it.", lower_bound=1)
_AFTER = flags.DEFINE_list("after", ["100", "10000"], "Steps after the checkpoint.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Of each reading.", lower_bound=1)
_FOLDER = flags.DEFINE_string("folder", "", "Where to write; default: the system's temporary folder.")
_OTHER = flags.DEFINE_string("other", "", "A checkout to compare with.")
_OTHER_STEPS = flags.DEFINE_integer("other_steps", 100_000, "Of the journal that both read.", lower_bound=1000)

WRITERS = tuple(f"searcher-{number}-4f0c{number}a7e" for number in range(4))
# The begin and the end of a program; what stands between reads the journal in `folder` after the step `after`.
_BEGIN = """
import sys, time
from pathlib import Path
from tba_jax.replay import journal
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
folder, after, before, begin = Path(sys.argv[1]), int(sys.argv[2]), peak(), time.perf_counter()
"""
_HERE = """
from tba_jax.replay import gaps
lines = journal.read_lineage(folder, after=after, must_exist=True)
gaps.KnownGaps(each for line in lines for each in line["visible"])
"""
_OTHERS = "lines = journal.read_lineage(folder, must_exist=True)[after:]"
_END = """
count = sum(1 for line in lines)
print(time.perf_counter() - begin, (peak() - before) / 1024, count)
"""


def write(folder: Path, *, steps: int, rows: int, epochs: int) -> int:
    """Writes a journal as `epochs` trainers leave it, each of which went on where the one before ended. Returns its bytes."""
    draw, heads = np.random.default_rng(0), np.zeros(len(WRITERS), np.int64)
    bounds = np.linspace(1, steps + 1, epochs + 1).astype(int)
    for epoch, (first, stop) in enumerate(itertools.pairwise(bounds), start=1):
        with open(folder / f"epoch-{epoch:06d}.jsonl", "w") as file:
            for step in range(int(first), int(stop)):
                heads += rows // len(WRITERS)
                of_writers = draw.integers(0, len(WRITERS), rows)
                drawn = draw.integers(np.maximum(0, heads[of_writers] - 10_000), heads[of_writers])
                ids = [(WRITERS[writer], row) for writer, row in zip(of_writers, drawn, strict=True)]
                seen = dict(zip(WRITERS, heads.tolist(), strict=True))
                line = journal_line(step=step, visible=[gaps.integration(seen)], ids=ids, reward_version=1, key=step - 1, rows={})
                line |= {"batch": hashlib.sha256(b"%d" % step).hexdigest(), "epoch": epoch}
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
    return sum(path.stat().st_size for path in folder.iterdir())


def read(folder: Path, *, after: int, checkout: str = "") -> tuple[float, float, int]:
    """Seconds, MiB and number of lines of one reading in a process of its own."""
    program = _BEGIN + (_OTHERS if checkout else _HERE) + _END
    here = checkout or str(Path(__file__).parent.parent)
    command = [sys.executable, "-c", program, str(folder), str(after)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": here}, cwd=here, stdout=subprocess.PIPE, text=True, check=True)
    seconds, peak, lines = done.stdout.split()
    return float(seconds), float(peak), int(lines)


def tell(what: str, found: Sequence[tuple[float, float, int]]) -> None:
    seconds, peaks, lines = zip(*found, strict=True)
    print(
        f"  {what:34} {lines[0]:9,} lines  {statistics.median(seconds):8.3f} s ({min(seconds):.3f} to {max(seconds):.3f})  "
        f"{max(peaks):8.1f} MiB",
        flush=True,
    )


def main(arguments: Sequence[str]) -> None:
    del arguments
    distances = [int(each) for each in _AFTER.value]
    with tempfile.TemporaryDirectory(dir=_FOLDER.value or None) as root:
        folder = Path(root) / "long"
        folder.mkdir()
        size = write(folder, steps=_STEPS.value, rows=_ROWS.value, epochs=_EPOCHS.value)
        print(f"{_STEPS.value:,} steps of {_ROWS.value} rows by {_EPOCHS.value} epochs, {size / 1e6:,.0f} MB", flush=True)
        for distance in [*distances, _STEPS.value]:
            what = f"{distance:,} steps after the checkpoint" if distance < _STEPS.value else "every line"
            tell(what, [read(folder, after=_STEPS.value - distance) for _ in range(_REPEATS.value)])
        if not _OTHER.value:
            return
        folder = Path(root) / "short"
        folder.mkdir()
        size = write(folder, steps=_OTHER_STEPS.value, rows=_ROWS.value, epochs=_EPOCHS.value)
        print(f"{_OTHER_STEPS.value:,} steps, {size / 1e6:,.0f} MB, {distances[0]:,} after the checkpoint", flush=True)
        after = _OTHER_STEPS.value - distances[0]
        found: dict[str, list[tuple[float, float, int]]] = {"": [], _OTHER.value: []}
        for repeat in range(_REPEATS.value):
            for checkout in list(found)[:: -1 if repeat % 2 else 1]:
                found[checkout].append(read(folder, after=after, checkout=checkout))
        for checkout, readings in found.items():
            tell(checkout or "here", readings)


if __name__ == "__main__":
    app.run(main)
