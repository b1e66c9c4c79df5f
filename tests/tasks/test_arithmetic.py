"""Sums: splits, rewards on responses written by hand, and worked examples."""

import numpy as np
import pytest

from tba_jax.tasks.arithmetic import Arithmetic, work_out
from tba_jax.tasks.interface import SPLITS, Query


def arithmetic(**changes) -> Arithmetic:
    return Arithmetic(**dict(digits=3, train_queries=300, heldout_queries=50, seed=0) | changes)


def test_sums_are_distinct_right_and_in_one_split():
    task = arithmetic()
    queries = {split: task.queries(split) for split in SPLITS}
    assert {split: len(set(queries[split])) for split in SPLITS} == {"train": 300, "heldout": 50}
    assert not set(queries["train"]) & set(queries["heldout"])
    for query in (*queries["train"], *queries["heldout"]):
        a, b = (int(number) for number in query.prompt.removesuffix("=").split("+"))
        assert query.prompt == f"{a}+{b}=" and min(a, b) >= 100 and max(a, b) <= 999
        assert query.answer == str(a + b)
    assert arithmetic().queries("train") == queries["train"]
    assert arithmetic(seed=1).queries("train") != queries["train"]
    # As many as are allowed: half of the 81 sums of one digit.
    assert len(set(arithmetic(digits=1, train_queries=30, heldout_queries=10).queries("train"))) == 30


RIGHT = ["#1341", "4+7+0=11,8+5+1=14,3+9+1=13#1341", "4+7=0#1341", "#17#1341"]  # how it gets there is its own business
WRONG = ["", "#1341#1340", "#13410", "#134"]


def test_the_reward_is_for_exactly_the_sum_after_the_last_sign():
    responses = [*RIGHT, *WRONG, RIGHT[0]]
    finished = np.arange(9) < 8
    scores = arithmetic().rewards([Query(prompt="384+957=", answer="1341")] * 9, responses, finished)
    assert scores.reward.tolist() == [1] * 4 + [0] * 5 == scores.parts[:, 0].tolist()
    assert scores.reward.dtype == scores.parts.dtype == np.float32


def test_worked_examples_are_right_and_not_held_out():
    task = arithmetic(digits=2, train_queries=100, heldout_queries=1000)
    examples = task.worked_examples(np.random.default_rng(0), 4000)
    heldout = {query.prompt for query in task.queries("heldout")}
    assert len(examples) == 4000 and not heldout & {prompt for prompt, _ in examples}
    queries, responses = [], []
    for prompt, response in examples:
        a, b = (int(number) for number in prompt.removesuffix("=").split("+"))
        queries.append(Query(prompt=prompt, answer=str(a + b)))
        responses.append(response)
        assert response in (f"#{a + b}", work_out(a, b))
    assert task.rewards(queries, responses, np.ones(4000, bool)).reward.all()
    skipped = {small: [r[0] == "#" for (p, r) in examples if (int(p[:2]) < 64) == small] for small in (True, False)}
    assert np.mean(skipped[True]) == pytest.approx(0.8, abs=0.03) and np.mean(skipped[False]) == pytest.approx(0.1, abs=0.03)
