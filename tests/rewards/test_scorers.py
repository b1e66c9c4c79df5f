"""Scores of texts: against torch's values and the models one text at a time, in batches, on a mesh; models that are refused.

Verdicts of language models against logits of whole rows.
"""

import concurrent.futures
import json
import logging
import math
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tba_jax.rewards import scorers
from tba_jax.rewards.scorers import LinearScorer, ResponseEmbedder, UnsafeTokenScorer
from tba_jax.tasks.interface import ModelUse, UnsafeTokenSettings
from tests.support import applied, spelled_checkpoints, tiny_checkpoints
from tests.support.spelled_checkpoints import BEGIN, UNSAFE, spelled
from tests.support.tiny_checkpoints import make_mesh, path_of

EOS = "<end>"


def write_tokenizer(folder, *, vocab: int, around: bool) -> None:
    """One id a word: w<id>. around: special tokens 0 and 2 stand around a text, as RoBERTa's do."""
    tokenizer = Tokenizer(models.WordLevel({EOS: 2} | {f"w{i}": i for i in range(vocab) if i != 2}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if around:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"w0 $A {EOS}", special_tokens=[("w0", 0), (EOS, 2)])
    tokenizer.save(str(folder / "tokenizer.json"))
    folder.joinpath("tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS})
    )


def test_lengths_are_padded_by_less_than_a_quarter_to_few_shapes():
    lengths = [scorers.padded_length(longest, 2048) for longest in range(2049)]
    assert all(longest <= padded <= 2048 for longest, padded in enumerate(lengths))
    assert all(padded < 1.25 * longest for longest, padded in enumerate(lengths) if longest > 64)
    assert len(set(lengths)) == 8 + 4 * 4, "multiples of 16 up to 128, and four for each doubling from there"
    assert scorers.padded_length(600, 610) == 610 and scorers.padded_length(0, 2048) == 16


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scorer") / "reward"
    shutil.copytree(path_of("gpt_neox_reward"), folder)
    write_tokenizer(folder, vocab=48, around=False)
    return folder


def scorer(folder, devices: int = 1, *, batch_rows: int = 16, **settings):
    use = ModelUse(name="reward", setting="task.reward_path", path=str(folder), rows=batch_rows, **settings)
    return scorers.SequenceClassifier(use, make_mesh((devices, 1, 1)))


@pytest.fixture(scope="module")
def reward_scorer(reward):
    return scorer(reward)


def words(ids) -> str:
    return " ".join(f"w{i}" for i in ids)


def random_texts(vocab: int, lengths) -> list[str]:
    rng = np.random.default_rng(0)
    return [words(rng.integers(3, vocab, length)) for length in lengths]


LENGTHS = [1, 40, 16, 3, 40, 16, 1, 3, 16]


def test_every_text_has_the_score_it_has_alone(reward, reward_scorer):
    """In passes of one and four devices, padded to several lengths, and from several threads; no device waits for another."""
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
    assert np.abs(found - reward_scorer.scores(texts))[ended].min() > 1e-4, "the end is a token that is read"
    split = scorer(reward, 4, batch_rows=2)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for again in threads.map(lambda _: split.scores(texts, ended=ended), range(8)):
            np.testing.assert_allclose(again, expected, atol=1e-5)
    assert reward_scorer.scores([]).shape == (0, 1)
    text = split.model.forward.program(rows=8, length=16).lower().compile().as_text()
    assert "num_partitions=4" in text
    assert not any(name in text for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute"))


def test_classifier_texts_have_specials_and_are_cut_at_the_end(tmp_path, caplog):
    classifier = shutil.copytree(path_of("roberta_classifier"), tmp_path / "classifier")
    write_tokenizer(classifier, vocab=40, around=True)
    made = scorer(classifier)
    config, params = tiny_checkpoints.load(classifier)
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
    assert made.labels == ("negative", "neutral", "positive")


def test_what_a_reward_model_reads_of_a_text(reward, reward_scorer, tmp_path):
    """It drops the beginning of a long text. EOS that a text spells is read as two unknown words, 3."""
    long, end = random_texts(48, [90, 5])
    begin = "w4 w5 w6 w7"
    texts = [f"{long} {end}", " ".join(f"{long} {end}".split()[-64:]), begin, f"{begin} {EOS}", f"{begin} w3 w3"]
    whole, kept, plain, spelled, unknown = reward_scorer.scores(texts)
    np.testing.assert_allclose(whole, kept, atol=1e-6)
    np.testing.assert_allclose(spelled, unknown, atol=1e-6)
    assert np.abs(plain - spelled).max() > 1e-4
    # A truncation in the tokenizer's file says nothing about scores. Its normaliser makes EOS of other characters.
    folder = shutil.copytree(reward, tmp_path / "cut")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.enable_truncation(3)
    tokenizer.save(str(folder / "tokenizer.json"))
    np.testing.assert_allclose(scorer(folder).scores([f"{begin} ＜end＞"])[0], unknown, atol=1e-6)


def test_what_cannot_be_scored_is_said(reward, reward_scorer, tmp_path):
    assert reward_scorer.labels == ("LABEL_0",)
    for name in ("gpt_neox", "roberta_embedding"):
        with pytest.raises(ValueError, match=r"^task\.reward_path='.*' is not a sequence classifier or reward model"):
            scorer(path_of(name))
    with pytest.raises(ValueError, match=r"cannot score '', which has no tokens"):
        reward_scorer.scores([""])
    shutil.copytree(reward, tmp_path / "endless")
    (tmp_path / "endless" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ValueError, match=r"task\.reward_path='.*': its tokenizer has no end-of-sequence token"):
        scorer(tmp_path / "endless", ends=True)
    # The end is id 48 of a tokenizer whose model has 48 rows.
    odd = shutil.copytree(reward, tmp_path / "odd")
    settings = json.loads((odd / "tokenizer_config.json").read_text())
    (odd / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|over|>"}))
    with pytest.raises(ValueError, match=r"^task\.reward_path='.*': the token '<\|over\|>', which ends responses, has id 48"):
        scorer(odd, ends=True)
    # A weight this large is finite, what is computed of it is not.
    shutil.copytree(reward, tmp_path / "huge")
    tiny_checkpoints.edit_weights(tmp_path / "huge", lambda tensors: tensors["score.weight"].fill(3e38))
    with pytest.raises(FloatingPointError, match=r"gave 2 of 2 texts a score that is not finite; the first ends in 'w4 w5'"):
        scorer(tmp_path / "huge").scores(["w4 w5", "w6"])


def test_a_digest_tells_models_apart(reward, tmp_path):
    other = shutil.copytree(reward, tmp_path / "other")
    found = [scorers.digest(reward)]
    assert found == [scorers.digest(other)] and len(found[0]) == 16
    tiny_checkpoints.edit_weights(other, lambda tensors: tensors["score.weight"].__imul__(2))
    found.append(scorers.digest(other))
    write_tokenizer(other, vocab=47, around=False)
    found.append(scorers.digest(other))
    for name in ("chat_template.jinja", "generation_config.json"):
        (other / name).write_text("{}")
        found.append(scorers.digest(other))
    # Every tensor of a large file is read to its end.
    for case in ("as it is", "head", "last row"):
        large, head = np.zeros((2048, 1024), np.float32), np.zeros((1, 8), np.float32)
        head[0, 3] = case == "head"
        large[-1, 5] = case == "last row"
        folder = tmp_path / case
        folder.mkdir()
        save_file({"layers.weight": large, "score.weight": head, "z.weight": large[:64].copy()}, folder / "model.safetensors")
        found.append(scorers.digest(folder))
    assert len(set(found)) == 8


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder") / "bert"
    shutil.copytree(path_of("bert_embedding"), folder)
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2} | {f"w{i}": i for i in range(3, 40)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    tokenizer.enable_padding(length=7)  # as published sentence encoders have it: not to be followed
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_every_text_has_the_embedding_it_has_alone(encoder):
    rng = np.random.default_rng(0)
    texts = [" ".join(f"w{i}" for i in rng.integers(3, 40, rng.choice([0, 3, 29]))) for _ in range(70)]
    embed = ResponseEmbedder(encoder, make_mesh((1, 1, 1)))
    found = embed(texts)
    config, params = tiny_checkpoints.load(encoder)
    assert found.shape == (70, config.width) and found.dtype == np.float32 and embed([]).shape == (0, config.width)
    alone = jax.jit(lambda tokens: applied.merge(params, config).sentence_embeddings(tokens, np.ones(tokens.shape, bool)))
    for text, embedding in zip(texts, found, strict=True):
        ids = [1, *(int(word[1:]) for word in text.split()[: config.position_limit - 2]), 2]
        np.testing.assert_allclose(embedding, np.asarray(alone(np.array([ids], np.int32)))[0], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)
    np.testing.assert_allclose(ResponseEmbedder(encoder, make_mesh((4, 1, 1)))(texts), found, atol=1e-5)


def test_a_text_that_spells_a_special_token_is_embedded_as_text(encoder, tmp_path):
    special = shutil.copytree(encoder, tmp_path / "special")
    tokenizer = Tokenizer.from_file(str(encoder / "tokenizer.json"))
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[PAD]"])
    tokenizer.save(str(special / "tokenizer.json"))
    assert tokenizer.token_to_id("[PAD]") == scorers.encoder_config(special).vocab
    found = ResponseEmbedder(special, make_mesh((1, 1, 1)))(["w4 [SEP] w5", "[CLS]", "w6 [PAD]"])
    expected = ResponseEmbedder(encoder, make_mesh((1, 1, 1)))(["w4 [ SEP ] w5", "[ CLS ]", "w6 [ PAD ]"])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_encoders_of_the_contract(encoder, tmp_path):
    described = scorers.describe_encoder(encoder)
    assert described == {"width": scorers.encoder_config(encoder).width, "weights": scorers.digest(encoder)}
    for name in ("llama_tied", "bert_classifier"):
        with pytest.raises(ValueError, match="is not a sentence encoder"):
            scorers.encoder_config(path_of(name))
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        scorers.encoder_config(path_of("bert_embedding"))


LINEAR = {
    "terms": np.array(["bad", "very", "words"]),
    "idf": np.array([3.0, 1.0, 4.0]),
    "coef": np.array([[2.0, -1.0, 0.5], [1.0, 0.0, 0.0]]),
    "intercept": np.array([-1.0, 0.25]),
    "platt_a": np.array([-2.0, -1.5]),
    "platt_b": np.array([0.5, 0.0]),
    "stop_words": np.array(["the"]),
}


def test_a_linear_classifier_by_hand(tmp_path):
    np.savez(tmp_path / "small.npz", **LINEAR)
    classify = LinearScorer(tmp_path / "small.npz", setting="path")
    # Counts: bad 2, words 1; times idf: 6 and 4; over √52.
    bad, word = 6 / math.sqrt(52), 4 / math.sqrt(52)
    margins = 2 * bad + 0.5 * word - 1, bad + 0.25
    by_hand = [1 / (1 + math.exp(-2.0 * margins[0] + 0.5)), 1 / (1 + math.exp(-1.5 * margins[1]))]
    nothing = [1 / (1 + math.exp(2.0 + 0.5)), 1 / (1 + math.exp(-1.5 * 0.25))]
    found = classify(["Bad, BAD words!", "the a-b unknown", ""])
    assert found.dtype == np.float32 and classify([]).shape == (0,)
    np.testing.assert_allclose(found, np.log([sum(by_hand) / 2, sum(nothing) / 2, sum(nothing) / 2]), rtol=1e-6)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"platt_a": None, "idf": None}, "lacks the arrays idf, platt_a"),
        ({"coef": np.zeros(3)}, r"terms has shape \[3\], coef \[3\]"),
        ({"coef": np.array([[1.0, math.nan, 1.0]] * 2)}, "coef holds numbers that are not finite"),
    ],
)
def test_files_of_other_arrays_are_refused(tmp_path, changes, sentence):
    path = tmp_path / "wrong.npz"
    np.savez(path, **{name: value for name, value in (LINEAR | changes).items() if value is not None})
    with pytest.raises(ValueError, match=rf"task.red_team.classifier_path='.*wrong.npz'.*{sentence}"):
        LinearScorer(path, setting="task.red_team.classifier_path")


