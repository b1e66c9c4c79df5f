"""Checkpoints of encoders: import and export, the folders of sentence-transformers, and every refusal."""

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tba_jax.models.config import EncoderConfig
from tba_jax.models.hugging_face import export
from tba_jax.models.hugging_face import load as load_lib
from tests.support.tiny_checkpoints import ENCODERS, assert_same_params, edit_config, edit_weights, load, path_of

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
