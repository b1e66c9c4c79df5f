"""The layers of decoder and encoder: linear maps (with LoRA and int8 as variants), norms, embeddings, scalar heads.

A module states shape, axes, initialiser and equation of its parameters in one place. Equations use the letters of the axis table
(trajectory.py), with `t` for flat tokens B·T: XLA's CPU backend is several times slower on the gradients of a matrix product with
two leading axes than on the same product with one.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

from tba_jax import sharding
from tba_jax.models.config import CLAMPED, CLAMPED_GAIN, CLAMPED_LIMIT, STD, ModelConfig
from tba_jax.models.parameters import parameter

# Name of a setting -> policy of jax.checkpoint, which says what a layer keeps for its backward pass. None: it keeps everything.
REMAT_POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,  # keeps the layer's input alone
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # also keeps results of linear maps, not of experts
}
REMAT = tuple(REMAT_POLICIES)

# Name in config.ACTIVATIONS -> function of each element.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}
_LEVELS = 127  # int8 values on either side of 0


def clamped(gate: jax.Array, up: jax.Array) -> jax.Array:
    """g σ(1.702 g) (u + 1), elementwise, of g = min(gate, 7) and u = up within ±7."""
    gate, up = jnp.minimum(gate, CLAMPED_LIMIT), jnp.clip(up, -CLAMPED_LIMIT, CLAMPED_LIMIT)
    return gate * jax.nn.sigmoid(CLAMPED_GAIN * gate) * (up + 1)


def gate_by(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """act(gate) · up, elementwise, or clamped(gate, up). Args: activation: a name of ACTIVATIONS, or CLAMPED."""
    return clamped(gate, up) if activation == CLAMPED else ACTIVATIONS[activation](gate) * up


def full_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of a model, with exact products if its compute dtype is float32: by default GPUs round their inputs to 10 bits
    (TF32) and TPUs to 7, so that sampler and learner would disagree by a thousandth of a nat."""

    @functools.wraps(function)
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.default_matmul_precision("highest" if model.config.compute_dtype == "float32" else None):
            return function(model, *args, **kwargs)

    return call