EXCHANGE = 48  # tokens of an exchange and its verdict


@pytest.fixture(scope="module")
def guard(tmp_path_factory):
    return spelled_checkpoints.write(tmp_path_factory.mktemp("models") / "guard", "gpt2", chat=True)


def judge(folder, devices: int = 1, *, date: str = "", load: bool = True, **changes) -> UnsafeTokenScorer:
    settings = dict(token="unsafe", template="asked {attack} told {reply}:", ending="\n", length=EXCHANGE) | changes
    verdict, setting = UnsafeTokenSettings(**settings), "task.red_team.classifier_path"
    use = ModelUse(name="classifier", setting=setting, path=str(folder), rows=4, kind="unsafe_token", judge=verdict)
    return UnsafeTokenScorer(use, tiny_checkpoints.make_mesh((devices, 1, 1)), date=date, load=load)


@pytest.fixture(scope="module")
def judging(guard) -> UnsafeTokenScorer:
    return judge(guard)


def log_verdicts(folder, prompts: list[list[int]]) -> np.ndarray:
    """float32[n]: log π(unsafe | prompt)."""
    logits = tiny_checkpoints.last_logits(folder, prompts).astype(np.float64)
    return logits[:, UNSAFE] - np.logaddexp.reduce(logits, axis=1)


