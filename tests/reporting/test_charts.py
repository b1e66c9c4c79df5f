"""Which rows are shown, against a sort of all rows, and the texts of their tokens. test_page.py looks at the charts of runs."""

import types

import numpy as np

from tba_jax.reporting import charts
from tba_jax.reporting.gathering import FIGURES


def table(reward, query, step) -> np.ndarray:
    rows = np.zeros(len(reward), FIGURES)
    rows["key"] = np.arange(len(reward))
    rows["reward"], rows["query_id"], rows["newest_step"] = reward, query, step
    return rows


def test_the_worst_and_the_best_are_those_of_a_sort_of_all():
    rng, n = np.random.default_rng(0), 2000
    rows = table(rng.integers(0, 3, n), np.arange(n), rng.integers(0, 50, n))
    counts = rng.integers(0, 2, n)
    found = charts.chosen(rows, counts)
    for name, sign in (("worst", 1), ("best", -1)):
        keys = sorted((sign * row["reward"], count == 0, -row["newest_step"]) for row, count in zip(rows, counts, strict=True))
        mine = [(sign * rows["reward"][i], counts[i] == 0, -rows["newest_step"][i]) for i in found[name]]
        assert mine == keys[: charts.ROWS_EACH]
    assert len(set(found["random"])) == charts.RANDOM_ROWS
    assert found["random"] == sorted(found["random"], key=lambda i: -rows["newest_step"][i])
    assert rows["newest_step"][found["steps"]].tolist() == np.repeat([0, 7, 14, 21, 28, 35, 42, 49], 3).tolist()


def test_different_queries_come_first_and_disagreeing_ones_with_their_best_and_worst_row():
    rows = table([0, 0, 0, 0, 1], [7, 7, 7, 8, 9], [5, 5, 5, 1, 9])
    worst = charts.chosen(rows, np.zeros(5, int))["worst"]
    assert worst[1:3] == [3, 4] and sorted(worst) == [0, 1, 2, 3, 4]
    rows = table([0, 1, 0.5, 0.6, 5, -5, 2, np.nan], [1, 1, 2, 2, 3, 3, 4, 4], [0] * 8)
    assert charts.chosen(rows, np.zeros(8, int))["disagreeing"] == [4, 5, 1, 0, 3, 2]
    assert charts.chosen(table([1, 1, 1], [1, 1, 2], [-1] * 3), np.zeros(3, int))["disagreeing"] == []
    assert charts.chosen(table([], [], []), np.zeros(0, int)) == {}


def test_a_character_of_several_tokens_stands_at_the_one_that_completes_it():
    contents = [*(bytes([byte]) for byte in range(256)), b"<|end|>"]
    tokenizer = types.SimpleNamespace(eos_id=256, pad_id=256, special_ids=(256,), token_bytes=lambda: contents)
    texts = charts.pieces(tokenizer)
    assert texts([*"aé→".encode(), 256]) == ["a", "", "é", "", "", "→", "⟨end⟩"]
    assert texts("é".encode()[:1]) == ["�"] and texts(["é".encode()[0], 256, 97]) == ["", "�⟨end⟩", "a"]
    assert charts.pieces(None)([5]) == ["⟨5⟩"]
