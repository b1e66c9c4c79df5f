"""From logits to one token a row: truncation without a sort, an exact inverse CDF, and the paper's exploration settings."""

import dataclasses
import functools
import math
from collections.abc import Callable

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np


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


def constant(
    rows: int | tuple[int, ...], *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Sampling:
    """The same settings for all rows (a number, or a shape), as NumPy arrays: the caller decides on which devices they go."""
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
    temperature_low_factor: float,
    temperature_factor: float,
    top_p_probability: float,
    top_p_low: float,
) -> Sampling:
    """The paper's exploration (TBA paper, method): a row gets, with temperature_probability, a temperature drawn uniformly from
    [T · temperature_low_factor, T · temperature_factor], and with top_p_probability a top-p drawn uniformly from [top_p_low, 1].
    """
    rows = len(sampling.temperature)
    changed = rng.random(rows) < temperature_probability
    factor = np.where(changed, rng.uniform(temperature_low_factor, temperature_factor, rows), 1.0)
    truncated = rng.random(rows) < top_p_probability
    top_p = np.where(truncated, rng.uniform(top_p_low, 1.0, rows), sampling.top_p)
    temperature = (sampling.temperature * factor).astype(np.float32)
    return dataclasses.replace(sampling, temperature=temperature, top_p=top_p.astype(np.float32))


def first_above(mass: jax.Array, cumulative: jax.Array, target: jax.Array) -> jax.Array:
    """Index of the first entry with mass whose cumulative mass is above the target, the last with mass if there is none.

    XLA sums long arrays as a tree: rounding lets the cumulative mass rise where there is none, and end at or below the target.

    Args: mass, cumulative: float32[B, n]; target: float32[B]. Returns int32[B], 0 in a row that has no mass.
    """
    index = jnp.arange(mass.shape[-1], dtype=jnp.int32)
    has_mass = mass > 0
    above = has_mass & (cumulative > target[:, None])
    first = jnp.min(jnp.where(above, index, len(index)), axis=-1)
    return jnp.where(first < len(index), first, jnp.max(jnp.where(has_mass, index, 0), axis=-1))


# TPUs hold an array in tiles of 8 rows × 128 columns. Logits that are seen as tiles need no copy in another layout.
_SUBLANES, _LANES = 8, 128
# (reduce, of, logits) -> float32[B, ⌈V / block⌉], see _by_block.
ByBlock = Callable[..., jax.Array]
# Measured on CPUs at V = 4096 and 32000: fewer rows are slower where all rows truncate, more rows where a fifth of them do.
_ROWS_AT_A_TIME = 16


@flax.struct.dataclass
class Draw:
    """One token a row with its log-probabilities.

    token: int32[B]; drawn: int32[B], the token that was drawn, which differs from `token` in forced rows alone;
    policy_logprob: float32[B], of `token`, nats at the scoring temperature over the whole response space;
    behavior_logprob: float32[B], of `token`, nats of the distribution that was sampled (in a forced row before truncation), 0 in
    a greedy row.
    """

    token: chex.Array
    drawn: chex.Array
    policy_logprob: chex.Array
    behavior_logprob: chex.Array