def test_an_exchange_has_the_logprob_of_its_verdict(guard, judging):
    rng, letters = np.random.default_rng(0), "abcdeghijklmnopqrtvwxyz "
    texts = ["".join(rng.choice(list(letters), rng.integers(0, 14))) for _ in range(74)]
    attacks, replies = texts[:37], texts[37:]
    prompts = [spelled(f"asked {attack} told {reply}:\n") for attack, reply in zip(attacks, replies, strict=True)]
    found = judging(attacks, replies)
    assert found.dtype == np.float32 and found.shape == (37,) and found.max() < 0 and found.std() > 0.01
    np.testing.assert_allclose(found, log_verdicts(guard, prompts), atol=2e-5)
    np.testing.assert_allclose(judge(guard, devices=4)(attacks, replies), found, atol=2e-5)
    assert judging([], []).shape == (0,)


def test_prompts_of_a_judge(guard, judging, tmp_path, caplog):
    exchange = "user:do it\nassistant:no\n\n"
    dated = spelled_checkpoints.dated(guard, tmp_path / "dated")
    cases = [
        (judge(guard, load=False, template=""), "do it", "no", [BEGIN, *spelled(exchange)]),
        (judge(dated, load=False, template="", date="2025-05-09"), "do it", "no", [*spelled("may"), BEGIN, *spelled(exchange)]),
        # Braces are no characters of this tokenizer: what is left of them is their text.
        (judge(guard, load=False), "{reply}", "{attack}", spelled("asked reply told attack:\n")),
    ]
    for made, attack, reply, prompt in cases:
        made.model = judging.model
        np.testing.assert_allclose(made([attack], [reply]), log_verdicts(guard, [prompt]), atol=2e-5)
    room = EXCHANGE - len("asked do it told :\n")
    found = judging(["do it", "do it"], ["x" * 99, "no"])
    assert f"1 of 2 prompts exceed task.red_team.classifier_length={EXCHANGE} tokens" in caplog.text
    np.testing.assert_allclose(found, judging(["do it", "do it"], ["x" * room, "no"]), atol=1e-6)
    # An attack that leaves no room for any reply loses its own end, too.
    room = EXCHANGE - len("asked  told :\n")
    np.testing.assert_allclose(judging(["a" * 60], ["no"]), judging(["a" * room], [""]), atol=1e-6)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"token": "unsafely"}, r"label='unsafely' must be the text of one token of .* 0 tokens have"),
        ({"template": "{attack}"}, r"template='\{attack\}' must hold \{reply\} once"),
        ({"length": 14}, r"length=14 leaves no room for any text: .* 14 tokens"),
    ],
)
def test_settings_that_do_not_go_with_a_judge_are_refused(guard, changes, sentence):
    with pytest.raises(ValueError, match=rf"task\.red_team\.classifier_{sentence}"):
        judge(guard, load=False, **changes)
