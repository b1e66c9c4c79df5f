"""Attention: the module with its projections, rotary positions, and the kernels: of whole rows (training, prefill), of the last
token of a prompt, and of a new token in each row, which reads caches (decoding)."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tba_jax import sharding
from tba_jax.models import hardware
from tba_jax.models.config import DecoderConfig, ModelConfig, RopeScaling
from tba_jax.models.layers import Einsum, Norm

# cos and sin of positions [t], or None where positions are not rotary.
Rotary = tuple[jax.Array, jax.Array] | None
# attend(query [t, N, H], key [t, G, H], value [t, G, H]) -> ([t, N, H], keys and values to keep, or None).
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


class Prefix(NamedTuple):
    """Where the sequences of W ways, B in all, continue others of the same way.

    sequence: int32[W, B / W], the number in its way of the sequence that each one continues. segments: int32[B, T], the segment
    there to which a token attends besides its own; 0: none.
    """

    sequence: jax.Array
    segments: jax.Array

    def of(self, x: jax.Array) -> jax.Array:
        """[B, ...] -> [B, ...]: what the continued sequences have. A way reads its own alone."""
        by_way = x.reshape(*self.sequence.shape, *x.shape[1:])
        return jax.vmap(lambda of_way, sequence: of_way[sequence])(by_way, self.sequence).reshape(x.shape)


# Stands for -inf in scores: a row without anything to attend to, as an idle slot is, must not become NaN.
_MASKED = -1e30


class Attention(nnx.Module):
    """Projections of a multi-head attention with N query heads that share G key and value heads."""

    query_norm: Any = None
    key_norm: Any = None

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c, sizes = config, config.sizes
        self.query_scale = math.sqrt(c.head_size / (c.query_scalar or c.head_size))
        self.query = Einsum("tD,DNH->tNH", sizes, bias=c.qkv_bias, rngs=rngs)
        self.key = Einsum("tD,DGH->tGH", sizes, bias=c.qkv_bias, rngs=rngs)
        self.value = Einsum("tD,DGH->tGH", sizes, bias=c.qkv_bias, rngs=rngs)
        self.out = Einsum("tNH,NHD->tD", sizes, bias=c.out_bias, std=c.residual_std, rngs=rngs)
        if c.qk_norm:
            self.query_norm = Norm(c.norm, "H", sizes, epsilon=c.norm_epsilon, rngs=rngs)
            self.key_norm = Norm(c.norm, "H", sizes, epsilon=c.norm_epsilon, rngs=rngs)

    def project(self, x: jax.Array, rotary: Rotary) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Query [t, N, H], key and value [t, G, H] of x [t, D]."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if rotary is not None:
            query, key = rotate(query, *rotary), rotate(key, *rotary)
        if self.query_scale != 1:  # kernels divide scores by sqrt(H), whatever the model divides them by
            query = query * self.query_scale
        return query, key, value

    def __call__(self, x: jax.Array, rotary: Rotary, attend: Attend) -> tuple[jax.Array, Any]:
        """Returns [t, D], and the second result of `attend`."""
        attended, kept = attend(*self.project(x, rotary))
        return self.out(attended), kept


def rotary_frequencies(size: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """float32[size / 2], radians per position."""
    frequency = theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    if scaling is not None and not scaling.original_positions:
        frequency = frequency / scaling.factor
    elif scaling is not None:
        turns = scaling.original_positions * frequency / (2 * np.pi)
        kept = np.clip((turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency), 0.0, 1.0)
        frequency = frequency * (kept + (1 - kept) / scaling.factor)
    return frequency.astype(np.float32)


def rotary_tables(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """cos, sin: float32[..., 1, size / 2] for int32[...] positions; the 1 broadcasts over heads."""
    angle = positions.astype(jnp.float32)[..., None, None] * frequencies
    return jnp.cos(angle), jnp.sin(angle)


def rotary(positions: jax.Array, config: DecoderConfig, *, local: bool) -> Rotary:
    """The rotary tables of positions int32[t], which all local or all global layers share."""
    if config.positions != "rotary":
        return None
    size, theta, scaling = config.rotary_size or config.head_size, config.rope_theta, config.rope_scaling
    if local and config.local_rope_theta:
        theta, scaling = config.local_rope_theta, None
    return rotary_tables(positions, rotary_frequencies(size, theta, scaling))


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first elements of x [..., heads, H], as many as the tables cover, pairing i with i + size/2 (rotate-half)."""
    half = cos.shape[-1]
    x32 = x.astype(jnp.float32)
    first, second, rest = jnp.split(x32, (half, 2 * half), axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1).astype(x.dtype)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    *,
    causal: bool,
    kernel: str,
    window: int = 0,
    positions: jax.Array | None = None,
    prefix: Prefix | None = None,
) -> jax.Array:
    """Attention over whole sequences.

    Args:
      query, result: [B, T, N, H]; key, value: [B, T, G, H]; the softmax is float32.
      segments: int32[B, T], at least 0; a token attends to the tokens of its segment. None: a row is one segment.
      kernel: "xla", "cudnn" (flash attention on NVIDIA GPUs), "splash" (on TPUs; on other devices it is interpreted, which is
        for tests), or "auto": what `fastest` says.
      window: with causal attention, a query attends to at most this many tokens, the last of which is itself; 0: to all.
      positions, prefix: int32[B, T], and which tokens of other sequences are read as well, causally; not by "splash".
    """
    platform = sharding.platform()
    if kernel == "auto":
        kernel = fastest(platform, query.dtype, query.shape[-1])
    if prefix is not None:
        assert causal and segments is not None and positions is not None and kernel != "splash"
        mask = _mask_with_prefix(segments, positions, prefix, window=window)
        key, value = (jnp.concatenate([prefix.of(x), x], axis=1) for x in (key, value))
        if kernel == "xla":
            return _attend_xla(query, key, value, mask)
        return jax.nn.dot_product_attention(query, key, value, mask=mask[:, None], implementation="cudnn")
    if kernel == "splash":
        from tba_jax.models import splash_attention  # imports Pallas, which processes without TPUs can do without

        interpret = platform != "tpu"
        return splash_attention.attend(query, key, value, segments, causal=causal, window=window, interpret=interpret)
    if kernel == "xla":
        mask = _causal_mask(query.shape[1], window) if causal else jnp.ones((1, 1, 1), bool)
        return _attend_xla(query, key, value, mask if segments is None else mask & _same(segments, segments))
    return _attend_cudnn(query, key, value, segments, causal=causal, window=window)