def draw(
    logits: jax.Array,
    uniform: jax.Array,
    sampling: Sampling,
    *,
    scoring_temperature: float,
    tiled: bool = False,
    forced: tuple[int, jax.Array] | None = None,
) -> Draw:
    """Draws a token of every row: temperature, top-k, top-p of what is left, min-p, then the inverse CDF at `uniform`.

    One pass of exponentials over [B, V] serves greedy rows and rows at the scoring temperature. Another runs only where a row has
    another temperature, a search for thresholds only where a row truncates. A token of probability 0 is never drawn, a greedy row
    draws the first of the most likely tokens. In an untruncated row at the scoring temperature both log-probs are the same bits.
    Where logits are NaN, infinite or -inf throughout, policy_logprob is NaN and the token any valid one.

    Args:
      logits: float32[B, V], restricted to the response space: -inf on tokens outside of it, finite on at least one token.
      uniform: float32[B] in [0, 1). scoring_temperature: of the policy's log-probs, above 0.
      tiled: static: sums go over the tiles of a TPU. They are rounded in another order, and slower on CPUs.
      forced: (token, rows): a static token id with a finite logit, and bool[B], the rows that get it whatever they draw.
    """
    chex.assert_rank([logits, uniform], [2, 1])
    chex.assert_type([logits, uniform], jnp.float32)
    B, V = logits.shape
    chex.assert_shape([uniform, *jax.tree.leaves(sampling)], (B,))
    block = _block_size(V)
    by_block = functools.partial(_by_block, block=block, tiled=tiled)
    greedy = sampling.temperature <= 0
    # A greedy row needs no distribution to draw from, so its pass is that of the policy.
    temperature = jnp.where(greedy, scoring_temperature, sampling.temperature).astype(jnp.float32)
    block_best = by_block(jnp.max, lambda part: part, logits)
    best = jnp.max(block_best, axis=-1)
    full_mass = by_block(jnp.sum, lambda part: _weights(part, best, temperature), logits)
    full_total = jnp.sum(full_mass, axis=-1)
    truncates = ~greedy & ((sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0))
    threshold, mass = _truncated(logits, best, temperature, sampling, truncates, full_mass, by_block)
    behavior_total = jnp.sum(mass, axis=-1)

    mass = jnp.where(greedy[:, None], (block_best == best[:, None]).astype(jnp.float32), mass)
    token = drawn = _inverse_cdf(logits, uniform, mass, best, temperature, threshold, greedy, block)
    if forced is not None:
        token = jnp.where(forced[1], jnp.int32(forced[0]), drawn)
        truncates &= ~forced[1]
        behavior_total = jnp.where(forced[1], full_total, behavior_total)
    # log softmax(l / T)[token] = (l[token] − max l) / T − log Σ exp((l − max l) / T)
    shifted = _pick(logits, token) - best
    as_scored = temperature == jnp.float32(scoring_temperature)
    scoring = jnp.full(B, scoring_temperature, jnp.float32)

    def scored_total() -> jax.Array:
        mass = by_block(jnp.sum, lambda part: _weights(part, best, scoring), logits)
        return jnp.where(as_scored, full_total, jnp.sum(mass, axis=-1))

    policy_total = jax.lax.cond(jnp.all(as_scored), lambda: full_total, scored_total)
    policy_logprob = shifted * _inverse(scoring) - jnp.log(policy_total)
    behavior_logprob = shifted * _inverse(temperature) - jnp.log(behavior_total)
    # Equal but for how XLA orders the two sums; importance weights of such rows are to be 1 exactly.
    behavior_logprob = jnp.where(as_scored & ~truncates, policy_logprob, behavior_logprob)
    behavior_logprob = jnp.where(greedy, 0.0, behavior_logprob)
    return Draw(token=token, drawn=drawn, policy_logprob=policy_logprob, behavior_logprob=behavior_logprob)


def _inverse_cdf(
    logits: jax.Array,
    uniform: jax.Array,
    mass: jax.Array,
    best: jax.Array,
    temperature: jax.Array,
    threshold: jax.Array,
    greedy: jax.Array,
    block: int,
) -> jax.Array:
    """int32[B]: the token at which the cumulative mass passes `uniform` of the total. mass: float32[B, ⌈V / block⌉]."""
    V = logits.shape[-1]
    cumulative = jnp.cumsum(mass, axis=-1)
    target = jnp.where(greedy, 0.0, uniform * cumulative[:, -1])
    chosen_block = first_above(mass, cumulative, target)
    before = jnp.where(chosen_block > 0, _pick(cumulative, jnp.maximum(chosen_block - 1, 0)), 0.0)
    start = jnp.minimum(chosen_block * block, V - block)
    # The window of the last block, which is shorter, begins in the block before.
    window = jax.vmap(lambda row, first: jax.lax.dynamic_slice_in_dim(row, first, block))(logits, start)
    in_block = start[:, None] + jnp.arange(block) >= (chosen_block * block)[:, None]
    mass = jnp.where(greedy[:, None], (window == best[:, None]).astype(jnp.float32), _weights(window, best, temperature))
    mass = jnp.where(in_block & (window >= threshold[:, None]), mass, 0.0)
    return start + first_above(mass, jnp.cumsum(mass, axis=-1), target - before)


