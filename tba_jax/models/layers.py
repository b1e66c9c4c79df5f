"""What decoder and encoder are built from: linear maps, norms, rotary positions, attention.

Equations use the letters of the axis table (trajectory.py), with `t` for flat tokens B·T: XLA's CPU backend is several times
slower on the gradients of a matrix product with two leading axes than on the same product with one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax import mesh as mesh_lib
from tba_jax.models.parameters import Params

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}

# How much a rematerialised layer keeps for its backward pass -> policy of jax.checkpoint.
REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,  # the layer's input alone
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # also results of linear maps, not attention scores
}
REMAT = ("none", *REMAT_POLICIES)


def full_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes matrix products of a function of `config` float32 where config.compute_dtype says so.

    By default GPUs round the inputs of such products to 10 bits (TF32) and TPUs to 7, so that sampler and learner would
    disagree by a thousandth of a nat.
    """

    @functools.wraps(function)
    def call(*args: Any, config: Any, **kwargs: Any) -> Any:
        with jax.default_matmul_precision("highest" if config.compute_dtype == "float32" else None):
            return function(*args, config=config, **kwargs)

    return call


def remat(function: Any, policy: str) -> Any:
    """`function` with the named rematerialisation policy ("none": as it is)."""
    return function if policy == "none" else jax.checkpoint(function, policy=REMAT_POLICIES[policy])


def linear(equation: str, x: jax.Array, weights: Params, *, dtype: Any = None) -> jax.Array:
    """A linear map: einsum(equation, x, weight) and what else `weights` holds.

    Args:
      equation: as "tD,DNH->tNH", letters of the axis table; x, the weight, the result.
      weights: `weight`, in a float dtype, or int8 with `quant_scale` float32[outputs] (models/quantize.py); optionally `bias`
        [outputs]; optionally `lora_a` [inputs, rank] and `lora_b` [rank, outputs], B already scaled (models/lora.py).
      dtype: of the result and of the sums in it; default: x.dtype.

    Returns:
      `dtype`. On a mesh, weights are gathered over the fsdp axis where they are used, and the result is split as its letters say.
    """
    operands, result = equation.split("->")
    x_axes, weight_axes = operands.split(",")
    weight = mesh_lib.constrain(weights["weight"], weight_axes).astype(x.dtype)
    y = jnp.einsum(equation, x, weight, preferred_element_type=dtype)
    outputs = "".join(axis for axis in weight_axes if axis not in x_axes)
    if "quant_scale" in weights:
        y = (y.astype(jnp.float32) * weights["quant_scale"]).astype(y.dtype)
    if "lora_a" in weights:
        inputs = "".join(axis for axis in weight_axes if axis in x_axes)
        batch = "".join(axis for axis in x_axes if axis not in inputs)
        low = jnp.einsum(f"{x_axes},{inputs}r->{batch}r", x, mesh_lib.constrain(weights["lora_a"], f"{inputs}r"))
        y = y + jnp.einsum(f"{batch}r,r{outputs}->{result}", low, mesh_lib.constrain(weights["lora_b"], f"r{outputs}"))
    if "bias" in weights:
        y = y + mesh_lib.constrain(weights["bias"], outputs)
    return mesh_lib.constrain(y, result)


