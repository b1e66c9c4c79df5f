"""Encoders: parity with torch's transformers, import and export of their checkpoints, every refusal, and equal results on a mesh.

tests/fixtures holds torch's results in float64 (make_encoder_fixtures.py), so parity is checked without torch as well.
"""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tba_jax import sharding
from tba_jax.models import encoder, parameters
from tba_jax.models.config import EncoderConfig
from tba_jax.models.hugging_face import export
from tba_jax.models.hugging_face import load as load_lib
from tests.support import applied

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
CLASSIFIERS = ("tiny_bert_classifier", "tiny_roberta_classifier")
TINY_ENCODERS = ("tiny_bert_embedding", "tiny_roberta_embedding", *CLASSIFIERS)
LABELS = ("negative", "neutral", "positive")


@functools.partial(jax.jit, static_argnames="config")
def hidden_and_head(params, tokens, token_mask, config, token_types=None):
    """Hidden states, and logits or embeddings: in one program, which most tests share."""
    model = applied.merge(params, config)
    head = model.classify if config.head == "classification" else model.sentence_embeddings
    return model(tokens, token_mask, token_types), head(tokens, token_mask, token_types)


@pytest.fixture
def copy_of(tmp_path):
    """copy_of(name): a writable copy of the fixture."""
    return lambda name: Path(shutil.copytree(FIXTURES / name, tmp_path / name))


def one_device() -> jax.sharding.Mesh:
    return sharding.make_mesh((1, 1, 1), setting="mesh", devices=jax.devices()[:1])


def load(folder: Path, mesh: jax.sharding.Mesh | None = None) -> tuple[EncoderConfig, parameters.Params]:
    config = load_lib.read_config(folder, compute_dtype="float32")
    return config, load_lib.load_params(folder, config, applied.shardings(config, mesh or one_device()))


@functools.cache
def loaded(name: str) -> tuple[EncoderConfig, parameters.Params]:
    return load(FIXTURES / name)