class Einsum(nnx.Module):
    """A linear map: y = einsum(equation, x, weight) + bias. Letters of the axis table name the weight's dimensions, inputs first.

    Two variants have more parameters: one has a low-rank adapter (`adapt`), and the weight of the other is int8 (`quantize`).
    """

    bias: Any = None
    lora_a: Any = None
    lora_b: Any = None
    quant_scale: Any = None

    def __init__(self, equation: str, sizes: Mapping[str, int], *, bias: bool = False, std: float = STD, rngs: nnx.Rngs):
        """Args: equation: as "tD,DNH->tNH": x, weight, result; sizes: letter -> size; std: of the initial weight."""
        self.equation, self.lora_scale = equation, 0.0
        self.weight = parameter(self.axes, sizes, nnx.initializers.normal(std), rngs)
        if bias:
            self.bias = parameter(self.outputs, sizes, nnx.initializers.zeros_init(), rngs)

    @property
    def axes(self) -> str:
        """The letters of the weight's dimensions."""
        return self.equation.split("->")[0].split(",")[1]

    @property
    def inputs(self) -> str:
        """The letters that the weight shares with x: the map sums over them."""
        x_axes = self.equation.split(",")[0]
        return "".join(axis for axis in self.axes if axis in x_axes)

    @property
    def outputs(self) -> str:
        """The letters of the weight that x does not have."""
        return "".join(axis for axis in self.axes if axis not in self.inputs)

    def __call__(self, x: jax.Array, *, dtype: Any = None) -> jax.Array:
        """The map of x in `dtype` (default: the dtype of x). Products are summed in the same dtype.

        On a mesh, the weight is gathered over the fsdp axis where it is used, and the result is split as its letters say.
        """
        weight = sharding.constrain(self.weight[...], self.axes).astype(x.dtype)
        y = self._product(x, weight, dtype)
        if self.quant_scale is not None:
            y = (y.astype(jnp.float32) * self.quant_scale[...]).astype(y.dtype)
        if self.lora_a is not None:
            into, out_of = self.adapter_equations()
            lora_a = sharding.constrain(self.lora_a[...], f"{self.inputs}r").astype(x.dtype)
            lora_b = sharding.constrain(self.lora_b[...], f"r{self.outputs}").astype(x.dtype)
            y = y + jnp.einsum(out_of, self.lora_scale * jnp.einsum(into, x, lora_a), lora_b)
        if self.bias is not None:
            y = y + sharding.constrain(self.bias[...], self.outputs).astype(y.dtype)
        return sharding.constrain(y, self.equation.split("->")[1])

    def _product(self, x: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
        """einsum(equation, x, weight). On CPUs a product of two matrices: of others, XLA copies transposed operands there, most
        of them in the backward pass."""
        if sharding.platform() != "cpu":
            return jnp.einsum(self.equation, x, weight, preferred_element_type=dtype)
        summed = len(self.inputs)
        rows, columns = x.shape[: x.ndim - summed], weight.shape[summed:]
        inputs = math.prod(weight.shape[:summed])
        y = jnp.matmul(x.reshape(-1, inputs), weight.reshape(inputs, -1), preferred_element_type=dtype)
        return y.reshape(*rows, *columns)

    def adapter_equations(self) -> tuple[str, str]:
        """The einsum equations of x A and of (x A) B."""
        x_axes, result = self.equation.split(",")[0], self.equation.split("->")[1]
        low = f"{x_axes.removesuffix(self.inputs)}r"
        return f"{x_axes},{self.inputs}r->{low}", f"{low},r{self.outputs}->{result}"

    def sizes(self) -> dict[str, int]:
        """Letter -> size of each dimension of the weight; "L" is the first dimension of a stacked map."""
        letters = self._stacked() + self.axes
        return dict(zip(letters, self.weight.shape, strict=True))

    def adapt(self, rank: int, scale: float, rngs: nnx.Rngs) -> None:
        """Adds a low-rank adapter (LoRA, Hu et al., 2021): y = einsum(x, weight) + scale · (x A) B.

        B is 0, and A uniform in ±1/√(size of x), as in PEFT, so that published learning rates of adapters hold here.
        """
        sizes, stacked = self.sizes() | {"r": rank}, self._stacked()
        bound = math.prod(sizes[letter] for letter in self.inputs) ** -0.5
        self.lora_scale = scale

        def random(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
            return jax.random.uniform(key, shape, dtype, -bound, bound)

        zeros = nnx.initializers.zeros_init()
        self.lora_a = parameter(f"{stacked}{self.inputs}r", sizes, random, rngs, nnx.LoRAParam)
        self.lora_b = parameter(f"{stacked}r{self.outputs}", sizes, zeros, rngs, nnx.LoRAParam)

    def merge(self) -> None:
        """Replaces the weight by weight + scale · A B, float32, and drops the adapter, if there is one."""
        if self.lora_a is None:
            return
        equation = f"...{self.inputs}r,...r{self.outputs}->...{self.axes}"
        update = jnp.einsum(equation, self.lora_a[...], self.lora_b[...], precision="highest")
        merged = self.weight[...].astype(jnp.float32) + self.lora_scale * update
        self.weight = nnx.Param(merged, axes=self.weight.get_metadata("axes"))
        del self.lora_a, self.lora_b

    def quantize(self) -> None:
        """Makes the weight int8 with one symmetric float32 scale for each output: weight ≈ int8 · quant_scale.

        Samplers may decode with it: trajectory balance asks no more of the sampling distribution than full support.
        """
        stacked = self._stacked()
        inputs = tuple(len(stacked) + self.axes.index(axis) for axis in self.inputs)
        weight = self.weight[...].astype(jnp.float32)
        largest = jnp.max(jnp.abs(weight), axis=inputs, keepdims=True)
        scale = jnp.where(largest > 0, largest, 1.0) / _LEVELS
        self.weight = nnx.Param(jnp.round(weight / scale).astype(jnp.int8), axes=sharding.logical_axes(stacked + self.axes))
        self.quant_scale = nnx.Param(jnp.squeeze(scale, inputs), axes=sharding.logical_axes(stacked + self.outputs))

    def _stacked(self) -> str:
        """ "L" if the map is stacked, else ""."""
        return "L" * (len(self.weight.shape) - len(self.axes))


def linear_maps(model: nnx.Module) -> Iterator[tuple[str, Einsum]]:
    """(dotted name, map) of every linear map of a model."""
    for path, part in nnx.iter_modules(model):
        if isinstance(part, Einsum):
            yield ".".join(map(str, path)), part


def float32_sums(equation: str) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """einsum(equation, x, weight) for weights that a loop reads again and again: product(x, weight, master) -> float32.

    Args: equation: as "tD,DV->tV".

    The arguments of the function that is returned: x, in the compute dtype; weight, in that dtype, gathered once by the caller;
    master, the parameter that `weight` was made from, which is not read. Products are made in the compute dtype with float32
    sums, in the backward pass too. The gradient, and its sums over a loop, go to `master` alone, in its dtype.
    """
    operands, result = equation.split("->")
    x_axes, axes = operands.split(",")

    def einsum(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
        # The backward pass is traced outside of `full_precision`.
        precision = "highest" if x.dtype == jnp.float32 else None
        return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=jnp.float32)

    @jax.custom_vjp
    def product(x: jax.Array, weight: jax.Array, master: jax.Array) -> jax.Array:
        return sharding.constrain(einsum(equation, x, weight), result)

    def forward(x: jax.Array, weight: jax.Array, master: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return product(x, weight, master), (x, weight, master)

    def backward(kept: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, None, jax.Array]:
        x, weight, master = kept
        cotangent = cotangent.astype(x.dtype)
        of_x = einsum(f"{result},{axes}->{x_axes}", cotangent, weight).astype(x.dtype)
        return of_x, None, einsum(f"{x_axes},{result}->{axes}", x, cotangent).astype(master.dtype)

    product.defvjp(forward, backward)
    return product


def over_rows(product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """product(x, weight, master) for a function that is vmapped over rows: all rows go through one product, flattened into `t`.

    It is differentiated with its vmap only: jax.grad of a function that vmaps it.
    """
    vmapped = jax.custom_batching.custom_vmap(product)

    @vmapped.def_vmap
    def flattened(size: int, batched: Any, x: jax.Array, weight: jax.Array, master: jax.Array) -> tuple[jax.Array, bool]:
        assert batched == [True, False, False], "the weight is the same for all rows"
        y = product(x.reshape(size * x.shape[1], *x.shape[2:]), weight, master)
        return y.reshape(size, x.shape[1], *y.shape[1:]), True

    return vmapped


@flax.struct.dataclass
class ReadyMap:
    """x -> product(x, weight, master), see float32_sums."""

    weight: jax.Array
    master: jax.Array
    product: Callable[..., jax.Array] = flax.struct.field(pytree_node=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.product(x, self.weight, self.master)


class Norm(nnx.Module):
    """A norm over the last axes, those of its scale, in float32, since bfloat16 loses digits of mean and variance.

    Kind "rms": y = scale · x / rms(x); "offset_rms": y = (1 + scale) · x / rms(x); "layer": y = scale · (x - mean) / std + bias.
    """

    bias: Any = None

    def __init__(self, kind: str, axes: str, sizes: Mapping[str, int], *, epsilon: float, rngs: nnx.Rngs):
        self.kind, self.epsilon, self.over = kind, epsilon, tuple(range(-len(axes), 0))
        initializer = nnx.initializers.zeros_init() if kind == "offset_rms" else nnx.initializers.ones_init()
        self.scale = parameter(axes, sizes, initializer, rngs)
        if kind == "layer":
            self.bias = parameter(axes, sizes, nnx.initializers.zeros_init(), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        if self.kind == "layer":
            x32 = x32 - jnp.mean(x32, axis=self.over, keepdims=True)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=self.over, keepdims=True) + self.epsilon)

        def weight(parameter: Any) -> jax.Array:
            """The parameter rounded to the compute dtype, as samplers hold it."""
            return parameter[...].astype(x.dtype).astype(jnp.float32)

        scale = weight(self.scale)
        y = normed * (1 + scale if self.kind == "offset_rms" else scale)
        return (y if self.bias is None else y + weight(self.bias)).astype(x.dtype)


class FeedForward(nnx.Module):
    """down(act(gate(x)) · up(x)), or down(act(up(x))) without a gate."""

    gate: Any = None

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c, sizes = config, config.sizes
        self.activation = c.activation
        if c.gated:
            self.gate = Einsum("tD,DF->tF", sizes, bias=c.ffn_bias, rngs=rngs)
        self.up = Einsum("tD,DF->tF", sizes, bias=c.ffn_bias, rngs=rngs)
        self.down = Einsum("tF,FD->tD", sizes, bias=c.ffn_bias, std=c.residual_std, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x [t, D] to [t, D]."""
        up = self.up(x)
        return self.down(ACTIVATIONS[self.activation](up) if self.gate is None else gate_by(self.activation, self.gate(x), up))


class Embedding(nnx.Module):
    """A table of vectors: y = weight[index]."""

    def __init__(self, axes: str, sizes: Mapping[str, int], *, rngs: nnx.Rngs):
        self.axes = axes
        self.weight = parameter(axes, sizes, nnx.initializers.normal(STD), rngs)

    def __call__(self, index: jax.Array, *, dtype: str) -> jax.Array:
        """Returns dtype[t, D] for indices int32[t]."""
        return sharding.constrain(self.weight[...].astype(dtype), self.axes)[index]


class ScalarHead(nnx.Module):
    """A linear map of hidden states to C numbers, in float32: scores of sequences, values of states, log Z of prompts, and the
    logits of a router over experts.

    y = x W + b. It is a small product, and rewards, losses or choices of experts read it.
    """

    bias: Any = None

    def __init__(self, width: int, *, outputs: int = 1, bias: bool, std: float, rngs: nnx.Rngs):
        sizes = {"D": width, "C": outputs}
        initializer = nnx.initializers.normal(std) if std else nnx.initializers.zeros_init()
        self.weight = parameter("DC", sizes, initializer, rngs)
        if bias:
            self.bias = parameter("C", sizes, nnx.initializers.zeros_init(), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """float32[..., C] of x [..., D]."""
        weight = sharding.constrain(self.weight[...], "DC").astype(jnp.float32)
        y = jnp.matmul(x.astype(jnp.float32), weight, precision="highest")
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)
