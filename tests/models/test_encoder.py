"""Encoders: parity with torch's float64 results in tests/fixtures (make_encoder_fixtures.py), and equal results on a mesh."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tba_jax import sharding
from tba_jax.models import parameters
from tba_jax.models.config import EncoderConfig
from tba_jax.models.hugging_face import export
from tests.support import applied
from tests.support.tiny_checkpoints import ENCODERS, load, make_mesh, path_of

CLASSIFIERS = ("bert_classifier", "roberta_classifier")


@functools.partial(jax.jit, static_argnames="config")
def hidden_and_head(params, tokens, token_mask, config):
    """Hidden states, and logits or embeddings: in one program, which most tests share."""
    model = applied.merge(params, config)
    head = model.classify if config.head == "classification" else model.sentence_embeddings
    return model(tokens, token_mask), head(tokens, token_mask)


@functools.cache
def loaded(name: str) -> tuple[EncoderConfig, parameters.Params]:
    return load(path_of(name))


def numpy_embedding(hidden: np.ndarray, token_mask: np.ndarray) -> np.ndarray:
    """float64[B, D]: mean over each row's real tokens, to length 1, one row at a time."""
    rows = [row[mask].astype(np.float64).mean(axis=0) for row, mask in zip(hidden, token_mask, strict=True)]
    return np.stack([row / np.sqrt((row**2).sum()) for row in rows])


def assert_equals_torch(config, params, expected, tokens, token_mask) -> None:
    """Hidden states at real tokens, those at padding have no meaning; then what the head gives."""
    hidden, given = hidden_and_head(params, np.asarray(tokens, np.int32), token_mask, config)
    np.testing.assert_allclose(hidden[token_mask], expected["hidden"][token_mask], atol=1e-5)
    if config.head == "classification":
        assert given.shape == (len(tokens), len(config.labels))
        np.testing.assert_allclose(given, expected["logits"], atol=1e-5)
    else:
        np.testing.assert_allclose(given, numpy_embedding(expected["hidden"], token_mask), atol=1e-6)


@pytest.mark.parametrize("name", ENCODERS)
def test_tiny_encoders_equal_the_golden_results(name):
    config, params = loaded(name)
    golden = np.load(path_of(name) / "golden.npz")
    assert_equals_torch(config, params, golden, golden["tokens"], golden["token_mask"])


@pytest.mark.parametrize("name", ENCODERS)
def test_random_encoders_equal_torch_before_and_after_export(torch, tmp_path, name):
    from tests.fixtures.make_encoder_fixtures import TINY_ENCODERS as BUILDS
    from tests.fixtures.make_encoder_fixtures import outputs, padded_rows, tiny_encoder

    model = tiny_encoder(f"tiny_{name}", seed=11)
    model.save_pretrained(tmp_path / "imported")
    config, params = load(tmp_path / "imported")
    rows = padded_rows(model, seed=11)
    expected = outputs(model, *rows)
    assert_equals_torch(config, params, expected, *rows)
    export.save(tmp_path / "exported", config, params, dtype="float32")
    model_class, pooler = BUILDS[f"tiny_{name}"][0], {"add_pooling_layer": False} if name.endswith("embedding") else {}
    again, report = model_class.from_pretrained(tmp_path / "exported", output_loading_info=True, **pooler)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert config.labels == (tuple(again.config.id2label.values()) if name in CLASSIFIERS else ())
    for key, value in outputs(again.eval(), *rows).items():
        np.testing.assert_array_equal(value, expected[key])


def test_empty_rows_give_zeros_and_finite_gradients():
    config, params = loaded("bert_embedding")
    tokens, token_mask = np.full((2, 3), 5, np.int32), np.array([[True, True, False], [False] * 3])

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradients_and_embedding(params):
        embedding = applied.merge(params, config).sentence_embeddings(tokens, token_mask)
        return embedding.sum(), embedding

    gradients, embedding = gradients_and_embedding(params)
    np.testing.assert_allclose(np.linalg.norm(embedding, axis=1), [1.0, 0.0], atol=1e-6)
    assert all(np.isfinite(gradient).all() for gradient in jax.tree.leaves(gradients))


def test_a_mesh_of_eight_devices_gives_the_same(name="roberta_classifier"):
    config, params = loaded(name)
    golden = np.load(path_of(name) / "golden.npz")
    rows = golden["tokens"], golden["token_mask"]
    expected = hidden_and_head(params, *rows, config)[1]
    mesh = make_mesh((2, 2, 2))
    _, sharded = load(path_of(name), (2, 2, 2))
    assert sharded["layers"]["feed_forward"]["up"]["weight"].sharding.shard_shape((2, 16, 24)) == (2, 8, 12)
    found = sharding.on_mesh(mesh, hidden_and_head)(sharded, *sharding.put_rows(mesh, rows), config)[1]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_bfloat16_computes_in_bfloat16_and_gives_float32():
    config, params = loaded("bert_classifier")
    golden = np.load(path_of("bert_classifier") / "golden.npz")
    config = dataclasses.replace(config, compute_dtype="bfloat16")
    hidden, logits = hidden_and_head(params, golden["tokens"], golden["token_mask"], config)
    assert hidden.dtype == jax.numpy.bfloat16 and logits.dtype == jax.numpy.float32
    assert 1e-4 < np.abs(logits - golden["logits"]).max() < 0.3


@pytest.mark.parametrize("name, limit", [("bert_embedding", 20), ("roberta_embedding", 18)])
def test_rows_longer_than_the_positions_are_refused(name, limit):
    config, params = loaded(name)
    tokens = np.full((1, limit + 1), 7, np.int32)
    sentence = rf"rows of {limit + 1} tokens are longer than the {limit} positions of the encoder"
    with pytest.raises(ValueError, match=sentence):
        applied.merge(params, config).sentence_embeddings(tokens, tokens > 0)
