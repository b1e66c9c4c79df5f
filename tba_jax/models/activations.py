"""The activations of feed-forward layers: their functions, and their names in config.json."""

import dataclasses
import functools
from collections.abc import Callable

import jax


@dataclasses.dataclass(frozen=True)
class Activation:
    """function: applied to each element of an array. names: its names in config.json; export writes the first."""

    function: Callable[[jax.Array], jax.Array]
    names: tuple[str, ...]


ACTIVATIONS = {
    "silu": Activation(jax.nn.silu, ("silu", "swish")),
    "gelu": Activation(functools.partial(jax.nn.gelu, approximate=False), ("gelu",)),
    "gelu_tanh": Activation(functools.partial(jax.nn.gelu, approximate=True), ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")),
    "relu": Activation(jax.nn.relu, ("relu",)),
}

# Name in config.json -> name in ACTIVATIONS.
OURS = {name: ours for ours, activation in ACTIVATIONS.items() for name in activation.names}
