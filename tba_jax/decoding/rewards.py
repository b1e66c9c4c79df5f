"""From generated tokens to rewards: what searchers train on and evaluators measure."""

from collections.abc import Sequence

import numpy as np

from tba_jax.decoding.requests import Generation
from tba_jax.tasks.interface import EncodedQuery, Scores, Task
from tba_jax.tokenizer import Tokenizer


def response_texts(generation: Generation, queries: Sequence[EncodedQuery], tokenizer: Tokenizer) -> list[str]:
    """The texts of B responses, one to each of B queries."""
    return [
        tokenizer.decode_continuation(query.prompt, tokens[:length].tolist())
        for query, tokens, length in zip(queries, generation.tokens, generation.length, strict=True)
    ]


def reward_texts(
    texts: Sequence[str],
    finished: np.ndarray,
    queries: Sequence[EncodedQuery],
    *,
    task: Task,
    missing_eos_reward: float | None,
) -> Scores:
    """Scores of B responses.

    Args:
      finished: bool[B], ended by themselves.
      missing_eos_reward: the reward of a response that was cut at the length limit; None: what the task gives it. The parts stay
        the task's. A response that the task could not score has no reward for that either: NaN stays NaN.
    """
    scores = task.rewards([query.query for query in queries], texts, finished)
    if missing_eos_reward is None:
        return scores
    penalised = ~finished & ~np.isnan(scores.reward)
    return Scores(np.where(penalised, np.float32(missing_eos_reward), scores.reward), scores.parts)


def reward_generation(
    generation: Generation, queries: Sequence[EncodedQuery], *, task: Task, tokenizer: Tokenizer, missing_eos_reward: float | None
) -> tuple[list[str], Scores]:
    """Decodes and scores a generation that is on the host: response_texts, then reward_texts."""
    texts = response_texts(generation, queries, tokenizer)
    return texts, reward_texts(texts, generation.finished, queries, task=task, missing_eos_reward=missing_eos_reward)
