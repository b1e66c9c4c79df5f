"""Checkpoints of encoders: import and export, the folders of sentence-transformers, and every refusal.

Encoders: parity with torch's float64 results in tests/fixtures (make_encoder_fixtures.py), and equal results on a mesh.
"""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tba_jax import sharding
from tba_jax.models.config import EncoderConfig
from tba_jax.models.hugging_face import export
from tba_jax.models.hugging_face import load as load_lib
from tests.support import applied
from tests.support.tiny_checkpoints import ENCODERS, assert_same_params, edit_config, edit_weights, load, make_mesh, path_of

LABELS = ("negative", "neutral", "positive")
read_config = functools.partial(load_lib.read_config, compute_dtype="float32")


@functools.cache
def loaded(name: str):
    return load(path_of(name))


@pytest.fixture
def copy_of(tmp_path):
    return lambda name: Path(shutil.copytree(path_of(name), tmp_path / name))


@pytest.mark.parametrize("name", ENCODERS)
def test_config_json_is_read(name):
    config, _ = loaded(name)
    of = dict(architecture="bert", token_types=2) if name.startswith("bert") else dict(architecture="roberta", token_types=1)
    of |= dict(position_offset=2) if name.startswith("roberta") else {}
    of |= dict(head="classification", labels=LABELS, pooler=True) if name.endswith("classifier") else {}
    of |= dict(activation="gelu_tanh") if name == "roberta_classifier" else {}
    sizes = dict(layers=2, width=16, heads=4, head_size=4, ffn=24, vocab=40, max_positions=20, norm_epsilon=1e-5)
    assert config == EncoderConfig(**sizes, **of)


def test_tensors_that_no_head_reads_are_left_out(copy_of):
    square, ids = np.zeros((16, 16), np.float32), np.arange(20)[None]
    folder = copy_of("bert_embedding")
    assert "pooler.dense.weight" in load_file(folder / "model.safetensors")
    more = {"embeddings.position_ids": ids, "cls.predictions.transform.dense.weight": square}
    edit_weights(folder, lambda tensors: tensors.update(more))
    assert_same_params(load(folder)[1], loaded("bert_embedding")[1])
    folder = copy_of("roberta_classifier")
    more = {"roberta.embeddings.position_ids": ids, "roberta.pooler.dense.weight": square, "lm_head.dense.weight": square}
    edit_weights(folder, lambda tensors: tensors.update(more))
    assert_same_params(load(folder)[1], loaded("roberta_classifier")[1])


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"pad_token_id": None}, r"pad_token_id=None must be a token: positions are counted from it"),
        ({"pad_token_id": 19}, r"config\.json: max_positions=20 leaves no position at position_offset=20"),
        ({"architectures": ["RobertaForMaskedLM"]}, r"architectures=\['RobertaForMaskedLM'\] is a language model"),
        ({"id2label": {"0": "a", "2": "b"}}, r"id2label={'0': 'a', '2': 'b'} must give each of the classes 0 to 1 a name"),
    ],
    ids=str,
)
def test_settings_that_are_not_computed_are_named(copy_of, settings, sentence):
    folder = copy_of("roberta_classifier")
    edit_config(folder, **settings)
    with pytest.raises(ValueError, match=rf"{folder}/config\.json: ") as refusal:
        read_config(folder)
    assert refusal.match(sentence)


@pytest.mark.parametrize("key, value", [("mode_mean_tokens", False), ("mode_lasttoken", True), ("mode", "cls")])
@pytest.mark.parametrize("has_modules", [True, False])  # the folder of the pooling says enough
def test_sentence_transformers_folders_must_pool_by_the_mean(copy_of, key, value, has_modules):
    folder = copy_of("bert_embedding")
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {f"pooling_{key}": value}))
    if not has_modules:
        (folder / "modules.json").unlink()
    with pytest.raises(ValueError, match=rf"{pooling}: pooling_{key}={value!r} is not supported"):
        read_config(folder)


@pytest.mark.parametrize(
    "kinds, sentence",
    [
        (["Transformer", "Pooling", "Dense", "Normalize"], r"modules\.json lists Dense, which would be left out"),
        ([], r"modules\.json is not a list of modules with type and path"),
    ],
    ids=str,
)
def test_modules_that_would_be_left_out_are_named(copy_of, kinds, sentence):
    folder = copy_of("bert_embedding")
    modules = [{"idx": i, "path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules or {"idx": 0}))
    with pytest.raises(ValueError, match=f"{folder}/{sentence}"):
        read_config(folder)


def test_sentence_transformers_makes_a_language_model_an_encoder(copy_of):
    folder = copy_of("bert_embedding")
    edit_config(folder, architectures=["BertForMaskedLM"])
    assert load(folder)[0] == loaded("bert_embedding")[0]
    (folder / "modules.json").unlink()
    with pytest.raises(ValueError, match=r"architectures=\['BertForMaskedLM'\] is a language model"):
        read_config(folder)


@pytest.mark.parametrize("name", ["bert_embedding", "roberta_classifier"])
def test_export_and_import_give_the_same(tmp_path, name):
    config, params = loaded(name)
    export.save(tmp_path / "exported", config, params, dtype="float32")
    export.save(tmp_path / "kept", config, params, dtype="float32", source=path_of(name))
    for folder in ("exported", "kept"):
        again, same = load(tmp_path / folder)
        assert again == config
        assert_same_params(same, params)


def test_heads_that_encoders_do_not_have_are_refused():
    for head, sentence in (("score", "model_type='bert' cannot score texts"), ("classification", "needs labels")):
        with pytest.raises(ValueError, match=sentence):
            read_config(path_of("bert_embedding"), head=head)
    # A classifier's body is no sentence encoder: its head would be dropped.
    config = read_config(path_of("bert_classifier"), head="embedding")
    with pytest.raises(ValueError, match=r"unknown to the model: classifier\.bias, classifier\.weight"):
        load_lib.check_weights(path_of("bert_classifier"), config)


CLASSIFIERS = ("bert_classifier", "roberta_classifier")


@functools.partial(jax.jit, static_argnames="config")
def hidden_and_head(params, tokens, token_mask, config):
    """Hidden states, and logits or embeddings: in one program, which most tests share."""
    model = applied.merge(params, config)
    head = model.classify if config.head == "classification" else model.sentence_embeddings
    return model(tokens, token_mask), head(tokens, token_mask)


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


def test_the_parameters_are_as_many_as_the_published_model_has():
    sizes = dict(layers=6, width=384, heads=12, head_size=32, ffn=1536, vocab=30_522, max_positions=512, token_types=2)
    assert applied.count(EncoderConfig(architecture="bert", pooler=True, **sizes)) == 22_713_216
    assert applied.count(EncoderConfig(architecture="bert", **sizes)) == 22_565_376
