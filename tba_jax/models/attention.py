"""Attention: the module with its projections, rotary positions, and the kernels of whole rows, for training and prefill.

kv_cache.py has the kernels that read caches, for decoding.
"""

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
from tba_jax.models.parameters import parameter

# cos and sin of positions [t], or None where positions are not rotary.
Rotary = tuple[jax.Array, jax.Array] | None
# attend(query [t, N, H], key [t, G, H], value [t, G, H], sinks [N] or None) -> ([t, N, H], keys and values to keep, or None).
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], tuple[jax.Array, Any]]


class Prefix(NamedTuple):
    """Which sequences continue others: B sequences in W ways, each of which continues one of its own way.

    sequence: int32[W, B / W], the number of the continued sequence in its way; segments: int32[B, T], the segment of it to which
    a token attends besides its own, 0 for none.
    """

    sequence: jax.Array
    segments: jax.Array

    def of(self, x: jax.Array) -> jax.Array:
        """[B, ...] -> [B, ...]: the values of the continued sequences."""
        by_way = x.reshape(*self.sequence.shape, *x.shape[1:])
        return jax.vmap(lambda of_way, sequence: of_way[sequence])(by_way, self.sequence).reshape(x.shape)


# Splash attention: tokens of a block of queries or keys, a multiple of the width of a TPU's vector register.
_LANES, _LARGEST_BLOCK = 128, 512
_PADDING = -1  # segment of the positions that are added to a row
# Stands for -inf in scores: a row without anything to attend to, as an idle slot is, must not become NaN.
MASKED = -1e30


class Attention(nnx.Module):
    """Projections of a multi-head attention with N query heads that share G key and value heads."""

    query_norm: Any = None
    key_norm: Any = None
    sinks: Any = None

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c, sizes = config, config.sizes
        self.query_scale = math.sqrt(c.head_size / (c.query_scalar or c.head_size))
        self.query = Einsum("tD,DNH->tNH", sizes, bias=c.qkv_bias, rngs=rngs)
        self.key = Einsum("tD,DGH->tGH", sizes, bias=c.qkv_bias, rngs=rngs)
        self.value = Einsum("tD,DGH->tGH", sizes, bias=c.qkv_bias, rngs=rngs)
        self.out = Einsum("tNH,NHD->tD", sizes, bias=c.out_bias, std=c.residual_std, rngs=rngs)
        if c.sinks:
            self.sinks = parameter("N", sizes, nnx.initializers.zeros_init(), rngs)
        if c.qk_norm:
            norm = functools.partial(Norm, c.norm, sizes=sizes, epsilon=c.norm_epsilon, rngs=rngs)
            self.query_norm, self.key_norm = (norm(axes if c.qk_norm == "token" else "H") for axes in ("NH", "GH"))

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
        attended, kept = attend(*self.project(x, rotary), None if self.sinks is None else self.sinks[...])
        return self.out(attended), kept