def edit_json(path: Path, **settings) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def edit_weights(folder: Path, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(edit(tensors), folder / "model.safetensors")


def numpy_embedding(hidden: np.ndarray, token_mask: np.ndarray) -> np.ndarray:
    """float64[B, D]: mean over each row's real tokens, to length 1, one row at a time."""
    rows = [row[mask].astype(np.float64).mean(axis=0) for row, mask in zip(hidden, token_mask, strict=True)]
    return np.stack([row / np.sqrt((row**2).sum()) for row in rows])


def assert_equals_torch(config, params, expected, tokens, token_mask, token_types=None) -> None:
    """Hidden states at every position, padding too: transformers computes the same there; then what the head gives."""
    hidden, given = hidden_and_head(params, np.asarray(tokens, np.int32), token_mask, config, token_types)
    np.testing.assert_allclose(hidden, expected["hidden"], atol=1e-5)
    if config.head == "classification":
        assert given.shape == (len(tokens), len(config.labels))
        np.testing.assert_allclose(given, expected["logits"], atol=1e-5)
    else:
        np.testing.assert_allclose(given, numpy_embedding(expected["hidden"], token_mask), atol=1e-6)


@pytest.mark.parametrize("name", TINY_ENCODERS)
def test_tiny_encoders_equal_the_golden_results(name):
    config, params = loaded(name)
    golden = np.load(FIXTURES / name / "golden.npz")
    assert_equals_torch(config, params, golden, golden["tokens"], golden["token_mask"])


@pytest.mark.parametrize("name", TINY_ENCODERS)
def test_random_encoders_equal_torch_before_and_after_export(torch, tmp_path, name):
    from tests.fixtures.make_encoder_fixtures import TINY_ENCODERS as BUILDS
    from tests.fixtures.make_encoder_fixtures import outputs, padded_rows, tiny_encoder

    model = tiny_encoder(name, seed=11)
    model.save_pretrained(tmp_path / "imported")
    config, params = load(tmp_path / "imported")
    rows = padded_rows(model, seed=11)
    expected = outputs(model, *rows)
    assert_equals_torch(config, params, expected, *rows)

    export.save(tmp_path / "exported", config, params, dtype="float32")
    model_class, pooler = BUILDS[name][0], {"add_pooling_layer": False} if name.endswith("embedding") else {}
    again, report = model_class.from_pretrained(tmp_path / "exported", output_loading_info=True, **pooler)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert config.labels == (tuple(again.config.id2label.values()) if name in CLASSIFIERS else ())
    for key, value in outputs(again.eval(), *rows).items():
        np.testing.assert_array_equal(value, expected[key])


def test_token_types_equal_torch(torch):
    from transformers import BertForSequenceClassification

    from tests.fixtures.make_encoder_fixtures import outputs

    folder = FIXTURES / "tiny_bert_classifier"
    config, params = loaded(folder.name)
    golden = np.load(folder / "golden.npz")
    tokens, token_mask = golden["tokens"], golden["token_mask"]
    token_types = (np.arange(tokens.shape[1])[None, :] >= np.array([[5], [2], [1], [3]])).astype(np.int32)
    model = BertForSequenceClassification.from_pretrained(folder).eval()
    expected = outputs(model, tokens, token_mask, token_type_ids=torch.tensor(token_types, dtype=torch.long))
    assert np.abs(expected["hidden"] - golden["hidden"]).max() > 0.1
    assert_equals_torch(config, params, expected, tokens, token_mask, token_types=token_types)


@pytest.mark.parametrize("name", TINY_ENCODERS)
def test_what_padding_holds_changes_nothing(name):
    config, params = loaded(name)
    golden = np.load(FIXTURES / name / "golden.npz")
    tokens, token_mask = golden["tokens"], golden["token_mask"]
    expected = hidden_and_head(params, tokens, token_mask, config)[1]
    found = hidden_and_head(params, np.where(token_mask, tokens, 17), token_mask, config)[1]
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("name", ["tiny_bert_embedding", "tiny_roberta_classifier"])
def test_a_row_alone_is_the_row_among_others(name):
    config, params = loaded(name)
    golden = np.load(FIXTURES / name / "golden.npz")
    tokens, length = golden["tokens"], golden["token_mask"][1].sum()
    together = hidden_and_head(params, tokens, golden["token_mask"], config)[1]
    alone = hidden_and_head(params, tokens[1:2, :length], np.ones((1, length), bool), config)[1]
    np.testing.assert_allclose(together[1], alone[0], atol=1e-5)


def test_empty_rows_give_zeros_and_finite_gradients():
    config, params = loaded("tiny_bert_embedding")
    tokens, token_mask = np.full((2, 3), 5, np.int32), np.array([[True, True, False], [False] * 3])

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradients_and_embedding(params):
        embedding = applied.merge(params, config).sentence_embeddings(tokens, token_mask)
        return embedding.sum(), embedding

    gradients, embedding = gradients_and_embedding(params)
    np.testing.assert_allclose(np.linalg.norm(embedding, axis=1), [1.0, 0.0], atol=1e-6)
    assert all(np.isfinite(gradient).all() for gradient in jax.tree.leaves(gradients))


@pytest.mark.parametrize("name", ["tiny_bert_embedding", "tiny_roberta_classifier"])
def test_a_mesh_of_eight_devices_gives_the_same(name):
    config, params = loaded(name)
    golden = np.load(FIXTURES / name / "golden.npz")
    rows = golden["tokens"], golden["token_mask"]
    expected = hidden_and_head(params, *rows, config)[1]
    mesh = sharding.make_mesh((2, 2, 2), setting="mesh")
    _, sharded = load(FIXTURES / name, mesh)
    assert sharded["layers"]["feed_forward"]["up"]["weight"].sharding.shard_shape((2, 16, 24)) == (2, 8, 12)
    found = sharding.on_mesh(mesh, hidden_and_head)(sharded, *sharding.put_rows(mesh, rows), config)[1]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_bfloat16_computes_in_bfloat16_and_gives_float32():
    config, params = loaded("tiny_bert_classifier")
    golden = np.load(FIXTURES / "tiny_bert_classifier" / "golden.npz")
    config = dataclasses.replace(config, compute_dtype="bfloat16")
    hidden, logits = hidden_and_head(params, golden["tokens"], golden["token_mask"], config)
    assert hidden.dtype == jax.numpy.bfloat16 and logits.dtype == jax.numpy.float32
    assert 1e-4 < np.abs(logits - golden["logits"]).max() < 0.3


MINILM = EncoderConfig(
    architecture="bert",
    layers=6,
    width=384,
    heads=12,
    head_size=32,
    ffn=1536,
    vocab=30_522,
    max_positions=512,
    token_types=2,
)
ROBERTA = EncoderConfig(
    architecture="roberta",
    layers=12,
    width=768,
    heads=12,
    head_size=64,
    ffn=3072,
    vocab=50_265,
    max_positions=514,
    token_types=1,
    position_offset=2,
    norm_epsilon=1e-5,
)


def test_parameter_counts_are_those_of_the_published_models():
    # sentence-transformers/all-MiniLM-L6-v2, with the pooler that its file holds, and without; FacebookAI/roberta-base likewise,
    # and a RobertaForSequenceClassification of two labels on it.
    assert applied.count(dataclasses.replace(MINILM, pooler=True)) == 22_713_216
    assert applied.count(MINILM) == 22_565_376
    assert applied.count(dataclasses.replace(ROBERTA, pooler=True)) == 124_645_632
    classifier = dataclasses.replace(ROBERTA, pooler=True, head="classification", labels=("no", "yes"))
    assert applied.count(classifier) == 124_647_170


def test_initialisation_has_the_shapes_of_the_checkpoint():
    for name in TINY_ENCODERS:
        config, params = loaded(name)
        drawn = jax.eval_shape(functools.partial(applied.init, config=config), jax.random.key(0))
        assert jax.tree.map(lambda p: (p.shape, p.dtype), drawn) == jax.tree.map(lambda p: (p.shape, p.dtype), params)
    for path, leaf in parameters.flatten(applied.init(jax.random.key(0), config)).items():
        if path.endswith(".weight"):
            assert abs(leaf.mean()) < 4 * 0.02 / leaf.size**0.5 and 0.8 * 0.02 < leaf.std() < 1.2 * 0.02, path
        else:
            np.testing.assert_array_equal(leaf, float(path.endswith(".scale")))


def test_labels_are_found_by_name():
    for name in CLASSIFIERS:
        config, _ = loaded(name)
        assert config.labels == LABELS
        assert encoder.label_index(config, "positive") == 2
        with pytest.raises(ValueError, match=r"no label 'POSITIVE': its labels are 'negative', 'neutral', 'positive'"):
            encoder.label_index(config, "POSITIVE")
    with pytest.raises(ValueError, match="no label 'positive': it has no classification head"):
        encoder.label_index(loaded("tiny_bert_embedding")[0], "positive")


@pytest.mark.parametrize(
    "edit, sentence",
    [
        (lambda tokens, mask: mask.__setitem__((1, 0), False), r"row 1 has padding before a real token; pad on the right"),
        (lambda tokens, mask: mask.__setitem__((2, 1), False), r"row 2 has padding before a real token; pad on the right"),
        (lambda tokens, mask: mask.__setitem__(3, False), r"row 3 has no real token"),
        (lambda tokens, mask: tokens.__setitem__((2, 3), 40), r"row 2 holds token 40, the encoder's vocabulary has 40"),
        (lambda tokens, mask: tokens.__setitem__((0, 1), -1), r"row 0 holds token -1"),
    ],
    ids=["left", "hole", "empty", "beyond the vocabulary", "negative"],
)
def test_rows_that_the_encoder_would_misread_are_named(edit, sentence):
    config, _ = loaded("tiny_bert_embedding")
    tokens, token_mask = np.full((4, 5), 7, np.int32), np.ones((4, 5), bool)
    token_mask[1:, 3:] = False
    encoder.check_rows(tokens, token_mask, config=config)
    edit(tokens, token_mask)
    with pytest.raises(ValueError, match=sentence):
        encoder.check_rows(tokens, token_mask, config=config)


@pytest.mark.parametrize("name, limit", [("tiny_bert_embedding", 20), ("tiny_roberta_embedding", 18)])
def test_rows_longer_than_the_positions_are_refused(name, limit):
    config, params = loaded(name)
    tokens = np.full((1, limit + 1), 7, np.int32)
    sentence = rf"rows of {limit + 1} tokens are longer than the {limit} positions of the encoder"
    encoder.check_rows(tokens[:, 1:], tokens[:, 1:] > 0, config=config)
    with pytest.raises(ValueError, match=sentence):
        applied.merge(params, config).sentence_embeddings(tokens, tokens > 0)
    with pytest.raises(ValueError, match=sentence):
        encoder.check_rows(tokens, tokens > 0, config=config)


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"head": "tagging"}, "head='tagging' is not a head of an encoder; choose one of embedding, classification"),
        ({"activation": "tanh"}, "activation='tanh' is unknown; choose one of silu, gelu"),
        ({"head": "classification"}, "needs labels and pooler=True"),
        ({"labels": ("a",)}, "need head='classification'"),
        ({"head": "classification", "pooler": True, "labels": ("a", "b", "a")}, r"name \['a'\] more than once"),
        ({"position_offset": 512}, "max_positions=512 leaves no position at position_offset=512"),
    ],
    ids=str,
)
def test_configurations_without_a_meaning_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(MINILM, **settings)


