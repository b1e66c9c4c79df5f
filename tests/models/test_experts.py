"""Mixtures of experts against NumPy loops: on meshes, in both forms of their products, in bfloat16, int8 and beside adapters."""

import dataclasses
import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tba_jax import sharding
from tba_jax.experiment import topologies
from tba_jax.models import experts, kv_cache, parameters
from tba_jax.models.config import DecoderConfig
from tba_jax.models.policy import LoraConfig, Policy
from tests.models.test_decoder import BYTES_PER_STEP, gathered, random_rows, score_and_gradient
from tests.support import applied
from tests.support.tiny_decoders import CONFIGS, GROUPED, logits_of_whole, random_params

MOE, GPT_OSS = CONFIGS["experts"], CONFIGS["gpt-oss"]


def of_first_layer(config: DecoderConfig) -> dict:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), random_params(config)["layers"]["feed_forward"])


LAYER, OF_GPT_OSS = of_first_layer(MOE), of_first_layer(GPT_OSS)
X = np.random.default_rng(1).normal(size=(37, MOE.width)).astype(np.float32)
TWO = LAYER | {"router": {"weight": jnp.zeros_like(LAYER["router"]["weight"]).at[:, :2].set(jnp.array([2.0, 1.0]))}}

HERE = experts._here
on_tpu = pytest.mark.parametrize("on_tpu", [False, True], ids=["elsewhere", "on TPUs"])


def force(monkeypatch, on_tpu: bool) -> None:
    """Layers that are traced from now on compute their products as TPUs do, or as other platforms do."""
    monkeypatch.setattr(experts, "_here", lambda *given, **how: HERE(*given, **how | {"on_tpu": on_tpu}))


def layer(config: DecoderConfig = MOE, params: dict = LAYER, weights: str = "full") -> experts.Experts:
    made = experts.Experts(config, rngs=nnx.Rngs(0))
    if weights == "int8":
        for each in (made.gate, made.up, made.down):
            each.quantize()
    return parameters.module(nnx.graphdef(made), params)


def in_numpy(x: np.ndarray, params: dict = LAYER, config: DecoderConfig = MOE) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """y float64[t, D], whether each token goes through each expert bool[t, e], and the router's softmax float64[t, e]."""
    names = ("router", "gate", "up", "down")
    router, gate, up, down = (np.asarray(params[name]["weight"], np.float64) for name in names)
    of_router, of_gate, of_up, of_down = (
        np.asarray(params[name].get("bias", np.zeros(each.shape[::2] if each.ndim == 3 else each.shape[1:])), np.float64)
        for name, each in zip(names, (router, gate, up, down), strict=True)
    )
    scores = np.exp(x @ router + of_router)
    probabilities = scores / scores.sum(1, keepdims=True)
    y, goes = np.zeros(x.shape), np.zeros(probabilities.shape, bool)
    for t, p in enumerate(probabilities):
        goes[t, np.argsort(p)[-config.experts_per_token :]] = True
        share = p[goes[t]].sum() if config.norm_top_k else 1.0
        for i in np.flatnonzero(goes[t]):
            gated, its_up, gain = x[t] @ gate[i] + of_gate[i], x[t] @ up[i] + of_up[i], 1.0
            if config.activation == "clamped":
                gated, its_up, gain = np.minimum(gated, 7), np.clip(its_up, -7, 7) + 1, 1.702
            y[t] += p[i] / share * ((gated / (1 + np.exp(-gain * gated)) * its_up) @ down[i] + of_down[i])
    return y, goes, probabilities


@on_tpu
@pytest.mark.parametrize("norm_top_k", [True, False])
def test_tokens_go_through_their_experts(monkeypatch, on_tpu, norm_top_k):
    force(monkeypatch, on_tpu)
    config, counted = dataclasses.replace(MOE, norm_top_k=norm_top_k), np.arange(len(X)) % 3 > 0
    found, routing = layer(config)(jnp.asarray(X), jnp.asarray(counted))
    y, goes, probabilities = in_numpy(X, config=config)
    np.testing.assert_allclose(found, y, atol=1e-5)
    np.testing.assert_array_equal(routing.tokens, goes[counted].sum(0))
    np.testing.assert_allclose(routing.probabilities, probabilities[counted].sum(0), rtol=1e-5)
    np.testing.assert_allclose(routing.entropy, -(probabilities * np.log(probabilities))[counted].sum(), rtol=1e-5)
    assert routing.counted == counted.sum()