def rotary_frequencies(size: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """float32[size / 2], radians per position."""
    frequency = theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    if scaling is not None and not scaling.original_positions:
        frequency = frequency / scaling.factor
    elif scaling is not None and scaling.yarn:
        # The elements, not whole, of which the original positions are so many turns.
        turns = np.array([scaling.high_frequency, scaling.low_frequency])
        low, high = np.log(scaling.original_positions / (2 * np.pi * turns)) * size / (2 * np.log(theta))
        low, high = max(low, 0), min(high, size - 1)
        kept = 1 - np.clip((np.arange(size // 2) - low) / (high - low or 0.001), 0.0, 1.0)
        frequency = frequency * (kept + (1 - kept) / scaling.factor)
    elif scaling is not None:
        turns = scaling.original_positions * frequency / (2 * np.pi)
        kept = np.clip((turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency), 0.0, 1.0)
        frequency = frequency * (kept + (1 - kept) / scaling.factor)
    return frequency.astype(np.float32)


def rotary(positions: jax.Array, config: DecoderConfig, *, local: bool) -> Rotary:
    """cos, sin: float32[t, 1, size / 2] of positions int32[t], which all local or all global layers share."""
    if config.positions != "rotary":
        return None
    size, theta, scaling = config.rotary_size or config.head_size, config.rope_theta, config.rope_scaling
    if local and config.local_rope_theta:
        theta, scaling = config.local_rope_theta, None
    angle = positions.astype(jnp.float32)[:, None, None] * rotary_frequencies(size, theta, scaling)
    length = 1 + math.log(max(scaling.factor, 1)) / 10 if scaling is not None and scaling.yarn else 1.0
    return length * jnp.cos(angle), length * jnp.sin(angle)


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
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention over whole sequences.

    Args:
      query, result: [B, T, N, H]; key, value: [B, T, G, H]; the softmax is float32.
      segments: int32[B, T], at least 0; a token attends to the tokens of its segment. None: a row is one segment.
      kernel: "xla", "cudnn" (flash attention on NVIDIA GPUs), "splash" (on TPUs; on other devices it is interpreted, which is
        for tests), or "auto": what `fastest` says.
      window: with causal attention, a query attends to at most this many tokens, the last of which is itself; 0: to all.
      positions: int32[B, T]; prefix: which tokens of other sequences are read as well, causally; not by "splash".
      sinks: [N], a further score in the softmaxes of each query head, without a value; not with "cudnn". None: there are none.
    """
    platform = sharding.platform()
    if kernel == "auto":
        kernel = fastest(platform, query.dtype, query.shape[-1], sinks=sinks is not None)
    if prefix is not None:
        assert causal and segments is not None and positions is not None and kernel != "splash"
        mask = _mask_with_prefix(segments, positions, prefix, window=window)
        key, value = (jnp.concatenate([prefix.of(x), x], axis=1) for x in (key, value))
        if kernel == "xla":
            return _attend_xla(query, key, value, mask, sinks)
        return jax.nn.dot_product_attention(query, key, value, mask=mask[:, None], implementation="cudnn")
    if kernel == "splash":
        return _attend_splash(query, key, value, segments, sinks, causal=causal, window=window, interpret=platform != "tpu")
    if kernel == "xla":
        mask = _causal_mask(query.shape[1], window) if causal else jnp.ones((1, 1, 1), bool)
        return _attend_xla(query, key, value, mask if segments is None else mask & _same(segments, segments), sinks)
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


def _attend_xla(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Two batches of matrix products with heads before tokens: XLA's CPU backend is slower on others. mask: as bool[B, T, S]."""
    B, T, N, H = query.shape
    S, G = key.shape[1:3]
    query = query.reshape(B, T, G, N // G, H).transpose(0, 2, 3, 1, 4).reshape(B, G, -1, H)
    key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
    scores = jnp.einsum("BGxH,BGSH->BGxS", query, key, preferred_element_type=jnp.float32) * (1 / math.sqrt(H))
    scores = jnp.where(mask[:, None, None], scores.reshape(B, G, N // G, T, S), MASKED)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sinks = sinks.astype(jnp.float32).reshape(G, N // G, 1, 1)
        largest = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks))
        weights = jnp.exp(scores - largest)
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sinks - largest))
    attended = jnp.einsum("BGxS,BGSH->BGxH", weights.astype(value.dtype).reshape(B, G, -1, S), value)
    return attended.reshape(B, G, N // G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def _attend_splash(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    sinks: jax.Array | None,
    *,
    causal: bool,
    window: int,
    interpret: bool,
) -> jax.Array:
    """JAX' splash attention: scores exist a block at a time, so that memory grows with T and not with T². Each device computes
    its own rows and heads. Args: interpret: whether other operations compute the kernel block by block, on devices without it."""
    if segments is None and not causal:  # otherwise added positions come last, where no query of the row reads them
        segments = jnp.zeros(query.shape[:2], jnp.int32)
    here = functools.partial(_splash_here, causal=causal, window=window, interpret=interpret)
    axes = ("BTNH", "BTGH", "BTGH", "BT", "N")
    return sharding.by_device(here, query, key, value, segments, sinks, axes=axes, result="BTNH")


def _splash_here(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    sinks: jax.Array | None,
    *,
    causal: bool,
    window: int,
    interpret: bool,
) -> jax.Array:
    """`_attend_splash` for the rows and heads of one device."""
    # Imports Pallas, which processes without TPUs can do without.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    _, T, N, H = query.shape
    blocks = -(-T // _LARGEST_BLOCK)
    size = -(-T // (blocks * _LANES)) * _LANES
    padded = blocks * size
    # The kernel does not divide scores. In bfloat16, a factor that is rounded would change all of them alike.
    query = (query.astype(jnp.float32) / math.sqrt(H)).astype(query.dtype)
    arrays = [jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, padded - T), (0, 0))) for x in (query, key, value)]
    if segments is not None:
        segments = jnp.pad(segments, ((0, 0), (0, padded - T)), constant_values=_PADDING)

    def by_row(query: jax.Array, key: jax.Array, value: jax.Array, segments: Any, sinks: Any) -> Any:
        mask: masks.Mask = masks.CausalMask((padded, padded)) if causal else masks.FullMask((padded, padded))
        if window:
            mask = masks.LocalMask((padded, padded), (window - 1, 0), 0)
        names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
        sizes: dict[str, Any] = dict.fromkeys(names, size)
        options: dict[str, Any] = dict(block_sizes=kernels.BlockSizes(**sizes), head_shards=1, q_seq_shards=1)
        kernel = kernels.make_splash_mha(masks.MultiHeadMask([mask] * N), **options, interpret=interpret)
        ids = None if segments is None else kernels.SegmentIds(segments, segments)
        return jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))(query, key, value, ids, sinks)

    exactly = _full_precision if query.dtype == jnp.float32 else lambda function, *args: function(*args)
    attended = exactly(by_row, *arrays, segments, sinks)
    return attended[:, :, :T].swapaxes(1, 2)