def test_an_embedding_encoder_does_not_classify():
    config, params = loaded("tiny_bert_embedding")
    with pytest.raises(ValueError, match="head='embedding' does not classify"):
        applied.merge(params, config).classify(np.ones((1, 2), np.int32), np.ones((1, 2), bool))


@pytest.mark.parametrize("name", TINY_ENCODERS)
def test_config_json_is_read(name):
    config, _ = loaded(name)
    bert, classifier = "bert" in name.split("_"), name in CLASSIFIERS
    assert config == EncoderConfig(
        architecture="bert" if bert else "roberta",
        layers=2,
        width=16,
        heads=4,
        head_size=4,
        ffn=24,
        vocab=40,
        max_positions=20,
        token_types=2 if bert else 1,
        norm_epsilon=1e-5,
        activation="gelu_tanh" if name == "tiny_roberta_classifier" else "gelu",
        position_offset=0 if bert else 2,
        head="classification" if classifier else "embedding",
        labels=LABELS if classifier else (),
        pooler=classifier,
    )


@pytest.mark.parametrize("name", TINY_ENCODERS)
def test_names_with_and_without_the_prefix_are_the_same_tensors(copy_of, name):
    folder, prefix = copy_of(name), name.split("_")[1] + "."

    def exchange(tensors):
        if any(key.startswith(prefix) for key in tensors):
            return {key.removeprefix(prefix): value for key, value in tensors.items()}
        return {prefix + key: value for key, value in tensors.items()}

    edit_weights(folder, exchange)
    jax.tree.map(np.testing.assert_array_equal, load(folder)[1], loaded(name)[1])


