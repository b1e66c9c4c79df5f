"""Floating-point operations of a decoder, from its shape: two for each weight and token of a matrix product, and attention.

Norms, activations and softmax are left out; so are positions that a causal mask hides.
"""

import numpy as np

from tba_jax.models.config import DecoderConfig

# Passes of a row through the layers: forward, and backward towards activations and weights. Weights that stay need no gradient.
_PASSES_TRAINED, _PASSES_FROZEN = 3, 2


def passes(*, adapters: bool, held_reference: bool) -> int:
    """How often an update computes what a forward pass does.

    Args: adapters: whether only these are trained; held_reference: whether the update scores the rows by a reference first.
    """
    return (_PASSES_FROZEN if adapters else _PASSES_TRAINED) + held_reference


def layer_weights(model: DecoderConfig) -> int:
    """The weights of all layers that each token is multiplied with."""
    D, N, G, H, F = model.width, model.heads, model.kv_heads, model.head_size, model.ffn
    return model.layers * (D * H * (2 * N + 2 * G) + D * F * (3 if model.gated else 2))


def head_weights(model: DecoderConfig) -> int:
    """The weights of the map to the vocabulary."""
    return model.width * model.vocab


def attention(model: DecoderConfig, positions: int) -> int:
    """FLOPs of the attention of the first `positions` tokens of a row, each to itself and to those before it, in all layers."""
    return sum(
        4 * model.heads * model.head_size * _pairs(positions, model.window if local else 0) for local in model.local_layers
    )


def _pairs(positions: int, window: int) -> int:
    """Σ min(t, window) over t = 1 … positions; window 0: Σ t."""
    near = min(positions, window) if window else positions
    return near * (near + 1) // 2 + (positions - near) * window


def attention_of(model: DecoderConfig, positions: np.ndarray) -> int:
    """Σ attention(model, n) over the numbers n of `positions`, int64[…]."""
    total = 0
    for local in set(model.local_layers):
        window = model.window if local else 0
        near = np.minimum(positions, window) if window else positions
        pairs = near * (near + 1) // 2 + (positions - near) * window
        total += model.local_layers.count(local) * int(pairs.sum())
    return 4 * model.heads * model.head_size * total


def forward(model: DecoderConfig, *, positions: int, logits: int) -> int:
    """Of one row: `positions` tokens through all layers, `logits` of them to the vocabulary."""
    return 2 * layer_weights(model) * positions + 2 * head_weights(model) * logits + attention(model, positions)


def scoring(model: DecoderConfig, *, rows: int, queries: int, prompt: int, response: int) -> int:
    """Of rows that share the prompts of so many queries: the last token of a row goes through no layer."""
    of_prompt = forward(model, positions=prompt, logits=0)
    of_row = forward(model, positions=prompt + response - 1, logits=response)
    return queries * of_prompt + rows * (of_row - of_prompt)


def decoding(model: DecoderConfig, *, prompt: int, response: int) -> int:
    """FLOPs of the `response` decode steps of one row with caches; the prompt is in the cache."""
    through = 2 * (layer_weights(model) + head_weights(model)) * response
    return through + attention(model, prompt + response) - attention(model, prompt)
