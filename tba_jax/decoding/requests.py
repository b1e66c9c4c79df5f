"""Requests, which the decoder is asked, generations, which it gives back, and parts of requests as prefill takes them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tba_jax.decoding import sampling as sampling_lib
from tba_jax.decoding.sampling import Sampling
from tba_jax.decoding.slots import Arrivals, Samples, SlotsConfig
from tba_jax.text.stop_strings import StopStrings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Asks for S samples of one prompt.

    name: how messages call the query. prompt: its token ids, at least one.
    keys: uint32[S, 2], see slots.row_keys. Token t of a response is drawn with fold_in(key of the response, t), so that a sample
      is the same whatever other samples share the slots with it.
    sampling: leaves [S].
    beginning: given response tokens that all samples continue (Monte-Carlo values of a state in a response).
    limit: int32[S], the most response tokens of each sample, given tokens and end of sequence included; None: response_length.
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

    tokens: int32[B, R], right-padded.
    length: int32[B], end-of-sequence included.
    finished: bool[B], whether the response ended by itself: by a stop string, or an end of sequence that was drawn.
    policy_logprobs: float32[B, R], nats at the scoring temperature; 0 where masked, and on given tokens.
    behavior_logprobs: float32[B, R], nats of the distribution that was sampled; 0 likewise.
    policy_step: int32[B, R], of the weights that drew each token; -1 where masked, and on given tokens.
    """

    tokens: np.ndarray
    length: np.ndarray
    finished: np.ndarray
    policy_logprobs: np.ndarray
    behavior_logprobs: np.ndarray
    policy_step: np.ndarray

    @property
    def responses(self) -> list[np.ndarray]:
        """The B responses without padding, int32[length]."""
        return [tokens[:length] for tokens, length in zip(self.tokens, self.length, strict=True)]


def concatenate(parts: Sequence[Generation]) -> Generation:
    """The rows of all parts, in their order."""
    fields = [field.name for field in dataclasses.fields(Generation)]
    return Generation(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in fields})


def check(request: Request, config: SlotsConfig, *, longest_prompt: int) -> None:
    """Whether slots of this config can answer the request.

    Args: longest_prompt: tokens; the rest of the cache is for given response tokens.

    Raises:
      ValueError: a prompt that is empty or longer than the cache, a beginning that leaves no room, or bad sampling settings;
        names the query, the value and the limit.
    """
    try:
        _check_tokens(request, config, longest_prompt)
        _check_samples(request, config)
    except ValueError as error:
        raise ValueError(f"query {request.name}: {error}") from None


def _check_tokens(request: Request, config: SlotsConfig, longest_prompt: int) -> None:
    prompt, given = len(request.prompt), len(request.beginning)
    if not prompt or prompt + given > config.prompt_length:
        raise ValueError(
            f"{prompt + given} tokens of prompt (with {given} of the response) do not fit the cache, which holds 1 to "
            f"{config.prompt_length}"
        )
    if prompt > longest_prompt:
        raise ValueError(
            f"a prompt of {prompt} tokens is longer than {longest_prompt}, the rest of the cache is for given response tokens"
        )
    if given >= config.response_length:
        raise ValueError(f"{given} given response tokens leave none of response_length={config.response_length}")
    for token in (*request.prompt, *request.beginning):
        if not isinstance(token, int | np.integer) or not 0 <= token < config.model.vocab:
            raise ValueError(f"token {token!r} is not an id of the vocabulary of {config.model.vocab}")
    barred = {*config.space.banned_tokens, config.space.eos_id}
    if ended := [token for token in request.beginning if token in barred]:
        raise ValueError(f"the given response tokens hold {ended[0]}, which ends a response or is banned")


