"""Kernels against XLA's: splash attention, interpreted on CPU devices; cuDNN's, lowered for CUDA, and computed on a GPU."""

import dataclasses
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


def inputs(B: int, T: int, N: int, G: int, H: int, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    """Query, key, value, and weights of a sum over the result."""
    shapes = ((B, T, N, H), (B, T, G, H), (B, T, G, H), (B, T, N, H))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))


def attended(query, key, value, weights, *, kernel: str, segments=None, **masks) -> tuple[jax.Array, ...]:
    """The result, and gradients of a weighted sum of it."""

    def loss(*qkv):
        result = attention.attend(*qkv, segments, kernel=kernel, **masks)
        return (result * weights).astype(jnp.float32).sum(), result

    (_, result), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(query, key, value)
    return result, *gradients


def compare(found, expected, *, tolerance: float) -> None:
    """Args: tolerance: as a share of the largest number of each array."""
    for name, a, b in zip(("result", "query", "key", "value"), found, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(a).all(), name
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=0, err_msg=name)


@pytest.mark.parametrize(
    "case",
    [
        dict(T=131, heads=(4, 2, 16), causal=True),  # padded to 256
        dict(T=520, heads=(2, 1, 16), causal=True, window=300),  # two blocks; one of first queries and last keys is skipped
    ],
    ids=str,
)
def test_splash_is_xlas_attention(case):
    T, heads, masks = case["T"], case["heads"], {name: case[name] for name in ("causal", "window") if name in case}
    find = functools.partial(attended, *inputs(2, T, *heads), **masks)
    compare(find(kernel="splash"), find(kernel="xla"), tolerance=1e-5)


def test_products_of_float32_are_exact():
    """TPUs round their inputs unless they are told otherwise, and a backward pass is traced where nobody tells them."""

    def loss(*qkv):
        return attention.attend(*qkv, None, causal=True, kernel="splash").sum()

    with jax.default_matmul_precision("highest"):
        traced = jax.vjp(loss, *inputs(1, 128, 2, 2, 8)[:3])[1]
    program = str(jax.make_jaxpr(traced)(jnp.float32(1)))
    assert program.count("dot_general[") == program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") > 1


def test_in_bfloat16_splash_errs_no_more_than_rounding_does():
    """Scores are float32 either way; queries are rounded once more, since they are divided by sqrt(H) before the product."""
    rounded = inputs(1, 128, 2, 1, 128, jnp.bfloat16)
    found = attended(*rounded, kernel="splash", causal=True)
    assert all(x.dtype == jnp.bfloat16 for x in found)
    compare(found, attended(*(x.astype(jnp.float32) for x in rounded), kernel="xla", causal=True), tolerance=0.02)


@pytest.mark.parametrize("masks", [dict(causal=False), dict(causal=True, window=5)], ids=str)
def test_tokens_attend_within_their_segment(masks):
    """A padded row, three segments in a row, and a row of padding alone."""
    lengths = [[90, 50], [30, 60, 50], [140]]
    segments = jnp.array([np.repeat(range(len(each)), each) for each in lengths], jnp.int32)
    qkv = inputs(3, 140, 4, 2, 16)
    found = attended(*qkv, kernel="splash", segments=segments, **masks)
    compare(found, attended(*qkv, kernel="xla", segments=segments, **masks), tolerance=1e-5)


