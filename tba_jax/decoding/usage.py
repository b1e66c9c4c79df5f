"""What a decoder has done so far: slot-steps, tokens, operations, and the bytes that its steps must read."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from tba_jax.decoding import slots as slots_lib
from tba_jax.decoding.slots import SlotsConfig
from tba_jax.models import flops, parameters
from tba_jax.models.config import DecoderConfig
from tba_jax.models.parameters import Params


@dataclasses.dataclass
class Usage:
    """slot_steps: slots × decode steps so far; useful: slot-steps that gave a token of a sample. prefilled: tokens of prefill
    calls, padding included; prompt_tokens: those of prompts. flops: of prompts and of samples that have ended, without padding;
    bytes: see `step_bytes`, of all decode steps."""

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
    """Bytes of the weights that a decode step reads: all but embeddings that are no head, of which it reads a row a slot.

    Args: weights: arrays or shapes, as a lane holds them.
    """
    unread = ("position_embedding.", *(() if model.tied_embedding else ("embedding.",)))
    read = [leaf for name, leaf in parameters.flatten(weights).items() if not name.startswith(unread)]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in read)


def step_bytes(config: SlotsConfig, weights: int, *, buffers: int, window: int) -> int:
    """Bytes that a decode step must read at least: the weights and the entries of the caches, of idle slots as well.

    Args: weights: see weight_bytes; buffers, window: see decode_loop.decode.
    """
    c, m = config, config.model
    entries = c.groups * (buffers * slots_lib.prompt_entries(c) + c.width * window)
    return weights + entries * 2 * m.layers * m.kv_heads * m.head_size * jax.numpy.dtype(m.compute_dtype).itemsize


def prefill_flops(model: DecoderConfig, prompts: Sequence[int]) -> int:
    """FLOPs of prompts of these lengths."""
    return sum(flops.forward(model, positions=length, logits=1) for length in prompts)


def decode_flops(model: DecoderConfig, *, prompt: int, drawn: np.ndarray) -> int:
    """FLOPs of samples that have drawn so many tokens, int[n]; the first of each is drawn from the logits of its prompt.

    Args: prompt: the tokens that all samples of it continue.
    """
    steps = np.maximum(drawn - 1, 0)
    through = 2 * (flops.layer_weights(model) + flops.head_weights(model)) * int(steps.sum())
    return through + flops.attention_of(model, prompt + steps) - len(steps) * flops.attention(model, prompt)
