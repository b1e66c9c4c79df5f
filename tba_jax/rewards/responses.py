"""From generated tokens to rewards: texts of responses, scores by the task, and the reward of responses that were cut."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tba_jax.tasks.interface import EncodedQuery, Query, Scores, Task
from tba_jax.text.tokenizers import Tokenizer


def response_texts(
    responses: Sequence[np.ndarray | Sequence[int]], queries: Sequence[EncodedQuery], tokenizer: Tokenizer
) -> list[str]:
    """The texts of B responses, token ids without padding, one response for each of B queries."""
    return [
        tokenizer.decode_continuation(query.prompt, np.asarray(response).tolist())
        for query, response in zip(queries, responses, strict=True)
    ]


def reward_texts(
    texts: Sequence[str],
    finished: np.ndarray,
    queries: Sequence[EncodedQuery],
    *,
    task: Task,
    missing_eos_reward: float | None,
) -> Scores:
    """Scores of B responses. Raises TypeError or ValueError where the task returned anything else.

    Args: finished: bool[B], whether a response ended before the length limit; missing_eos_reward replaces the reward of others,
      unless that is NaN; None: the task's reward is kept. Reward parts are always the task's.
    """
    scores = _checked(task, [query.query for query in queries], texts, finished)
    if missing_eos_reward is None:
        return scores
    penalised = ~finished & ~np.isnan(scores.reward)
    reward = np.where(penalised, np.float32(missing_eos_reward), scores.reward)
    return dataclasses.replace(scores, reward=reward)


def _checked(task: Task, queries: Sequence[Query], texts: Sequence[str], finished: np.ndarray) -> Scores:
    """The task's scores in float32. Their type and shapes are checked, since a custom task may return anything."""
    method, n = f"rewards() of task {type(task).__name__}", len(texts)
    try:
        scores = task.rewards(queries, texts, finished)
    except SystemExit as error:
        raise RuntimeError(f"{method} raised SystemExit: {error}") from error
    if not isinstance(scores, Scores):
        raise TypeError(f"{method} must return Scores, not {type(scores).__name__}")
    found, shapes = (np.shape(scores.reward), np.shape(scores.parts)), ((n,), (n, len(task.reward_parts)))
    if found != shapes:
        raise ValueError(
            f"{method} returned a reward of shape {found[0]} and parts of shape {found[1]}; for {n} responses they must have "
            f"shapes {shapes[0]} and {shapes[1]}"
        )
    return Scores(np.asarray(scores.reward, np.float32), np.asarray(scores.parts, np.float32), str(scores.failure))