# data, fsdp, tensor. Over 4 ways each device has all of 3 rows.
@pytest.mark.parametrize("sizes, B", [((4, 1, 1), 3), ((1, 2, 2), 4)], ids=str)
def test_meshes_give_the_result_of_one_device(sizes, B):
    qkv = inputs(B, 40, 8, 2, 16)
    segments = jnp.broadcast_to(jnp.arange(40) // 25, (B, 40)).astype(jnp.int32)
    expected = attended(*qkv, kernel="xla", causal=True, segments=segments)
    with jax.set_mesh(sharding.make_mesh(sizes, setting="learner.mesh", devices=jax.devices()[:4])):
        compare(attended(*qkv, kernel="splash", causal=True, segments=segments), expected, tolerance=1e-5)


@pytest.mark.slow
def test_splash_compiles_for_tpus_from_a_process_without_one():
    """Whatever the devices of the process, the kernel is chosen by the mesh for which a program is compiled."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU's compiler is not installed: pip install -e '.[tpu]'")
    topologies.use_no_devices()
    mesh = sharding.make_mesh((1, 2, 2), setting="learner.mesh", devices=topologies.devices("v5e:2x2"))
    for H, dtype in ((64, jnp.bfloat16), (128, jnp.float32), (256, jnp.bfloat16)):
        shapes = [jax.ShapeDtypeStruct((4, 1030, heads, H), dtype, sharding=sharding.rows_sharding(mesh)) for heads in (8, 2, 2)]

        def loss(*qkv):
            return attention.attend(*qkv, None, causal=True, kernel="auto").astype(jnp.float32).sum()

        program = sharding.on_mesh(mesh, jax.jit(jax.grad(loss, argnums=(0, 1, 2)))).lower(*shapes).compile()
        assert "splash_mha_dkv" in program.as_text()
        scores = 4 // 2 * 8 // 2 * 1030 * 1030 * 4
        assert program.memory_analysis().temp_size_in_bytes < scores


@dataclasses.dataclass(frozen=True)
class Form:
    """A call of attention.attend. length: T; heads, kv_heads: N, G; segments: of two in a row; shares: prefixes are read too."""

    length: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    causal: bool = True
    segments: bool = False
    shares: bool = False
    window: int = 0


FORMS = {
    "a prompt of odd length": Form(length=31),
    "qwen2.5-1.5b": Form(heads=12, head_size=128, shares=True),
    "one key head, windows of shared prompts": Form(heads=8, kv_heads=1, shares=True, window=5),
    "rows apart of odd length": Form(length=31, segments=True),
    "encoder": Form(causal=False, segments=True),
}


def loss_and_gradients(form: Form, kernel: str):
    """A function of query, key and value [3, T, ., H], bfloat16, and the segments and prefixes of the form."""
    T = form.length
    segments = jnp.asarray(np.arange(T) // (T // 2 + 1) + 1, jnp.int32) * jnp.ones((3, 1), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (3, T))
    first = jnp.where(jnp.arange(3)[:, None] > 0, segments[:1], 0)  # all but the first sequence continue it
    prefix = Prefix(jnp.zeros((1, 3), jnp.int32), first) if form.shares else None
    options = dict(positions=positions, prefix=prefix) if form.shares else {}

    def loss(query, key, value):
        of = segments if form.segments or form.shares else None
        found = attention.attend(query, key, value, of, causal=form.causal, kernel=kernel, window=form.window, **options)
        assert found.shape == query.shape
        return jnp.sum(jnp.sin(found.astype(jnp.float32))), found

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


def inputs_of(form: Form):
    rng = np.random.default_rng(0)
    heads = (form.heads, form.kv_heads, form.kv_heads)
    return [jnp.asarray(rng.standard_normal((3, form.length, n, form.head_size)), jnp.bfloat16) for n in heads]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_is_one_that_jax_hands_to_cudnn(form, monkeypatch):
    """jax asks which cuDNN there is, which no machine without a GPU can say; all its checks of shapes and dtypes are its own."""
    monkeypatch.setattr(fused_attention_stablehlo, "cuda_versions", types.SimpleNamespace(cudnn_get_version=lambda: 91000))
    monkeypatch.setattr(sharding, "platform", lambda: "gpu")
    lowered = loss_and_gradients(form, "auto").trace(*inputs_of(form)).lower(lowering_platforms=("cuda",))
    called = set(re.findall(r"__cudnn\$\w+", lowered.as_text()))
    assert len(called) == 2 and any(name.endswith("Backward") for name in called), called


def assert_as_xla(form: Form) -> None:
    (_, ours), gradients = loss_and_gradients(form, "cudnn")(*inputs_of(form))
    (_, expected), expected_gradients = loss_and_gradients(form, "xla")(*inputs_of(form))
    for found, wanted in zip((ours, *gradients), (expected, *expected_gradients), strict=True):
        found, wanted = np.asarray(found, np.float32), np.asarray(wanted, np.float32)
        # bfloat16 has 8 bits: the two kernels round the weights of the softmax at different places.
        assert np.linalg.norm(found - wanted) < 2e-2 * np.linalg.norm(wanted)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_is_asked_of_cudnn_means_what_xla_computes(form, monkeypatch):
    """jax computes the same call by XLA too."""
    kernel = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *x, implementation, **y: kernel(*x, implementation="xla", **y))
    assert_as_xla(form)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_values_and_gradients_are_those_of_xla(form):
    assert_as_xla(form)
