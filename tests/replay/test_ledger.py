"""The account of every row: it balances whatever became of rows, and tells when one was lost or counted twice."""

import dataclasses

import numpy as np

from tba_jax.replay import ledger
from tba_jax.replay.index import ReplayIndex
from tba_jax.trajectory import RowShape

SHAPE = RowShape(prompt_length=2, response_length=3, reward_parts=())


def rows_of(first: int, responses: list[int]) -> dict[str, np.ndarray]:
    rows = {name: np.zeros((len(responses), *row), dtype) for name, (dtype, row) in SHAPE.columns().items()}
    rows["row"] = np.arange(first, first + len(responses))
    rows["response_length"][:] = 1
    rows["tokens"][:, 0] = responses
    return rows


def index_with_everything() -> ReplayIndex:
    """Of writer a:
    2 duplicates, 1 of a token that does not exist, 1 damaged, 2 expired, 1 passed over, 3 resident, 2 evicted by the capacity."""
    index = ReplayIndex(shape=SHAPE, capacity=3, capacity_per_query=9, vocab_size=8)
    index.add("a", rows_of(0, [1, 1, 2, 9]), step=1)
    for start, stop, kind in ((4, 5, "damaged"), (5, 7, "expired"), (7, 8, "passed_over")):
        index.skip("a", start, stop, kind=kind)
    index.add("a", rows_of(8, [2, 3, 4, 5]), step=2)
    return index


def test_a_row_that_is_lost_or_counted_twice_is_told():
    account = ledger.accounts(index_with_everything(), {"a": 14})["a"]
    for changed in ("committed", "resident", "damaged", "expired", "passed_over", "unseen"):
        assert not dataclasses.replace(account, **{changed: getattr(account, changed) + 1}).balances, changed
    assert not dataclasses.replace(account, evicted=account.evicted | {"duplicate": 1}).balances
    assert not dataclasses.replace(account, rejected=account.rejected | {"reward": 1}).balances
    index = index_with_everything()
    index.heads["a"] += 1
    assert not ledger.accounts(index, {"a": 14})["a"].balances
    assert not ledger.accounts(index_with_everything(), {"a": 11})["a"].balances, "more was seen than committed"
