"""The sentences at the top of a page: whether a run learns, and who waits."""

import numpy as np
import pytest

from tba_jax.reporting import learning
from tba_jax.reporting.series import Series
from tba_jax.reporting.timeline import DOWN


def rewards(values):
    series = Series("step")
    series.add([{"step": i, "time": float(i), "reward": float(value)} for i, value in enumerate(values)])
    return series


@pytest.mark.parametrize(
    ("first", "last", "verdict"), [(0.4, 0.9, "yes"), (0.9, 0.4, "no"), (0.50, 0.52, "unclear"), (0.5, 0.5, "unclear")]
)
def test_held_out_rewards_decide_where_they_differ_by_more_than_chance(first, last, verdict):
    found = [{"step": 0, "greedy_reward": first, "queries": 256}, {"step": 100, "greedy_reward": last, "queries": 256}]
    told, sentence = learning.held_out(found)
    assert told == verdict and f"{first:.3f}" in sentence and f"{last:.3f}" in sentence and "100" in sentence


@pytest.mark.parametrize("error, verdict", [(0.1, "yes"), (0.2, "unclear"), (0.0, "yes")])
def test_the_standard_errors_of_the_reports_decide(error, verdict):
    """0.5 is more than twice √2 · 0.1, and less than twice √2 · 0.2."""
    found = [{"step": s, "greedy_reward": r, "greedy_reward_stderr": error, "queries": 4} for s, r in ((0, 0.25), (100, 0.75))]
    told, sentence = learning.held_out(found)
    assert told == verdict and f"0.250 ± {error:.3f} at step 0 to 0.750 ± {error:.3f} at step 100" in sentence


def test_the_best_step_is_told():
    found = [{"step": step, "greedy_reward": reward, "queries": 256} for step, reward in ((0, 0.1), (50, 0.9), (100, 0.5))]
    assert learning.held_out(found)[1].endswith("0.500 at step 100; the best is 0.900 at step 50.")
    assert learning.held_out(found[:2])[1].endswith("0.900 at step 50, the best so far.")
    found[2]["greedy_reward"] = 0.9
    assert learning.held_out(found)[1].endswith("0.900 at step 100, the best so far.")


def test_without_scores_nothing_is_claimed():
    assert learning.held_out([]) == ("", "There is no held-out score.")
    assert learning.held_out([{"step": 0, "greedy_reward": 0.5}])[0] == ""
    assert learning.trained(rewards([0.5] * 4))[0] == ""
    assert learning.verdict("", "") == "Too early to say"


def test_trained_rewards_are_compared_with_their_noise():
    noise = np.random.default_rng(0).normal(size=400)
    assert learning.trained(rewards(noise))[0] == "unclear"
    assert learning.trained(rewards(noise + np.linspace(0, 9, 400)))[0] == "yes"
    assert learning.trained(rewards(noise - np.linspace(0, 9, 400)))[0] == "no"


def test_held_out_rewards_outrank_trained_ones():
    assert learning.verdict("no", "yes") == "It gets worse" and learning.verdict("yes", "no") == "It learns"
    assert learning.verdict("unclear", "yes") == "The trained reward rises"


def test_waits_name_whom_a_role_waits_for():
    told = learning.waits("trainer", {"wait_rows": 60.0, "update": 30.0, "other": 10.0, DOWN: 50.0})
    assert "waited 60% of its time for rows from searchers" in told and "update 30%" in told and "down for 50 s" in told
    assert "waited for nobody" in learning.waits("searcher-0", {"decode": 99.9, "wait_rewards": 0.1})
    assert "no time yet" in learning.waits("trainer", {})


def test_the_heading_is_about_who_waits_most():
    totals = {"trainer": {"wait_rows": 60.0, "update": 40.0}, "searcher-0": {"decode": 90.0, "wait_policy": 10.0}}
    assert learning.heading_of_waits(totals) == "trainer waits most: 60% for rows from searchers"
    assert (
        learning.heading_of_waits({"trainer": {"update": 1.0}, "evaluator": {"wait_policy": 9.0}})
        == "Neither trainer nor searchers wait"
    )
    assert "Nothing is known" in learning.heading_of_waits({})
