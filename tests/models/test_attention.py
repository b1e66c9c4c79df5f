"""Kernels against XLA's: splash attention, interpreted on CPU devices; cuDNN's, lowered for CUDA, and computed on a GPU."""

import functools
import importlib.util
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from tba_jax import sharding
from tba_jax.experiment import topologies
from tba_jax.models import attention
from tba_jax.models.attention import Prefix


def inputs(B: int, T: int, N: int, G: int, H: int, dtype: Any = jnp.float32) -> list[jax.Array]:
    """Query, key and value."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((B, T, heads, H)), dtype) for heads in (N, G, G)]


def program(*, kernel: str, segments=None, **options):
    """A jitted function of query, key and value: the result, and gradients of the sum of its sine."""

    def loss(*qkv):
        found = attention.attend(*qkv, segments, kernel=kernel, **options)
        assert found.shape == qkv[0].shape
        return jnp.sum(jnp.sin(found.astype(jnp.float32))), found

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


def attended(qkv, **options) -> tuple[jax.Array, ...]:
    (_, found), gradients = program(**options)(*qkv)
    return found, *gradients


def compare(found, expected, *, tolerance: float) -> None:
    """Args: tolerance: as a share of the largest number of each array."""
    for name, a, b in zip(("result", "query", "key", "value"), found, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(a).all(), name
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=0, err_msg=name)


# Padded to 256; and two blocks, of which one of first queries and last keys is skipped.
@pytest.mark.parametrize("T, heads, masks", [(131, (4, 2, 16), {}), (520, (2, 1, 16), {"window": 300})], ids=str)
def test_splash_is_xlas_attention(T, heads, masks):
    find = functools.partial(attended, inputs(2, T, *heads), causal=True, **masks)
    compare(find(kernel="splash"), find(kernel="xla"), tolerance=1e-5)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 2)], ids=str)
def test_sinks_take_part_in_softmaxes(sizes):
    """Both kernels against NumPy, and their gradients against each other's, over devices too."""
    query, key, value = inputs(4, 131, 4, 2, 16)
    sinks = jnp.array([-3.0, 0.5, 2.0, 5.0])

    @functools.partial(jax.jit, static_argnames="kernel")
    def gradients(*given, kernel):
        def loss(*given):
            found = attention.attend(*given[:3], None, causal=True, window=20, kernel=kernel, sinks=given[3])
            return jnp.sum(jnp.sin(found)), found

        return jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(*given)

    with jax.set_mesh(sharding.make_mesh(sizes, setting="learner.mesh", devices=jax.devices()[: int(np.prod(sizes))])):
        both = {kernel: gradients(query, key, value, sinks, kernel=kernel) for kernel in ("xla", "splash")}
    scores = np.einsum("BtNH,BTNH->BNtT", *(np.asarray(x, np.float64) for x in (query, key.repeat(2, axis=2)))) / 4
    weights = np.exp(scores) * np.tril(np.triu(np.ones((131, 131)), -19))
    weights /= weights.sum(-1, keepdims=True) + np.exp(np.asarray(sinks))[:, None, None]
    expected = np.einsum("BNtT,BTNH->BtNH", weights, np.asarray(value.repeat(2, axis=2), np.float64))
    for found, attended in zip(*both.values(), strict=True):  # gradients, then results
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()), found, attended)
    np.testing.assert_allclose(both["xla"][1], expected, atol=1e-5)


def test_products_of_float32_are_exact():
    """TPUs round their inputs unless they are told otherwise, and a backward pass is traced where nobody tells them."""

    def loss(*qkv):
        return attention.attend(*qkv, None, causal=True, kernel="splash").sum()

    with jax.default_matmul_precision("highest"):
        traced = jax.vjp(loss, *inputs(1, 128, 2, 2, 8))[1]
    program = str(jax.make_jaxpr(traced)(jnp.float32(1)))
    assert program.count("dot_general[") == program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") > 1


def test_in_bfloat16_splash_errs_no_more_than_rounding_does():
    """Scores are float32 either way; queries are rounded once more, since they are divided by sqrt(H) before the product."""
    rounded = inputs(1, 128, 2, 1, 128, jnp.bfloat16)
    found = attended(rounded, kernel="splash", causal=True)
    assert all(x.dtype == jnp.bfloat16 for x in found)
    compare(found, attended([x.astype(jnp.float32) for x in rounded], kernel="xla", causal=True), tolerance=0.02)


@pytest.mark.parametrize("masks", [dict(causal=False), dict(causal=True, window=5)], ids=str)
def test_tokens_attend_within_their_segment(masks):
    lengths = [[90, 50], [30, 60, 50], [140]]  # a padded row, three segments in a row, and a row of padding alone
    segments = jnp.array([np.repeat(range(len(each)), each) for each in lengths], jnp.int32)
    find = functools.partial(attended, inputs(3, 140, 4, 2, 16), segments=segments, **masks)
    compare(find(kernel="splash"), find(kernel="xla"), tolerance=1e-5)