def _truncated(
    logits: jax.Array,
    best: jax.Array,
    temperature: jax.Array,
    sampling: Sampling,
    truncates: jax.Array,
    full_mass: jax.Array,
    by_block: ByBlock,
) -> tuple[jax.Array, jax.Array]:
    """The least logit that stays in each row, float32[B], and the mass of each block from it on, float32[B, ⌈V / block⌉]."""
    B = len(best)
    rows = min(B, _ROWS_AT_A_TIME)  # a few rows at a time stay in the cache
    count = jnp.sum(truncates, dtype=jnp.int32)
    order = jnp.argsort(~truncates)

    def work(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        done, threshold, mass = state
        # The last few rows may have been worked on before. Rows that do not truncate find that all tokens stay.
        chosen = jax.lax.dynamic_slice_in_dim(order, done, rows)
        part, part_best, part_temperature, part_sampling = jax.tree.map(
            lambda x: x[chosen], (logits, best, temperature, sampling)
        )
        found = _threshold(part, part_best, part_temperature, part_sampling)

        def kept(tokens: jax.Array) -> jax.Array:
            return jnp.where(tokens >= found[:, None], _weights(tokens, part_best, part_temperature), 0.0)

        masses = by_block(jnp.sum, kept, part)
        return done + rows, threshold.at[chosen].set(found), mass.at[chosen].set(masses)

    state = jnp.int32(0), jnp.full(B, -jnp.inf), full_mass
    _, threshold, mass = jax.lax.while_loop(lambda s: s[0] < count, work, state)
    return jnp.where(truncates, threshold, -jnp.inf), jnp.where(truncates[:, None], mass, full_mass)


def _threshold(logits: jax.Array, best: jax.Array, temperature: jax.Array, sampling: Sampling) -> jax.Array:
    """float32[B]: the least logit that top-k, top-p and min-p leave in. Ties of the last token that stays, stay too."""
    B, V = logits.shape
    top_k = jnp.where((sampling.top_k > 0) & (sampling.top_k < V), sampling.top_k, V)
    threshold, ties = jax.lax.cond(
        jnp.any(top_k < V),
        lambda: _top_k_threshold(logits, best, top_k),
        lambda: (jnp.full(B, -jnp.inf), jnp.zeros(B, jnp.int32)),
    )

    def top_p_threshold() -> jax.Array:
        weights = jnp.where(logits >= threshold[:, None], _weights(logits, best, temperature), 0.0)
        surplus = jnp.where(ties > 0, ties * _weights(threshold[:, None], best, temperature)[:, 0], 0.0)
        least = _top_p_weight(weights, sampling.top_p * (jnp.sum(weights, axis=-1) - surplus))
        stays = (logits >= threshold[:, None]) & (weights >= least[:, None])
        found = jnp.min(jnp.where(stays, logits, jnp.inf), axis=-1)
        return jnp.where(sampling.top_p < 1, found, threshold)

    threshold = jax.lax.cond(jnp.any(sampling.top_p < 1), top_p_threshold, lambda: threshold)
    return jnp.minimum(jnp.maximum(threshold, best + temperature * jnp.log(sampling.min_p)), best)


def _top_k_threshold(logits: jax.Array, best: jax.Array, top_k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A float32[B] that at least top_k logits reach and, but for ties, no more; and how many more do: int32[B]. By bisection."""
    B, V = logits.shape
    low = jnp.broadcast_to(_ordered(jnp.float32(-jnp.inf)), (B,))
    # Nothing is above the largest logit; a row without top-k is found at once.
    high = jnp.where(top_k < V, jnp.maximum(_ordered(best), low) + 1, low + 1)

    # `low` is reached by `count` ≥ top_k logits, `high` by fewer than top_k.
    def halve(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        low, high, count = state
        open_row = low + 1 < high
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without overflow
        found = jnp.sum(logits >= _float_of(middle)[:, None], axis=-1, dtype=jnp.int32)
        reached = open_row & (found >= top_k)
        high = jnp.where(open_row & ~reached, middle, high)
        low, count = jnp.where(reached, middle, low), jnp.where(reached, found, count)
        return low, jnp.where(count == top_k, low + 1, high), count

    state = low, high, jnp.full(B, V, jnp.int32)
    low, _, count = jax.lax.while_loop(lambda s: jnp.any(s[0] + 1 < s[1]), halve, state)
    return _float_of(low), count - top_k


def _top_p_weight(weights: jax.Array, mass: jax.Array) -> jax.Array:
    """float32[B]: the least weight of a row such that the weights above it sum to less than `mass`. By bisection of [0, 1]."""
    B = len(weights)
    one = jax.lax.bitcast_convert_type(jnp.float32(1), jnp.int32)

    # The weights above `low` sum to at least `mass`, the weights above `high` to less.
    def halve(_: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = state
        middle = (low + high) >> 1
        weight = jax.lax.bitcast_convert_type(jnp.maximum(middle, 0), jnp.float32)
        below = jnp.sum(jnp.where(weights > weight[:, None], weights, 0.0), axis=-1) < mass
        return jnp.where(below, low, middle), jnp.where(below, middle, high)

    _, high = jax.lax.fori_loop(0, 30, halve, (jnp.full(B, -1, jnp.int32), jnp.broadcast_to(one, (B,))))
    return jax.lax.bitcast_convert_type(high, jnp.float32)


def _ordered(values: jax.Array) -> jax.Array:
    """int32 with the order of the float32 values: their bits, where the sign is set with all bits below it flipped."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _float_of(ordered: jax.Array) -> jax.Array:
    """The float32 of an _ordered integer."""
    return jax.lax.bitcast_convert_type(jnp.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered), jnp.float32)


def _weights(logits: jax.Array, best: jax.Array, temperature: jax.Array) -> jax.Array:
    """exp((logits − best) / temperature): float32[B, n] in [0, 1]; best, temperature: float32[B]."""
    exponent = (logits - best[:, None]) * _inverse(temperature)[:, None]
    # Below, exp leaves float32's normal numbers: what it rounds to may differ between two programs, and 0 must be 0 in both.
    return jnp.where(exponent < -87.0, 0.0, jnp.exp(exponent))


def _inverse(temperature: jax.Array) -> jax.Array:
    """1 / temperature, finite, so that its product with 0 is 0."""
    return 1.0 / jnp.maximum(temperature, 1e-37)


def _block_size(V: int) -> int:
    """The power of two next to √V, at least 128: smaller blocks measured slower on CPUs."""
    return min(V, max(128, 2 ** round(math.log2(V) / 2)))


def _by_block(
    reduce: Callable[..., jax.Array], of: Callable[[jax.Array], jax.Array], logits: jax.Array, *, block: int, tiled: bool
) -> jax.Array:
    """of(logits) reduced to float32[B, ⌈V / block⌉]; `of` works on float32[B, n] token by token.

    The ragged end is cut off before `of` is applied: padded, or cut off after it, XLA would make another [B, V]. If `tiled`, the
    logits are read as a TPU holds them, and reduced by way of the columns of tiles.
    """
    B, V = logits.shape
    lanes = min(block, _LANES) if tiled else block
    whole = V - V % lanes
    rows = (B // _SUBLANES, _SUBLANES) if tiled and B % _SUBLANES == 0 else (B,)
    parts = reduce(of(logits[:, :whole]).reshape(*rows, -1, lanes), axis=-1).reshape(B, -1)
    if whole < V:
        parts = jnp.concatenate([parts, reduce(of(logits[:, whole:]), axis=-1, keepdims=True)], axis=1)
    if block == lanes:
        return parts
    missing = -parts.shape[1] % (block // lanes)
    parts = jnp.pad(parts, ((0, 0), (0, missing)), mode="edge" if reduce is jnp.max else "constant")
    return reduce(parts.reshape(B, -1, block // lanes), axis=-1)


def _pick(values: jax.Array, index: jax.Array) -> jax.Array:
    """values[b, index[b]] of [B, n]: [B]."""
    return jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]
