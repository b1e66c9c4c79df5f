"""Attention on TPUs by JAX' splash attention: scores exist a block at a time, so that memory grows with T and not with T²."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

from tba_jax import sharding

# Tokens of a block of queries or keys: a multiple of _LANES, the width of a TPU's vector register.
_LANES = 128
_LARGEST_BLOCK = 512
_PADDING = -1  # segment of the positions that are added to a row


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, *, causal: bool, window: int, interpret: bool
) -> jax.Array:
    """See attention.attend. On the mesh of the context, each device computes its own rows and heads. In float32, products are
    exactly float32, those of the backward pass too.

    Args: interpret: whether other operations compute the kernel block by block, as they can on devices that are no TPUs.
    """
    here = functools.partial(_attend_here, causal=causal, window=window, interpret=interpret)
    if segments is None and causal:  # added positions come last, where no query of the row reads them
        return sharding.by_device(here, query, key, value, axes=("BTNH", "BTGH", "BTGH"), result="BTNH")
    if segments is None:
        segments = jnp.zeros(query.shape[:2], jnp.int32)
    return sharding.by_device(here, query, key, value, segments, axes=("BTNH", "BTGH", "BTGH", "BT"), result="BTNH")


def _attend_here(
    query: jax.Array, key: jax.Array, value: jax.Array, *segments: jax.Array, causal: bool, window: int, interpret: bool
) -> jax.Array:
    """`attend` for the rows and heads of one device. Args: segments: int32[B, T], or nothing."""
    _, T, N, H = query.shape
    blocks = -(-T // _LARGEST_BLOCK)
    size = -(-T // (blocks * _LANES)) * _LANES
    added = blocks * size - T
    # The kernel does not divide scores. In bfloat16, a factor that is rounded would change all of them alike.
    query = (query.astype(jnp.float32) / math.sqrt(H)).astype(query.dtype)
    arrays = [jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, added), (0, 0))) for x in (query, key, value)]
    arrays += [jnp.pad(x, ((0, 0), (0, added)), constant_values=_PADDING) for x in segments]

    def by_row(query: jax.Array, key: jax.Array, value: jax.Array, *segments: jax.Array) -> Any:
        kernel = _kernel(blocks * size, N, size, causal=causal, window=window, interpret=interpret)
        return jax.vmap(kernel)(query, key, value, *(splash_attention_kernel.SegmentIds(x, x) for x in segments))

    attended = _full_precision(by_row, *arrays) if query.dtype == jnp.float32 else by_row(*arrays)
    return attended[:, :, :T].swapaxes(1, 2)


def _full_precision(function: Callable[..., jax.Array], *args: jax.Array) -> jax.Array:
    """function(*args) with float32 products: the kernel's own backward pass is traced outside of `layers.full_precision`."""

    @jax.custom_vjp
    def exact(*args: jax.Array) -> jax.Array:
        return function(*args)

    def forward(*args: jax.Array) -> tuple[jax.Array, Callable[..., Any]]:
        return jax.vjp(function, *args)

    def backward(pull: Callable[..., Any], cotangent: jax.Array) -> Any:
        with jax.default_matmul_precision("highest"):
            return pull(cotangent)

    exact.defvjp(forward, backward)
    with jax.default_matmul_precision("highest"):
        return exact(*args)


def _kernel(
    T: int, N: int, size: int, *, causal: bool, window: int, interpret: bool
) -> splash_attention_kernel.SplashAttentionKernel:
    """The kernel of a row of T tokens, a multiple of `size`, and N query heads. Args: size: tokens of a block."""
    mask: splash_attention_mask.Mask = splash_attention_mask.FullMask((T, T))
    if window:
        mask = splash_attention_mask.LocalMask((T, T), (window - 1, 0), 0)
    elif causal:
        mask = splash_attention_mask.CausalMask((T, T))
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes: dict[str, Any] = dict.fromkeys(names, size)
    blocks = splash_attention_kernel.BlockSizes(**sizes)
    heads = splash_attention_mask.MultiHeadMask([mask] * N)
    return splash_attention_kernel.make_splash_mha(heads, block_sizes=blocks, head_shards=1, q_seq_shards=1, interpret=interpret)
