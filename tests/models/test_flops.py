"""Operations counted from shapes against the matrix products of the model as it is traced."""

import math

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.models import decoder, hardware, parameters
from tests.support import tiny_decoders

B, T = 2, 12


def products(jaxpr, times: int = 1) -> int:
    """Operations of all matrix products of a program, two for each multiplication; a loop's body counts as often as it runs."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            sizes = [equation.invars[0].aval.shape[axis] for axis in contracted]
            total += times * 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(sizes)
        again = times * equation.params.get("length", 1)
        inner = [products(inner, again) for inner in jax.extend.core.jaxprs_in_params(equation.params)]
        total += max(inner) if equation.primitive.name == "cond" else sum(inner)
    return total


@pytest.mark.parametrize("name", ["grouped, tied", "multi-head, untied", "learned positions", "local and global layers"])
def test_products_of_a_traced_model(name):
    config = tiny_decoders.CONFIGS[name]
    made = decoder.define(config)
    shapes = parameters.map_specs(lambda _, spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), made.specs)

    def forward(params, tokens):
        model = parameters.module(made.graphdef, params)
        return model.head()(model(tokens).reshape(B * T, config.width))

    traced = jax.make_jaxpr(forward)(shapes, jax.ShapeDtypeStruct((B, T), jnp.int32))
    # The traced attention computes all pairs, also those that the mask hides.
    pairs = 4 * config.layers * config.heads * config.head_size * T * T
    hidden = pairs - hardware.attention_flops(config, T)
    assert products(traced.jaxpr) == B * (hardware.forward_flops(config, positions=T, logits=T) + hidden)


@pytest.mark.parametrize("window", [0, 1, 3, 50])
def test_attention_is_of_each_token_to_those_before_it(window):
    config = tiny_decoders.CONFIGS["grouped, tied"]
    pattern = dict(layer_pattern="gl", window=window) if window else dict(layer_pattern="", window=0)
    config = type(config)(**{**vars(config), **pattern})
    one = 4 * config.heads * config.head_size
    for positions in (1, 2, 10):
        seen = sum(min(t, window) if local else t for local in config.local_layers for t in range(1, positions + 1))
        assert hardware.attention_flops(config, positions) == one * seen
    assert hardware.attention_flops(config, np.array([1, 9, 9])) == sum(hardware.attention_flops(config, n) for n in (1, 9, 9))