def _attend_cudnn(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, *, causal: bool, window: int
) -> jax.Array:
    """Args: see attend."""
    added = query.shape[1] % 2 if causal else 0
    if added:  # cuDNN's gradient takes even lengths only. No token attends to one that is added behind it.
        query, key, value = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (query, key, value))
        segments = None if segments is None else jnp.pad(segments, ((0, 0), (0, 1)))
    of_segments = None if segments is None else _same(segments, segments)[:, None]
    local = (window - 1, 0) if window else None
    attended = jax.nn.dot_product_attention(
        query, key, value, mask=of_segments, is_causal=causal, local_window_size=local, implementation="cudnn"
    )
    return attended[:, : query.shape[1] - added]


def _same(these: jax.Array, others: jax.Array) -> jax.Array:
    """bool[B, T, S]: where int32[B, T] and int32[B, S] are equal."""
    return these[:, :, None] == others[:, None, :]


def _causal_mask(T: int, window: int) -> jax.Array:
    """bool[1, T, T]. Args: window: see attend."""
    later = (jnp.arange(T)[:, None] - jnp.arange(T))[None]
    return (later >= 0) & (later < window) if window else later >= 0


def _mask_with_prefix(segments: jax.Array, positions: jax.Array, prefix: Prefix, *, window: int) -> jax.Array:
    """bool[B, T, 2T]: which tokens of the sequence that is continued a token attends to, and then which ones of its own."""
    before = _same(prefix.segments, prefix.of(segments)) & (prefix.segments > 0)[:, :, None]
    if window:
        before &= positions[:, :, None] - prefix.of(positions)[:, None, :] < window
    own = _causal_mask(segments.shape[1], window) & _same(segments, segments)
    return jnp.concatenate([before, own], axis=2)


