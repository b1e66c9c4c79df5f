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


def attend_to_cache(query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
    """Attention of one new token a row. query: [B, N, H]; keys, values: [B, G, S, H]; mask: bool[B, S]. Returns [B, N, H]."""
    B, N, H = query.shape
    G = keys.shape[1]
    bias = jnp.where(mask, 0.0, -jnp.inf)[:, None, None, :]
    grouped = query.reshape(B, G, N // G, H)
    scores = jnp.einsum("BGnH,BGSH->BGnS", grouped, keys, preferred_element_type=jnp.float32) / math.sqrt(H)
    weights = jax.nn.softmax(scores + bias, axis=-1).astype(query.dtype)
    return jnp.einsum("BGnS,BGSH->BGnH", weights, values).reshape(B, N, H)