def _full_precision(function: Callable[..., jax.Array], *args: Any) -> jax.Array:
    """function(*args) with float32 products: the kernel's own backward pass is traced outside of `layers.full_precision`."""

    @jax.custom_vjp
    def exact(*args: Any) -> jax.Array:
        return function(*args)

    def forward(*args: Any) -> tuple[jax.Array, Callable[..., Any]]:
        return jax.vjp(function, *args)

    def backward(pull: Callable[..., Any], cotangent: jax.Array) -> Any:
        with jax.default_matmul_precision("highest"):
            return pull(cotangent)

    exact.defvjp(forward, backward)
    with jax.default_matmul_precision("highest"):
        return exact(*args)


def fastest(platform: str, dtype: Any, head_size: int, *, sinks: bool = False) -> str:
    """The kernel that "auto" stands for: that of models.hardware, or "xla" where cuDNN's does not take dtype, heads or sinks."""
    kernel: str = hardware.value("model.attention", hardware.AUTO, platform)
    takes = dtype == jnp.bfloat16 and cudnn_takes(head_size) and not sinks
    return "xla" if kernel == "cudnn" and not (platform == "gpu" and takes) else kernel


def cudnn_takes(head_size: int) -> bool:
    """Whether cuDNN's flash attention computes heads of this size."""
    return head_size % 8 == 0 and head_size <= 128


def whole_rows(B: int, T: int, segments: jax.Array | None, **options: Any) -> Attend:
    """The `attend` of B whole sequences of T tokens. It keeps key and value [B, T, G, H]. Args: see attend."""

    def attend_rows(query: jax.Array, key: jax.Array, value: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, Any]:
        query, key, value = (x.reshape(B, T, *x.shape[1:]) for x in (query, key, value))
        attended = attend(query, key, value, segments, sinks=sinks, **options)
        return attended.reshape(B * T, *attended.shape[2:]), (key, value)

    return attend_rows
