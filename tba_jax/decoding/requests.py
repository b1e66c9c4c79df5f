"""What is asked of the decoder, and what it gives back."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tba_jax.decoding.sampling import Sampling
from tba_jax.decoding.slots import SlotsConfig


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


def check(request: Request, config: SlotsConfig, *, longest_prompt: int) -> None:
    """Whether slots of this config can answer it.

    Raises:
      ValueError: a prompt that is empty or longer than the cache, a beginning that leaves no room, or bad sampling settings;
        names the query, the value and the limit.
    """
    tokens, given, S = len(request.prompt) + len(request.beginning), len(request.beginning), request.samples
    if not len(request.prompt) or tokens > config.prompt_length:
        raise ValueError(
            f"query {request.name}: {tokens} tokens of prompt (with {given} of the response) do not fit the cache, which holds 1 "
            f"to {config.prompt_length}"
        )
    if len(request.prompt) > longest_prompt:
        raise ValueError(
            f"query {request.name}: a prompt of {len(request.prompt)} tokens is longer than {longest_prompt}, the rest of the "
            "cache is for given response tokens"
        )
    if given >= config.response_length:
        raise ValueError(
            f"query {request.name}: {given} given response tokens leave none of response_length={config.response_length}"
        )
    if S < 1:
        raise ValueError(f"query {request.name}: no samples are asked for")
    for token in (*request.prompt, *request.beginning):
        if not isinstance(token, int | np.integer) or not 0 <= token < config.model.vocab:
            raise ValueError(f"query {request.name}: token {token!r} is not an id of the vocabulary of {config.model.vocab}")
    barred = {*config.space.banned_tokens, config.space.eos_id}
    if ended := [token for token in request.beginning if token in barred]:
        raise ValueError(f"query {request.name}: the given response tokens hold {ended[0]}, which ends a response or is banned")
    if request.keys.dtype != np.uint32 or request.keys.shape != (S, 2):
        raise ValueError(f"query {request.name}: keys are {request.keys.dtype}{list(request.keys.shape)}, not uint32[{S}, 2]")
    if request.limit is not None and request.limit.shape != (S,):
        raise ValueError(f"query {request.name}: limits have shape {list(request.limit.shape)}, the samples are {S}")
    s = request.sampling
    for name, good, limit in (
        ("temperature", np.isfinite(s.temperature) & (s.temperature >= 0), "at least 0"),
        ("top_k", s.top_k >= 0, "at least 0"),
        ("top_p", (s.top_p > 0) & (s.top_p <= 1), "within (0, 1]"),
        ("min_p", (s.min_p >= 0) & (s.min_p < 1), "within [0, 1)"),
    ):
        values = np.asarray(getattr(s, name))
        if values.shape != (S,):
            raise ValueError(f"query {request.name}: sampling.{name} has shape {values.shape}, the samples are {S}")
        if not np.all(good):
            raise ValueError(f"query {request.name}: {name}={values[int(np.argmin(good))]} must be {limit}")
    if request.limit is not None and not (np.all(request.limit > given) and np.all(request.limit <= config.response_length)):
        raise ValueError(
            f"query {request.name}: limits {request.limit.min()} to {request.limit.max()} must be within {given + 1} to "
            f"{config.response_length} response tokens"
        )
