"""Which of two responses stays where identical and near ones are merged, and when."""

import numpy as np
import pytest

from tba_jax.replay.index import ReplayIndex
from tba_jax.trajectory import RowShape
from tests.replay.test_index import V, index_of, make_rows, resident


def test_the_nearest_response_within_the_share_is_replaced():
    shape = RowShape(prompt_length=1, response_length=12, reward_parts=())
    index = ReplayIndex(shape=shape, capacity=50, capacity_per_query=50, vocab_size=2000, merge_edit_distance=0.13)
    responses = [
        [5] * 8,
        [5, 69, 133, 197, 5, 69, 133, 197],  # other tokens of the same bucket
        [1, 2, 3, 4, 5, 6, 7, 8],
        [1, 2, 3, 4, 5, 6, 9, 9],  # 2 of 8 + 8 from the one before: it goes
        [1, 2, 3, 4, 5, 9, 9, 9, 9],  # 3 of 9 + 8: too far
        [2, 3, 4, 5, 6, 9, 9],  # an insertion, 1 of 7 + 8 from row 3; 3 of 7 + 9 from row 4
        [1, 2, 3, 9, 4, 5, 9, 9, 9, 9, 9],  # 2 of 11 + 9 from row 4
        [],
        [1500],
        [1501],
    ]
    rows = {name: np.zeros((len(responses), *row), dtype) for name, (dtype, row) in shape.columns().items()}
    rows["row"] = np.arange(len(responses))
    for i, response in enumerate(responses):
        rows["response_length"][i] = len(response)
        rows["tokens"][i, : len(response)] = response
    index.add("a", rows, step=1)
    assert not index.merge(before=1) and len(index) == 10, "rows of the recent window are as they came"
    assert index.merge(before=2) and not index.merge(before=2)
    assert [row for _, row in resident(index)] == [0, 1, 5, 6, 7, 8, 9]
    assert index.ledger()["a"]["evicted"] == {"duplicate": 3, "query_capacity": 0, "capacity": 0}
    # Another query's responses are not compared.
    index.add("b", {name: column[:1] for name, column in rows.items()} | {"query_id": np.uint64([3])}, step=2)
    assert index.merge(before=3) and len(index) == 8


@pytest.mark.parametrize("rules", [{}, {"merge_edit_distance": 0.3}], ids=str)
def test_the_better_of_two_stays_and_of_equals_the_newer(rules):
    """(0, 1, 2) and (0, 1, 3) are near. What a response is merged with may have come in the same call."""
    index = index_of(merge_keep="best", **rules)
    responses = [(0, 1, 2), (0, 1, 2), (4,), (0, 1, 2), (0, 1, 3)]
    rows = make_rows(0, [7] * 5, responses) | {"reward": np.float32([2, 1, 0, 2, 1.5])}
    index.add("a", rows, step=1)
    index.merge(before=2)
    # Row 1 is worse than row 0, and row 3 as good; row 4 is near, and worse.
    assert resident(index) == [("a", 2), ("a", 3), *([] if rules else [("a", 4)])]
    index.mark_drawn(index.slots_of([("a", 2), ("a", 3)]))
    worse = make_rows(0, [7, 8, 7], [(0, 1, 2), (0, 1, 2), (0, 1, 2)]) | {"reward": np.float32([1.9, 1, 1.8])}
    index.add("b", worse, step=9)
    query = index.slot_query[index.slots_of([("a", 3)])[0]]
    assert (index.slots_of([("b", 0), ("b", 1), ("b", 2)]) >= 0).all(), "they may be drawn while they are recent"
    assert index.newest_visible_step[query] == 9 and index.recent_draws[query] == 0
    index.add("c", make_rows(0, [7], [(0, 1, 2)]) | {"reward": np.float32([2.5])}, step=10)
    index.merge(before=10)
    assert index.slots_of([("b", 0), ("b", 2)]).tolist() == [-1, -1]
    assert (index.slots_of([("a", 3), ("b", 1), ("c", 0)]) >= 0).all()
    assert index.ledger()["b"] | {"seen": 3, "resident": 1} == index.ledger()["b"]
    assert index.ledger()["b"]["evicted"] == {"duplicate": 2, "query_capacity": 0, "capacity": 0}
    assert index.ledger()["b"]["evicted_untrained"] == 0
    index.merge(before=11)
    assert index.slots_of([("a", 3)]).tolist() == [-1] and index.row_draws[index.slots_of([("c", 0)])[0]] == 0


def test_near_embeddings_are_merged_within_their_query():
    shape = RowShape(prompt_length=2, response_length=4, reward_parts=(), embedding_size=2)
    index = ReplayIndex(shape=shape, capacity=9, capacity_per_query=9, vocab_size=V, merge_cosine_distance=0.1)
    degrees = np.radians([0, 40, 90, 25, 20, 20])  # cosine distance 0.1 is 25.8 degrees
    rows = {name: np.zeros((6, *row), dtype) for name, (dtype, row) in shape.columns().items()}
    rows["row"], rows["query_id"] = np.arange(6), np.array([7, 7, 7, 7, 7, 8], np.uint64)
    rows["response_length"][:], rows["tokens"][:, 0] = 1, np.arange(6) % V
    rows["embedding"] = np.stack([np.cos(degrees), np.sin(degrees)], axis=1).astype(np.float32)
    index.add("a", {name: column[:4] for name, column in rows.items()}, step=1)
    index.merge(before=2)
    # 25 degrees are 15 from row 1 and 25 from row 0: the nearest goes.
    assert [row for _, row in resident(index)] == [0, 2, 3]
    index.add("a", {name: column[4:] for name, column in rows.items()}, step=2)
    index.merge(before=3)
    assert [row for _, row in resident(index)] == [0, 2, 4, 5]
    assert index.ledger()["a"]["evicted"]["duplicate"] == 2
    spoilt = {name: column[5:].copy() for name, column in rows.items()} | {"row": np.arange(6, 7)}
    spoilt["embedding"][0, 1] = np.nan
    index.add("a", spoilt, step=3)
    assert index.ledger()["a"]["rejected"]["embedding"] == 1 and len(index) == 4
