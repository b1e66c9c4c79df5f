"""What a task is: queries, a reward, and worked examples if it offers a warm start."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from tba_jax import trajectory

SPLITS = ("train", "heldout")


@dataclasses.dataclass(frozen=True)
class Query:
    """A prompt as text, and what the reward needs to know about it (the gold answer, say; may be empty)."""

    prompt: str
    answer: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedQuery:
    """A query and its prompt's token ids (without padding)."""

    query: Query
    prompt: tuple[int, ...]

    @property
    def name(self) -> str:
        """How messages call the query: its id and how its prompt begins."""
        return f"{trajectory.query_id(self.prompt):016x} ({self.query.prompt[:60]!r})"


@dataclasses.dataclass(frozen=True)
class Scores:
    """reward: float32[n], what the objective sees, NaN where a response could not be scored; parts: float32[n, M], what it was
    made of, in reward_parts' order."""

    reward: np.ndarray
    parts: np.ndarray


class Task(Protocol):
    """One file under tasks/ implements this; its constructor takes the task's own settings by name.

    score_name: what the mean held-out greedy reward is called ("accuracy" for a 0/1 reward).
    reward_parts: names of the M parts. reward_version: counts up when the reward's definition changes.
    A class whose prompts and responses are made of few characters may do without a pretrained model: `alphabet` holds them.
    """

    @property
    def score_name(self) -> str: ...

    @property
    def reward_parts(self) -> tuple[str, ...]: ...

    @property
    def reward_version(self) -> int: ...

    def queries(self, split: str) -> Sequence[Query]:
        """All queries of "train" or "heldout", in a fixed order."""
        ...

    def rewards(self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray) -> Scores:
        """Scores response i, the decoded text without special tokens, for query i; finished: bool[n], it ended by itself.

        Several threads may call it at a time, beside the decoder (searchers.reward_batches).
        """
        ...

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        """(prompt, response) pairs for a supervised warm start. Raises ValueError where the task has none."""
        ...


@runtime_checkable
class Closable(Protocol):
    """What a task may offer besides: an end to processes or connections of its own."""

    def close(self) -> None:
        """Called once, when its role ends in good order."""
        ...


@runtime_checkable
class HasFinalAnswer(Protocol):
    """What a task may offer besides: the answer that a response comes to, by which responses are put to the vote."""

    def final_answer(self, response: str) -> str:
        """The answer of a response in a form that is equal for equal answers, as far as the task can tell; "" if it has none."""
        ...
