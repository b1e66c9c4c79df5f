"""Which rows are shown, against a sort of all rows, and the texts of their tokens."""

import numpy as np

from tba_jax.reporting import samples
from tba_jax.reporting.rows import FIGURES


def table(reward, query, step) -> np.ndarray:
    rows = np.zeros(len(reward), FIGURES)
    rows["key"] = np.arange(len(reward))
    rows["reward"], rows["query_id"], rows["newest_step"] = reward, query, step
    return rows


def test_the_worst_and_the_best_are_those_of_a_sort_of_all():
    rng, n = np.random.default_rng(0), 2000
    rows = table(rng.integers(0, 3, n), np.arange(n), rng.integers(0, 50, n))
    counts = rng.integers(0, 2, n)
    found = samples.chosen(rows, counts)
    for name, sign in (("worst", 1), ("best", -1)):
        keys = sorted((sign * row["reward"], count == 0, -row["newest_step"]) for row, count in zip(rows, counts, strict=True))
        mine = [(sign * rows["reward"][i], counts[i] == 0, -rows["newest_step"][i]) for i in found[name]]
        assert mine == keys[: samples.ROWS_EACH]
    assert len(set(found["random"])) == samples.RANDOM_ROWS
    assert found["random"] == sorted(found["random"], key=lambda i: -rows["newest_step"][i])
    steps = rows["newest_step"][found["steps"]]
    assert steps.tolist() == np.repeat([0, 7, 14, 21, 28, 35, 42, 49], 3).tolist()


def test_different_queries_come_first_and_disagreeing_ones_with_their_best_and_worst_row():
    rows = table([0, 0, 0, 0, 1], [7, 7, 7, 8, 9], [5, 5, 5, 1, 9])
    worst = samples.chosen(rows, np.zeros(5, int))["worst"]
    assert worst[1:3] == [3, 4] and sorted(worst) == [0, 1, 2, 3, 4]
    rows = table([0, 1, 0.5, 0.6, 5, -5, 2, np.nan], [1, 1, 2, 2, 3, 3, 4, 4], [0] * 8)
    assert samples.chosen(rows, np.zeros(8, int))["disagreeing"] == [4, 5, 1, 0, 3, 2]
    assert samples.chosen(table([1, 1, 1], [1, 1, 2], [-1] * 3), np.zeros(3, int))["disagreeing"] == []
    assert samples.chosen(table([], [], []), np.zeros(0, int)) == {}


class Bytes:
    """A tokenizer with one id a byte, as byte-level vocabularies have them, and an end of sequence."""

    vocab_size, eos_id, pad_id, special_ids = 257, 256, 256, (256,)

    def token_bytes(self):
        return [*(bytes([byte]) for byte in range(256)), b"<|end|>"]


def test_a_character_of_several_tokens_stands_at_the_one_that_completes_it():
    pieces = samples.Pieces(Bytes())
    assert pieces.texts([*"aé→".encode(), 256]) == ["a", "", "é", "", "", "→", "⟨end⟩"]
    assert pieces.texts("é".encode()[:1]) == ["�"]
    assert pieces.texts(["é".encode()[0], 256, 97]) == ["", "�⟨end⟩", "a"]
    assert samples.Pieces(None).texts([5]) == ["⟨5⟩"]