@on_tpu
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_experts_may_have_biases_and_a_clamp(monkeypatch, on_tpu, sizes):
    """As gpt-oss has them; on a mesh each device adds the biases of its own experts."""
    force(monkeypatch, on_tpu)
    x = 6 * X[:32]
    y, goes, _ = in_numpy(x, OF_GPT_OSS, GPT_OSS)
    mesh = sharding.make_mesh(sizes, setting="learner.mesh", devices=jax.devices()[: int(np.prod(sizes))])
    with jax.set_mesh(mesh):
        found, routing = jax.jit(lambda x: layer(GPT_OSS, OF_GPT_OSS)(x, jnp.ones(len(x))))(jnp.asarray(x))
    np.testing.assert_allclose(found, y, atol=2e-4)
    np.testing.assert_array_equal(routing.tokens, goes.sum(0))


@on_tpu
def test_all_tokens_may_go_through_the_same_experts(monkeypatch, on_tpu):
    """None is dropped, and an expert without tokens has no gradient."""
    force(monkeypatch, on_tpu)
    x = np.abs(X)

    def loss(params: dict) -> jax.Array:
        return jnp.sum(layer(params=params)(jnp.asarray(x))[0] ** 2)

    np.testing.assert_allclose(layer(params=TWO)(jnp.asarray(x))[0], in_numpy(x, TWO)[0], atol=1e-4)
    gradients = jax.grad(loss)(TWO)
    for gradient in (gradients[name]["weight"] for name in ("gate", "up", "down")):
        assert np.abs(gradient[:2]).max(axis=(1, 2)).min() > 0 and not gradient[2:].any()


@pytest.mark.parametrize("tokens", [1, 37, 700])  # blocks of 8 and of 128 places
@pytest.mark.parametrize(
    "config, params", [(MOE, LAYER), (MOE, TWO), (GPT_OSS, OF_GPT_OSS)], ids=["all experts", "two experts", "gpt-oss"]
)
def test_both_forms_of_the_products_have_the_same_gradients(monkeypatch, config, params, tokens):
    x = jnp.abs(jnp.asarray(np.random.default_rng(2).normal(size=(tokens, MOE.width)), jnp.float32))

    by_row = experts._by_row

    def undefined(x: jax.Array, weight: jax.Array, sizes: jax.Array, interpret: bool) -> jax.Array:
        """As on TPUs, anything may stand in the rows after those of the last expert."""
        return jnp.where((jnp.arange(len(x)) < jnp.sum(sizes))[:, None], by_row(x, weight, sizes, interpret), jnp.nan)

    monkeypatch.setattr(experts, "_by_row", undefined)

    def gradients(on_tpu: bool) -> tuple[dict, jax.Array]:
        force(monkeypatch, on_tpu)
        return jax.jit(jax.grad(lambda params, x: jnp.sum(jnp.sin(layer(config, params)(x)[0])), argnums=(0, 1)))(params, x)

    found, expected = gradients(True), gradients(False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()), found, expected)


def test_gradients_of_biases_are_sums_of_float32():
    """In bfloat16 the sum over 4,096 rows would stop where it is 256 times a row."""
    x = jnp.asarray(np.random.default_rng(2).normal(size=(4096, MOE.width)), jnp.float32)

    def gradients(dtype: str) -> dict:
        def loss(params: dict) -> jax.Array:
            rounded = parameters.cast(params, dtype)
            return jnp.sum(layer(GPT_OSS, rounded)(x.astype(dtype))[0].astype(jnp.float32))

        return jax.jit(jax.grad(loss))(OF_GPT_OSS)

    found, expected = gradients("bfloat16"), gradients("float32")
    for name in ("gate", "up", "down"):
        a, b = (each[name]["bias"] for each in (found, expected))
        assert np.linalg.norm(a - b) < 0.03 * np.linalg.norm(b), name


SIZES = {
    "some without rows": [0, 30, 0, 7, 0],
    "one has all": [0, 0, 40, 0, 0],
    "none has any": [0, 0, 0, 0, 0],
    "several tiles": [0, 256, 300, 0, 100],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_tpus_against_a_loop(sizes, dtype):
    """No row after those of the last expert counts, whatever it holds."""
    rng, used = np.random.default_rng(4), sum(sizes)
    rows = experts._whole_tiles(max(used, 40) + 3)
    x, weight, cotangent = (rng.normal(size=size).astype(dtype) for size in ((rows, 24), (5, 24, 200), (rows, 200)))
    x[used:] = cotangent[used:] = np.nan
    y, pull = jax.vjp(lambda x, weight: experts._by_row(x, weight, jnp.array(sizes, jnp.int32), True), x, weight)
    of_x, of_weight = pull(jnp.asarray(cotangent))
    assert {each.dtype for each in (y, of_x, of_weight)} == {jnp.dtype(dtype)}
    first, close = 0, functools.partial(np.testing.assert_allclose, rtol=1e-5 if dtype == "float32" else 0.01)
    for i, size in enumerate(sizes):
        here = slice(first, first := first + size)
        mine, its, pulled = (each.astype(np.float64) for each in (x[here], weight[i], cotangent[here]))
        for found, expected in ((y[here], mine @ its), (of_x[here], pulled @ its.T), (of_weight[i], mine.T @ pulled)):
            close(np.asarray(found, np.float64), expected, atol=1e-5 if dtype == "float32" else 0.01)
    assert not np.asarray(of_weight)[np.array(sizes) == 0].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_tpus_are_exact_in_float32(dtype):
    """The kernel's product, too, and in the backward pass, which is traced outside of layers.full_precision."""
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((48, 24), (5, 24, 200), (48, 200))]

    def gradients(x, weight, cotangent):
        return jax.vjp(lambda x, weight: experts._by_row(x, weight, jnp.full(5, 9), True), x, weight)[1](cotangent)

    program = str(jax.make_jaxpr(gradients)(*shapes))
    products = program.count("dot_general[")
    assert products == 3 and program.count("Precision.HIGHEST, Precision.HIGHEST") == (products if dtype == "float32" else 0)


