"""Embeddings of texts: against torch's values, in batches of any size and length, on a mesh; folders that are refused."""

import shutil

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tba_jax import sharding, trajectory
from tba_jax.experiment import jobs
from tba_jax.models.hugging_face import load
from tba_jax.replay.reader import LogReader
from tba_jax.rewards import embeddings
from tba_jax.storage import layout
from tests.support import applied, tiny_run
from tests.support.tiny_checkpoints import path_of


def mesh(devices: int):
    return sharding.make_mesh((devices, 1, 1), setting="test", devices=jax.devices()[:devices])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny BERT with a tokenizer of one id a word."""
    folder = tmp_path_factory.mktemp("encoder") / "bert"
    shutil.copytree(path_of("bert_embedding"), folder)
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2} | {f"w{i}": i for i in range(3, 40)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    tokenizer.enable_padding(length=7)  # as published sentence encoders have it: not to be followed
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_every_text_has_the_embedding_it_has_alone(folder):
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{i}" for i in rng.integers(3, 40, rng.choice([0, 3, 9, 29]))) for _ in range(70)]
    found = embeddings.ResponseEmbedder(folder, mesh(1))(texts)
    config = embeddings.read_config(folder)
    params = load.load_params(folder, config, applied.shardings(config, mesh(1)))
    assert found.shape == (70, config.width) and found.dtype == np.float32
    embed = jax.jit(lambda tokens: applied.merge(params, config).sentence_embeddings(tokens, np.ones(tokens.shape, bool)))
    for text, embedding in zip(texts, found, strict=True):
        ids = [1, *(int(word[1:]) for word in text.split()[: config.position_limit - 2]), 2]
        np.testing.assert_allclose(embedding, np.asarray(embed(np.array([ids], np.int32)))[0], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)
    np.testing.assert_allclose(embeddings.ResponseEmbedder(folder, mesh(4))(texts), found, atol=1e-5)
    assert embeddings.ResponseEmbedder(folder, mesh(1))([]).shape == (0, config.width)


def test_a_text_that_spells_a_special_token_is_embedded_as_text(folder):
    """The pre-tokenizer makes three words of "[SEP]" that are unknown; as one special token it would be one."""
    embed = embeddings.ResponseEmbedder(folder, mesh(1))
    shutil.copytree(folder, folder.parent / "special")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    tokenizer.save(str(folder.parent / "special" / "tokenizer.json"))
    special = embeddings.ResponseEmbedder(folder.parent / "special", mesh(1))
    np.testing.assert_allclose(special(["w4 [SEP] w5", "[CLS]"]), embed(["w4 [ SEP ] w5", "[ CLS ]"]), atol=1e-5)


def test_special_tokens_without_a_row_in_the_embedding_are_not_used(folder, tmp_path):
    padded = shutil.copytree(folder, tmp_path / "padded")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["[PAD]"])
    tokenizer.save(str(padded / "tokenizer.json"))
    assert tokenizer.token_to_id("[PAD]") == embeddings.read_config(padded).vocab
    texts = ["w4 w5", "w6 [ PAD ]"]
    expected = embeddings.ResponseEmbedder(folder, mesh(1))(texts)
    np.testing.assert_array_equal(embeddings.ResponseEmbedder(padded, mesh(1))(["w4 w5", "w6 [PAD]"]), expected)


def test_the_contract_tells_encoders_apart(folder, tmp_path):
    described = embeddings.describe(folder)
    assert described["width"] == embeddings.read_config(folder).width and described == embeddings.describe(folder)
    shutil.copytree(folder, tmp_path / "other")
    text = (tmp_path / "other" / "tokenizer.json").read_text()
    (tmp_path / "other" / "tokenizer.json").write_text(text.replace("w39", "w40"))
    assert embeddings.describe(tmp_path / "other")["weights"] != described["weights"]


def test_folders_that_do_not_embed_are_refused():
    for name, words in [("llama_tied", "is not a sentence encoder"), ("bert_classifier", "is not a sentence encoder")]:
        with pytest.raises(ValueError, match=words):
            embeddings.read_config(path_of(name))
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        embeddings.read_config(path_of("bert_embedding"))


def test_a_run_stores_embeddings_and_merges_by_them(folder, tmp_path, one_device):
    """Two-digit sums whose every response the tokenizer does not know: all have one embedding, so a query keeps one row."""
    changes = {"schedule__mode": "interleaved", "evaluation__enabled": False, "learner__steps": 3}
    c = tiny_run.config(task__embedding_path=str(folder), replay__merge_cosine_distance=0.01, **changes)
    s = tiny_run.settings(tmp_path, c)
    assert jobs.everything(s)() == 0
    reader = LogReader(s.run.replay, s.experiment.contract.row_shape())
    ((writer, head),) = reader.heads().items()
    rows = reader.read(writer, 0, head)
    texts = [s.experiment.tokenizer.decode(trajectory.response(rows, i)) for i in range(head)]
    expected = embeddings.ResponseEmbedder(folder, mesh(1))(texts)
    np.testing.assert_allclose(rows["embedding"], expected, atol=1e-6)
    entry = layout.read_json(s.run.finished)["ledger"][writer]
    assert entry["evicted"]["duplicate"] > 0 and entry["resident"] < len(np.unique(trajectory.response_tokens(rows), axis=0))
