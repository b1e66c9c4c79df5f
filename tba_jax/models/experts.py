"""Mixtures of experts: each token goes through the k experts of a layer that its router weighs highest, however many choose one.

Tokens are sorted by expert, so that the tokens of an expert are one product with its weight. No expert has a capacity, and no
token is dropped. Experts are split over the mesh axis `tensor`, along which each device has the whole activations of the same
tokens: it computes its own experts for them, and results are added up over the axis, as those of attention are. An axis for
experts alone would have to send tokens between devices.
"""

import functools
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from tba_jax import sharding
from tba_jax.models.config import STD, DecoderConfig
from tba_jax.models.layers import Einsum, ScalarHead, gate_by

# Tiles of `tgmm`. An expert of qwen3-30b-a3b has about 512 rows of a batch: taller tiles would mix experts. Wider ones exceed the
# VMEM of a v5p in float32.
_TILE_ROWS, _TILE_BYTES = 256, 2048


@flax.struct.dataclass
class Routing:
    """Sums over the tokens that are counted, for each of L layers; one layer's are without the axis.

    tokens: float32[L, e], those that go through each expert; probabilities: float32[L, e], of the router's softmax; entropy:
    float32[L], nats, of that softmax; counted: float32[L], tokens.
    """

    tokens: chex.Array
    probabilities: chex.Array
    entropy: chex.Array
    counted: chex.Array


class ExpertMaps(Einsum):
    """One linear map of every expert of a layer, all in one weight, for tokens that are sorted by expert. See `Experts`."""

    def __call__(self, x: jax.Array, *, dtype: Any = None) -> jax.Array:
        raise TypeError("the maps of experts are computed together, by Experts")


class Experts(nnx.Module):
    """y = Σ_i p_i · down_i(gate_by(act, gate_i(x), up_i(x))) over the k experts i with the largest p = softmax(router(x)).

    Router, softmax, choice and weights are float32 whatever the compute dtype; the router's weight is rounded to that dtype, as
    samplers hold it, so that sampler and learner choose alike.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        c, sizes = config, config.sizes
        self.activation, self.chosen, self.norm_top_k = c.activation, c.experts_per_token, c.norm_top_k
        self.router = ScalarHead(c.width, outputs=c.experts, bias=c.ffn_bias, std=STD, rngs=rngs)
        self.gate = ExpertMaps("tD,eDf->tf", sizes, bias=c.ffn_bias, rngs=rngs)
        self.up = ExpertMaps("tD,eDf->tf", sizes, bias=c.ffn_bias, rngs=rngs)
        self.down = ExpertMaps("tf,efD->tD", sizes, bias=c.ffn_bias, std=c.residual_std, rngs=rngs)

    def __call__(self, x: jax.Array, counted: jax.Array | None = None) -> tuple[jax.Array, Routing | None]:
        """Maps x [t, D] to [t, D]. Args: counted: [t], how often each token counts in the Routing; None: none."""
        probabilities = jax.nn.softmax(self.router(x), axis=-1)
        # XLA would gather the tokens of all devices to choose.
        weights, experts = sharding.by_device(self._choose, probabilities, axes=("tC",), result=("tC", "tC"))
        maps = [self.gate, self.up, self.down]
        arrays: list[jax.Array | None] = [each.weight[...].astype(x.dtype) for each in maps]
        axes = [each.axes for each in maps]
        of_outputs = [each.quant_scale for each in maps] + [each.bias for each in maps]
        arrays += [None if each is None else each[...] for each in of_outputs]
        axes += 2 * [each.outputs for each in maps]
        of_all, on_tpu = probabilities.shape[-1], sharding.platform() == "tpu"
        here = functools.partial(_here, activation=self.activation, of_all=of_all, on_tpu=on_tpu)
        given = (x, weights, experts, jnp.arange(of_all), *arrays)
        parts = sharding.by_device(here, *given, axes=("tD", "tk", "tk", "e", *axes), result="etD")
        y = sharding.constrain(jnp.sum(parts, axis=0), "tD")
        return y, None if counted is None else _routing(probabilities, experts, counted)

    def _choose(self, probabilities: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Weights and numbers of the experts of each token, float32 and int32[t, k]."""
        weights, experts = jax.lax.top_k(probabilities, self.chosen)
        return weights / jnp.sum(weights, axis=-1, keepdims=True) if self.norm_top_k else weights, experts


