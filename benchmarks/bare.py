"""A bare JAX training step of trajectory balance: the fastest plain form of the mathematics that the project's update computes.

It uses JAX and optax alone, and none of the project's modules. It knows one architecture (Llama with a tied embedding and as many
key as query heads, float32), prompts of one length, one loss, and one device, and computes the prompt of each row. The layers are
unrolled, attention has its heads before its tokens, logits exist for response tokens only, and nothing is rematerialised: the
fastest of the forms that were tried.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Weights = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """heads: N of size H; prompt: P, tokens of every prompt; completions: K, rows of a prompt, which are consecutive; beta: β."""

    heads: int
    prompt: int
    completions: int
    beta: float
    rope_theta: float = 10_000.0
    epsilon: float = 1e-6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """tokens: int32[B, P + R]; mask: bool[B, R], true on response tokens; ref_logprobs: float32[B, R], nats, 0 where masked;
    reward: float32[B]."""

    tokens: Any
    mask: Any
    ref_logprobs: Any
    reward: Any


def loss(weights: Weights, rows: Rows, sizes: Sizes) -> jax.Array:
    """L = mean_{i,j} ( log Ẑ(x_i) + log π_θ(y_ij|x_i) − log p̃(y_ij|x_i) )², float32[]; log p̃ = log π_ref + r/β; VarGrad."""
    R = rows.mask.shape[1]
    # Token t of a response is predicted from the state before it.
    hidden = _hidden(weights, rows.tokens[:, :-1], sizes)[:, sizes.prompt - 1 : sizes.prompt - 1 + R]
    logits = hidden.reshape(-1, hidden.shape[-1]) @ weights["embedding"].T
    chosen = jnp.take_along_axis(logits, rows.tokens[:, sizes.prompt :].reshape(-1, 1), axis=1)[:, 0]
    logprobs = (chosen - jax.nn.logsumexp(logits, axis=1)).reshape(rows.mask.shape)
    policy = jnp.sum(jnp.where(rows.mask, logprobs, 0.0), axis=1).reshape(-1, sizes.completions)
    target = (jnp.sum(rows.ref_logprobs, axis=1) + rows.reward / sizes.beta).reshape(-1, sizes.completions)
    log_z = jax.lax.stop_gradient(jnp.mean(target - policy, axis=1, keepdims=True))
    return jnp.mean((log_z + policy - target) ** 2)


def make_step(
    optimizer: optax.GradientTransformation, sizes: Sizes
) -> Callable[[tuple[Weights, Any], Rows], tuple[tuple[Weights, Any], dict[str, jax.Array]]]:
    """(weights and state of the optimiser, rows) -> (both after the step, the loss and the gradient's norm), jitted, in place."""

    def step(state: tuple[Weights, Any], rows: Rows) -> tuple[tuple[Weights, Any], dict[str, jax.Array]]:
        weights, moments = state
        value, gradient = jax.value_and_grad(loss)(weights, rows, sizes)
        updates, moments = optimizer.update(gradient, moments, weights)
        return (optax.apply_updates(weights, updates), moments), {"loss": value, "grad_norm": optax.tree.norm(gradient)}

    return jax.jit(step, donate_argnums=0)


def _hidden(weights: Weights, tokens: jax.Array, sizes: Sizes) -> jax.Array:
    """float32[B, T, D] after the final norm."""
    B, T = tokens.shape
    x = weights["embedding"][tokens.reshape(-1)]
    for layer in weights["layers"]:
        x = x + _attention(layer, _norm(x, layer["attention_norm"], sizes), B, T, sizes)
        normed = _norm(x, layer["feed_forward_norm"], sizes)
        x = x + (jax.nn.silu(normed @ layer["gate"]) * (normed @ layer["up"])) @ layer["down"]
    return _norm(x, weights["final_norm"], sizes).reshape(B, T, -1)


def _attention(layer: Weights, x: jax.Array, B: int, T: int, sizes: Sizes) -> jax.Array:
    """Causal attention of B sequences of T tokens, x [B·T, D]."""
    query, key, value = ((x @ layer[name]).reshape(B, T, sizes.heads, -1) for name in ("query", "key", "value"))
    query, key, value = (x.swapaxes(1, 2) for x in (_rotate(query, sizes), _rotate(key, sizes), value))
    scores = jnp.einsum("bnth,bnsh->bnts", query, key) * (1 / math.sqrt(query.shape[-1]))
    shares = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e30), axis=-1)
    return jnp.einsum("bnts,bnsh->bnth", shares, value).swapaxes(1, 2).reshape(B * T, -1) @ layer["out"]


def _rotate(x: jax.Array, sizes: Sizes) -> jax.Array:
    """Rotary positions of x [B, T, N, H]."""
    T, H = x.shape[1], x.shape[-1]
    angle = jnp.arange(T)[:, None, None] * (sizes.rope_theta ** (-np.arange(0, H, 2, dtype=np.float32) / H))
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _norm(x: jax.Array, scale: jax.Array, sizes: Sizes) -> jax.Array:
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + sizes.epsilon)
