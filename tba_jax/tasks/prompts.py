"""Prompts and no reward: where the reference, such as a teacher, is all that the policy is to learn."""

from collections.abc import Sequence

import numpy as np

from tba_jax.tasks import data
from tba_jax.tasks.interface import SPLITS, Query, Scores, SplitTask


class Prompts(SplitTask):
    """Every reward is 0, so that the optimum is the reference: π_ref·exp(0/β). Equal prompts count once."""

    score_name = "reward"
    reward_parts = ("none",)
    reward_range = (0.0, 0.0)

    def __init__(self, *, train_path: str, heldout_path: str):
        """Args: files or hub data sets of rows {"prompt"}, see data.read. Raises ValueError: a row is malformed, or a
        path is empty."""
        self._splits = {}
        for split, path in zip(SPLITS, (train_path, heldout_path), strict=True):
            setting = f"task.prompts.{split}_path"
            if not path:
                raise ValueError(f"{setting}='' names no prompts: set it to a file of rows {{\"prompt\"}}")
            rows = data.read(path, fields={"prompt": str}, setting=setting, split="train" if split == "train" else "test")
            self._splits[split] = [Query(prompt=prompt) for prompt in dict.fromkeys(row["prompt"] for row in rows)]

    def rewards(self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray) -> Scores:
        return Scores.of_one(np.zeros(len(responses)))

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        raise ValueError("task prompts has no worked examples: set model.path to a pretrained model and warm_start.steps=0")
