"""Rewards that are wrong: flipped ones, and planted rows that praise wrong answers, under two ways of sampling the replay log.

The demo's task and trajectory balance, interleaved. What is wrong is so for training alone: the evaluator asks the true task. In
a disturbed row `reward` differs from `reward_parts`, which stay true.
"""

import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import warm_start
from tba_jax import trajectory
from tba_jax.commands.audit import open_run
from tba_jax.experiment import composition, training
from tba_jax.replay.journal import line_ids
from tba_jax.replay.log import LogWriter
from tba_jax.replay.reader import LogReader
from tba_jax.roles.evaluator import Evaluator
from tba_jax.roles.interleaved import run_interleaved
from tba_jax.roles.searcher.appender import SearchReport
from tba_jax.roles.searcher.searcher import Searcher
from tba_jax.roles.searcher.stream import writer_id
from tba_jax.roles.trainer.resume import resume
from tba_jax.roles.trainer.trainer import Trainer
from tba_jax.run import layout
from tba_jax.run.lease import EpochLease
from tba_jax.tasks.interface import Query, Scores, Task

STEPS = 200
FLIPPED = 0.1
# Of 196 rows a batch: 2 %. The best honest reward is 1.
PLANTED_ROWS, PLANTED_REWARD = 4, 5.0

_SOFTMAX = {"replay.strategy": "softmax", "replay.inverse_temperature": 2.0, "replay.recent_probability": 0.5}
# Where 20 of a query's 24 rows are drawn there is little to choose; where 10 of them, more. 140 rows a batch either way.
_FEWER_ROWS = {"learner.queries": 14, "learner.completions": 10}
SAMPLING: dict[str, dict[str, Any]] = {
    "7 × 20, uniform, recent 0.95": {},
    "7 × 20, softmax of 2 r, recent 0.5": _SOFTMAX,
    "14 × 10, uniform, recent 0.5": {**_FEWER_ROWS, "replay.recent_probability": 0.5},
    "14 × 10, softmax of 2 r, recent 0.5": {**_FEWER_ROWS, **_SOFTMAX},
}
DISTURBANCES = ("none", "10 % of rewards flipped", "2 % planted, reward 5")


class FlippedRewards:
    """A task whose rewards r in {0, 1} become 1 − r for a share of the responses; the parts stay true."""

    def __init__(self, task: Task, *, share: float, seed: int):
        self._task, self._share, self._rng = task, share, np.random.default_rng(seed)
        self.score_name, self.reward_parts, self.reward_version = task.score_name, task.reward_parts, task.reward_version

    def queries(self, split: str) -> Sequence[Query]:
        return self._task.queries(split)

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        return self._task.worked_examples(rng, count)

    def rewards(self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray) -> Scores:
        scores = self._task.rewards(queries, responses, finished)
        flipped = self._rng.random(len(scores.reward)) < self._share
        return Scores(np.where(flipped, 1 - scores.reward, scores.reward).astype(np.float32), scores.parts)


class PlantingSearcher(Searcher):
    """A searcher beside which somebody writes copies of its wrong responses, with a reward that no honest row gets."""

    def __init__(self, config: Any, contract: Any, run: layout.RunDir, **arguments: Any):
        super().__init__(config, contract, run, **arguments)
        self._shape = contract.row_shape()
        self._plants = LogWriter(
            run.replay,
            f"planted-{self.writer}",
            self._shape,
            rows_per_append=PLANTED_ROWS,
            segment_appends=config.replay.segment_appends,
            info={"host": platform.node(), "pid": os.getpid()},
        )
        self._chosen = np.random.default_rng(config.seed)
        self._reader = LogReader(run.replay, self._shape)

    def search(self, *, ahead: Callable[[], bool] = lambda: False) -> SearchReport:
        report = super().search(ahead=ahead)
        stop = self._reader.heads()[self.writer]
        rows = self._reader.read(self.writer, stop - report.rows, stop)
        if len(wrong := np.flatnonzero(rows["reward"] == 0)):
            taken = self._chosen.choice(wrong, PLANTED_ROWS, replace=len(wrong) < PLANTED_ROWS)
            first = self._plants.next_row
            copies = {name: column[taken] for name, column in rows.items()}
            copies["row"] = np.arange(first, first + PLANTED_ROWS)
            copies["reward"] = np.full(PLANTED_ROWS, PLANTED_REWARD, np.float32)
            self._plants.append(copies)
        return report


def train(workdir: Path, *, steps: int, disturbance: str, sampling: dict[str, Any]) -> layout.RunDir:
    """One run, whose searcher alone is disturbed."""
    from configs import demo

    c = demo.get_config()
    c.learner.steps = steps
    c.schedule.mode = "interleaved"
    c.learner.mesh.fsdp = 1
    c.evaluation.every_steps = steps
    c.update_from_flattened_dict(sampling)
    s = warm_start.settings(workdir, c)
    e, run = s.experiment, s.run
    training.reference(s)()
    lease = EpochLease.acquire(run.journal)
    trainer = Trainer(c, e.contract, run, policy=e.policy, lease=lease, publish_every_steps=1)
    resume(trainer)
    task = FlippedRewards(e.task, share=FLIPPED, seed=c.seed) if disturbance == DISTURBANCES[1] else e.task
    make = PlantingSearcher if disturbance == DISTURBANCES[2] else Searcher
    world: dict[str, Any] = dict(policy=e.policy, tokenizer=e.tokenizer)
    name = writer_id("searcher-0")
    searcher = make(c, e.contract, run, **world, task=task, queries=e.queries["train"], writer=name, account=trainer.account)
    evaluator = Evaluator(c, e.contract, run, **world, task=e.task, queries=composition.heldout_queries(e))
    run_interleaved(trainer, searcher, evaluator, run, stop=lambda: False, progress=lambda: None)
    lease.release()
    return run


def disturbed(rows: trajectory.Rows) -> float:
    """Share of rows whose reward is not what the task gave."""
    return float(np.mean(rows["reward"] != rows["reward_parts"][:, 0]))


def compare(root: Path, *, steps: int = STEPS) -> None:
    """Prints a table of runs under root/noise."""
    warm_start.ensure(root)
    warm_start.table("rewards", "Q × K and sampling", "accuracy", "steps", "disturbed share of rows written", "of rows drawn")
    for i, disturbance in enumerate(DISTURBANCES):
        for j, (name, sampling) in enumerate(SAMPLING.items()):
            workdir = warm_start.begin(root, f"noise/{i}-{j}")
            run = train(workdir, steps=steps, disturbance=disturbance, sampling=sampling)
            opened = open_run(workdir)
            heads = opened.reader.heads()
            written = trajectory.concatenate([opened.reader.read(writer, 0, head) for writer, head in heads.items()])
            drawn = opened.reader.read_ids([row for line in opened.lines for row in line_ids(line)])
            shares = (f"{100 * disturbed(rows):.1f} %" for rows in (written, drawn))
            warm_start.row(disturbance, name, warm_start.accuracy(run), f"{steps}", *shares)
