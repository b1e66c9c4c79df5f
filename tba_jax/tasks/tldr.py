r"""Summaries of posts (TL;DR; Stiennon et al. 2020), rewarded by a reward model: the paper's preference tuning.

A query is `SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:`, or the data set's own `query`; a space stands
between it and a summary, unless it ends in white space itself. The reward is
the score that a reward model gives query and response, read at the end-of-sequence token where the response has one (what a
response without one gets is task.missing_eos_reward). Evaluation compares with the reference summaries under a second, larger
reward model, the gold one.
"""

import bisect
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tba_jax.tasks import data
from tba_jax.tasks.interface import SPLITS, Makers, ModelUse, Query, Scores, SequenceScorer

if TYPE_CHECKING:
    from jax.sharding import Mesh

HUB_SPLITS = {"train": "train", "heldout": "validation"}
_POST = {"subreddit": str, "title": str, "post": str}


class TLDR:
    """The rows of train_path train, those of heldout_path are held out; equal queries count once, the first summary stays."""

    score_name = "reward"
    reward_parts = ("score",)
    reward_version = 1

    def __init__(
        self,
        *,
        train_path: str,
        heldout_path: str,
        reward_path: str,
        gold_path: str,
        compute_dtype: str,
        batch_rows: int,
    ):
        """Args:
          train_path, heldout_path: files, or hub data sets (of these the splits train and validation), of {"summary"} and either
            "query", or "title", "post" and perhaps "subreddit".
          reward_path, gold_path: the models' folders or hub ids; gold_path "": no comparison with the reference summaries.
          compute_dtype, batch_rows: of both models, see tba_jax.rewards.

        Raises:
          ValueError: no reward model is named; a row is malformed (names file, line and field).
        """
        if not reward_path:
            raise ValueError(
                "task.tldr.reward_path='' names no reward model: set it to a Hugging Face folder or hub id with one label"
            )
        self._queries: dict[str, list[Query]] = {}
        # Of queries that are made here, by their prompts.
        self._posts: dict[str, data.Row] = {}
        for split, source in zip(SPLITS, (train_path, heldout_path), strict=True):
            setting = f"task.tldr.{split}_path"
            rows = data.read(
                source, fields={"summary": str}, optional={"query": str, **_POST}, setting=setting, split=HUB_SPLITS[split]
            )
            summaries: dict[str, str] = {}
            for row in rows:
                if not row["summary"].strip():
                    raise ValueError(f"{row.where}: field 'summary' is empty, with which nothing can be compared")
                summaries.setdefault(self._query(row), row["summary"].strip())
            self._queries[split] = [Query(prompt=prompt, answer=summary) for prompt, summary in summaries.items()]
        self._paths = {"reward": reward_path, "gold": gold_path}
        self._compute_dtype, self._batch_rows = compute_dtype, batch_rows
        self._started: tuple[Mesh, Makers] | None = None
        self._reward: SequenceScorer | None = None
        self._gold: SequenceScorer | None = None
        self._gold_of_summary: dict[Query, float] = {}

    def _query(self, row: data.Row) -> str:
        if row.get("query"):
            return row["query"]
        if missing := [name for name in ("title", "post") if name not in row]:
            raise ValueError(f"{row.where}: it has no 'query', and to make one, field {missing[0]!r} is missing")
        query = make_query(row, row["post"])
        self._posts[query] = row
        return query

    def shortened(self, query: Query, fits: Callable[[str], bool]) -> Query | None:
        """With as many of the post's paragraphs (lines) as fit; where not even the first does, with as many of its words.

        Ready queries of the data set stay as they are.
        """
        if (post := self._posts.get(query.prompt)) is None or not fits(make_query(post, "")):
            return None
        text: str = post["post"]
        paragraphs = [i for i, character in enumerate(text) if character == "\n" and text[:i].strip()]
        words = [word.end() for word in re.finditer(r"\S+", text)]
        end = next((ends[kept - 1] for ends in (paragraphs, words) if (kept := self._that_fit(post, ends, fits))), 0)
        return Query(prompt=make_query(post, text[:end].rstrip()), answer=query.answer)

    @staticmethod
    def _that_fit(post: data.Row, ends: Sequence[int], fits: Callable[[str], bool]) -> int:
        """How many of the parts of a post, which end there, fit: a part more is never shorter."""
        numbers = range(1, len(ends) + 1)
        return bisect.bisect_left(numbers, True, key=lambda n: not fits(make_query(post, post["post"][: ends[n - 1]].rstrip())))

    def queries(self, split: str) -> Sequence[Query]:
        """A query's answer is its reference summary."""
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is not one of {SPLITS}")
        return self._queries[split]

    def models(self) -> Sequence[ModelUse]:
        roles = {"reward": ("searcher", "evaluator"), "gold": ("evaluator",)}
        return [
            ModelUse(
                name=f"{name} model",
                setting=f"task.tldr.{name}_path",
                path=path,
                rows=self._batch_rows,
                compute_dtype=self._compute_dtype,
                labels=1,
                ends=True,
                roles=roles[name],
            )
            for name, path in self._paths.items()
            if path
        ]

    def start(self, mesh: "Mesh", makers: Makers) -> None:
        """Loads the reward model; the gold one with the first evaluation.

        Raises:
          ValueError: the reward model cannot be used.
        """
        self._started = mesh, makers
        self._reward = self._load("reward")

    def _load(self, name: str) -> SequenceScorer:
        if self._started is None:
            raise RuntimeError("start() comes before the first rewards")
        mesh, makers = self._started
        setting, path = f"task.tldr.{name}_path", self._paths[name]
        return makers.sequence_scorer(
            path, mesh, setting=setting, compute_dtype=self._compute_dtype, batch_rows=self._batch_rows, ends=True
        )

    def rewards(self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray) -> Scores:
        """The reward model's scores; a response that did not end by itself has no end-of-sequence token.

        Raises:
          FloatingPointError: a score is not finite.
          RuntimeError: start() was not called.
        """
        if self._reward is None:
            raise RuntimeError("start() comes before the first rewards")
        reward = _scores(self._reward, queries, responses, finished)
        return Scores(reward=reward, parts=reward[:, None])

    def measures(
        self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray, rewards: np.ndarray
    ) -> dict[str, float]:
        """win_rate: share of responses that the gold model prefers to the query's reference summary, a tie counts half;
        gold_reward, gold_reward_of_summaries: means of its scores. Nothing without task.tldr.gold_path."""
        if not self._paths["gold"]:
            return {}
        if self._gold is None:
            self._gold = self._load("gold")
        # Every evaluation asks the same queries.
        new = [query for query in dict.fromkeys(queries) if query not in self._gold_of_summary]
        summaries = [_summary(query) for query in new]
        found = _scores(self._gold, new, summaries, np.ones(len(new), bool)).tolist()
        self._gold_of_summary.update(zip(new, found, strict=True))
        ours = _scores(self._gold, queries, responses, finished)
        theirs = np.array([self._gold_of_summary[query] for query in queries], np.float32)
        return {
            "win_rate": float(np.mean((ours > theirs) + 0.5 * (ours == theirs))),
            "gold_reward": float(ours.mean()),
            "gold_reward_of_summaries": float(theirs.mean()),
        }

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        """Train queries with their reference summaries, in random rounds."""
        train = self._queries["train"]
        rounds = -(-count // len(train))
        chosen = np.concatenate([np.zeros(0, int), *(rng.permutation(len(train)) for _ in range(rounds))])
        return [(train[i].prompt, _summary(train[i])) for i in chosen[:count]]


def _scores(scorer: SequenceScorer, queries: Sequence[Query], responses: Sequence[str], ended: np.ndarray) -> np.ndarray:
    """float32[n], of query and response as one text."""
    texts = [query.prompt + response for query, response in zip(queries, responses, strict=True)]
    return scorer.scores(texts, ended=ended)[:, 0]


def _summary(query: Query) -> str:
    """The reference summary as a response: after the space that follows `TL;DR:`, which a query of the data set may end with."""
    return query.answer if query.prompt[-1:].isspace() else f" {query.answer}"


def make_query(post: data.Row, text: str) -> str:
    """The query of a post: {"title"} and perhaps {"subreddit"}, with this text of it."""
    subreddit = post.get("subreddit", "").removeprefix("r/")
    head = f"SUBREDDIT: r/{subreddit}\n\n" if subreddit else ""
    return f"{head}TITLE: {post['title']}\n\nPOST: {text}\n\nTL;DR:"
