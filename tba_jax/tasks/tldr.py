r"""Summaries of posts (TL;DR; Stiennon et al. 2020), rewarded by a reward model: the TBA paper's preference tuning.

A query is `SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:`, or the data set's own `query`. The reward is
the reward model's score of query and response, read at the end-of-sequence token if the response has one. Evaluation compares
responses with the reference summaries under a second reward model, the gold model.
"""

import bisect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tba_jax.tasks import data
from tba_jax.tasks.interface import SPLITS, ModelUse, Query, Scores, SequenceScorer, SplitTask

HUB_SPLITS = {"train": "train", "heldout": "validation"}
_POST = {"subreddit": str, "title": str, "post": str}


class TLDR(SplitTask):
    """The train split has the rows of train_path, the held-out split the rows of heldout_path.

    Equal queries count once. A query's answer is its reference summary, the first one.
    """

    score_name = "reward"
    reward_parts = ("score",)
    reward_range = (-math.inf, math.inf)

    def __init__(
        self, *, train_path: str, heldout_path: str, reward_path: str, gold_path: str, compute_dtype: str, batch_rows: int
    ):
        """Args:
          train_path, heldout_path: files, or hub data sets with splits train and validation. A row has "summary", and either
            "query" or "title", "post" and optionally "subreddit".
          reward_path, gold_path: folders or hub ids of the models; gold_path="" turns the comparison of evaluations off.

        Raises ValueError: reward_path is empty, or a row is malformed (names file, line and field).
        """
        if not reward_path:
            what = "a Hugging Face folder or hub id with one label"
            raise ValueError(f"task.tldr.reward_path='' names no reward model: set it to {what}")
        self._splits = {}
        # prompt -> the row from which it was made, so that its post can be shortened.
        self._posts: dict[str, data.Row] = {}
        for split, source in zip(SPLITS, (train_path, heldout_path), strict=True):
            setting = f"task.tldr.{split}_path"
            rows = data.read(
                source, fields={"summary": str}, optional={"query": str, **_POST}, setting=setting, split=HUB_SPLITS[split]
            )
            summaries: dict[str, str] = {}
            for row in rows:
                if not row["summary"].strip():
                    raise ValueError(f"{row.where}: field 'summary' is empty: it must hold the reference summary")
                summaries.setdefault(self._query(row), row["summary"].strip())
            self._splits[split] = [Query(prompt=prompt, answer=summary) for prompt, summary in summaries.items()]
        paths = {"reward": (reward_path, ("searcher", "evaluator")), "gold": (gold_path, ("evaluator",))}
        same: dict[str, Any] = dict(rows=batch_rows, rows_setting="task.tldr.batch_rows", compute_dtype=compute_dtype)
        same |= dict(labels=1, ends=True)
        self._models = {
            name: ModelUse(name=f"{name} model", setting=f"task.tldr.{name}_path", path=path, roles=roles, **same)
            for name, (path, roles) in paths.items()
            if path
        }
        self._load: Any = None  # see UsesModels.start
        self._reward: SequenceScorer | None = None
        self._gold: Any = None
        self._gold_of_summary: dict[Query, float] = {}

    def _query(self, row: data.Row) -> str:
        if row.get("query"):
            return row["query"]
        if missing := [name for name in ("title", "post") if name not in row]:
            raise ValueError(f"{row.where}: fields 'query' and {missing[0]!r} are both missing: the row must have one of them")
        query = make_query(row, row["post"])
        self._posts[query] = row
        return query

    def shortened(self, query: Query, fits: Callable[[str], bool]) -> Query | None:
        """The query with as many of the post's paragraphs (lines) as fit, or as many of its words if the first line is too long.

        None if no word fits, and for the data set's own queries.
        """
        if (post := self._posts.get(query.prompt)) is None or not fits(make_query(post, "")):
            return None
        text: str = post["post"]
        paragraphs = [i for i, character in enumerate(text) if character == "\n" and text[:i].strip()]
        words = [word.end() for word in re.finditer(r"\S+", text)]
        for ends in (paragraphs, words):  # to how many of these ends, which ascend, does the post fit?
            kept = bisect.bisect_left(ends, True, key=lambda end: not fits(make_query(post, text[:end].rstrip())))
            if kept:
                return Query(prompt=make_query(post, text[: ends[kept - 1]].rstrip()), answer=query.answer)
        return Query(prompt=make_query(post, ""), answer=query.answer)

    def models(self) -> Sequence[ModelUse]:
        return list(self._models.values())

    def start(self, load: Callable[[ModelUse], SequenceScorer]) -> None:
        """Loads the reward model. The first evaluation loads the gold model."""
        self._load, self._reward = load, load(self._models["reward"])

    def rewards(self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray) -> Scores:
        """The reward model's scores. A response that was cut at the length limit is scored without an end-of-sequence token."""
        if self._reward is None:
            raise RuntimeError("start() must be called before rewards()")
        return Scores.of_one(_scores(self._reward, queries, responses, finished))

    def measures(
        self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray, rewards: np.ndarray
    ) -> dict[str, float | np.ndarray]:
        """Measurements of each response by the gold model, if there is one. win_rate_strict: whether it prefers the response to
        the reference summary; win_rate_ties_half: the same, half for a tie; gold_reward, gold_reward_of_summaries: both
        scores."""
        if "gold" not in self._models:
            return {}
        self._gold = self._gold or self._load(self._models["gold"])
        # Every evaluation has the same queries, so the scores of their summaries are kept.
        new = [query for query in dict.fromkeys(queries) if query not in self._gold_of_summary]
        summaries = [_summary(query) for query in new]
        found = _scores(self._gold, new, summaries, np.ones(len(new), bool)).tolist()
        self._gold_of_summary.update(zip(new, found, strict=True))
        ours = _scores(self._gold, queries, responses, finished)
        theirs = np.array([self._gold_of_summary[query] for query in queries], np.float32)
        return {
            "win_rate_strict": ours > theirs,
            "win_rate_ties_half": (ours > theirs) + 0.5 * (ours == theirs),
            "gold_reward": ours,
            "gold_reward_of_summaries": theirs,
        }

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        """Train queries with their reference summaries, see data.in_epochs."""
        return [(query.prompt, _summary(query)) for query in data.in_epochs(self._splits["train"], rng, count)]


def _scores(scorer: SequenceScorer, queries: Sequence[Query], responses: Sequence[str], ended: np.ndarray) -> np.ndarray:
    """float32[n]: the score of each query and response as one text."""
    texts = [query.prompt + response for query, response in zip(queries, responses, strict=True)]
    return scorer.scores(texts, ended=ended)[:, 0]


def _summary(query: Query) -> str:
    """The reference summary as a response: it begins with a space, unless the query ends in white space."""
    return query.answer if query.prompt[-1:].isspace() else f" {query.answer}"


def make_query(post: data.Row, text: str) -> str:
    """The query of a row {"title"} and perhaps {"subreddit"}, with this text as its post."""
    subreddit = post.get("subreddit", "").removeprefix("r/")
    head = f"SUBREDDIT: r/{subreddit}\n\n" if subreddit else ""
    return f"{head}TITLE: {post['title']}\n\nPOST: {text}\n\nTL;DR:"
