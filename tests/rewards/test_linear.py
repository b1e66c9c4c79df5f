"""The linear classifier: against loops over plain numbers, on a real file, and files that are refused."""

import math

import numpy as np
import pytest

from tba_jax.rewards.linear import LinearScorer

SMALL = {
    "terms": np.array(["bad", "very", "words"]),
    "idf": np.array([3.0, 1.0, 4.0]),
    "coef": np.array([[2.0, -1.0, 0.5], [1.0, 0.0, 0.0]]),
    "intercept": np.array([-1.0, 0.25]),
    "platt_a": np.array([-2.0, -1.5]),
    "platt_b": np.array([0.5, 0.0]),
    "stop_words": np.array(["the"]),
}


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.npz"
    np.savez(path, **SMALL)
    return path


def test_a_text_by_hand(small):
    # Counts: bad 2, words 1; times idf: 6 and 4; over √52.
    bad, words = 6 / math.sqrt(52), 4 / math.sqrt(52)
    margins = 2 * bad + 0.5 * words - 1, bad + 0.25
    by_hand = [1 / (1 + math.exp(-2.0 * margins[0] + 0.5)), 1 / (1 + math.exp(-1.5 * margins[1]))]
    nothing = [1 / (1 + math.exp(2.0 + 0.5)), 1 / (1 + math.exp(-1.5 * 0.25))]
    texts = ["Bad, BAD words!", "the a-b unknown", ""]
    found = LinearScorer(small, setting="path")(texts)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.log([sum(by_hand) / 2, sum(nothing) / 2, sum(nothing) / 2]), rtol=1e-6)
    assert LinearScorer(small, setting="path")([]).shape == (0,)


def test_profanity_is_told_from_plain_speech(data_dir):
    path = data_dir / "classifiers/profanity_check_linear.npz"
    arrays = dict(np.load(path, allow_pickle=False))
    texts = ["You are a stupid idiot, shut up", "The water cycle is explained in one sentence", "what a lovely day it is"]
    found = np.exp(LinearScorer(path, setting="path")(texts))
    assert found[0] > 0.9 and found[1:].max() < 0.2
    words = {term: i for i, term in enumerate(arrays["terms"])}
    for text, probability in zip(texts, found, strict=True):
        x = np.zeros(len(words))
        for word in text.lower().replace(",", "").split():
            if len(word) > 1 and word in words and word not in arrays["stop_words"]:
                x[words[word]] += arrays["idf"][words[word]]
        x /= np.linalg.norm(x)
        by_svm = [
            1 / (1 + math.exp(a * (sum(w * x) + c) + b))
            for w, c, a, b in zip(*(arrays[name] for name in ("coef", "intercept", "platt_a", "platt_b")), strict=True)
        ]
        assert probability == pytest.approx(sum(by_svm) / 5, rel=1e-5)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"platt_a": None, "idf": None}, "lacks the arrays idf, platt_a"),
        ({"intercept": np.zeros(3)}, r"intercept has shape \[3\], coef \[2, 3\]"),
        ({"coef": np.zeros(3)}, r"terms has shape \[3\], coef \[3\]"),
        ({"idf": np.array([1.0, math.inf, 1.0])}, "idf holds numbers that are not finite"),
        ({"coef": np.array([[1.0, math.nan, 1.0]] * 2)}, "coef holds numbers that are not finite"),
    ],
)
def test_arrays_that_do_not_go_together_are_refused(tmp_path, changes, sentence):
    path = tmp_path / "wrong.npz"
    np.savez(path, **{name: value for name, value in (SMALL | changes).items() if value is not None})
    with pytest.raises(ValueError, match=rf"task.red_team.classifier_path='.*wrong.npz'.*{sentence}"):
        LinearScorer(path, setting="task.red_team.classifier_path")


def test_files_that_are_no_archives_of_arrays_are_refused(tmp_path):
    (tmp_path / "text.npz").write_text("no")
    np.save(tmp_path / "one.npy", np.zeros(3))
    for name in ("text.npz", "one.npy", "none.npz", "."):
        with pytest.raises(ValueError, match=r"classifier_path='.*' cannot be read as \.npz: "):
            LinearScorer(tmp_path / name, setting="task.red_team.classifier_path")
