"""From generated tokens to rewards: what searchers train on and evaluators measure."""

from collections.abc import Sequence

import numpy as np

from tba_jax.decoding.requests import Generation
from tba_jax.tasks.interface import EncodedQuery, Query, Scores, Task
from tba_jax.text.tokenizers import Tokenizer


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

    Raises:
      TypeError, ValueError: the task gave something else than Scores of these responses.
    """
    scores = _checked(task, [query.query for query in queries], texts, finished)
    if missing_eos_reward is None:
        return scores
    penalised = ~finished & ~np.isnan(scores.reward)
    return Scores(np.where(penalised, np.float32(missing_eos_reward), scores.reward), scores.parts)


def _checked(task: Task, queries: Sequence[Query], texts: Sequence[str], finished: np.ndarray) -> Scores:
    """What the task's rewards give, which may be of one's own."""
    what = f"rewards() of task {type(task).__name__}"
    try:
        scores = task.rewards(queries, texts, finished)
    except SystemExit as error:
        raise RuntimeError(f"{what} left by SystemExit: {error}") from error
    shapes = (len(texts),), (len(texts), len(task.reward_parts))
    if not isinstance(scores, Scores):
        raise TypeError(f"{what} must give Scores, and gave {type(scores).__name__}")
    if (np.shape(scores.reward), np.shape(scores.parts)) != shapes:
        raise ValueError(
            f"{what} gave reward of shape {np.shape(scores.reward)} and parts of shape {np.shape(scores.parts)}; "
            f"for {len(texts)} responses they must be {shapes[0]} and {shapes[1]}"
        )
    return Scores(np.asarray(scores.reward, np.float32), np.asarray(scores.parts, np.float32))


def reward_generation(
    generation: Generation, queries: Sequence[EncodedQuery], *, task: Task, tokenizer: Tokenizer, missing_eos_reward: float | None
) -> tuple[list[str], Scores]:
    """Decodes and scores a generation that is on the host: response_texts, then reward_texts."""
    texts = response_texts(generation, queries, tokenizer)
    return texts, reward_texts(texts, generation.finished, queries, task=task, missing_eos_reward=missing_eos_reward)