@on_tpu
@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 4, 2), (2, 2, 2)], ids=str)
def test_meshes_give_the_loss_and_gradients_of_one_device(monkeypatch, sizes, on_tpu):
    params, rows = random_params(MOE), random_rows(16, 5, 7, 40)
    settings = dict(logit_bytes=3 * BYTES_PER_STEP, remat="full", config=MOE)
    expected = score_and_gradient(params, rows, **settings)
    force(monkeypatch, on_tpu)
    mesh = sharding.make_mesh(sizes, setting="learner.mesh")
    with jax.set_mesh(mesh):
        sharded = jax.device_put(params, applied.shardings(MOE, mesh))
        found = score_and_gradient(sharded, sharding.put_rows(mesh, rows), **settings)
    experts_here = sharded["layers"]["feed_forward"]["gate"]["weight"].addressable_shards[0].data.shape[1]
    assert experts_here == MOE.experts // sizes[2]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), found, expected)


def test_devices_gather_weights_and_never_rows():
    assert not gathered((8, 1, 1), differentiate=False, config=MOE)
    shapes = gathered((2, 2, 2), differentiate=True, config=MOE)
    assert shapes and not [shape for shape in shapes if {16, 16 * (5 + 7 - 1)} & set(shape)], shapes


@pytest.mark.slow
def test_the_compiler_of_tpus_takes_experts_and_moves_no_tokens():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU's compiler is not installed: pip install -e '.[tpu]'")
    topologies.use_no_devices()
    mesh = sharding.make_mesh((1, 2, 2), setting="learner.mesh", devices=topologies.devices("v5e:2x2"))
    sizes = dict(width=256, head_size=128, ffn=128, experts=8, compute_dtype="bfloat16", attention="xla")
    config = dataclasses.replace(MOE, **sizes)

    def loss(params: dict, tokens: jax.Array) -> jax.Array:
        return applied.hidden_states(params, tokens, config=config, remat="full").astype(jnp.float32).sum()

    params = parameters.sharded_shapes(applied.specs(config), mesh, dtype="float32")
    tokens = jax.ShapeDtypeStruct((8, 256), jnp.int32, sharding=sharding.rows_sharding(mesh))
    lowered = sharding.on_mesh(mesh, jax.jit(jax.grad(loss))).lower(params, tokens)
    assert all(product in lowered.as_text() for product in ("ragged_dot", "tpu_custom_call"))
    program = lowered.compile().as_text()
    assert "all-to-all(" not in program
    experts_here, rows = config.experts // 2, 8 * 256 // 2 * config.experts_per_token
    arrays = {tuple(map(int, shape.split(","))) for shape in re.findall(r"\w\[(\d+(?:,\d+)+)\]", program)}
    assert (rows, 128) in arrays and (experts_here, 256, 128) in arrays
    assert not [shape for shape in arrays if {experts_here, rows} <= set(shape)]  # no expert computes the rows of all


def test_a_mesh_that_does_not_divide_the_experts_is_named():
    mesh = sharding.make_mesh((4, 1, 2), setting="learner.mesh")
    with pytest.raises(ValueError, match=r"feed_forward\.down\.weight: axis 'experts' of size 5 is not divisible by 2"):
        applied.shardings(dataclasses.replace(MOE, experts=5), mesh)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        (dict(experts_per_token=7), r"model\.experts=6 must be 2 to 4096, .* 1 to 6, not model\.experts_per_token=7"),
        (dict(experts_per_token=0), r"not model\.experts_per_token=0"),
        (dict(experts=1, experts_per_token=1), r"model\.experts=1 must be 2 to 4096"),
        (dict(gated=False), "experts=6 and activation='silu' have a gate, not gated=False"),
        (dict(sinks=True, attention="cudnn"), r"^model\.attention=cudnn computes no attention sinks, which llama has"),
    ],
    ids=str,
)
def test_impossible_shapes_name_the_settings(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(MOE, **changes)


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_changes_no_gradients(remat):
    params, rows = random_params(MOE), random_rows(16, 5, 7, 40)
    expected, found = (score_and_gradient(params, rows, logit_bytes=1 << 20, remat=each, config=MOE) for each in ("none", remat))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), found, expected)


