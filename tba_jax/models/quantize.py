"""Weight-only int8 for samplers: one symmetric scale for each output channel of a linear map, activations as they are.

A searcher may sample from such a policy: trajectory balance needs no more of it than full support (PAPER §1).
"""

import jax.numpy as jnp

from tba_jax.models import parameters
from tba_jax.models.parameters import Params, ParamSpec, Specs

_LEVELS = 127


def is_quantized(name: str, spec: ParamSpec) -> bool:
    """Whether the parameter becomes int8: weights of linear maps in the layers and of lm_head."""
    return spec.inputs > 0 and name.startswith(("layers.", "lm_head."))


def quantize(params: Params, specs: Specs) -> Params:
    """`params` with int8 weights in every layer's linear maps and in lm_head; embeddings, norms and biases stay as they are.

    Args:
      params: float parameters, as specs describe them.

    Returns:
      a tree in which `weight` is int8, and `quant_scale` float32[layers, outputs] stands beside it:
      weight ≈ int8 · quant_scale, off by at most half a scale.
    """
    flat, table = parameters.flatten(params), parameters.flatten(specs)
    quantized = dict(flat)
    for name, weight in flat.items():
        spec = table[name]
        if not is_quantized(name, spec):
            continue
        first = 1 if spec.axes[0] == "layers" else 0
        inputs = tuple(range(first, first + spec.inputs))
        weight = weight.astype(jnp.float32)
        largest = jnp.max(jnp.abs(weight), axis=inputs, keepdims=True)
        scale = jnp.where(largest > 0, largest, 1.0) / _LEVELS
        quantized[name] = jnp.round(weight / scale).astype(jnp.int8)
        quantized[name.removesuffix("weight") + "quant_scale"] = jnp.squeeze(scale, inputs)
    return parameters.unflatten(quantized)
