"""What is asked of the decoder, and what it gives back."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tba_jax.decoding.sampling import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Samples of one prompt.

    name: what messages call the query; prompt: its tokens, at least one.
    keys: uint32[S, 2], see slots.row_keys: token t of a response is drawn with fold_in(its key, t), so that a sample is the same
      whatever it shares the slots with. sampling: leaves [S].
    beginning: response tokens that are given; all samples continue them (Monte-Carlo values of a state in a response).
    limit: int32[S], response tokens at most, the given ones and the end-of-sequence token included; None: all that there is room
      for.
    """

    name: str
    prompt: Sequence[int]
    keys: np.ndarray
    sampling: Sampling
    beginning: Sequence[int] = ()
    limit: np.ndarray | None = None

    @property
    def samples(self) -> int:
        return len(self.keys)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """Responses and their log-probabilities, on the host.

    tokens: int32[B, R], right-padded; length: int32[B], end-of-sequence included; finished: bool[B], ended by an
    end-of-sequence token or a stop string; policy_logprobs: float32[B, R], nats at the scoring temperature;
    behavior_logprobs: float32[B, R], nats of the distribution that was sampled; both 0 where masked, and on tokens that were
    given; policy_step: int32[B, R], of the weights that drew each token, -1 where masked or given.
    """

    tokens: np.ndarray
    length: np.ndarray
    finished: np.ndarray
    policy_logprobs: np.ndarray
    behavior_logprobs: np.ndarray
    policy_step: np.ndarray


def concatenate(parts: Sequence[Generation]) -> Generation:
    """The rows of all parts, in their order."""
    fields = [field.name for field in dataclasses.fields(Generation)]
    return Generation(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in fields})
