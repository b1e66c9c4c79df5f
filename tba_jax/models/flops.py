"""Floating-point operations of a decoder, from its shape: two for each weight and token of a matrix product, and attention.

Norms, activations and softmax are left out; so are positions that a causal mask hides.
"""

import numpy as np

from tba_jax.models.config import DecoderConfig


def passes(*, adapters: bool, held_reference: bool) -> int:
    """How often an update computes what a forward pass does.

    Args: adapters: whether only these are trained; held_reference: whether the update scores the rows by a reference first.
    """
    # Forward, and backward towards activations and weights; weights that stay need no gradient.
    return (2 if adapters else 3) + held_reference


def layer_weights(model: DecoderConfig) -> int:
    """The weights of all layers that each token is multiplied with."""
    D, N, G, H, F = model.width, model.heads, model.kv_heads, model.head_size, model.ffn
    return model.layers * (D * H * (2 * N + 2 * G) + D * F * (3 if model.gated else 2))


def head_weights(model: DecoderConfig) -> int:
    """The weights of the map to the vocabulary."""
    return model.width * model.vocab


def attention(model: DecoderConfig, positions: int | np.ndarray) -> int:
    """FLOPs of the attention of the first `positions` tokens of a row, each to itself and to those before it, in all layers.

    Args: positions: of one row, or int64[…] of several, whose FLOPs are added up.
    """
    total = 0
    for local in set(model.local_layers):
        window = model.window if local else 0
        near = np.minimum(positions, window) if window else np.asarray(positions)
        pairs = near * (near + 1) // 2 + (positions - near) * window  # Σ min(t, window) over t = 1 … positions
        total += model.local_layers.count(local) * int(pairs.sum())
    return 4 * model.heads * model.head_size * total


def forward(model: DecoderConfig, *, positions: int, logits: int) -> int:
    """Of one row: `positions` tokens through all layers, `logits` of them to the vocabulary."""
    return 2 * layer_weights(model) * positions + 2 * head_weights(model) * logits + attention(model, positions)