def _attend_xla(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention by two batches of matrix products, whose heads come before their tokens: XLA's CPU backend is slower on others.

    Args: query: [B, T, N, H]; key, value: [B, S, G, H]; mask: bool[B, T, S], or what broadcasts to it.
    """
    B, T, N, H = query.shape
    S, G = key.shape[1:3]
    query = query.reshape(B, T, G, N // G, H).transpose(0, 2, 3, 1, 4).reshape(B, G, -1, H)
    key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
    scores = jnp.einsum("BGxH,BGSH->BGxS", query, key, preferred_element_type=jnp.float32) * (1 / math.sqrt(H))
    scores = jnp.where(mask[:, None, None], scores.reshape(B, G, N // G, T, S), _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    attended = jnp.einsum("BGxS,BGSH->BGxH", weights.reshape(B, G, -1, S), value)
    return attended.reshape(B, G, N // G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def fastest(platform: str, dtype: Any, head_size: int) -> str:
    """The kernel that "auto" stands for: that of models.hardware, or "xla" where cuDNN's does not take dtype and heads."""
    kernel: str = hardware.value("model.attention", hardware.AUTO, platform)
    takes = dtype == jnp.bfloat16 and cudnn_takes(head_size)
    return "xla" if kernel == "cudnn" and not (platform == "gpu" and takes) else kernel


def cudnn_takes(head_size: int) -> bool:
    """Whether cuDNN's flash attention computes heads of this size."""
    return head_size % 8 == 0 and head_size <= 128


def whole_rows(B: int, T: int, segments: jax.Array | None, **options: Any) -> Attend:
    """The `attend` of B whole sequences of T tokens. It keeps key and value [B, T, G, H]. Args: see attend."""

    def attend_rows(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, Any]:
        query, key, value = (x.reshape(B, T, *x.shape[1:]) for x in (query, key, value))
        attended = attend(query, key, value, segments, **options)
        return attended.reshape(B * T, *attended.shape[2:]), (key, value)

    return attend_rows


def last_of_prompt(cache: tuple[jax.Array, ...], before: jax.Array) -> Attend:
    """The `attend` of the last token of Q prompts, which reads itself and earlier tokens. It keeps nothing.

    Args: cache: keys, values [Q, G, P, H]; before: bool[Q, P], the earlier tokens that are read.
    """

    def attend_last(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, None]:
        itself = (key[:, :, None], value[:, :, None])
        return attend_in_two_parts(query, cache, itself, before[:, None], jnp.ones((len(query), 1), bool)), None

    return attend_last


def one_token(
    prompt: tuple[jax.Array, ...],
    own: tuple[jax.Array, ...],
    entry: jax.Array,
    prompt_mask: jax.Array,
    own_mask: jax.Array,
    *,
    tiled: bool = False,
) -> Attend:
    """The `attend` of one new token in each row. It keeps the row's own keys and values, with the new token's at `entry`.

    Args:
      entry: int32[]; for the others see attend_in_two_parts. Caches may have more entries than the masks, which are not read.
      tiled: static, the form for TPUs: caches are read as they were before the step, and the new token is a part of its own.
        If the step read what it has written, XLA would write the whole cache, not one entry.
    """
    prompt = tuple(x[:, :, : prompt_mask.shape[-1]] for x in prompt)
    before = own_mask & (jnp.arange(own_mask.shape[-1]) != entry)

    def read(caches: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(x[:, :, : own_mask.shape[-1]] for x in caches)

    def attend_cached(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, Any]:
        def written(cached: jax.Array, new: jax.Array) -> jax.Array:
            new = new.reshape(len(new), cached.shape[1], 1, cached.shape[3])
            return jax.lax.dynamic_update_slice_in_dim(cached, new, entry, axis=2)

        if not tiled:
            kept = written(own[0], key), written(own[1], value)
            return attend_in_two_parts(query, prompt, read(kept), prompt_mask, own_mask), kept
        itself = key, value
        attended = attend_in_two_parts(query, prompt, read(own), prompt_mask, before, itself=itself, least_rows=2)
        attended, key, value = jax.lax.optimization_barrier((attended, key, value))  # the caches are written after they are read
        return attended, (written(own[0], key), written(own[1], value))

    return attend_cached


def attend_in_two_parts(
    query: jax.Array,
    prompt: tuple[jax.Array, ...],
    own: tuple[jax.Array, ...],
    prompt_mask: jax.Array,
    own_mask: jax.Array,
    *,
    itself: tuple[jax.Array, jax.Array] | None = None,
    least_rows: int = 1,
) -> jax.Array:
    """Attention of one new token a row: to the prompt that its group shares and to its own continuation, one softmax over both.

    Args:
      query, result: [B, N, H] with B = J·W; prompt: keys and values [J, G, S, H].
      own: keys and values [B, G, R, H]; or [B, G/t, R, t·H], where t heads lie side by side in an entry.
      prompt_mask: bool[J, W, S]; own_mask: bool[B, R].
      itself: key and value [B, G, H] of the new token, where `own` does not have them.
      least_rows: static: a matrix product has so many rows of queries; rows of zeros are added. On TPUs 2: XLA computes a product
        of one row in other units, and copies the caches of the whole decode loop into another layout for them.
    """
    (prompt_keys, prompt_values), (own_keys, own_values) = prompt, own
    B, N, H = query.shape
    J, G, S, _ = prompt_keys.shape
    W, n, dtype, scale = B // J, N // G, query.dtype, 1 / math.sqrt(H)
    product, together = functools.partial(_product, least_rows=least_rows), G // own_keys.shape[1]
    query = query.reshape(B, G, n, H)
    prompt_query = _by_group(query, J).reshape(J, G, W * n, H)
    prompt_scores = product("JGxH,JGSH->JGxS", prompt_query, prompt_keys, preferred_element_type=jnp.float32)
    prompt_scores = jnp.where(prompt_mask[:, None, :, None, :], prompt_scores.reshape(J, G, W, n, S) * scale, _MASKED)
    own_scores = product("BGnH,BGRH->BGnR", _side_by_side(query, together), own_keys, preferred_element_type=jnp.float32)
    own_scores = jnp.where(own_mask[:, None, None, :], own_scores.reshape(B, G, n, -1) * scale, _MASKED)
    largest = jnp.maximum(_by_row(jnp.max(prompt_scores, axis=-1)), jnp.max(own_scores, axis=-1))
    if itself is not None:
        scores = jnp.einsum("BGnH,BGH->BGn", query, itself[0], preferred_element_type=jnp.float32) * scale
        largest = jnp.maximum(largest, scores)
    prompt_weights = jnp.exp(prompt_scores - _by_group(largest, J)[..., None])
    own_weights = jnp.exp(own_scores - largest[..., None])
    total = _by_row(jnp.sum(prompt_weights, axis=-1)) + jnp.sum(own_weights, axis=-1)
    of_prompt = product("JGxS,JGSH->JGxH", prompt_weights.reshape(J, G, W * n, S).astype(dtype), prompt_values)
    own_weights = own_weights.astype(dtype).reshape(B, G // together, together * n, -1)
    attended = _by_row(of_prompt.reshape(J, G, W, n, H)) + _apart(product("BGnR,BGRH->BGnH", own_weights, own_values), together)
    if itself is not None:
        weights = jnp.exp(scores - largest)
        total, attended = total + weights, attended + weights.astype(dtype)[..., None] * itself[1][:, :, None]
    return (attended / total[..., None]).astype(dtype).reshape(B, N, H)


def _by_group(x: jax.Array, groups: int) -> jax.Array:
    """[B, G, n, ...] -> [J, G, W, n, ...]."""
    return x.reshape(groups, -1, *x.shape[1:]).swapaxes(1, 2)


def _by_row(x: jax.Array) -> jax.Array:
    """The inverse of _by_group."""
    x = x.swapaxes(1, 2)
    return x.reshape(-1, *x.shape[2:])


def _product(equation: str, rows: jax.Array, cache: jax.Array, *, least_rows: int, **options: Any) -> jax.Array:
    """einsum of rows [., ., x, .] and a cache. Args: least_rows: see attend_in_two_parts."""
    added = max(0, least_rows - rows.shape[2])
    return jnp.einsum(equation, jnp.pad(rows, ((0, 0), (0, 0), (0, added), (0, 0))), cache, **options)[:, :, : rows.shape[2]]


def _side_by_side(query: jax.Array, together: int) -> jax.Array:
    """[B, G, n, H] -> [B, G/t, t·n, t·H]: queries whose products with t heads side by side are those with their own head."""
    if together == 1:
        return query
    B, G, n, H = query.shape
    own = jnp.eye(together, dtype=bool)[:, None, :, None]
    query = query.reshape(B, G // together, together, n, 1, H)
    return jnp.where(own, query, 0).reshape(B, G // together, together * n, together * H)


def _apart(attended: jax.Array, together: int) -> jax.Array:
    """[B, G/t, t·n, t·H] -> [B, G, n, H]: the part of each query's own head."""
    if together == 1:
        return attended
    B, groups, rows, _ = attended.shape
    attended = attended.reshape(B, groups, together, rows // together, together, -1)
    heads = jnp.stack([attended[:, :, t, :, t] for t in range(together)], axis=2)
    return heads.reshape(B, groups * together, *heads.shape[3:])
