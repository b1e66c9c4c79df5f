"""Requests, which the decoder is asked, generations, which it gives back, and what they cost it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tba_jax.decoding.sampling import Sampling
from tba_jax.decoding.slots import SlotsConfig
from tba_jax.models import hardware, parameters
from tba_jax.models.config import DecoderConfig
from tba_jax.models.parameters import Params


@dataclasses.dataclass(eq=False)
class Parked:
    """Where the cache of a conversation lies between two of its turns.

    lane: the Lane whose buffer holds the cache; None while a turn is decoded, after another request took the buffer, and before
    the first turn. buffer: (group, buffer) there. tokens: how many tokens of the conversation the buffer holds.
    """

    lane: Any = None
    buffer: tuple[int, int] = (0, 0)
    tokens: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Asks for S samples of one prompt.

    name: how messages call the query. prompt: its token ids, at least one.
    keys: uint32[S, 2], see slots.row_keys. Token t of a response is drawn with fold_in(its key, t), whatever shares the slots.
    sampling: leaves [S].
    beginning: given response tokens that all samples continue (Monte-Carlo values of a state in a response, earlier turns).
    turn: how many of the given tokens are of earlier turns, whose stop strings have ended them.
    parked: the place of a conversation's cache, where this request of one sample is a turn of it. The buffer stays as it is until
      another request needs it, and the conversation's next request computes what its context has more. None: nothing is kept.
    limit: int32[S], the most response tokens of each sample, given tokens and end of sequence included; None: response_length.
    """

    name: str
    prompt: Sequence[int]
    keys: np.ndarray
    sampling: Sampling
    beginning: Sequence[int] = ()
    turn: int = 0
    parked: Parked | None = None
    limit: np.ndarray | None = None

    @property
    def samples(self) -> int:
        return len(self.keys)

    @property
    def begun(self) -> Sequence[int]:
        """The given tokens of the turn that is to be generated."""
        return self.beginning[self.turn :]

    @property
    def context(self) -> list[int]:
        """The prompt and the given response tokens."""
        return [*self.prompt, *self.beginning]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """Responses and their log-probabilities, on the host.

    tokens: int32[B, R], right-padded.
    length: int32[B], end-of-sequence included.
    finished: bool[B], whether the response ended by itself: by a stop string, or an end of sequence that was drawn.
    policy_logprobs: float32[B, R], nats at the scoring temperature; 0 where masked, and on given tokens.
    behavior_logprobs: float32[B, R], nats of the distribution that was sampled; 0 in the same places.
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


_FIELDS = tuple(field.name for field in dataclasses.fields(Generation))


def concatenate(parts: Sequence[Generation]) -> Generation:
    """The rows of all parts, in their order."""
    return Generation(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS})


def empty(rows: tuple[int, ...], *, response_length: int, pad_id: int) -> Generation:
    """A generation of rows without a token, with leaves [*rows, R] and [*rows]."""
    whole = (*rows, response_length)
    return Generation(
        tokens=np.full(whole, pad_id, np.int32),
        length=np.zeros(rows, np.int32),
        finished=np.zeros(rows, bool),
        policy_logprobs=np.zeros(whole, np.float32),
        behavior_logprobs=np.zeros(whole, np.float32),
        policy_step=np.full(whole, -1, np.int32),
    )


class Ticket:
    """A request and its generation.

    Attributes: generation: the given tokens, and all tokens of samples that have ended; left: how many samples have not ended.
    """

    def __init__(self, request: Request, *, response_length: int, pad_id: int):
        self.request, self.left, given = request, request.samples, len(request.beginning)
        self.generation = empty((request.samples,), response_length=response_length, pad_id=pad_id)
        self.generation.tokens[:, :given], self.generation.length[:] = request.beginning, given
        self.limit = np.full(request.samples, response_length, np.int32) if request.limit is None else request.limit


@dataclasses.dataclass(frozen=True)
class Part:
    """Samples first, first + 1, … first + count − 1 of a request, which share a buffer."""

    ticket: Ticket
    first: int
    count: int

    @property
    def rows(self) -> slice:
        """The rows of the samples in the generation."""
        return slice(self.first, self.first + self.count)

    @property
    def given(self) -> int:
        return len(self.ticket.request.beginning)

    @property
    def parked(self) -> Parked | None:
        """The place of the conversation's cache, if a lane has it."""
        its = self.ticket.request.parked
        return its if its is not None and its.lane is not None else None

    def begin(self, made: Generation, at: tuple[int, slice]) -> None:
        """Copies the samples, which have given tokens alone, to the places `at` of a generation with leaves [J, X, ...]."""
        for name in _FIELDS:
            getattr(made, name)[at] = getattr(self.ticket.generation, name)[self.rows]

    def end(self, made: Generation, at: tuple[int, slice]) -> None:
        """Copies the samples, which have all ended, back from there."""
        for name in _FIELDS:
            getattr(self.ticket.generation, name)[self.rows] = getattr(made, name)[at]
        self.ticket.left -= self.count


@dataclasses.dataclass
class Usage:
    """slot_steps: slots × decode steps; useful: slot-steps that gave a token of a sample. prefilled: tokens of prefill calls,
    padding included; prompt_tokens: those of prompts. flops: of prompts and of samples that have ended; bytes: see step_bytes."""

    slot_steps: int = 0
    useful: int = 0
    prefilled: int = 0
    prompt_tokens: int = 0
    flops: int = 0
    bytes: int = 0

    @property
    def idle(self) -> float:
        """Share of slot-steps that gave no token."""
        return 1 - self.useful / self.slot_steps if self.slot_steps else 0.0


def weight_bytes(weights: Params, model: DecoderConfig) -> int:
    """Bytes of the weights that a decode step reads: all but embeddings that are no head, of which it reads a row a slot."""
    unread = ("position_embedding.", *(() if model.tied_embedding else ("embedding.",)))
    read = [leaf for name, leaf in parameters.flatten(weights).items() if not name.startswith(unread)]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in read)


def step_bytes(config: SlotsConfig, weights: int, *, buffers: int, window: int) -> int:
    """Bytes that a decode step must read at least: the weights and the entries of the caches, of idle slots as well."""
    c, m = config, config.model
    entries = c.groups * (buffers * c.prompt_entries + c.width * window)
    return weights + entries * 2 * m.layers * m.kv_heads * m.head_size * jnp.dtype(m.compute_dtype).itemsize


def prefill_flops(model: DecoderConfig, prompts: Sequence[int], kept: Sequence[int]) -> int:
    """FLOPs of prompts of these lengths, whose caches hold the first tokens, so many of each, already."""

    def flops(length: int, logits: int) -> int:
        return hardware.forward_flops(model, positions=length, logits=logits) if length else 0

    return sum(flops(length, 1) - flops(old, 0) for length, old in zip(prompts, kept, strict=True))


def decode_flops(model: DecoderConfig, *, prompt: int, drawn: np.ndarray) -> int:
    """FLOPs of samples that have drawn so many tokens, int[n]; the first of each is drawn from the logits of its prompt.

    Args: prompt: the tokens that all samples of it continue.
    """
    steps = np.maximum(drawn - 1, 0)
    through = 2 * (hardware.layer_weights(model) + hardware.head_weights(model)) * int(steps.sum())
    return through + hardware.attention_flops(model, prompt + steps) - len(steps) * hardware.attention_flops(model, prompt)
