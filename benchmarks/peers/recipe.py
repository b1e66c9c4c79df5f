"""The recipe of tba_jax's runs in benchmarks.peers, and its task: prompts from a file, and the reward of all systems."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.peers import recording
from configs import base
from tba_jax.tasks.interface import SPLITS, Query, Scores, SplitTask


class Prompts(SplitTask):
    score_name = "digits"
    reward_parts = ("digits",)

    def __init__(self, *, path: str, reward_seconds: float):
        """Args: path: a JSON list of texts; reward_seconds: of a batch, besides the reward's own time."""
        queries = [Query(prompt=prompt) for prompt in json.loads(Path(path).read_text())]
        self._splits = dict.fromkeys(SPLITS, queries)
        self._seconds = reward_seconds

    def rewards(self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray) -> Scores:
        reward = np.array(recording.digits(list(responses), seconds=self._seconds), np.float32)
        return Scores(reward=reward, parts=reward[:, None])

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        raise ValueError("these prompts have no solutions")


def get_config():
    c = base.get_config()
    c.task.name = f"{__file__}:Prompts"
    c.task.custom.path, c.task.custom.reward_seconds = "", 0.0
    # As in the peers' updates: nothing is computed twice to save memory, and the logits of a batch may exist at a time.
    c.learner.remat, c.learner.logit_megabytes = "none", 512
    return c
