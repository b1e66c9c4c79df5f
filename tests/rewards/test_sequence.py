"""Scores of texts: against torch's values and the models one text at a time, in batches, on a mesh; models that are refused."""

import concurrent.futures
import json
import logging
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tba_jax import sharding
from tba_jax.models.config import EncoderConfig
from tba_jax.rewards import sequence
from tests.support import applied, tiny_checkpoints
from tests.support.tiny_checkpoints import path_of

EOS = "<end>"


def mesh(sizes: tuple[int, int, int] = (1, 1, 1)):
    return sharding.make_mesh(sizes, setting="test", devices=jax.devices()[: int(np.prod(sizes))])


def write_tokenizer(folder, *, vocab: int, around: bool, end: int = 2) -> None:
    """One id a word: w<id>. around: special tokens 0 and 2 stand around a text, as RoBERTa's do. end: id of the end."""
    tokenizer = Tokenizer(models.WordLevel({EOS: end} | {f"w{i}": i for i in range(vocab) if i != end}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if around:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"w0 $A {EOS}", special_tokens=[("w0", 0), (EOS, 2)])
    tokenizer.save(str(folder / "tokenizer.json"))
    folder.joinpath("tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS})
    )


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scorer") / "reward"
    shutil.copytree(path_of("gpt_neox_reward"), folder)
    write_tokenizer(folder, vocab=48, around=False)
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scorer") / "classifier"
    shutil.copytree(path_of("roberta_classifier"), folder)
    write_tokenizer(folder, vocab=40, around=True)
    return folder


def scorer(folder, sizes=(1, 1, 1), **settings):
    return sequence.SequenceClassifier(folder, mesh(sizes), setting="task.reward_path", **settings)


def words(ids) -> str:
    return " ".join(f"w{i}" for i in ids)


def without_specials(folder, to, *, vocab: int):
    """A copy whose tokenizer has a word for every id of the golden rows, in which 5 does not occur."""
    shutil.copytree(folder, to)
    write_tokenizer(to, vocab=vocab, around=False, end=5)
    return to


def test_a_reward_model_gives_the_scores_of_torch(reward, tmp_path):
    golden = np.load(reward / "golden.npz")
    rows = [tokens[mask] for tokens, mask in zip(golden["tokens"], golden["mask"], strict=True)]
    found = scorer(without_specials(reward, tmp_path / "plain", vocab=48)).scores([words(row) for row in rows])
    assert found.dtype == np.float32 and found.shape == (3, 1)
    np.testing.assert_allclose(found, golden["scores"], atol=1e-5)


def test_a_classifier_gives_the_logits_of_torch(classifier, tmp_path):
    golden = np.load(classifier / "golden.npz")
    rows = [tokens[mask] for tokens, mask in zip(golden["tokens"], golden["token_mask"], strict=True)]
    folder = without_specials(classifier, tmp_path / "plain", vocab=40)
    np.testing.assert_allclose(scorer(folder).scores([words(row) for row in rows]), golden["logits"], atol=1e-5)


def random_texts(vocab: int, lengths) -> list[str]:
    rng = np.random.default_rng(0)
    return [words(rng.integers(3, vocab, length)) for length in lengths]


LENGTHS = [1, 40, 16, 3, 40, 16, 1, 3, 16]


def test_every_text_has_the_score_it_has_alone(reward):
    """In passes of one to four devices, padded to several lengths, and from several threads."""
    config, params = tiny_checkpoints.load(reward)
    texts = random_texts(48, LENGTHS)
    ended = np.arange(len(texts)) % 3 > 0
    expected = []
    for text, end in zip(texts, ended, strict=True):
        ids = [int(word[1:]) for word in text.split()] + [2] * bool(end)
        row = np.array([ids + [0] * (48 - len(ids))], np.int32)
        expected.append(np.asarray(tiny_checkpoints.scores(params, row, np.arange(48)[None] < len(ids), config))[0])
    found = scorer(reward, batch_rows=3).scores(texts, ended=ended)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(found - scorer(reward).scores(texts))[ended].min() > 1e-4, "the end is a token that is read"
    split = scorer(reward, (2, 1, 2), batch_rows=2)
    np.testing.assert_allclose(split.scores(texts, ended=ended), expected, atol=1e-5)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for again in threads.map(lambda _: split.scores(texts, ended=ended), range(8)):
            np.testing.assert_allclose(again, expected, atol=1e-5)
    assert scorer(reward).scores([]).shape == (0, 1)


def test_classifier_texts_have_specials_and_are_cut_at_the_end(classifier, caplog):
    config = sequence.read_config(classifier, setting="test", compute_dtype="float32")
    assert isinstance(config, EncoderConfig)
    made, params = scorer(classifier), tiny_checkpoints.load(classifier)[1]
    texts = random_texts(40, [5, config.position_limit + 9, 0])
    with caplog.at_level(logging.WARNING):
        found = made.scores(texts)
        made.scores(texts)
    assert [record.message for record in caplog.records] == [
        f"texts for task.reward_path={str(classifier)!r} exceed its {config.position_limit} positions and are cut"
    ]
    classify = jax.jit(lambda tokens: applied.merge(params, config).classify(tokens, np.ones(tokens.shape, bool)))
    for text, logits in zip(texts, found, strict=True):
        ids = [0, *(int(word[1:]) for word in text.split()[: config.position_limit - 2]), 2]
        np.testing.assert_allclose(logits, np.asarray(classify(np.array([ids], np.int32)))[0], atol=1e-5)
    assert made.labels == ("negative", "neutral", "positive") and made.label("positive") == 2


def test_a_reward_models_text_is_cut_at_its_beginning(reward):
    long, end = random_texts(48, [90, 5])
    kept = " ".join(f"{long} {end}".split()[-64:])
    np.testing.assert_allclose(scorer(reward).scores([f"{long} {end}"]), scorer(reward).scores([kept]), atol=1e-6)


@pytest.mark.parametrize("kind", ["reward", "classifier"])
def test_a_text_that_spells_a_special_token_is_read_as_text(request, kind):
    """Of EOS with a space in it, whose parts are no words, the vocabulary has the word for what is unknown, 3, twice."""
    made = scorer(request.getfixturevalue(kind))
    plain, spelled, unknown = "w4 w5", f"w4 {EOS} w5", "w4 w3 w3 w5"
    scores = made.scores([plain, spelled, unknown])
    np.testing.assert_allclose(scores[1], scores[2], atol=1e-6)
    assert np.abs(scores[0] - scores[1]).max() > 1e-4


def test_a_text_that_spells_a_special_token_behind_a_cut_is_read_as_text(reward, tmp_path):
    """The tokenizer's file holds a truncation, which says nothing about scores; its normaliser makes EOS of other characters."""
    folder = tmp_path / "cut"
    shutil.copytree(reward, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.enable_truncation(3)
    tokenizer.save(str(folder / "tokenizer.json"))
    begin = "w4 w5 w6 w7"
    plain, spelled, unknown = scorer(folder).scores([begin, f"{begin} ＜end＞", f"{begin} w3 w3"])
    np.testing.assert_allclose(spelled, unknown, atol=1e-6)
    assert np.abs(plain - spelled).max() > 1e-4


def test_devices_do_not_wait_for_each_other(reward, classifier, monkeypatch):
    compiled, jit = [], jax.jit

    def noting(*arguments, **settings):
        program = jit(*arguments, **settings)
        return lambda *given: (compiled.append(program.lower(*given).compile().as_text()), program(*given))[1]

    for folder in (reward, classifier):
        with monkeypatch.context() as patch:
            patch.setattr(jax, "jit", noting)
            made = scorer(folder, (2, 2, 1), batch_rows=2)
        compiled.clear()
        made.scores(random_texts(48, LENGTHS))
        assert compiled and all("num_partitions=4" in text for text in compiled)
        for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute"):
            assert not any(name in text for text in compiled), name


def test_bfloat16_weights_take_half_the_memory(reward):
    before = {id(array) for array in jax.live_arrays()}
    made = scorer(reward, compute_dtype="bfloat16")
    assert {str(array.dtype) for array in jax.live_arrays() if id(array) not in before} == {"bfloat16"}
    texts = random_texts(48, LENGTHS)
    whole = scorer(reward).scores(texts)
    np.testing.assert_allclose(made.scores(texts), whole, atol=0.05 * np.abs(whole).max())


def test_what_cannot_be_scored_is_said(reward, classifier, tmp_path):
    with pytest.raises(ValueError, match=r"task\.reward_path='.*' has no label 'toxic': its labels are 'negative', 'neut"):
        scorer(classifier).label("toxic")
    assert scorer(reward).labels == ("LABEL_0",)
    for name in ("gpt_neox", "roberta_embedding"):
        with pytest.raises(ValueError, match=r"^task\.reward_path='.*' is not a sequence classifier or reward model"):
            scorer(path_of(name))
    with pytest.raises(ValueError, match="holds no tokenizer"):
        scorer(path_of("gpt_neox_reward"))
    with pytest.raises(ValueError, match=r"cannot score '', which has no tokens"):
        scorer(reward).scores([""])
    shutil.copytree(reward, tmp_path / "endless")
    (tmp_path / "endless" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    endless = scorer(tmp_path / "endless")
    with pytest.raises(ValueError, match=r"has no end-of-sequence token"):
        endless.scores(["w4"], ended=[True])
    with pytest.raises(ValueError, match=r"task\.reward_path='.*': its tokenizer has no end-of-sequence token"):
        scorer(tmp_path / "endless", ends=True)
    # A weight this large is finite, what is computed of it is not.
    shutil.copytree(reward, tmp_path / "huge")
    tiny_checkpoints.edit_weights(tmp_path / "huge", lambda tensors: tensors["score.weight"].fill(3e38))
    with pytest.raises(FloatingPointError, match=r"gave 2 of 2 texts a score that is not finite; the first ends in 'w4 w5'"):
        scorer(tmp_path / "huge").scores(["w4 w5", "w6"])


def test_special_tokens_without_a_row_in_the_embedding_are_not_used(reward, tmp_path):
    """The padding is id 48 of a tokenizer whose model has 48 rows; then the end is."""
    padded = shutil.copytree(reward, tmp_path / "padded")
    settings = json.loads((padded / "tokenizer_config.json").read_text())
    (padded / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "<|padding|>"}))
    texts, ended = ["w4 w5", "w6"], [True, False]
    np.testing.assert_array_equal(scorer(padded).scores(texts, ended=ended), scorer(reward).scores(texts, ended=ended))
    (padded / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|over|>"}))
    np.testing.assert_array_equal(scorer(padded).scores(texts), scorer(reward).scores(texts))
    told = r"^task\.reward_path='.*': the token '<\|over\|>', which ends responses, has id 48, but .* has 48 rows: set eos_token"
    with pytest.raises(ValueError, match=told):
        scorer(padded, ends=True)


def test_a_digest_tells_models_apart(reward, tmp_path):
    found = sequence.digest(reward)
    assert found == sequence.digest(reward) and len(found) == 16
    shutil.copytree(reward, tmp_path / "other")
    assert sequence.digest(tmp_path / "other") == found
    tiny_checkpoints.edit_weights(tmp_path / "other", lambda tensors: tensors["score.weight"].__imul__(2))
    assert sequence.digest(tmp_path / "other") != found
    shutil.copytree(reward, tmp_path / "words")
    write_tokenizer(tmp_path / "words", vocab=47, around=False)
    assert sequence.digest(tmp_path / "words") != found
    for name in ("chat_template.jinja", "generation_config.json"):
        before = sequence.digest(tmp_path / "other")
        (tmp_path / "other" / name).write_text("{}")
        assert sequence.digest(tmp_path / "other") != before


def test_a_digest_of_a_large_file_reads_every_tensor(tmp_path):
    """A small head at the end, or the last rows of a large tensor."""
    digests = set()
    for case in ("as it is", "head", "last row"):
        large, head = np.zeros((2048, 1024), np.float32), np.zeros((1, 8), np.float32)
        head[0, 3] = case == "head"
        large[-1, 5] = case == "last row"
        folder = tmp_path / case
        folder.mkdir()
        save_file({"layers.weight": large, "score.weight": head, "z.weight": large[:64].copy()}, folder / "model.safetensors")
        digests.add(sequence.digest(folder))
    assert len(digests) == 3
