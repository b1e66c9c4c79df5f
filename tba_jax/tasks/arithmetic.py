"""Sums worked out in steps: a task that needs no data, no network, and a minute of supervised training to begin with.

A prompt is `384+957+46=`; a worked response adds from the left, `384+957=1341,1341+46=1387#1387`. The reward is 1 if
the number after the last `#` is the sum, else 0: how the response gets there is the policy's own business.
"""

from collections.abc import Sequence

import numpy as np

from tba_jax.tasks.interface import SPLITS, Query, Scores

CHARACTERS = "0123456789+=,#"


class Arithmetic:
    """Queries are distinct sums of `terms` numbers of up to `digits` digits; the two splits share none."""

    score_name = "accuracy"
    reward_parts = ("correct",)
    reward_version = 1

    def __init__(self, *, terms: int, digits: int, train_queries: int, heldout_queries: int, seed: int):
        """Raises ValueError where there are fewer distinct sums than queries asked for."""
        possible = 10 ** (digits * terms)
        wanted = train_queries + heldout_queries
        if wanted > possible // 2:
            raise ValueError(
                f"task.arithmetic: {wanted} train and heldout queries, but terms={terms} and digits={digits} allow at most {possible // 2}"
            )
        self._terms, self._digits = terms, digits
        rng = np.random.default_rng([seed, 0])
        problems: dict[tuple[int, ...], None] = {}
        while len(problems) < wanted:
            problems |= dict.fromkeys(map(tuple, self._draw(rng, wanted)))
        chosen = list(problems)[:wanted]
        self._heldout = frozenset(chosen[:heldout_queries])
        self._splits = {"heldout": chosen[:heldout_queries], "train": chosen[heldout_queries:]}

    def _draw(self, rng: np.random.Generator, count: int) -> list[list[int]]:
        return rng.integers(0, 10**self._digits, (count, self._terms)).tolist()

    def queries(self, split: str) -> Sequence[Query]:
        if split not in SPLITS:
            raise ValueError(f"split {split!r} is not one of {SPLITS}")
        return [Query(prompt=_prompt(terms), answer=str(sum(terms))) for terms in self._splits[split]]

    def rewards(self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray) -> Scores:
        """1 where the text after the last `#` is exactly the sum and the response ended by itself."""
        correct = [
            bool(done) and "#" in response and response.rsplit("#", 1)[1] == query.answer
            for query, response, done in zip(queries, responses, finished, strict=True)
        ]
        reward = np.array(correct, np.float32)
        return Scores(reward=reward, parts=reward[:, None])

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        """Fresh sums outside of the held-out split, worked out without a mistake."""
        examples: list[tuple[str, str]] = []
        while len(examples) < count:
            drawn = (tuple(terms) for terms in self._draw(rng, count - len(examples)))
            examples += [(_prompt(terms), _worked(terms)) for terms in drawn if terms not in self._heldout]
        return examples


def _prompt(terms: Sequence[int]) -> str:
    return "+".join(map(str, terms)) + "="


def _worked(terms: Sequence[int]) -> str:
    steps, total = [], terms[0]
    for term in terms[1:]:
        steps.append(f"{total}+{term}={total + term}")
        total += term
    return ",".join(steps) + f"#{total}"