def _check_samples(request: Request, config: SlotsConfig) -> None:
    S, given, limit, s = request.samples, len(request.beginning), request.limit, request.sampling
    if S < 1:
        raise ValueError("no samples are asked for")
    if request.keys.dtype != np.uint32 or request.keys.shape != (S, 2):
        raise ValueError(f"keys are {request.keys.dtype}{list(request.keys.shape)}, not uint32[{S}, 2]")
    if limit is not None and limit.shape != (S,):
        raise ValueError(f"limits have shape {list(limit.shape)}, the samples are {S}")
    if limit is not None and (limit.min() <= given or limit.max() > config.response_length):
        raise ValueError(
            f"limits {limit.min()} to {limit.max()} must be within {given + 1} to {config.response_length} response tokens"
        )
    for name, good, allowed in (
        ("temperature", np.isfinite(s.temperature) & (s.temperature >= 0), "at least 0"),
        ("top_k", s.top_k >= 0, "at least 0"),
        ("top_p", (s.top_p > 0) & (s.top_p <= 1), "within (0, 1]"),
        ("min_p", (s.min_p >= 0) & (s.min_p < 1), "within [0, 1)"),
    ):
        values = np.asarray(getattr(s, name))
        if values.shape != (S,):
            raise ValueError(f"sampling.{name} has shape {values.shape}, the samples are {S}")
        if not np.all(good):
            raise ValueError(f"{name}={values[int(np.argmin(good))]} must be {allowed}")


@dataclasses.dataclass
class Ticket:
    """A request's generation while it is made. left: how many of its samples have not ended."""

    request: Request
    generation: Generation
    left: int


@dataclasses.dataclass(frozen=True)
class Part:
    """Samples first, first + 1, … first + count − 1 of a request, which share a buffer."""

    ticket: Ticket
    first: int
    count: int

    def limits(self, response_length: int) -> np.ndarray:
        """int32[count], the most response tokens of each sample. Args: response_length: of samples without a limit."""
        limit = self.ticket.request.limit
        return np.full(self.count, response_length, np.int32) if limit is None else limit[self.first : self.first + self.count]


def empty_arrivals(config: SlotsConfig, *, prompts: int, tokens: int, pad_id: int) -> Arrivals:
    """Prompts of so many tokens that are all padding."""
    I, K = prompts, config.places
    samples = Samples(
        key=np.zeros((I, K, 2), np.uint32),
        sampling=sampling_lib.constant((I, K), temperature=1.0),
        limit=np.zeros((I, K), np.int32),
    )
    return Arrivals(
        group=np.zeros(I, np.int32),
        buffer=np.zeros(I, np.int32),
        valid=np.zeros(I, bool),
        tokens=np.full((I, tokens), pad_id, np.int32),
        length=np.ones(I, np.int32),
        given=np.zeros(I, np.int32),
        stop_state=np.zeros(I, np.int32),
        samples=samples,
    )


def fill_arrivals(
    arrivals: Arrivals,
    contexts: Sequence[Sequence[int]],
    parts: Sequence[Part],
    buffers: Sequence[tuple[int, int]],
    *,
    stop_strings: StopStrings | None,
    config: SlotsConfig,
) -> None:
    """Writes parts into the first arrivals, which are empty.

    Args: contexts: prompt and given tokens of each part; buffers: (group, buffer) that it is prefilled into.
    """
    for i, (part, context, buffer) in enumerate(zip(parts, contexts, buffers, strict=True)):
        request, rows = part.ticket.request, slice(part.first, part.first + part.count)
        arrivals.group[i], arrivals.buffer[i], arrivals.valid[i] = *buffer, True
        arrivals.tokens[i, : len(context)], arrivals.length[i] = context, len(context)
        arrivals.given[i] = len(request.beginning)
        arrivals.stop_state[i] = stop_strings.run(request.beginning) if stop_strings is not None else 0
        samples = arrivals.samples
        samples.key[i, : part.count] = request.keys[rows]
        for field in dataclasses.fields(sampling_lib.Sampling):
            getattr(samples.sampling, field.name)[i, : part.count] = getattr(request.sampling, field.name)[rows]
        samples.limit[i, : part.count] = part.limits(config.response_length)
