"""What a slow reward costs a searcher: rows per second with and without a latency of each batch's rewards.

python -m benchmarks.rewards [--latency=2] [--batches=48] [--repeats=5]

One searcher of the demo, with random weights, on whatever devices JAX finds. Three ways take turns: rewards without latency; with
it, beside the decoder as searchers do; and with it in turn, each batch rewarded before the next is decoded. A block is so many
batches, more than may wait for rewards (searchers.reward_batches); its rate counts from the first to the last that is decoded.
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks import warm_start
from configs import demo
from tba_jax.experiment import training
from tba_jax.roles.searcher.searcher import Searcher
from tba_jax.roles.searcher.stream import writer_id
from tba_jax.run import layout
from tba_jax.tasks.interface import Query, Scores, Task
from tba_jax.telemetry.time_account import TimeAccount

_LATENCY = flags.DEFINE_float("latency", 2.0, "Seconds that the rewards of a batch take besides.", lower_bound=0.0)
_BATCHES = flags.DEFINE_integer("batches", 48, "Of a block.", lower_bound=2)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Blocks of each way.", lower_bound=1)

WAYS = ("no latency", "beside the decoder", "in turn")


class Late:
    """A task whose rewards come `seconds` late, as those of a service would."""

    def __init__(self, task: Task):
        self._task, self.seconds = task, 0.0
        self.score_name, self.reward_parts, self.reward_version = task.score_name, task.reward_parts, task.reward_version
        self.queries, self.worked_examples = task.queries, task.worked_examples

    def rewards(self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray) -> Scores:
        time.sleep(self.seconds)
        return self._task.rewards(queries, responses, finished)


def make_searcher(workdir: Path) -> tuple[Searcher, Late]:
    """A searcher with snapshot 0."""
    c = demo.get_config()
    c.warm_start.steps = 0
    s = warm_start.settings(workdir, c)
    e = s.experiment
    training.reference(s)()
    initial = layout.read_json(s.run.initial_reference)["id"]
    shutil.copytree(workdir / "reference" / initial, workdir / "policy" / layout.step_name(0))
    task = Late(e.task)
    made = Searcher(
        c,
        e.contract,
        s.run,
        policy=e.policy,
        tokenizer=e.tokenizer,
        task=task,
        queries=e.queries["train"],
        writer=writer_id("searcher"),
        account=TimeAccount(),
    )
    made.load_step(0)
    return made, task


def rate(searcher: Searcher, task: Late, way: str, batches: int) -> float:
    """Rows per second of one block."""
    task.seconds = _LATENCY.value if way != WAYS[0] else 0.0
    decoded = []
    for _ in range(batches):
        searcher.advance(ahead=lambda: True)
        if way == WAYS[2]:
            searcher.appended(wait_seconds=None)
        decoded.append(time.monotonic())
    searcher.appended(wait_seconds=None)
    return (batches - 1) * searcher.rows_per_batch / (decoded[-1] - decoded[0])


def main(argv: Sequence[str]) -> None:
    del argv
    with tempfile.TemporaryDirectory() as folder:
        searcher, task = make_searcher(Path(folder) / "run")
        searcher.search()  # compiles
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        for repeat in range(_REPEATS.value):
            for way in WAYS:
                rates[way].append(rate(searcher, task, way, _BATCHES.value))
                print(f"{repeat + 1}/{_REPEATS.value} {way}: {rates[way][-1]:.0f} rows/s", file=sys.stderr)
        searcher.close()
    print(f"\nlatency {_LATENCY.value:g} s a batch of {searcher.rows_per_batch} rows, {_BATCHES.value} batches a block\n")
    warm_start.table("rewards", "rows/s (least to most)", "share of the rate without latency")
    plain: Any = np.array(rates[WAYS[0]])
    for way in WAYS:
        found = np.array(rates[way])
        warm_start.row(way, f"{np.median(found):.0f} ({found.min():.0f}–{found.max():.0f})", f"{np.median(found / plain):.2f}")


if __name__ == "__main__":
    app.run(main)
