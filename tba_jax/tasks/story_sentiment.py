"""Happy endings: the policy continues the opening of a story, and is rewarded for positive sentiment.

Queries are the first words of each story in a JSON list of strings. The reward is VADER's compound score of the continuation, in
[-1, 1] (Hutto & Gilbert 2014).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tba_jax.tasks import data
from tba_jax.tasks.interface import Query, Scores, SplitTask


class StorySentiment(SplitTask):
    """The last `heldout_queries` distinct openings of the file are held out; the other openings are the train split."""

    score_name = "reward"
    reward_parts = ("compound",)
    reward_range = (-1.0, 1.0)

    def __init__(self, *, data_path: str, opening_words: int, heldout_queries: int):
        """Raises ValueError naming the file if it cannot be read, is malformed or has too few openings."""
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

        where = f"task.story_sentiment.data_path={data_path!r}"
        with data.named_errors(where):
            stories = data.parsed(Path(data_path).read_bytes(), where)
        if not isinstance(stories, list) or not all(isinstance(story, str) for story in stories):
            raise ValueError(f"{where} must be a JSON list of strings")
        openings = list(dict.fromkeys(" ".join(story.split()[:opening_words]) for story in stories))
        openings = [opening for opening in openings if opening]
        if len(openings) <= heldout_queries:
            raise ValueError(
                f"{where} has {len(openings)} distinct openings of {opening_words} words, "
                f"not more than task.story_sentiment.heldout_queries={heldout_queries}"
            )
        queries = [Query(prompt=opening) for opening in openings]
        self._splits = {"train": queries[:-heldout_queries], "heldout": queries[-heldout_queries:]}
        self._analyzer = SentimentIntensityAnalyzer()

    def rewards(self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray) -> Scores:
        return Scores.of_one(np.array([self._analyzer.polarity_scores(response)["compound"] for response in responses]))

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        raise ValueError(
            "task story_sentiment has no worked examples: set model.path to a pretrained model and warm_start.steps=0"
        )
