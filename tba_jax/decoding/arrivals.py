"""Parts of requests as `decode_loop.prefill` takes them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tba_jax.decoding import sampling as sampling_lib
from tba_jax.decoding.requests import Generation, Request
from tba_jax.decoding.slots import Arrivals, Samples, SlotsConfig
from tba_jax.text.stop_strings import StopStrings


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


def empty(config: SlotsConfig, *, prompts: int, tokens: int, pad_id: int) -> Arrivals:
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


def fill(
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
