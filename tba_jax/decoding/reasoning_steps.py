"""Reasoning steps of responses: where steps end, and which of the states between them are valued."""

import numpy as np

from tba_jax.text.stop_strings import StopStrings


def between_steps(tokens: np.ndarray, length: np.ndarray, step_ends: StopStrings) -> np.ndarray:
    """Which states lie between two reasoning steps of a response.

    A token ends a step if it completes a step end anywhere in its text; the rest of its text begins no further step end. The last
    token ends the response, whatever its text.

    Args:
      tokens: int32[B, R], right-padded; length: int32[B], real tokens.

    Returns:
      bool[B, R], of the state before each token; false for the state before the first.
    """
    B, R = tokens.shape
    between = np.zeros((B, R), bool)
    state = np.zeros(B, np.int32)
    for t in range(R - 1):
        state = step_ends.next_state[state, tokens[:, t]]
        ended = state == step_ends.accept
        state = np.where(ended, 0, state)
        between[:, t + 1] = ended & (t + 1 < length)
    return between


def evenly(states: np.ndarray, most: int) -> np.ndarray:
    """At most `most` of a response's states, spread evenly. Args: states: int[n], ascending; most: 0 keeps all states."""
    n = len(states)
    if not most or n <= most:
        return states
    return states[np.arange(1, most + 1) * (n + 1) // (most + 1) - 1]
