"""From generated tokens to rewards: what searchers train on and evaluators measure."""

from collections.abc import Sequence

import numpy as np

from tba_jax.decoding.requests import Generation
from tba_jax.tasks.interface import EncodedQuery, Scores, Task
from tba_jax.tokenizer import Tokenizer


def reward_generation(
    generation: Generation, queries: Sequence[EncodedQuery], *, task: Task, tokenizer: Tokenizer, missing_eos_reward: float | None
) -> tuple[list[str], Scores]:
    """Decodes and scores a generation that is on the host.

    Args:
      queries: one for each of the B rows.
      missing_eos_reward: the reward of a response that was cut at the length limit; None: what the task gives it.

    Returns:
      B response texts, and their scores with the missing-EOS rule applied to the reward (the parts stay the task's).
    """
    texts = [
        tokenizer.decode_continuation(query.prompt, tokens[:length].tolist())
        for query, tokens, length in zip(queries, generation.tokens, generation.length, strict=True)
    ]
    scores = task.rewards([query.query for query in queries], texts, generation.finished)
    if missing_eos_reward is None:
        return texts, scores
    return texts, Scores(np.where(generation.finished, scores.reward, np.float32(missing_eos_reward)), scores.parts)
