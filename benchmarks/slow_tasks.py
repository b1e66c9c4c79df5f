"""Tasks whose rewards take time and no core, as those of a judge on another machine: sums, and a space with planted modes. And
the recipes of studies with them: --config=benchmarks/slow_tasks.py:sums and :modes.

`concurrency` and names that end in `url` or `path` are no part of a run's contract, so runs of one warm start may differ in them.
"""

import itertools
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from configs import base, demo
from tba_jax.tasks.arithmetic import Arithmetic
from tba_jax.tasks.interface import Query, Scores, SplitTask

LETTERS, LENGTH = "abcdefgh", 3
# Of each letter in a worked example, whatever stands before it.
SHARES = np.array([0.28, 0.22, 0.17, 0.12, 0.09, 0.06, 0.04, 0.02])
# Shares of the planted texts among worked examples: 16 modes from the largest to the smallest, or one rare target.
LARGEST, SMALLEST, RARE = 2e-2, 2e-4, 1e-4
FREE = 2


def seconds_of(url: str) -> float:
    """How long a batch waits for its rewards, of a url such as sleep:2. Raises ValueError for another."""
    scheme, _, seconds = url.partition(":")
    if scheme != "sleep":
        raise ValueError(f"task.custom.url={url!r} must be sleep:SECONDS")
    return float(seconds)


def leave(folder: Path, what: str) -> None:
    """Leaves a file in the folder that says when this process was first here."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{what}-{os.getpid()}"
    if not file.exists():
        file.write_text(str(time.time()))


def left(folder: Path, what: str) -> list[float]:
    """When processes were first there, seconds of time.time()."""
    return [float(file.read_text()) for file in folder.glob(f"{what}-*")]


class Sums(Arithmetic):
    """The demo's sums, whose rewards come after a while. meeting_path: where a process leaves when it first asked for some; "":
    nowhere."""

    def __init__(self, *, digits: int, url: str, meeting_path: str):
        super().__init__(digits=digits, train_queries=4000, heldout_queries=256, seed=0)
        self._seconds, self._folder = seconds_of(url), Path(meeting_path) if meeting_path else None

    def rewards(self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray) -> Scores:
        if self._folder:
            leave(self._folder, "asks")
        time.sleep(self._seconds)
        return super().rewards(queries, responses, finished)


def planted(count: int) -> tuple[str, ...]:
    """`count` texts of LENGTH letters, whose shares among worked examples are spaced evenly in the logarithm; 1: the rare one."""
    texts = ["".join(letters) for letters in itertools.product(LETTERS, repeat=LENGTH)]
    logs = np.array([sum(np.log(SHARES[LETTERS.index(letter)]) for letter in text) for text in texts])
    order = np.random.default_rng(0).permutation(len(texts))  # texts of one share differ by the order of their letters
    found = list[int]()
    for share in np.geomspace(LARGEST, SMALLEST, count) if count > 1 else [RARE]:
        gaps = np.abs(logs[order] - np.log(share))
        gaps[np.isin(order, found)] = np.inf
        found.append(int(order[gaps.argmin()]))
    return tuple(texts[i] for i in found)


def target(reference: np.ndarray, beta: float) -> np.ndarray:
    """p* of the modes: float64[modes], of their probabilities under π_ref. Rewards are 1 for modes, else 0."""
    weighed = reference * math.exp(1 / beta)
    return weighed / (1 - reference.sum() + weighed.sum())


def total_variation(masses: np.ndarray, optimum: np.ndarray) -> float:
    """½ Σ |π − p*| over the modes and all other responses together."""
    return float(np.abs(masses - optimum).sum() + abs(masses.sum() - optimum.sum())) / 2


def found(masses: np.ndarray, samples: int) -> float:
    """The expected number of modes among the samples."""
    return float((1 - (1 - masses) ** samples).sum())


class Planted(SplitTask):
    """One prompt; a response is worth 1 if it is one of the planted texts, else 0.

    Searchers start one after another, each once the last has done FREE batches. The rewards of so many batches of a process come
    at once, and a rare target is worth 0 there, so that nobody finds it before. Its next ones wait until `concurrency` processes
    have asked for theirs, so that all begin together. Each then leaves a file in the folder meeting_path, which holds the time;
    so does each at its first reward of 1.
    """

    score_name = "hit"
    alphabet = f"{LETTERS}>"

    def __init__(self, *, count: int, url: str, concurrency: int, meeting_path: str):
        self._texts, self._seconds = frozenset(planted(count)), seconds_of(url)
        self._concurrency, self._folder, self._calls, self._rare = concurrency, Path(meeting_path), 0, count == 1
        self._splits = {split: [Query(prompt=">")] for split in ("train", "heldout")}

    def rewards(self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray) -> Scores:
        right = np.array([response in self._texts for response in responses]) & np.asarray(finished, bool)
        self._calls += 1
        if self._calls > FREE:
            leave(self._folder, "asks")
            while len(list(self._folder.glob("asks-*"))) < self._concurrency:
                time.sleep(0.05)
            time.sleep(self._seconds)
            if right.any():
                leave(self._folder, "hits")
        elif self._rare:  # of 16 modes there are many in free batches, and a reward of 0 would teach against them
            right[:] = False
        return Scores.of_one(right)

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        letters = rng.choice(list(LETTERS), size=(count, LENGTH), p=SHARES)
        return [(">", "".join(row)) for row in letters]


def get_config(variant: str):
    """Variants: sums3, sums4 … by the digits of the numbers, from which the lengths of prompt and response follow; modes."""
    if variant.startswith("sums"):
        c, digits = demo.get_config(), int(variant[4:])
        c.task.name, c.publish.keep_seconds = f"{__file__}:Sums", 5.0
        c.task.custom.update(digits=digits, url="sleep:0", meeting_path="")
        c.task.prompt_length, c.task.response_length = 2 * digits + 3, 11 * digits - 1
        return c
    if variant != "modes":
        raise ValueError(f"the variant {variant!r} is neither sums with a number of digits nor modes")
    c = base.get_config()
    c.task.name, c.task.prompt_length, c.task.response_length = f"{__file__}:Planted", 2, LENGTH + 2
    c.task.custom.update(count=16, concurrency=1, url="sleep:0", meeting_path="")
    c.model.update(width=64, ffn=128, head_size=16)
    c.warm_start.update(steps=400, batch_size=512)
    # A batch has the rows of an update, and a searcher gets rewards for one after the other.
    c.searchers.update(reward_batches=1, queries_per_batch=1, samples_per_query=64)
    c.replay.update(capacity=50_000, capacity_per_query=50_000, merge_duplicates=False)
    c.replay.update(recent_probability=0.5, recent_fill="older")  # the others are uniform over all rows
    c.learner.update(queries=1, completions=64, steps=100_000, clip_norm=0.0)
    c.publish.update(keep=3, keep_seconds=5.0)
    c.checkpoint.every_steps = 100_000
    c.evaluation.update(enabled=False, every_steps=5)
    c.metrics.update(every_steps=1, sinks=())
    return c
