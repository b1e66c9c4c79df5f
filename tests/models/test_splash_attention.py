"""Splash attention, interpreted on CPU devices, against XLA's attention: results and gradients."""

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax import sharding
from tba_jax.experiment import topologies
from tba_jax.models import attention


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
        dict(T=131, heads=(4, 2, 128), causal=True),  # padded to 256
        dict(T=520, heads=(2, 1, 16), causal=True, window=300),  # two blocks; one of first queries and last keys is skipped
        dict(T=128, heads=(2, 2, 32), causal=False),
    ],
    ids=str,
)
def test_it_is_xlas_attention(case):
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


def test_in_bfloat16_it_errs_no_more_than_rounding_does():
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


# data, fsdp, tensor. Over 4 ways each device has all of 3 rows, and all heads of 2 groups.
@pytest.mark.parametrize("sizes, B", [((4, 1, 1), 3), ((1, 2, 2), 4), ((1, 1, 4), 4)], ids=str)
def test_meshes_give_the_result_of_one_device(sizes, B):
    qkv = inputs(B, 40, 8, 2, 16)
    segments = jnp.broadcast_to(jnp.arange(40) // 25, (B, 40)).astype(jnp.int32)
    expected = attended(*qkv, kernel="xla", causal=True, segments=segments)
    with jax.set_mesh(sharding.make_mesh(sizes, setting="learner.mesh", devices=jax.devices()[:4])):
        compare(attended(*qkv, kernel="splash", causal=True, segments=segments), expected, tolerance=1e-5)


@pytest.mark.slow
def test_it_compiles_for_tpus_from_a_process_without_one():
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
