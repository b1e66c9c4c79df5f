"""From logits to one token a row: truncation rules, exact inverse-CDF sampling, and the paper's exploration settings."""

import dataclasses
import math

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.models import scoring


@flax.struct.dataclass
class Sampling:
    """Per-row sampling settings, traced, so that changing them never recompiles.

    temperature: float32[B], 0 = greedy; top_k: int32[B], 0 = off; top_p: float32[B] in (0, 1], 1 = off;
    min_p: float32[B] in [0, 1), 0 = off.
    """

    temperature: chex.Array
    top_k: chex.Array
    top_p: chex.Array
    min_p: chex.Array


def constant(rows: int, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Sampling:
    """The same settings for all rows (NumPy arrays, so that the caller decides where they go)."""
    return Sampling(
        temperature=np.full(rows, temperature, np.float32),
        top_k=np.full(rows, top_k, np.int32),
        top_p=np.full(rows, top_p, np.float32),
        min_p=np.full(rows, min_p, np.float32),
    )


def explore(
    sampling: Sampling,
    rng: np.random.Generator,
    *,
    temperature_probability: float,
    temperature_factor: float,
    top_p_probability: float,
    top_p_low: float,
) -> Sampling:
    """The paper's exploration (PAPER §2): with some probability a hotter temperature, with some a random top-p.

    Args:
      temperature_probability: chance of a temperature drawn uniformly from [T, T · temperature_factor].
      top_p_probability: chance of a top-p drawn uniformly from [top_p_low, 1]; the other rows keep full support.
    """
    rows = len(sampling.temperature)
    hotter = rng.random(rows) < temperature_probability
    factor = np.where(hotter, rng.uniform(1.0, temperature_factor, rows), 1.0)
    truncated = rng.random(rows) < top_p_probability
    top_p = np.where(truncated, rng.uniform(top_p_low, 1.0, rows), sampling.top_p)
    temperature = (sampling.temperature * factor).astype(np.float32)
    return dataclasses.replace(sampling, temperature=temperature, top_p=top_p.astype(np.float32))


def is_truncating(sampling: Sampling) -> bool:
    """Whether any row leaves full support. A static choice: without truncation the decode loop needs no sort."""
    return bool(np.any(sampling.top_k > 0) or np.any(sampling.top_p < 1) or np.any(sampling.min_p > 0))


def behavior_log_distribution(
    logits: jax.Array, sampling: Sampling, *, banned_tokens: tuple[int, ...], truncating: bool
) -> jax.Array:
    """Log-probabilities of the distribution that is sampled: float32[B, V], -inf outside its support.

    Order: temperature, top-k, top-p, min-p, renormalise. A greedy row is a point mass on the most likely token.
    """
    greedy = (sampling.temperature <= 0)[:, None]
    temperature = jnp.where(greedy, 1.0, sampling.temperature[:, None])
    log_probs = scoring.log_softmax(logits, temperature, banned_tokens)
    if truncating:
        log_probs = jax.nn.log_softmax(_truncate(log_probs, sampling), axis=-1)
    best = jax.nn.one_hot(jnp.argmax(log_probs, axis=-1), log_probs.shape[-1], dtype=bool)
    return jnp.where(greedy, jnp.where(best, 0.0, -jnp.inf), log_probs)


def _truncate(log_probs: jax.Array, sampling: Sampling) -> jax.Array:
    """log_probs with -inf on the tokens that top-k, top-p or min-p leave out; the most likely token always stays."""
    V = log_probs.shape[-1]
    descending = -jnp.sort(-log_probs, axis=-1)
    top_k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, V), V)[:, None]
    in_top_k = jnp.arange(V)[None, :] < top_k
    probs = jnp.where(in_top_k, jnp.exp(descending), 0.0)
    probs = probs / jnp.sum(probs, axis=-1, keepdims=True)
    mass_before = jnp.cumsum(probs, axis=-1) - probs
    kept = in_top_k & ((mass_before < sampling.top_p[:, None]) | (sampling.top_p[:, None] >= 1))
    kept &= descending >= descending[:, :1] + jnp.log(sampling.min_p)[:, None]
    kept = kept.at[:, 0].set(True)
    threshold = jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(log_probs >= threshold, log_probs, -jnp.inf)


def sample(log_probs: jax.Array, uniform: jax.Array) -> jax.Array:
    """Exact inverse-CDF sampling in two levels: blocks of about √V tokens, then a token within the block.

    Args:
      log_probs: float32[B, V], normalised, -inf outside the support.
      uniform: float32[B] in [0, 1).

    Returns:
      int32[B]. A token of probability 0 is never drawn.
    """
    chex.assert_rank([log_probs, uniform], [2, 1])
    B, V = log_probs.shape
    block = max(1, math.isqrt(V))
    blocks = -(-V // block)
    probs = jnp.pad(jnp.exp(log_probs), ((0, 0), (0, blocks * block - V))).reshape(B, blocks, block)
    block_mass = jnp.sum(probs, axis=-1)
    cumulative = jnp.cumsum(block_mass, axis=-1)
    target = uniform * cumulative[:, -1]
    chosen_block = _first_above(block_mass, cumulative, target)
    before = jnp.where(chosen_block > 0, jnp.take_along_axis(cumulative, jnp.maximum(chosen_block - 1, 0)[:, None], 1)[:, 0], 0.0)
    mass = jnp.take_along_axis(probs, chosen_block[:, None, None], axis=1)[:, 0]
    return (chosen_block * block + _first_above(mass, jnp.cumsum(mass, axis=-1), target - before)).astype(jnp.int32)


def _first_above(mass: jax.Array, cumulative: jax.Array, target: jax.Array) -> jax.Array:
    """Index of the first entry with mass whose cumulative mass is above the target, the last with mass if there is none.

    XLA sums long arrays as a tree: rounding lets the cumulative mass rise where there is none, and end at or below the target.
    """
    has_mass = mass > 0
    above = has_mass & (cumulative > target[:, None])
    last = mass.shape[-1] - 1 - jnp.argmax(has_mass[:, ::-1], axis=-1)
    return jnp.where(jnp.any(above, axis=-1), jnp.argmax(above, axis=-1), last)