# data, fsdp, tensor. Over 4 ways each device has all of 3 rows.
@pytest.mark.parametrize("sizes, B", [((4, 1, 1), 3), ((1, 2, 2), 4)], ids=str)
def test_meshes_give_the_result_of_one_device(sizes, B):
    segments = jnp.broadcast_to(jnp.arange(40) // 25, (B, 40)).astype(jnp.int32)
    find = functools.partial(attended, inputs(B, 40, 8, 2, 16), causal=True, segments=segments)
    expected = find(kernel="xla")
    with jax.set_mesh(sharding.make_mesh(sizes, setting="learner.mesh", devices=jax.devices()[:4])):
        compare(find(kernel="splash"), expected, tolerance=1e-5)


@pytest.mark.slow
def test_splash_compiles_for_tpus_from_a_process_without_one():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU's compiler is not installed: pip install -e '.[tpu]'")
    topologies.use_no_devices()
    mesh = sharding.make_mesh((1, 2, 2), setting="learner.mesh", devices=topologies.devices("v5e:2x2"))
    for H, dtype in ((64, jnp.bfloat16), (128, jnp.float32), (256, jnp.bfloat16)):
        shapes = [jax.ShapeDtypeStruct((4, 1030, heads, H), dtype, sharding=sharding.rows_sharding(mesh)) for heads in (8, 2, 2)]

        def loss(*qkv, sinks):
            return attention.attend(*qkv, None, causal=True, kernel="auto", sinks=sinks).astype(jnp.float32).sum()

        sinks = jax.ShapeDtypeStruct((8,), dtype, sharding=sharding.replicated(mesh)) if H == 64 else None
        program = sharding.on_mesh(mesh, jax.jit(jax.grad(loss, argnums=(0, 1, 2)))).lower(*shapes, sinks=sinks).compile()
        assert "splash_mha_dkv" in program.as_text()
        scores = 4 // 2 * 8 // 2 * 1030 * 1030 * 4
        assert program.memory_analysis().temp_size_in_bytes < scores


def call(T: int = 32, N: int = 4, G: int = 2, H: int = 64, *, segments: bool = False, shares: bool = False, **masks):
    """Query, key and value [3, T, ., H], bfloat16, and options of attention.attend. Args: segments: of two in a row; shares:
    all but the first sequence continue it."""
    of = jnp.asarray(np.arange(T) // (T // 2 + 1) + 1, jnp.int32) * jnp.ones((3, 1), jnp.int32)
    options = dict(segments=of if segments or shares else None, **{"causal": True} | masks)
    if shares:
        prefix = Prefix(jnp.zeros((1, 3), jnp.int32), jnp.where(jnp.arange(3)[:, None] > 0, of[:1], 0))
        options |= dict(positions=jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (3, T)), prefix=prefix)
    return inputs(3, T, N, G, H, jnp.bfloat16), options


FORMS = {
    "qwen2.5-1.5b": dict(N=12, H=128, shares=True),
    "one key head, windows of shared prompts": dict(N=8, G=1, shares=True, window=5),
    "rows apart of odd length": dict(T=31, segments=True),
    "encoder": dict(causal=False, segments=True),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_is_one_that_jax_hands_to_cudnn(form, monkeypatch):
    """jax asks which cuDNN there is, which no machine without a GPU can say; all its checks of shapes and dtypes are its own."""
    monkeypatch.setattr(fused_attention_stablehlo, "cuda_versions", types.SimpleNamespace(cudnn_get_version=lambda: 91000))
    monkeypatch.setattr(sharding, "platform", lambda: "gpu")
    qkv, options = call(**form)
    lowered = program(kernel="auto", **options).trace(*qkv).lower(lowering_platforms=("cuda",))
    called = set(re.findall(r"__cudnn\$\w+", lowered.as_text()))
    assert len(called) == 2 and any(name.endswith("Backward") for name in called), called


def assert_as_xla(form) -> None:
    qkv, options = call(**form)
    for found, wanted in zip(*(attended(qkv, kernel=kernel, **options) for kernel in ("cudnn", "xla")), strict=True):
        found, wanted = np.asarray(found, np.float32), np.asarray(wanted, np.float32)
        # bfloat16 has 8 bits: the two kernels round the weights of the softmax at different places.
        assert np.linalg.norm(found - wanted) < 2e-2 * np.linalg.norm(wanted)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_is_asked_of_cudnn_means_what_xla_computes(form, monkeypatch):
    kernel = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *x, implementation, **y: kernel(*x, implementation="xla", **y))
    assert_as_xla(form)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_values_and_gradients_are_those_of_xla(form):
    assert_as_xla(form)
