"""Monte-Carlo values of the states between reasoning steps (Kazemnejad et al. 2024): the mean reward of responses that go on."""

import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.decoding.engine import Engine
from tba_jax.decoding.requests import Generation, Request, Ticket, concatenate
from tba_jax.decoding.sampling import Sampling
from tba_jax.decoding.served import ServedEngine
from tba_jax.tasks.interface import EncodedQuery, Scores
from tba_jax.text.tokenizers import StopStrings


def between_steps(tokens: np.ndarray, length: np.ndarray, step_ends: StopStrings) -> np.ndarray:
    """Which states lie between two reasoning steps of a response.

    A token ends a step if it completes a step end anywhere in its text; the rest of its text begins no further step end. The last
    token ends the response, whatever its text.

    Args: tokens: int32[B, R], right-padded; length: int32[B], real tokens.

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


# Token t of a row is drawn with fold_in(key of the row, t). Continuations of a row fold in this number, which is no t.
_CONTINUATIONS = 2**32 - 1


def continuation_keys(row_key: jax.Array, *, states: int, samples: int) -> jax.Array:
    """uint32[states, samples, 2]: the random keys of responses that go on from the state before each token of a row.

    Args: row_key: uint32[2].
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(row_key), np.uint32(_CONTINUATIONS))

    def of_state(state: jax.Array) -> jax.Array:
        return jax.vmap(functools.partial(jax.random.fold_in, jax.random.fold_in(key, state)))(
            jnp.arange(samples, dtype=jnp.uint32)
        )

    return jax.random.key_data(jax.vmap(of_state)(jnp.arange(states, dtype=jnp.uint32)))


def mean_of_others(reward: np.ndarray, samples: int) -> np.ndarray:
    """float32[B]: the mean reward of the other samples of each row's query, NaN where none of them has a reward.

    Args: reward: float32[B], rows of one query consecutive, NaN where there is none; samples: of each query, at least 2.
    """
    of_query = reward.astype(np.float64).reshape(-1, samples)
    # Summed anew for each sample: the total less one reward is not exact, even where all rewards are alike.
    others = ~np.eye(samples, dtype=bool)
    return np.stack([_mean(of_query[:, keep]) for keep in others], axis=1).reshape(-1).astype(np.float32)


def _mean(reward: np.ndarray) -> np.ndarray:
    """The mean over the last axis, without NaNs; NaN where there is no other value."""
    known = ~np.isnan(reward)
    return np.divide(
        np.where(known, reward, 0.0).sum(axis=-1, dtype=np.float64),
        known.sum(axis=-1),
        out=np.full(reward.shape[:-1], np.nan),
        where=known.any(axis=-1),
    )


@dataclasses.dataclass(kw_only=True)
class ValuedStates:
    """States whose continuations StateValues.decode decodes, and which then wait for their rewards.

    shape: (B, R) of the rows; samples_per_query: rows of one query, which are consecutive; tokens: that were generated for
    values; blocks: n states each, as (rows int[n], response tokens before the state int[n], scores of their continuations).
    """

    shape: tuple[int, int]
    samples_per_query: int
    blocks: list[tuple[np.ndarray, np.ndarray, Future[Scores]]] = dataclasses.field(default_factory=list)
    tokens: int = 0

    def finish(self, reward: np.ndarray) -> np.ndarray:
        """Waits for the rewards of the continuations. Returns float32[B, R], the value of the state before each token, NaN where
        the state was not valued and where masked.

        Args: reward: float32[B], rewards of the rows themselves, NaN where a reward could not be found.
        """
        values = np.full(self.shape, np.nan, np.float32)
        values[:, 0] = mean_of_others(reward, self.samples_per_query)
        for rows, states, scores in self.blocks:
            values[rows, states] = _mean(scores.result().reward.reshape(len(rows), -1))
        return values


class StateValues:
    """Values states with the decoder that makes the responses, by its weights of that moment and without exploration.

    The state before the response is valued by the query's other samples, as they were drawn.
    """

    def __init__(
        self,
        engine: Engine | ServedEngine,
        *,
        step_ends: StopStrings,
        sampling: Sampling,
        most_states: int,
        samples_per_query: int,
        states_at_a_time: int,
        reward: Callable[[Generation, Sequence[EncodedQuery]], tuple[list[str], Future[Scores]]],
    ):
        """
        Args:
          engine: its given_length has room for a whole response but its last token.
          sampling: settings of the responses that go on from one state; leaves [samples].
          most_states: of a response, besides the one before it; 0: all between its steps. samples_per_query: at least 2.
          states_at_a_time: states that are rewarded together; the decoder has at most twice as many at a time.
          reward: returns the texts of responses to queries, and a future of their scores.
        """
        self._engine, self._step_ends, self._sampling = engine, step_ends, sampling
        self._most_states, self._samples_per_query, self._at_a_time = most_states, samples_per_query, max(states_at_a_time, 1)
        self._samples = len(sampling.temperature)
        self._reward = reward
        self._jit_keys = jax.jit(continuation_keys, static_argnames=("states", "samples"))

    def begin(self, generation: Generation) -> ValuedStates:
        """No state of these rows is valued yet, see `decode`."""
        return ValuedStates(shape=generation.tokens.shape, samples_per_query=self._samples_per_query)

    def decode(
        self, valued: ValuedStates, generation: Generation, keys: np.ndarray, queries: Sequence[EncodedQuery]
    ) -> Iterator[int]:
        """Decodes responses that go on from states of B rows, and hands them on to be rewarded. Pauses and yields as
        Engine.decode does, once no state waits to be asked.

        Args: valued: gets the states; generation: the B rows, rows of one query consecutive; keys: uint32[B, 2], their random
          keys; queries: one a row.

        Raises FloatingPointError: see Engine.decode.
        """
        R = generation.tokens.shape[1]
        between = between_steps(generation.tokens, generation.length, self._step_ends)
        waiting: deque[tuple[int, int, Request]] = deque()
        for row, query in enumerate(queries):
            chosen = evenly(np.flatnonzero(between[row]), self._most_states).tolist()
            if not chosen:
                continue
            of_states = np.asarray(self._jit_keys(keys[row], states=R, samples=self._samples))
            for t in chosen:
                its: dict[str, Any] = dict(
                    keys=of_states[t], sampling=self._sampling, beginning=generation.tokens[row, :t].tolist()
                )
                waiting.append((row, t, Request(name=query.name, prompt=query.prompt, **its)))
        asked: deque[tuple[int, int, Ticket]] = deque()

        def ask(most: int) -> int:
            """Submits at most so many states; returns how many more there was room for."""
            while waiting and most > 0 and len(asked) < 2 * self._at_a_time:
                row, t, request = waiting.popleft()
                asked.append((row, t, self._engine.submit(request)))
                most -= 1
            return most

        while waiting or asked:
            ask(self._at_a_time - len(asked))
            rows, states, tickets = zip(*itertools.islice(asked, self._at_a_time), strict=True)
            for room in self._engine.decode(tickets):
                room = ask(room)
                if not waiting:
                    yield room
            for _ in tickets:
                asked.popleft()
            made = concatenate([ticket.generation for ticket in tickets])
            scores = self._reward(made, [queries[row] for row in np.repeat(rows, self._samples)])[1]
            valued.blocks.append((np.array(rows), np.array(states), scores))
            valued.tokens += int(made.length.sum() - self._samples * sum(states))
