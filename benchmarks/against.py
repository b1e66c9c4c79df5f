"""Is this checkout as fast, and as small in memory, as another one? Interleaved measurements of both, piece by piece.

git worktree add --detach ../before <commit>
python -m benchmarks.against --other=../before [--pairs=9] [--only=update_demo,…] [--limit=1.03] [--cores=2]
git worktree remove ../before

Both checkouts need benchmarks/pieces.py, which measures the code beside it: where their APIs differ, each has its own version of
that file, with the same names of pieces and figures. A worker runs in each checkout, with the same Python, environment and cores.
They are measured on CPUs and strictly in turn: a pair is one measurement of each, and the worker that goes first alternates.
Preparation (inputs, compilation, a first run) is not timed, and both workers do it at once.

The table has the medians of both checkouts, and the quartiles over the pairs of the ratio this / other. A figure that one
measurement settles, such as the memory that the compiler assigns, has one ratio. The command fails, with exit status 1, where the
lower quartile or the one ratio is above --limit: three pairs of four then agree that this checkout is worse by more than that.
Sizes are meant for ten minutes of nine pairs on a quiet machine; a busy one takes longer. Fewer than nine are for trying out.

Each piece says the load average. Where other processes take much of the cores' time, even two checkouts of one commit can differ
by more than the limit: repeat the piece (--only) on a quiet machine.
"""

import dataclasses
import os
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from benchmarks import json_worker

_OTHER = flags.DEFINE_string("other", "", "Folder of the checkout that this one is compared with.")
_PAIRS = flags.DEFINE_integer("pairs", 9, "Measurements of each checkout.", lower_bound=2)
_ONLY = flags.DEFINE_list("only", [], "Names of pieces; default: all.")
_LIMIT = flags.DEFINE_float("limit", 1.03, "The lower quartile of this / other may be so much.", lower_bound=0.0)
_CORES = flags.DEFINE_integer("cores", 2, "Of this process' cores, how many the workers get: the first ones.", lower_bound=1)

_THIS = Path(__file__).resolve().parents[1]
# Threads of one worker spin for a while after their work; they are to sleep when the other's begins.
_QUIET_SECONDS = 0.05
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# Would let a worker import other code than that of its checkout.
_CLEARED = ("PYTHONPATH", "PYTHONSAFEPATH")


@dataclasses.dataclass(frozen=True)
class Ratios:
    """Of this / other over the pairs: quartiles, which are one number where one measurement settles it."""

    lower: float
    median: float
    upper: float


def ratios(this: Sequence[float], other: Sequence[float]) -> Ratios:
    """Measurement i of `this` and of `other` are a pair. Quartiles lie on the line between the two nearest ratios."""
    found = [mine / theirs for mine, theirs in zip(this, other, strict=True)]
    return Ratios(*(statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3))


def worse(found: Mapping[str, Mapping[str, Ratios]], limit: float) -> list[str]:
    """A sentence about each figure whose lower quartile is above the limit. found: piece -> figure -> ratios."""
    return [
        f"{piece}: {figure}: the lower quartile of this / other is {ratio.lower:.3f}, above --limit={limit:g}"
        for piece, figures in found.items()
        for figure, ratio in figures.items()
        if ratio.lower > limit
    ]


def pieces_of(worker: json_worker.Worker) -> list[str]:
    """Raises ValueError: the worker imported the code of another checkout than its own."""
    listed = worker.ask("list")
    if Path(listed["code"]) != worker.folder:
        raise ValueError(f"the worker in {worker.folder} imports the code in {listed['code']}: uninstall tba_jax")
    return listed["pieces"]


def measure(piece: str, workers: Sequence[json_worker.Worker], pairs: int) -> list[dict[str, list[float]]]:
    """Of each worker, figure -> values: one of a figure that preparation settles, one a pair of the others."""
    for worker in workers:
        worker.send("prepare", piece=piece)
    found: list[dict[str, list[float]]] = [
        {figure: [value] for figure, value in worker.answer()["figures"].items()} for worker in workers
    ]
    for pair in range(pairs):
        for i in (0, 1) if pair % 2 == 0 else (1, 0):
            time.sleep(_QUIET_SECONDS)
            for figure, value in workers[i].ask("run")["figures"].items():
                found[i].setdefault(figure, []).append(value)
    return found


def compare(piece: str, this: json_worker.Worker, other: json_worker.Worker, pairs: int) -> dict[str, Ratios]:
    """Measures a piece, prints its lines of the table and returns the ratios of figures that both checkouts have."""
    begin = time.perf_counter()
    mine, theirs = measure(piece, (this, other), pairs)
    print(f"{piece} ({time.perf_counter() - begin:.0f} s; load average {os.getloadavg()[0]:.1f})")
    found = {}
    for figure in (name for name in mine if name in theirs):
        found[figure] = ratio = ratios(mine[figure], theirs[figure])
        medians = f"{statistics.median(mine[figure]):10.4g} {statistics.median(theirs[figure]):10.4g}"
        print(f"  {figure:26} {medians}   {ratio.lower:7.3f} {ratio.median:7.3f} {ratio.upper:7.3f}", flush=True)
    return found


def run(this: json_worker.Worker, other: json_worker.Worker, only: Sequence[str], *, pairs: int, limit: float) -> bool:
    """Compares and prints. Returns whether nothing is worse. Raises ValueError: the checkouts do not share the pieces."""
    mine, theirs = pieces_of(this), pieces_of(other)
    shared = [name for name in mine if name in theirs]
    if unknown := [name for name in only if name not in shared]:
        raise ValueError(f"--only={unknown[0]} is none of the pieces of both checkouts: {', '.join(shared)}")
    if not shared:
        raise ValueError(f"no piece is in both checkouts: this has {', '.join(mine)}; the other has {', '.join(theirs)}")
    print(f"this: {this.folder}, other: {other.folder}; {pairs} pairs, {len(os.sched_getaffinity(0))} cores")
    print("  {:26} {:>10} {:>10}   {:>7} {:>7} {:>7}".format("", "this", "other", "lower", "median", "upper"), flush=True)
    found = {name: compare(name, this, other, pairs) for name in only or shared}
    sentences = worse(found, limit) or [f"nothing is worse: no lower quartile of {len(found)} pieces is above {limit:g}"]
    print("\n".join(sentences))
    return not worse(found, limit)


def check_flags() -> Path:
    """The other checkout. Raises ValueError: a flag names what there is not."""
    if not _OTHER.value:
        raise ValueError("--other is needed: the folder of another checkout, see `git worktree add`")
    other = Path(_OTHER.value).resolve()
    if not (other / "benchmarks" / "pieces.py").is_file():
        raise ValueError(f"--other={_OTHER.value} is no checkout with benchmarks/pieces.py, by which it would be measured")
    if _CORES.value > (cores := len(os.sched_getaffinity(0))):
        raise ValueError(f"--cores={_CORES.value} is more than the {cores} cores that this process may use")
    return other


def main(argv: Sequence[str]) -> None:
    del argv
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the workers end as well
    try:
        folder = check_flags()
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: _CORES.value])  # workers inherit it
        environment = {name: value for name, value in os.environ.items() if name not in _CLEARED} | _ENVIRONMENT
        of_pieces: dict[str, Any] = dict(module="benchmarks.pieces", environment=environment)
        with (
            json_worker.started(folder=_THIS, **of_pieces) as this,
            json_worker.started(folder=folder, **of_pieces) as other,
        ):
            fine = run(this, other, _ONLY.value, pairs=_PAIRS.value, limit=_LIMIT.value)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    app.run(main)
