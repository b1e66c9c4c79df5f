"""Monte-Carlo values of the states between steps (Kazemnejad et al. 2024): mean rewards of responses that go on from them."""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import jax
import numpy as np

from tba_jax.decoding.engine import Engine, Ticket
from tba_jax.decoding.reasoning_steps import between_steps, evenly
from tba_jax.decoding.requests import Generation, Request, concatenate
from tba_jax.decoding.sampling import Sampling
from tba_jax.tasks.interface import EncodedQuery, Scores
from tba_jax.text.stop_strings import StopStrings

# Token t of a row is drawn with fold_in(its key, t): this is no t.
_CONTINUATIONS = 2**32 - 1
_KEYS_AT_A_TIME = 256


def continuation_keys(row_keys: jax.Array, states: jax.Array, *, samples: int) -> jax.Array:
    """uint32[n, samples, 2]: the random keys of responses that go on from states of rows.

    Args: row_keys: uint32[n, 2], the key of the row of each state; states: uint32[n], tokens of the response before it.
    """

    def of_state(key: jax.Array, state: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key), np.uint32(_CONTINUATIONS)), state)
        return jax.vmap(functools.partial(jax.random.fold_in, key))(np.arange(samples, dtype=np.uint32))

    return jax.random.key_data(jax.vmap(of_state)(row_keys, states))


def mean_of_others(reward: np.ndarray, samples: int) -> np.ndarray:
    """float32[B]: the mean reward of the other samples of each row's query, whose rows stand together; samples at least 2.

    Of those that have a reward; NaN where none has.
    """
    of_query = reward.astype(np.float64).reshape(-1, samples)
    # By sums of the others themselves: a difference of two sums is not exact where they are all alike.
    others = ~np.eye(samples, dtype=bool)
    return np.stack([_mean(of_query[:, keep]) for keep in others], axis=1).reshape(-1).astype(np.float32)


def _mean(reward: np.ndarray) -> np.ndarray:
    """Over the last axis, without NaNs; NaN where there is nothing else."""
    known = ~np.isnan(reward)
    return np.divide(
        np.where(known, reward, 0.0).sum(axis=-1, dtype=np.float64),
        known.sum(axis=-1),
        out=np.full(reward.shape[:-1], np.nan),
        where=known.any(axis=-1),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValuedStates:
    """States whose continuations are decoded, and on their way to be rewarded.

    shape: (B, R); samples_per_query: of the B rows, those of one query consecutive; blocks: (rows, states, scores) of n states
    each: int[n], int[n], tokens of the response before the state, and those of n times as many continuations as a state has;
    tokens: generated for them.
    """

    shape: tuple[int, int]
    samples_per_query: int
    blocks: list[tuple[np.ndarray, np.ndarray, Future[Scores]]]
    tokens: int

    def finish(self, reward: np.ndarray) -> np.ndarray:
        """Waits for the rewards.

        Args:
          reward: float32[B], of the rows themselves, NaN where it could not be found.

        Returns:
          float32[B, R], in units of the reward, of the state before each token: NaN where it was not valued, and where masked.
        """
        values = np.full(self.shape, np.nan, np.float32)
        values[:, 0] = mean_of_others(reward, self.samples_per_query)
        for rows, states, scores in self.blocks:
            values[rows, states] = _mean(scores.result().reward.reshape(len(rows), -1))
        return values


class StateValues:
    """Values states with the decoder that makes the responses, beside whatever else it decodes.

    By its weights as they are then, and without exploration; but the state before a response by the query's other samples, as
    they were drawn.
    """

    def __init__(
        self,
        engine: Engine,
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
          engine: with room for a prompt and a whole response but its last token.
          sampling: of the responses that go on from one state; leaves [samples].
          most_states: of a response, besides the one before it; 0: all between its steps.
          samples_per_query: of the rows that are valued, at least 2.
          states_at_a_time: states that are rewarded together; twice as many are with the decoder at most.
          reward: gives the texts of responses to queries, and what will be their scores.
        """
        self._engine, self._step_ends, self._sampling = engine, step_ends, sampling
        self._most_states, self._samples_per_query, self._at_a_time = most_states, samples_per_query, max(states_at_a_time, 1)
        self._samples = len(sampling.temperature)
        self._reward = reward
        self._jit_keys = jax.jit(functools.partial(continuation_keys, samples=self._samples))

    def __call__(
        self,
        generation: Generation,
        keys: np.ndarray,
        queries: Sequence[EncodedQuery],
        *,
        feed: Callable[[], bool] = lambda: False,
    ) -> ValuedStates:
        """Goes on from states of B rows.

        Args:
          generation, keys (uint32[B, 2]), queries: of the rows, those of one query consecutive.
          feed: see Engine.collect; asked where no state waits any more.

        Raises:
          FloatingPointError: see Engine.collect.
        """
        between = between_steps(generation.tokens, generation.length, self._step_ends)
        chosen = [(row, t) for row, states in enumerate(between) for t in evenly(np.flatnonzero(states), self._most_states)]
        waiting = deque(zip(chosen, self._keys(keys, chosen), strict=True))
        asked: deque[tuple[int, int, Ticket]] = deque()

        def ask() -> bool:
            if not waiting or len(asked) == 2 * self._at_a_time:
                return False
            (row, t), of_state = waiting.popleft()
            request = Request(
                name=queries[row].name,
                prompt=queries[row].prompt,
                keys=of_state,
                sampling=self._sampling,
                beginning=generation.tokens[row, :t].tolist(),
            )
            asked.append((row, t, self._engine.submit(request)))
            return True

        def more() -> bool:
            return ask() or (not waiting and feed())

        tokens, blocks = 0, []
        while waiting or asked:
            while len(asked) < self._at_a_time and ask():
                pass
            block = [asked[i] for i in range(min(len(asked), self._at_a_time))]
            made = concatenate(self._engine.collect([answer for _, _, answer in block], feed=more))
            for _ in block:
                asked.popleft()
            rows, states = (np.array(index) for index in zip(*((row, t) for row, t, _ in block), strict=True))
            of_rows = [queries[row] for row in np.repeat(rows, self._samples)]
            blocks.append((rows, states, self._reward(made, of_rows)[1]))
            tokens += int(made.length.sum() - self._samples * states.sum())
        return ValuedStates(
            shape=(len(queries), generation.tokens.shape[1]),
            samples_per_query=self._samples_per_query,
            blocks=blocks,
            tokens=tokens,
        )

    def _keys(self, keys: np.ndarray, chosen: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """uint32[samples, 2] for each of the states."""
        found: list[np.ndarray] = []
        for begin in range(0, len(chosen), _KEYS_AT_A_TIME):
            block = chosen[begin : begin + _KEYS_AT_A_TIME]
            # Padded, so that one program computes them all.
            rows, states = np.zeros((2, _KEYS_AT_A_TIME), np.uint32)
            rows[: len(block)], states[: len(block)] = zip(*block, strict=True)
            found.extend(np.asarray(self._jit_keys(keys[rows], states))[: len(block)])
        return found