def test_tensors_that_no_head_reads_are_left_out(copy_of):
    square, ids = np.zeros((16, 16), np.float32), np.arange(20)[None]
    folder = copy_of("tiny_bert_embedding")
    assert "pooler.dense.weight" in load_file(folder / "model.safetensors")
    more = {"embeddings.position_ids": ids, "cls.predictions.transform.dense.weight": square}
    edit_weights(folder, lambda tensors: tensors | more)
    jax.tree.map(np.testing.assert_array_equal, load(folder)[1], loaded("tiny_bert_embedding")[1])
    folder = copy_of("tiny_roberta_classifier")
    more = {"roberta.embeddings.position_ids": ids, "roberta.pooler.dense.weight": square, "lm_head.dense.weight": square}
    edit_weights(folder, lambda tensors: tensors | more)
    jax.tree.map(np.testing.assert_array_equal, load(folder)[1], loaded("tiny_roberta_classifier")[1])


UP = "bert.encoder.layer.1.intermediate.dense.weight"


@pytest.mark.parametrize(
    "edit, sentence",
    [
        ({UP: None}, rf"1 of 41 tensors are missing from the weights: {UP}"),
        ({"bert.pooler.dense.bias": None}, r"missing from the weights: bert\.pooler\.dense\.bias"),
        ({"classifier.bias": None}, r"missing from the weights: classifier\.bias"),
        ({UP: np.zeros((16, 24), np.float32)}, rf"{UP} has shape \[16, 24\], config\.json makes it \[24, 16\]"),
        ({"classifier.weight": np.zeros((2, 16), np.float32)}, r"classifier\.weight has shape \[2, 16\], .* \[3, 16\]"),
        ({"bert.encoder.layer.2.output.dense.bias": np.zeros(16, np.float32)}, r"unknown .*: bert\.encoder\.layer\.2\.output"),
        ({"qa_outputs.weight": np.zeros((2, 16), np.float32)}, r"unknown to the model: qa_outputs\.weight"),
    ],
    ids=["missing", "no pooler", "no classifier", "transposed", "other labels", "another layer", "another head"],
)
def test_tensors_that_do_not_fit_are_named(copy_of, edit, sentence):
    folder = copy_of("tiny_bert_classifier")
    edit_weights(folder, lambda tensors: {name: x for name, x in (tensors | edit).items() if x is not None})
    with pytest.raises(ValueError, match=sentence):
        load(folder)


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"position_embedding_type": "relative_key"}, r"position_embedding_type='relative_key' is not supported"),
        ({"is_decoder": True}, r"is_decoder=True is not supported"),
        ({"add_cross_attention": True}, r"add_cross_attention=True is not supported"),
        ({"pruned_heads": {"0": [1]}}, r"pruned_heads={'0': \[1\]} is not supported"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config=.* is not supported"),
        ({"hidden_act": "mish"}, r"hidden_act='mish' is not supported; .* hidden_act='gelu' or"),
        ({"num_attention_heads": 3}, r"hidden_size=16 is not divisible by num_attention_heads=3"),
        ({"type_vocab_size": 0}, r"type_vocab_size=0 must be a positive integer"),
        ({"pad_token_id": None}, r"pad_token_id=None must be a token: positions are counted from it"),
        ({"pad_token_id": 19}, r"config\.json: max_positions=20 leaves no position at position_offset=20"),
        ({"architectures": ["RobertaForTokenClassification"]}, r"architectures=\['RobertaForTokenClassification'\] is not"),
        ({"architectures": ["RobertaForMaskedLM"]}, r"architectures=\['RobertaForMaskedLM'\] is a language model"),
        ({"id2label": {"0": "a", "2": "b"}}, r"id2label={'0': 'a', '2': 'b'} must give each of the classes 0 to 1 a name"),
        ({"id2label": {"0": "a", "1": "a"}}, r"id2label=.* must give each of the classes 0 to 1 a name of its own"),
        ({"id2label": 3}, r"id2label=3 must be an object"),
        ({"id2label": ["a", "b", "c"]}, r"id2label=\['a', 'b', 'c'\] must be an object"),
        ({"num_labels": 10**12}, r"id2label=.* must give each of the classes 0 to 999999999999 a name of its own"),
        ({"architectures": "RobertaForSequenceClassification"}, r"architectures='Roberta.*' must be a list of names"),
        ({"hidden_act": ["gelu"]}, r"hidden_act=\['gelu'\] is not supported"),
        ({"layer_norm_eps": float("inf")}, r"layer_norm_eps=inf must be a positive number, and finite"),
        ({"is_decoder": 0}, r"is_decoder=0 is not supported"),
        ({"pad_token_id": True}, r"pad_token_id=True must be a token"),
        ({"num_labels": 2}, r"id2label=.* must give each of the classes 0 to 1 a name of its own"),
    ],
    ids=str,
)
def test_settings_that_are_not_computed_are_named(copy_of, settings, sentence):
    folder = copy_of("tiny_roberta_classifier")
    edit_json(folder / "config.json", **settings)
    with pytest.raises(ValueError, match=rf"{folder}/config\.json: ") as refusal:
        load_lib.read_config(folder, compute_dtype="float32")
    assert refusal.match(sentence)


