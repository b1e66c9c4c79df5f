"""Filters and orders of rows against sorting and filtering one row at a time."""

import itertools

import numpy as np
import pytest

from tba_jax.reporting import row_filter
from tba_jax.reporting.row_filter import Filter, Orders
from tba_jax.reporting.rows import Columns

WRITERS = ["b", "a"]


def columns(count: int = 300) -> Columns:
    rng = np.random.default_rng(0)
    reward = rng.integers(-2, 3, count).astype(np.float32)
    reward[:3] = np.nan, -0.0, 0.0
    steps = np.sort(rng.integers(-1, 20, (2, count)), axis=0).astype(np.int32)
    return Columns(
        writer=rng.integers(0, 2, count).astype(np.int32),
        row=np.arange(count, dtype=np.int64) * 7 % count,
        query_id=rng.integers(0, 5, count).astype(np.uint64),
        reward=reward,
        reward_parts=np.zeros((count, 1), np.float32),
        newest_step=steps[1],
        oldest_step=steps[0],
        response_length=rng.integers(0, 9, count).astype(np.int32),
        finished=rng.random(count) < 0.5,
        policy_logprob_sum=-rng.exponential(size=count).astype(np.float32),
        ref_logprob_sum=-rng.exponential(size=count).astype(np.float32),
    )


def wanted(table: Columns, asked: Filter) -> list[int]:
    def fits(i: int) -> bool:
        return (
            (not asked.query or int(table.query_id[i]) == int(asked.query, 16))
            and (not asked.writer or WRITERS[table.writer[i]] == asked.writer)
            and (asked.reward_from is None or table.reward[i] >= asked.reward_from)
            and (asked.reward_to is None or table.reward[i] <= asked.reward_to)
            and (asked.step_from is None or table.newest_step[i] >= asked.step_from)
            and (asked.step_to is None or table.newest_step[i] <= asked.step_to)
            and (not asked.finished or table.finished[i] == (asked.finished == "yes"))
        )

    def key(i: int) -> tuple:
        step, reward = int(table.newest_step[i]), float(table.reward[i])
        ratio = float(table.policy_logprob_sum[i] - table.ref_logprob_sum[i])
        is_nan = bool(np.isnan(reward))
        return {
            "newest": (-step, -int(table.row[i])),
            "oldest": (step, int(table.row[i])),
            "worst": (is_nan, 0.0 if is_nan else reward, -step, i),
            "best": (is_nan, 0.0 if is_nan else -reward, -step, i),
            "longest": (-int(table.response_length[i]), -step, i),
            "shortest": (int(table.response_length[i]), -step, i),
            "above": (-ratio, -step, i),
            "below": (ratio, -step, i),
        }[asked.order]

    return sorted(filter(fits, range(len(table))), key=key)


@pytest.mark.parametrize("order", row_filter.ORDERS)
def test_orders_are_those_of_sorting_each_row(order):
    table = columns()
    asked = Filter(order=order)
    assert Orders().matching(table, WRITERS, asked).tolist() == wanted(table, asked)


@pytest.mark.parametrize(
    "asked",
    [
        Filter(query="3".rjust(16, "0")),
        Filter(query="ff".rjust(16, "0")),
        Filter(writer="a"),
        Filter(writer="nobody"),
        Filter(reward_from=0.0),
        Filter(reward_from=-1.0, reward_to=1.0),
        Filter(step_from=3, step_to=9, order="worst"),
        Filter(step_from=-1, step_to=-1),
        Filter(finished="yes", writer="b", order="longest"),
        Filter(finished="no", reward_to=0.0, query="1".rjust(16, "0")),
    ],
)
def test_filters_keep_what_each_row_says(asked):
    table = columns()
    assert Orders().matching(table, WRITERS, asked).tolist() == wanted(table, asked)


def test_an_order_of_fewer_rows_does_not_change_while_the_table_grows():
    table, orders = columns(), Orders()
    before = orders.matching(table.first(100), WRITERS, Filter(order="worst")).tolist()
    for count, order in itertools.product((150, 200, 300), row_filter.ORDERS):
        orders.matching(table.first(count), WRITERS, Filter(order=order))
    assert orders.matching(table.first(100), WRITERS, Filter(order="worst")).tolist() == before


def test_an_address_asks_for_the_same_again():
    asked = Filter(query="00000000000000ab", writer="w-1", reward_from=-0.5, step_to=7, finished="no", text="ä b", order="best")
    assert row_filter.parse(asked.address()) == asked
    assert row_filter.parse(asked.address(page=3, of=50)) == Filter(**{**asked.__dict__, "page": 3, "of": 50})
    assert Filter().address() == {} and row_filter.parse({"text": " ", "unknown": "1"}) == Filter()


@pytest.mark.parametrize(
    "given",
    [
        {"query": "xyz"},
        {"query": "0" * 17},
        {"order": "sideways"},
        {"finished": "perhaps"},
        {"page": "0"},
        {"page": "-1"},
        {"page": "1e3"},
        {"page": "²"},
        {"page": "9" * 40},
        {"of": "x"},
        {"at": "-3"},
        {"reward_from": "nan"},
        {"reward_to": "low"},
        {"step_from": "1.5"},
        {"text": "x" * 201},
    ],
)
def test_nonsense_is_named(given):
    (name, value), *_ = given.items()
    with pytest.raises(ValueError, match=name) as refused:
        row_filter.parse(given)
    assert value[:20] in str(refused.value) or name == "text"
