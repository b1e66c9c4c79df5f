"""Modules and the plain trees that stand for them elsewhere: definitions, stacks, linear maps against NumPy, the kernel."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tba_jax
from tba_jax import sharding
from tba_jax.learner import state as state_lib
from tba_jax.models import decoder, kv_cache, parameters, scoring
from tba_jax.models.layers import Einsum, Embedding, Norm, ScalarHead
from tba_jax.models.policy import LoraConfig, Policy
from tests.support import applied
from tests.support.tiny_decoders import CONFIGS, EVERYTHING, GROUPED

SIZES = {"D": 6, "N": 2, "H": 3, "F": 5, "V": 7}


def test_a_module_states_shape_axes_and_start_of_its_parameters():
    linear = Einsum("tD,DNH->tNH", SIZES, bias=True, std=0.5, rngs=nnx.Rngs(0))
    assert linear.weight.shape == (6, 2, 3) and linear.weight.axes == ("embed", "heads", "head")
    assert linear.bias.shape == (2, 3) and linear.bias.axes == ("heads", "head") and not linear.bias[...].any()
    assert 0.25 < np.std(linear.weight[...]) < 1.0
    out = Einsum("tNH,NHD->tD", SIZES, rngs=nnx.Rngs(0))
    assert (out.inputs, out.outputs) == ("NH", "D") and out.bias is None
    assert (Norm("rms", "D", SIZES, epsilon=1e-6, rngs=nnx.Rngs(0)).scale[...] == 1).all()
    assert Embedding("VD", SIZES, rngs=nnx.Rngs(0)).weight.axes == ("vocab", "embed")
    assert not ScalarHead(6, bias=True, std=0.0, rngs=nnx.Rngs(0)).weight[...].any()


@pytest.mark.parametrize("equation, inputs", [("tD,DNH->tNH", 1), ("tNH,NHD->tD", 2)])
def test_variants_of_a_linear_map_equal_numpy(equation, inputs):
    """The map with a bias; with an adapter beside it; with the adapter merged; rounded to integers."""
    rng = np.random.default_rng(0)
    linear = Einsum(equation, SIZES, bias=True, std=1.0, rngs=nnx.Rngs(1))
    x = rng.standard_normal((4, *linear.weight.shape[:inputs])).astype(np.float32)
    weight, linear.bias[...] = np.asarray(linear.weight[...], np.float64), rng.standard_normal(linear.bias.shape)
    bias = np.asarray(linear.bias[...], np.float64)

    def expected(weight: np.ndarray) -> np.ndarray:
        return np.tensordot(x.astype(np.float64), weight, axes=inputs) + bias

    np.testing.assert_allclose(linear(x), expected(weight), atol=1e-5)
    linear.adapt(2, 0.5, nnx.Rngs(2))
    np.testing.assert_allclose(linear(x), expected(weight), atol=1e-5)  # B begins at 0
    linear.lora_b[...] = rng.standard_normal(linear.lora_b.shape)
    a, b = (np.asarray(part[...], np.float64) for part in (linear.lora_a, linear.lora_b))
    merged = weight + 0.5 * np.tensordot(a, b, axes=1)
    np.testing.assert_allclose(linear(x), expected(merged), atol=1e-5)
    linear.merge()
    assert linear.lora_a is None and linear.lora_b is None
    np.testing.assert_allclose(linear.weight[...], merged, atol=1e-5)
    np.testing.assert_allclose(linear(x), expected(merged), atol=1e-5)
    linear.quantize()
    scale = np.asarray(linear.quant_scale[...], np.float64)
    assert linear.weight.dtype == jnp.int8 and scale.shape == linear.bias.shape
    assert (np.abs(np.asarray(linear.weight[...]) * scale - merged) <= scale / 2 * 1.001).all()
    np.testing.assert_allclose(linear(x), expected(np.asarray(linear.weight[...]) * scale), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_definition_holds_no_weights_and_rebuilds_the_module(config):
    definition = decoder.define(config)
    assert hash(definition.graphdef) == hash(decoder.define(config).graphdef)
    assert definition.graphdef == decoder.define(config).graphdef
    assert not jax.tree.leaves(definition.graphdef)
    specs = parameters.flatten(definition.specs)
    assert all(spec.axes[0] == "layers" and spec.shape[0] == config.layers for name, spec in specs.items() if "layers." in name)
    params = applied.random(definition.specs, scale=0.3)
    jax.tree.map(np.testing.assert_array_equal, parameters.pure(parameters.module(definition.graphdef, params)), params)


def test_unstacked_layers_are_those_of_the_stack():
    params = applied.random(applied.specs(GROUPED), scale=0.3)
    model = parameters.module(kv_cache.define(GROUPED).graphdef, kv_cache.unstack(params, GROUPED))
    assert len(model.layers) == GROUPED.layers
    for layer, block in enumerate(model.layers):
        expected = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"])
        jax.tree.map(np.testing.assert_array_equal, parameters.pure(block), expected)
    specs = parameters.flatten(kv_cache.define(GROUPED).specs)
    assert specs["layers.1.attention.query.weight"] == parameters.ParamSpec(shape=(32, 4, 8), axes=("embed", "heads", "head"))


def test_other_weights_of_samplers_than_there_are_are_refused():
    with pytest.raises(ValueError, match="weights='int4' is neither 'full' nor 'int8'"):
        kv_cache.define(GROUPED, "int4")


def test_a_train_state_is_arrays_and_a_static_graph_definition():
    policy = Policy(model=GROUPED)
    optimizers = {"policy": optax.sgd(0.1), "log_z_head": optax.sgd(0.1), "value_head": optax.sgd(0.1)}
    state = state_lib.init_state(policy, policy.base.init(jax.random.key(0)), optimizers)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert set(state.params) == set(state.opt_state) == {"policy", "log_z_head", "value_head"}
    mesh = sharding.make_mesh((1, 1, 1), setting="test", devices=jax.devices()[:1])
    assert jax.tree.structure(state_lib.state_shapes(policy, optimizers, mesh)) == jax.tree.structure(state)
    plain = state_lib.init_state(policy, state.params["policy"], {"policy": optax.sgd(0.1)})
    assert plain.graphdef != state.graphdef and set(plain.params) == {"policy"}
    model = state.model(state.params, {})
    assert model.log_z_head is not None and plain.model(plain.params, {}).value_head is None


def head_gradient(config, steps: int) -> jax.Array:
    """float32[V, D] of log-probs and the table that is both embedding and head, in blocks of so many steps."""
    rng = np.random.default_rng(0)
    B, R, V = 2, 96, config.vocab
    table = (0.3 * rng.standard_normal((V, config.width))).astype(np.float32)
    hidden = rng.standard_normal((B, R, config.width)).astype(config.compute_dtype)
    tokens = rng.integers(0, V, (B, R)).astype(np.int32)

    def loss(table):
        params = applied.with_table(table, config)
        return applied.token_logprobs(params, hidden, tokens, config=config, space=EVERYTHING, logit_bytes=4 * B * V * steps)[
            0
        ].sum()

    return jax.jit(jax.grad(loss))(table)


def test_gradients_of_the_head_are_summed_over_blocks_in_float32():
    """96 blocks of a bfloat16 model: summed in bfloat16 they would be off by more than a hundredth of the largest."""
    config = dataclasses.replace(GROUPED, compute_dtype="bfloat16")
    whole, blocks = head_gradient(config, 96), head_gradient(config, 1)
    assert whole.dtype == jnp.float32
    np.testing.assert_allclose(blocks, whole, atol=1e-5 * np.abs(whole).max())


def test_the_head_is_cast_once_to_the_compute_dtype():
    config = dataclasses.replace(GROUPED, compute_dtype="bfloat16")
    V, D = config.vocab, config.width

    def loss(table, hidden):
        tokens = jnp.zeros(hidden.shape[:2], jnp.int32)
        params = applied.with_table(table, config)
        return applied.token_logprobs(params, hidden, tokens, config=config, space=EVERYTHING, logit_bytes=4 * 2 * V)[0].sum()

    shapes = jax.ShapeDtypeStruct((V, D), jnp.float32), jax.ShapeDtypeStruct((2, 5, D), jnp.bfloat16)
    loops = [
        eqn for eqn in equations(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*shapes).jaxpr) if eqn.primitive.name == "scan"
    ]
    assert len(loops) == 2  # forward, and backward
    inside = [eqn for loop in loops for eqn in equations(loop.params["jaxpr"].jaxpr)]
    products = [eqn for eqn in inside if eqn.primitive.name == "dot_general"]
    assert len(products) >= 4  # forward, again in the backward pass, and its two transposes
    for product in products:
        assert {str(variable.aval.dtype) for variable in product.invars} == {"bfloat16"}
        assert product.outvars[0].aval.dtype == jnp.float32
        assert len(product.invars[0].aval.shape) == 2  # all rows are one product
    casts = [eqn for eqn in inside if eqn.primitive.name == "convert_element_type"]
    assert not [eqn for eqn in casts if set(eqn.invars[0].aval.shape) == {V, D}]


def equations(jaxpr):
    """All equations of a program, those of the programs inside of it included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")
        ):
            if hasattr(inner, "jaxpr"):
                inner = inner.jaxpr
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_on_the_head_go_through_the_kernel(dtype):
    """In blocks, with gradients of the adapters, against the head with the adapters merged."""
    config = dataclasses.replace(GROUPED, tied_embedding=False, compute_dtype=dtype)
    policy = Policy(model=config, lora=LoraConfig(rank=2, alpha=4.0, targets=("lm_head",)))
    base = applied.random(policy.model_specs, scale=0.3)
    adapters = applied.random(policy.trained_specs, scale=0.3, seed=1)
    rng = np.random.default_rng(2)
    hidden = rng.standard_normal((2, 6, config.width)).astype(dtype)
    tokens = rng.integers(0, config.vocab, (2, 6)).astype(np.int32)

    def logprobs(model):
        return scoring.token_logprobs(model, hidden, tokens, space=EVERYTHING, logit_bytes=4 * 2 * config.vocab * 2)[0]

    def both(adapters):
        merged = parameters.module(policy.base.graphdef, policy.merged(adapters, base))
        return logprobs(policy.for_training(adapters, base)), logprobs(merged)

    exact = dtype == "float32"
    found, expected = jax.jit(both)(adapters)
    np.testing.assert_allclose(found, expected, atol=1e-4 if exact else 0.1)
    of_found, of_expected = (jax.jit(jax.grad(lambda a, i=i: both(a)[i].sum()))(adapters) for i in (0, 1))
    for name, leaf in parameters.flatten(of_found).items():
        other = np.asarray(parameters.flatten(of_expected)[name])
        assert leaf.dtype == jnp.float32 and np.abs(other).max() > 0.1
        np.testing.assert_allclose(leaf, other, atol=(1e-4 if exact else 0.05) * np.abs(other).max())


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_a_mesh_stay_on_their_devices_in_the_kernel(tied):
    """In one block of a time that the devices divide: nothing of the rows, nor of their logits, is moved."""
    config = dataclasses.replace(GROUPED, tied_embedding=tied)
    mesh = sharding.make_mesh((8, 1, 1), setting="test")
    definition = decoder.define(config)
    params = jax.device_put(applied.random(definition.specs, scale=0.3), definition.shardings(mesh))
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((8, 8, config.width)).astype(np.float32)
    tokens = rng.integers(0, config.vocab, (8, 8)).astype(np.int32)

    def logprobs(params, hidden, tokens):
        model = parameters.module(definition.graphdef, params)
        return scoring.token_logprobs(model, hidden, tokens, space=EVERYTHING, logit_bytes=1 << 20)[0]

    rows = sharding.put_rows(mesh, (hidden, tokens))
    program = sharding.on_mesh(mesh, jax.jit(logprobs).lower)(params, *rows).compile().as_text()
    assert "f32[1,8,40]" in program or "f32[8,40]" in program  # logits of a device's own row
    assert not re.findall(r"(?:all-to-all|all-gather|collective-permute)\(", program)