def test_classes_without_names_have_those_of_transformers(copy_of):
    folder = copy_of("tiny_bert_classifier")
    edit_json(folder / "config.json", id2label=None)
    assert load_lib.read_config(folder, compute_dtype="float32").labels == ("LABEL_0", "LABEL_1")
    edit_json(folder / "config.json", num_labels=3)
    assert load(folder)[0].labels == ("LABEL_0", "LABEL_1", "LABEL_2")


def edit_modules(folder: Path, kinds: list[str]) -> None:
    modules = [{"idx": i, "path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))


def test_sentence_transformers_folders_must_pool_by_the_mean(copy_of):
    folder = copy_of("tiny_bert_embedding")
    pooling = folder / "1_Pooling" / "config.json"
    original = pooling.read_text()
    for settings, key in (
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "pooling_mode_mean_tokens=False"),
        ({"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens=True"),
        ({"pooling_mode_lasttoken": True}, "pooling_mode_lasttoken=True"),
        ({"pooling_mode": "cls"}, "pooling_mode='cls'"),
    ):
        edit_json(pooling, **settings)
        with pytest.raises(ValueError, match=rf"{pooling}: {key} is not supported"):
            load_lib.read_config(folder, compute_dtype="float32")
        pooling.write_text(original)
    edit_json(pooling, pooling_mode_cls_token=True)
    (folder / "modules.json").unlink()  # the folder of the pooling says enough
    with pytest.raises(ValueError, match=rf"{pooling}: pooling_mode_cls_token=True is not supported"):
        load_lib.read_config(folder, compute_dtype="float32")


def test_modules_that_would_be_left_out_are_named(copy_of):
    folder = copy_of("tiny_bert_embedding")
    edit_modules(folder, ["Transformer", "Pooling"])
    assert load(folder)[0].head == "embedding"
    (folder / "1_Pooling").rename(folder / "pooling")
    with pytest.raises(ValueError, match=rf"{folder}/1_Pooling/config\.json does not exist"):
        load_lib.read_config(folder, compute_dtype="float32")
    (folder / "pooling").rename(folder / "1_Pooling")
    edit_modules(folder, ["Transformer", "Pooling", "Dense", "Normalize"])
    with pytest.raises(ValueError, match=rf"{folder}/modules\.json lists Dense, which would be left out"):
        load_lib.read_config(folder, compute_dtype="float32")
    (folder / "modules.json").write_text('{"idx": 0}')
    with pytest.raises(ValueError, match=rf"{folder}/modules\.json is not a list of modules with type and path"):
        load_lib.read_config(folder, compute_dtype="float32")


def test_sentence_transformers_makes_a_language_model_an_encoder(copy_of):
    folder = copy_of("tiny_bert_embedding")
    edit_json(folder / "config.json", architectures=["BertForMaskedLM"])
    assert load(folder)[0] == loaded("tiny_bert_embedding")[0]
    (folder / "modules.json").unlink()
    with pytest.raises(ValueError, match=r"architectures=\['BertForMaskedLM'\] is a language model"):
        load_lib.read_config(folder, compute_dtype="float32")


@pytest.mark.parametrize("name", TINY_ENCODERS)
def test_export_and_import_give_the_same(tmp_path, name):
    config, params = loaded(name)
    export.save(tmp_path / "exported", config, params, dtype="float32")
    export.save(tmp_path / "kept", config, params, dtype="float32", source=FIXTURES / name)
    for folder in ("exported", "kept"):
        again, same = load(tmp_path / folder)
        assert again == config
        jax.tree.map(np.testing.assert_array_equal, same, params)


def test_heads_that_encoders_do_not_have_are_refused():
    folder = FIXTURES / "tiny_bert_embedding"
    for settings, sentence in (
        ({"head": "score"}, "model_type='bert' cannot score texts"),
        ({"head": "classification"}, "head='classification' needs labels"),
    ):
        with pytest.raises(ValueError, match=sentence):
            load_lib.read_config(folder, compute_dtype="float32", **settings)
    # A classifier's body is no sentence encoder: its head would be dropped.
    config = load_lib.read_config(FIXTURES / "tiny_bert_classifier", compute_dtype="float32", head="embedding")
    with pytest.raises(ValueError, match=r"unknown to the model: classifier\.bias, classifier\.weight"):
        load_lib.check_weights(FIXTURES / "tiny_bert_classifier", config)
