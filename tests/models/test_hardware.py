"""What stands in for settings that a kind of device does not have; such devices are described, not needed.

Operations counted from shapes against the matrix products of the model as it is traced.
"""

import dataclasses
import math
from types import SimpleNamespace

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax import sharding
from tba_jax.models import attention, decoder, hardware, parameters
from tba_jax.models.config import DecoderConfig
from tba_jax.models.policy import Policy
from tests.support import tiny_decoders

T4 = SimpleNamespace(platform="gpu", device_kind="Tesla T4", compute_capability="7.5")
A100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100", compute_capability="8.0")
AMD = SimpleNamespace(platform="gpu", device_kind="AMD Instinct MI300X", compute_capability="gfx942")
TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
CPU = jax.devices()[0]


def model(compute_dtype: str, attention: str) -> DecoderConfig:
    sizes = dict(layers=1, width=8, heads=1, kv_heads=1, head_size=8, ffn=8, vocab=8, max_positions=8)
    return DecoderConfig(**sizes, compute_dtype=compute_dtype, attention=attention)


@pytest.mark.parametrize(
    "device, asked, gets, said",
    [
        (T4, ("bfloat16", "auto"), ("float32", "xla"), ["model.compute_dtype=bfloat16"]),
        (T4, ("bfloat16", "cudnn"), ("float32", "xla"), ["model.compute_dtype=bfloat16", "model.attention=cudnn"]),
        (A100, ("bfloat16", "cudnn"), ("bfloat16", "cudnn"), []),
        (AMD, ("bfloat16", "cudnn"), ("bfloat16", "xla"), ["model.attention=cudnn"]),
        (TPU, ("bfloat16", "splash"), ("bfloat16", "splash"), []),
        (CPU, ("bfloat16", "xla"), ("bfloat16", "xla"), []),
    ],
    ids=str,
)
def test_a_device_computes_with_what_it_has_and_the_log_says_so(device, asked, gets, said, caplog):
    found = Policy(model=model(*asked)).on_device(device)
    assert (found.model.compute_dtype, found.model.attention) == gets and found.snapshot_dtype == gets[0]
    sentences = [record.getMessage() for record in caplog.records]
    assert [sentence.split(":")[0] for sentence in sentences] == said
    for name, sentence in zip(said, sentences, strict=True):
        assert device.device_kind in sentence and gets[name.startswith("model.attention")] in sentence


@pytest.mark.parametrize("device, kernel", [(CPU, "splash"), (A100, "splash"), (CPU, "cudnn"), (TPU, "cudnn")], ids=str)
def test_a_kernel_of_another_platform_is_refused(device, kernel):
    with pytest.raises(ValueError, match=rf"^model\.attention={kernel} needs an? [\w ]+; JAX found {device.platform} \("):
        hardware.on_device(model("bfloat16", kernel), device, section="model")


def test_attention_is_the_tables_where_the_device_takes_it():
    half = jnp.dtype("bfloat16")
    assert [attention.fastest(platform, half, 64) for platform in ("cpu", "gpu", "tpu")] == ["xla", "cudnn", "splash"]
    assert {attention.fastest("gpu", *no) for no in ((jnp.dtype("float32"), 64), (half, 256), (half, 12))} == {"xla"}
    assert attention.fastest("gpu", half, 64, sinks=True) == "xla"


B, T = 2, 12


def products(jaxpr, times: int = 1) -> int:
    """Operations of all matrix products of a program, two for each multiplication; a loop's body counts as often as it runs."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "ragged_dot_general"):
            ragged = equation.params.get("ragged_dot_dimension_numbers")
            (contracted, _), _ = ragged.dot_dimension_numbers if ragged else equation.params["dimension_numbers"]
            sizes = [equation.invars[0].aval.shape[axis] for axis in contracted]
            total += times * 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(sizes)
        again = times * equation.params.get("length", 1)
        inner = [products(inner, again) for inner in jax.extend.core.jaxprs_in_params(equation.params)]
        total += max(inner) if equation.primitive.name == "cond" else sum(inner)
    return total


@pytest.mark.parametrize(
    "name", ["grouped, tied", "multi-head, untied", "learned positions", "local and global layers", "experts", "gpt-oss"]
)
def test_products_of_a_traced_model(monkeypatch, name):
    config = dataclasses.replace(tiny_decoders.CONFIGS[name], attention="xla")
    if config.experts:  # on CPUs they are computed in blocks with empty places
        monkeypatch.setattr(sharding, "platform", lambda: "tpu")
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
    assert hardware.attention_flops(config, np.array([1, 10, 10])) == sum(
        hardware.attention_flops(config, n) for n in (1, 10, 10)
    )