def test_parameters_of_other_keys_are_refused():
    """nnx.merge counts leaves, and takes them in the order of their keys."""
    config = dataclasses.replace(GROUPED, layers=12)
    definition, unstacked = decoder.define(config), kv_cache.define(config)
    params = applied.random(definition.specs, scale=0.3)
    renamed = params | {"last_norm": params["final_norm"]}
    del renamed["final_norm"]
    with pytest.raises(ValueError, match=r"not those of the Decoder: \['final_norm'\]\['scale'\] is missing or unknown"):
        parameters.module(definition.graphdef, renamed)
    # Texts in the place of numbers: "10" comes before "2".
    texts = parameters.cast(kv_cache.unstack(params, config), "float32")
    with pytest.raises(ValueError, match="not those of the Decoder"):
        parameters.module(unstacked.graphdef, texts)


def test_the_kernel_of_one_row_is_that_of_rows_together():
    rng = np.random.default_rng(1)
    model = applied.merge(applied.random(applied.specs(GROUPED), scale=0.3), GROUPED)
    hidden = rng.standard_normal((3, 7, GROUPED.width)).astype(np.float32)
    tokens = rng.integers(0, GROUPED.vocab, (3, 7)).astype(np.int32)
    together = scoring.token_logprobs(model, hidden, tokens, space=EVERYTHING, logit_bytes=4 * 3 * GROUPED.vocab * 2)
    for row in range(3):
        alone = scoring.row_logprobs(model.head(), hidden[row], tokens[row], np.arange(7), space=EVERYTHING, steps=2)
        for found, expected in zip(alone, together, strict=True):
            np.testing.assert_allclose(found, expected[row], atol=1e-5)


def test_modules_exist_while_tracing_only():
    """What of flax.nnx keeps modules around compiled steps costs milliseconds a step, so none of it is used."""
    for path in Path(tba_jax.__file__).parent.rglob("*.py"):
        found = re.findall(r"nnx\.(?:jit|scan|grad|value_and_grad|Optimizer|cached_partial|update)\b", path.read_text())
        assert not found, f"{path}: {found}"