def _routing(probabilities: jax.Array, experts: jax.Array, counted: jax.Array) -> Routing:
    """Of one layer. Args: probabilities: float32[t, e]; experts: int32[t, k]; counted: [t], how often a token counts."""
    real = counted.astype(jnp.float32)
    chosen = jnp.sum(jax.nn.one_hot(experts, probabilities.shape[-1]), axis=1)
    entropy = -jnp.sum(jax.scipy.special.xlogy(probabilities, probabilities), axis=-1)
    return Routing(tokens=real @ chosen, probabilities=real @ probabilities, entropy=real @ entropy, counted=jnp.sum(real))


def _here(
    x: jax.Array,
    weights: jax.Array,
    experts: jax.Array,
    own: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *of_outputs: jax.Array | None,
    activation: str,
    of_all: int,
    on_tpu: bool,
) -> jax.Array:
    """What the experts of one device add to its tokens, [1, t, D].

    The tokens of an expert lie in consecutive places: on TPUs one behind the other, with empty places after the last expert's;
    elsewhere in whole blocks, the last of which may have empty places.

    Args: x: [t, D]; weights, experts: float32 and int32[t, k]; own: int32[e], the numbers of the device's experts, in turn; gate,
    up: [e, D, f]; down: [e, f, D]; of_outputs: the float32 scales of int8 weights, [e, f], [e, f] and [e, D], and their
    biases, of the same shapes; None, where there are none; of_all: experts of all devices.
    """
    (t, k), e = experts.shape, len(own)
    block = 1 if on_tpu else _block(t * k / of_all)
    places = _whole_tiles(t * k) if on_tpu else (t * k // block + e) * block
    number = experts.reshape(-1) - own[0]
    number = jnp.where((number >= 0) & (number < e), number, e)  # tokens of other devices' experts come last, and have no place
    order = jnp.argsort(number)
    sizes = jnp.bincount(number, length=e + 1)[:e]
    blocks = -(-sizes // block)
    first = jnp.cumsum(blocks) * block - blocks * block + sizes - jnp.cumsum(sizes)
    number = number[order]
    place = jnp.where(number < e, jnp.append(first, 0)[number] + jnp.arange(t * k), places)
    token = jnp.full(places, t).at[place].set(order // k, mode="drop")  # t: the place is empty
    weight = jnp.zeros(places).at[place].set(weights.reshape(-1)[order], mode="drop")
    expert_of = jnp.searchsorted(jnp.cumsum(blocks), jnp.arange(places // block), side="right").clip(0, e - 1)
    by_row = jnp.where(token < t, expert_of.repeat(block), e)  # e: what an empty place holds has no gradient

    def by_place(of_experts: jax.Array) -> jax.Array:
        return of_experts.at[by_row].get(mode="fill", fill_value=0)

    def product(x: jax.Array, of_experts: jax.Array, number: int) -> jax.Array:
        if on_tpu:
            y = _by_row(x, of_experts, sizes, sharding.platform() != "tpu")
        else:
            y = _by_block(x.reshape(-1, block, x.shape[1]), of_experts, expert_of, jnp.sum(blocks)).reshape(places, -1)
        scale, bias = of_outputs[number], of_outputs[3 + number]
        if scale is None and bias is None:
            return y
        exact = y.astype(jnp.float32)  # so the gradient of a bias, a sum over rows, is one of float32
        exact = exact if scale is None else exact * by_place(scale)
        return (exact if bias is None else exact + by_place(bias.astype(jnp.float32))).astype(y.dtype)

    rows = x.at[token].get(mode="fill", fill_value=0)
    y = product(gate_by(activation, product(rows, gate, 0), product(rows, up, 1)), down, 2)
    sums = jnp.zeros(x.shape, jnp.float32).at[token].add(y.astype(jnp.float32) * weight[:, None], mode="drop")
    return sums[None].astype(x.dtype)


def _block(mean: float) -> int:
    """Places of a block, half of the mean number of tokens of an expert: larger blocks have more empty places, and products of
    smaller ones are slow."""
    return next((size for size in (8, 16, 32, 64) if 2 * size >= mean), 128)


@jax.custom_vjp
def _by_block(x: jax.Array, weight: jax.Array, expert_of: jax.Array, used: jax.Array) -> jax.Array:
    """[n, block, b]: y_i = x_i · weight[expert_of_i] of the first blocks; 0 of the others.

    Other than for TPUs, XLA computes ragged_dot with the weights of all experts for every token.

    Args: x: [n, block, a]; weight: [e, a, b]; expert_of: int32[n]; used: int32[], blocks that hold tokens.
    """

    def add(i: jax.Array, y: jax.Array) -> jax.Array:
        return y.at[i].set(_exact(x[i], weight[expert_of[i]]).astype(y.dtype))

    return jax.lax.fori_loop(0, used, add, jnp.zeros((*x.shape[:2], weight.shape[2]), x.dtype))


def _exact(x: jax.Array, y: jax.Array) -> jax.Array:
    """x · y with float32 sums, and exact products of float32."""
    # The backward pass is traced outside of layers.full_precision.
    return jnp.matmul(x, y, precision=_precision(x), preferred_element_type=jnp.float32)


def _precision(x: jax.Array) -> str | None:
    return "highest" if x.dtype == jnp.float32 else None


def _forward(*args: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _by_block(*args), args


def _backward(kept: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, jax.Array, None, None]:
    x, weight, expert_of, used = kept

    def add(i: jax.Array, of_weight: jax.Array) -> jax.Array:
        return of_weight.at[expert_of[i]].add(_exact(x[i].T, cotangent[i]))

    of_x = _by_block(cotangent, weight.swapaxes(1, 2), expert_of, used)
    of_weight = jax.lax.fori_loop(0, used, add, jnp.zeros(weight.shape, jnp.float32))
    return of_x, of_weight.astype(weight.dtype), None, None


_by_block.defvjp(_forward, _backward)


def _whole_tiles(rows: int) -> int:
    """`rows` rounded up to whole tiles of `tgmm`. Padding in the backward pass would copy both arguments of the kernel."""
    tile = _TILE_ROWS if rows > _TILE_ROWS else 16
    return -(-rows // tile) * tile


def _tile(size: int, most: int) -> int:
    """Columns of a tile, in whole registers of 128, where the fewest tiles of at most `most` columns hold `size` columns."""
    return min(size, -(-size // (-(-size // most) * 128)) * 128)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _by_row(x: jax.Array, weight: jax.Array, sizes: jax.Array, interpret: bool) -> jax.Array:
    """[m, b]: y_r = x_r · weight[expert of r], for TPUs. Rows of y after those of the last expert are undefined, and those of x
    do not count.

    Args: x: [m, a], m as of `_whole_tiles`; weight: [e, a, b]; sizes: int32[e], rows of each expert in turn; interpret: whether
    other operations compute the kernel of the gradient, on devices that cannot run it.
    """
    return jax.lax.ragged_dot(x, weight, sizes, precision=_precision(x))


def _forward_by_row(x: jax.Array, weight: jax.Array, sizes: jax.Array, interpret: bool) -> tuple[jax.Array, Any]:
    return _by_row(x, weight, sizes, interpret), (x, weight, sizes)


def _backward_by_row(interpret: bool, kept: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    """The TPU's compiler would expand JAX's own gradient by the weights to [e, m, a], all rows for each expert."""
    # Imports Pallas, which processes without TPUs can do without.
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    x, weight, sizes = kept
    of_x = _by_row(cotangent, weight.swapaxes(1, 2), sizes, interpret)
    most = _TILE_BYTES // weight.dtype.itemsize
    tiling = (min(len(x), _TILE_ROWS), _tile(x.shape[1], most), _tile(cotangent.shape[1], most))
    with jax.default_matmul_precision(_precision(x)):  # tgmm sums in float32, and writes 0 for experts without rows
        of_weight = tgmm(x.T, cotangent, sizes, weight.dtype, tiling, interpret=interpret)
    return of_x, of_weight, None


_by_row.defvjp(_forward_by_row, _backward_by_row)
