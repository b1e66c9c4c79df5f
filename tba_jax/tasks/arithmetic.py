"""Sums, with or without the working: a task that needs no data, no network, and a warm start of a minute.

A prompt is `384+957=`. A response may work the sum out digit by digit from the right, `4+7+0=11,8+5+1=14,3+9+1=13#1341`, or
give the answer at once, `#1341`. The teacher of the worked examples often skips the working. A small policy imitates both styles
but cannot add without the working, and reinforcement learning discovers that the working pays.
"""

from collections.abc import Sequence

import numpy as np

from tba_jax.tasks.interface import Query, Scores, SplitTask

CHARACTERS = "0123456789+=,#"
_SMALL_SHARE, _SKIP_OFTEN, _SKIP_RARELY = 0.6, 0.8, 0.1


class Arithmetic(SplitTask):
    """Queries are distinct sums of two numbers of `digits` digits; the two splits share none."""

    alphabet = CHARACTERS

    def __init__(self, *, digits: int, train_queries: int, heldout_queries: int, seed: int):
        """Raises ValueError if train_queries + heldout_queries exceed half of the distinct sums."""
        self._low, self._high = 10 ** (digits - 1), 10**digits
        possible = (self._high - self._low) ** 2
        wanted = train_queries + heldout_queries
        if digits < 1 or 2 * wanted > possible:
            raise ValueError(
                f"task.arithmetic.train_queries={train_queries} + heldout_queries={heldout_queries} exceed half of the "
                f"{possible} sums that task.arithmetic.digits={digits} allows"
            )
        rng = np.random.default_rng([seed, 0])
        problems: dict[tuple[int, int], None] = {}
        while len(problems) < wanted:
            problems |= dict.fromkeys(self._draw(rng, wanted))
        chosen = list(problems)[:wanted]
        self._heldout = frozenset(chosen[:heldout_queries])
        queries = [Query(prompt=f"{a}+{b}=", answer=str(a + b)) for a, b in chosen]
        self._splits = {"heldout": queries[:heldout_queries], "train": queries[heldout_queries:]}

    def _draw(self, rng: np.random.Generator, count: int) -> list[tuple[int, int]]:
        return [(int(a), int(b)) for a, b in rng.integers(self._low, self._high, (count, 2))]

    def rewards(self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray) -> Scores:
        """1 if the text after the last `#` is exactly the sum and the response ended before the length limit, else 0."""
        correct = [
            bool(done) and "#" in response and response.rsplit("#", 1)[1] == query.answer
            for query, response, done in zip(queries, responses, finished, strict=True)
        ]
        return Scores.of_one(np.array(correct))

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        """Fresh sums outside of the held-out split, answered by the teacher described above."""
        examples, small = list[tuple[str, str]](), self._low + _SMALL_SHARE * (self._high - self._low)
        while len(examples) < count:
            problems = [problem for problem in self._draw(rng, count - len(examples)) if problem not in self._heldout]
            for (a, b), luck in zip(problems, rng.random(len(problems)), strict=True):
                skips = luck < (_SKIP_OFTEN if a < small else _SKIP_RARELY)
                examples.append((f"{a}+{b}=", f"#{a + b}" if skips else work_out(a, b)))
        return examples


def work_out(a: int, b: int) -> str:
    """The working of a sum of two numbers of equal length and the sum; each step is digit + digit + carry = two digits."""
    steps, carry = [], 0
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}+{carry}={total:02}")
        carry = total // 10
    return f"{','.join(steps)}#{a + b}"
