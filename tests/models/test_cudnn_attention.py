"""cuDNN's flash attention: every form that models call it in is lowered for CUDA without a GPU; on a GPU, XLA's kernel gives the
same values and gradients."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from tba_jax import sharding
from tba_jax.models import attention
from tba_jax.models.attention import Prefix

B, H = 3, 64


@dataclasses.dataclass(frozen=True)
class Form:
    """A call of attention.attend. length: T; heads, kv_heads: N, G; segments: of two in a row; shares: prefixes are read too."""

    length: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_size: int = H
    causal: bool = True
    segments: bool = False
    shares: bool = False
    window: int = 0


FORMS = {
    "a prompt of odd length": Form(length=31),
    "qwen2.5-0.5b": Form(heads=14, shares=True),
    "qwen2.5-1.5b": Form(heads=12, head_size=128, shares=True),
    "pythia": Form(heads=16, kv_heads=16, shares=True),
    "one key head, windows of shared prompts": Form(heads=8, kv_heads=1, shares=True, window=5),
    "windows": Form(window=5),
    "rows apart of odd length": Form(length=31, segments=True),
    "encoder": Form(causal=False, segments=True),
}


def loss_and_gradients(form: Form, kernel: str):
    """A function of query, key and value [B, T, ., H], bfloat16, and the segments and prefixes of the form."""
    T = form.length
    segments = jnp.asarray(np.arange(T) // (T // 2 + 1) + 1, jnp.int32) * jnp.ones((B, 1), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    first = jnp.where(jnp.arange(B)[:, None] > 0, segments[:1], 0)  # all but the first sequence continue it
    prefix = Prefix(jnp.zeros((1, B), jnp.int32), first) if form.shares else None
    options = dict(positions=positions, prefix=prefix) if form.shares else {}

    def loss(query, key, value):
        of = segments if form.segments or form.shares else None
        found = attention.attend(query, key, value, of, causal=form.causal, kernel=kernel, window=form.window, **options)
        assert found.shape == query.shape
        return jnp.sum(jnp.sin(found.astype(jnp.float32))), found

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


def inputs(form: Form):
    rng = np.random.default_rng(0)
    heads = (form.heads, form.kv_heads, form.kv_heads)
    return [jnp.asarray(rng.standard_normal((B, form.length, n, form.head_size)), jnp.bfloat16) for n in heads]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_is_one_that_jax_hands_to_cudnn(form, monkeypatch):
    """jax asks which cuDNN there is, which no machine without a GPU can say; all its checks of shapes and dtypes are its own."""
    monkeypatch.setattr(fused_attention_stablehlo, "cuda_versions", types.SimpleNamespace(cudnn_get_version=lambda: 91000))
    monkeypatch.setattr(sharding, "platform", lambda: "gpu")
    lowered = loss_and_gradients(form, "auto").trace(*inputs(form)).lower(lowering_platforms=("cuda",))
    called = set(re.findall(r"__cudnn\$\w+", lowered.as_text()))
    assert len(called) == 2 and any(name.endswith("Backward") for name in called), called


def assert_as_xla(form: Form) -> None:
    (_, ours), gradients = loss_and_gradients(form, "cudnn")(*inputs(form))
    (_, expected), expected_gradients = loss_and_gradients(form, "xla")(*inputs(form))
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
