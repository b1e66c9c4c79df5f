"""The account of every row: it balances whatever became of rows, and tells when one was lost or counted twice."""

import dataclasses

import numpy as np

from tba_jax.replay import ledger
from tba_jax.replay.index import ReplayIndex
from tests.replay.test_index import SHAPE, make_rows


def test_a_row_that_is_lost_or_counted_twice_is_told():
    """2 duplicates, 1 without a reward, 1 damaged, 2 pending, 1 passed over, 3 resident, 2 evicted by the capacity, 2 unseen."""
    index = ReplayIndex(shape=SHAPE, capacity=3, capacity_per_query=9, vocab_size=8)
    rows = make_rows(0, [1] * 4, [(1,), (1,), (2,), (3,)])
    index.add("a", rows | {"reward": np.float32([0, 0, 0, np.nan])}, step=1)
    for start, stop, kind in ((4, 5, "damaged"), (5, 7, "pending"), (7, 8, "passed_over")):
        index.skip("a", start, stop, kind=kind)
    index.add("a", make_rows(8, [1] * 4, [(2,), (3,), (4,), (5,)]), step=2)
    account = ledger.accounts(index, {"a": 14})["a"]
    assert account.balances and account.unseen == 2
    for changed in ("committed", "resident", "damaged", "passed_over", "pending", "unseen"):
        assert not dataclasses.replace(account, **{changed: getattr(account, changed) + 1}).balances, changed
    assert not dataclasses.replace(account, evicted=account.evicted | {"duplicate": 1}).balances
    assert not dataclasses.replace(account, rejected=account.rejected | {"reward": 2}).balances
    assert not ledger.accounts(index, {"a": 11})["a"].balances, "more was seen than committed"
    index.lose("a", 8, 10)  # row 8 was evicted
    account = ledger.accounts(index, {"a": 14})["a"]
    assert account.balances and account.damaged == 2 == index.totals["damaged"] and account.resident == 2
    index.heads["a"] += 1
    assert not ledger.accounts(index, {"a": 14})["a"].balances
