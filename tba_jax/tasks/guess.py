"""Guess the number: a game of several turns, whose success needs what the environment answers.

A prompt is `#0391:`, and stands for a secret letter of the first `numbers` of the alphabet. In each turn the policy writes a
letter and a new line; the environment answers `<` if the secret comes before it in the alphabet, `>` if it comes after, `?` to
anything else. The reward is 1 if the secret was guessed within `turns`. Whoever halves what is left succeeds always where turns
are at least log₂(numbers + 1); whoever guesses at random, in `turns` of `numbers` games. The teacher of the worked examples
seldom halves and often guesses. A small policy imitates both, and reinforcement learning discovers that hints pay.
"""

import string
import time
from collections.abc import Iterator, Sequence

import numpy as np

from tba_jax.tasks.environments import EnvironmentTask
from tba_jax.tasks.interface import Query

_HALVES = 0.2  # the share of the teacher's games in which it halves what is left
CHARACTERS = string.digits + string.ascii_lowercase + "#:<>?\n"


class Game:
    """One game. latency: seconds after which each answer comes."""

    def __init__(self, *, numbers: int, turns: int, latency: float):
        self._letters, self._left, self._latency = string.ascii_lowercase[:numbers], turns, latency
        self.errors = 0

    def start(self, query: Query) -> None:
        self._secret = query.answer

    def step(self, message: str) -> tuple[str | None, float]:
        time.sleep(self._latency)
        self._left -= 1
        guess = message.removesuffix("\n")
        if guess == self._secret:
            return None, 1.0
        is_letter = len(guess) == 1 and guess in self._letters
        self.errors += not is_letter
        return (hint(guess, self._secret) if is_letter else "?\n") if self._left else None, 0.0


def hint(guess: str, secret: str) -> str:
    return "<\n" if secret < guess else ">\n"


class Guess(EnvironmentTask):
    """Queries are distinct numbers of four digits; the two splits share none."""

    score_name, reward_parts, reward_range = "success", ("success",), (0.0, 1.0)
    alphabet = CHARACTERS
    environment = Game

    def __init__(
        self,
        *,
        numbers: int,
        turns: int,
        train_queries: int,
        heldout_queries: int,
        seed: int,
        latency: float,
        time_limit: float,
        concurrency: int,
    ):
        """Raises ValueError if there are not as many queries."""
        if train_queries + heldout_queries > 10_000:
            raise ValueError(f"task.guess.train_queries={train_queries} + heldout_queries={heldout_queries} exceed 10000")
        self.most_turns, self._letters = turns, string.ascii_lowercase[:numbers]
        rng = np.random.default_rng([seed, 0])
        secrets = rng.choice(list(self._letters), 10_000)
        chosen = rng.permutation(10_000)[: train_queries + heldout_queries].tolist()
        queries = [Query(prompt=f"#{number:04}:", answer=str(secrets[number])) for number in chosen]
        self._splits = {"heldout": queries[:heldout_queries], "train": queries[heldout_queries:]}
        settings = dict(numbers=numbers, turns=turns, latency=latency)
        super().__init__(settings=settings, time_limit=time_limit, concurrency=concurrency, prefix="task.guess.")

    def episodes(self, split: str) -> Sequence[Query]:
        return self._splits[split]

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        """Games of the train split, as the teacher plays them."""
        train, examples = self._splits["train"], list[tuple[str, str]]()
        for query in (train[i] for i in rng.integers(len(train), size=count)):
            guesses = self._halving(query.answer) if rng.random() < _HALVES else rng.choice(list(self._letters), self.most_turns)
            played = ""
            for turn, guess in enumerate(guesses, 1):
                played += f"{guess}\n"
                if guess == query.answer or turn == self.most_turns:
                    break
                played += hint(guess, query.answer)
            examples.append((query.prompt, played))
        return examples

    def _halving(self, secret: str) -> Iterator[str]:
        low, high = 0, len(self._letters)
        while True:
            middle = (low + high) // 2
            yield self._letters[middle]
            low, high = (low, middle) if secret < self._letters[middle] else (middle + 1, high)