def test_the_router_computes_in_float32_in_bfloat16_models():
    """The choice is that of float32 arithmetic on rounded weights, where products in bfloat16 would choose otherwise."""
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2000, MOE.width)), jnp.bfloat16)
    rounded = parameters.cast(LAYER, "bfloat16")
    config = dataclasses.replace(MOE, compute_dtype="bfloat16")
    y, routing = layer(config, rounded)(x, jnp.ones(len(x), bool))
    expected, goes, _ = in_numpy(np.asarray(x, np.float64), jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), rounded))
    np.testing.assert_array_equal(routing.tokens, goes.sum(0))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, atol=0.02 * np.abs(expected).max())
    logits = np.asarray(x @ rounded["router"]["weight"], np.float64)
    assert (
        np.argsort(logits)[:, -2:] != np.argsort(np.asarray(x, np.float64) @ np.asarray(rounded["router"]["weight"]))[:, -2:]
    ).any()


@on_tpu
@pytest.mark.parametrize("config, plain", [(MOE, LAYER), (GPT_OSS, OF_GPT_OSS)], ids=["qwen3_moe", "gpt-oss"])
def test_int8_rounds_the_weights_of_each_expert_by_output(monkeypatch, config, plain, on_tpu):
    force(monkeypatch, on_tpu)
    made = layer(config, plain)
    for each in (made.gate, made.up, made.down):
        each.quantize()
    params = parameters.pure(made)
    restored = {"router": plain["router"]}
    for name, axis in (("gate", 1), ("up", 1), ("down", 1)):
        weight, scale = params[name]["weight"], params[name]["quant_scale"]
        assert weight.dtype == jnp.int8 and scale.shape == tuple(np.delete(weight.shape, axis))
        restored[name] = plain[name] | {"weight": np.asarray(weight, np.float32) * np.expand_dims(np.asarray(scale), axis)}
        np.testing.assert_allclose(restored[name]["weight"], plain[name]["weight"], atol=np.max(scale) / 2 + 1e-6)
    found, _ = layer(config, params, weights="int8")(jnp.asarray(X))
    np.testing.assert_allclose(found, in_numpy(X, restored, config)[0], atol=1e-4)


def test_int8_policies_sample_close_to_the_policy():
    params, tokens = random_params(MOE), random_rows(4, 5, 7, 40)[0]
    specs = parameters.flatten(kv_cache.define(MOE, "int8", unstacked=False).specs)
    rounded = {name for name, spec in specs.items() if spec.dtype == "int8"}
    assert {f"layers.feed_forward.{name}.weight" for name in ("gate", "up", "down")} < rounded
    assert "layers.feed_forward.router.weight" not in rounded
    found = logits_of_whole(applied.quantize(params, MOE), tokens, MOE)
    expected = logits_of_whole(params, tokens, MOE)
    assert 0 < np.median(np.abs(found - expected)) < 0.1  # a token that another expert takes may be further away


LORA = LoraConfig(rank=2, alpha=4.0, targets=("layers.*",))


def test_adapters_leave_experts_out():
    policy = Policy(model=MOE, lora=LORA)
    trained = {name.rsplit(".", 1)[0] for name in parameters.flatten(policy.trained_specs)}
    assert trained == {f"layers.attention.{name}" for name in ("query", "key", "value", "out")}
    base, adapters = random_params(MOE), applied.random(policy.trained_specs, scale=0.2)
    tokens = random_rows(4, 5, 7, 40)[0]
    merged = jax.jit(policy.merged)(adapters, base)
    found = jax.jit(lambda adapters, base: policy.for_training(adapters, base)(tokens))(adapters, base)
    expected = jax.jit(functools.partial(applied.hidden_states, config=MOE))(merged, tokens)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    only = dataclasses.replace(LORA, targets=("layers.attention.*", "layers.feed_forward.*"))
    with pytest.raises(ValueError, match=r"lora\.targets: 'layers\.feed_forward\.\*' names experts, which take no adapters"):
        _ = Policy(model=MOE, lora=only).trained_specs


def test_dense_models_have_no_routing():
    made = jax.jit(lambda params, tokens: applied.merge(params, GROUPED).routed(tokens, counted=tokens > 0))
    assert made(random_params(GROUPED), random_rows(4, 5, 7, 40)[0])[1] is None