def norm(x: jax.Array, weights: Params, epsilon: float, kind: str) -> jax.Array:
    """RMS norm or layer norm (kind "rms", "layer") over the last axis, in float32: bfloat16 loses digits of mean and variance."""
    x32 = x.astype(jnp.float32)
    if kind == "layer":
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)
    y = normed * weights["scale"].astype(jnp.float32)
    return (y + weights["bias"].astype(jnp.float32) if "bias" in weights else y).astype(x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's scaling of rotary frequencies: wavelengths beyond original_positions / low_frequency are stretched by `factor`,
    those below original_positions / high_frequency kept, those between interpolated."""

    factor: float
    low_frequency: float
    high_frequency: float
    original_positions: int


def rotary_frequencies(size: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """float32[size / 2], radians per position."""
    frequency = theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    if scaling is not None:
        turns = scaling.original_positions * frequency / (2 * np.pi)
        kept = np.clip((turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency), 0.0, 1.0)
        frequency = frequency * (kept + (1 - kept) / scaling.factor)
    return frequency.astype(np.float32)


def rotary_tables(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """cos, sin: float32[..., 1, size / 2] for int32[...] positions; the 1 broadcasts over heads."""
    angle = positions.astype(jnp.float32)[..., None, None] * frequencies
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first elements of x [..., heads, H], as many as the tables cover, pairing i with i + size/2 (rotate-half)."""
    half = cos.shape[-1]
    x32 = x.astype(jnp.float32)
    first, second, rest = x32[..., :half], x32[..., half : 2 * half], x32[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1).astype(x.dtype)


def attend(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None, *, causal: bool, kernel: str) -> jax.Array:
    """Attention over whole sequences.

    Args:
      query: [B, T, N, H]; key, value: [B, T, G, H]. mask: bool[B, 1, T, T] (query, key), or None.
      kernel: "xla", "cudnn" (flash attention on NVIDIA GPUs), or "auto": cudnn where it can be used.

    Returns:
      [B, T, N, H]; softmax in float32.
    """
    fits = query.dtype in (jnp.bfloat16, jnp.float16) and query.shape[-1] % 8 == 0 and query.shape[-1] <= 128
    usable = kernel == "auto" and jax.default_backend() == "gpu" and fits
    implementation: Literal["xla", "cudnn"] = "cudnn" if kernel == "cudnn" or usable else "xla"
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=causal, implementation=implementation)


# Stands for -inf in scores: a row without anything to attend to, as an idle slot is, must not become NaN.
_MASKED = -1e30


def attend_in_two_parts(
    query: jax.Array,
    prompt: tuple[jax.Array, ...],
    own: tuple[jax.Array, ...],
    prompt_mask: jax.Array,
    own_mask: jax.Array,
) -> jax.Array:
    """Attention of one new token a row: to the prompt that its group shares and to its own continuation, one softmax over both.

    Each part is one batch of matrix products, [W·N/G, H] × [H, S] a head and group, [N/G, H] × [H, R] a head and row.

    Args:
      query: [B, N, H] with B = J·W; prompt: keys and values [J, G, S, H]; own: keys and values [B, G, R, H].
      prompt_mask: bool[J, W, S]; own_mask: bool[B, R].

    Returns:
      [B, N, H]; softmax in float32. Rows that attend to nothing are finite.
    """
    (prompt_keys, prompt_values), (own_keys, own_values) = prompt, own
    B, N, H = query.shape
    J, G, S, _ = prompt_keys.shape
    W, n, dtype = B // J, N // G, query.dtype
    scale = 1 / math.sqrt(H)

    def by_group(x: jax.Array) -> jax.Array:
        """[B, G, n, ...] -> [J, G, W, n, ...]."""
        return x.reshape(J, W, *x.shape[1:]).swapaxes(1, 2)

    def by_row(x: jax.Array) -> jax.Array:
        """The inverse of by_group."""
        return x.swapaxes(1, 2).reshape(B, G, *x.shape[3:])

    own_query = query.reshape(B, G, n, H)
    prompt_query = by_group(own_query).reshape(J, G, W * n, H)
    prompt_scores = jnp.einsum("JGxH,JGSH->JGxS", prompt_query, prompt_keys, preferred_element_type=jnp.float32)
    prompt_scores = prompt_scores.reshape(J, G, W, n, S) * scale
    prompt_scores = jnp.where(prompt_mask[:, None, :, None, :], prompt_scores, _MASKED)
    own_scores = jnp.einsum("BGnH,BGRH->BGnR", own_query, own_keys, preferred_element_type=jnp.float32) * scale
    own_scores = jnp.where(own_mask[:, None, None, :], own_scores, _MASKED)
    largest = jnp.maximum(by_row(jnp.max(prompt_scores, axis=-1)), jnp.max(own_scores, axis=-1))
    prompt_weights = jnp.exp(prompt_scores - by_group(largest)[..., None])
    own_weights = jnp.exp(own_scores - largest[..., None])
    total = by_row(jnp.sum(prompt_weights, axis=-1)) + jnp.sum(own_weights, axis=-1)
    of_prompt = jnp.einsum("JGxS,JGSH->JGxH", prompt_weights.reshape(J, G, W * n, S).astype(dtype), prompt_values)
    of_own = jnp.einsum("BGnR,BGRH->BGnH", own_weights.astype(dtype), own_values)
    attended = (by_row(of_prompt.reshape(J, G, W, n, H)) + of_own) / total[..., None]
    return attended.astype(dtype).reshape(B, N, H)
