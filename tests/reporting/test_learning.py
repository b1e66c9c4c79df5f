"""The sentences at the top of a page: whether a run learns, and who waits."""

import numpy as np
import pytest

from tba_jax.reporting import learning


@pytest.mark.parametrize(
    ("first", "last", "more", "verdict"),
    [
        (0.4, 0.9, {}, "yes"),
        (0.9, 0.4, {}, "no"),
        (0.50, 0.52, {}, "unclear"),
        (0.5, 0.5, {}, "unclear"),
        (0.25, 0.75, {"greedy_reward_stderr": 0.1}, "yes"),  # 0.5 is more than twice √2 · 0.1, and less than twice √2 · 0.2
        (0.25, 0.75, {"greedy_reward_stderr": 0.2}, "unclear"),
    ],
)
def test_held_out_rewards_decide_where_they_differ_by_more_than_chance(first, last, more, verdict):
    found = [{"step": step, "greedy_reward": reward, "queries": 256, **more} for step, reward in ((0, first), (100, last))]
    told, sentence = learning.held_out(found)
    assert told == verdict and f"{first:.3f}" in sentence and f"{last:.3f}" in sentence and "step 100" in sentence


def test_the_best_step_is_told():
    found = [{"step": step, "greedy_reward": reward, "queries": 256} for step, reward in ((0, 0.1), (50, 0.9), (100, 0.5))]
    assert learning.held_out(found)[1].endswith("0.500 at step 100; the best is 0.900 at step 50.")
    assert learning.held_out(found[:2])[1].endswith("0.900 at step 50, the best so far.")


def test_without_scores_nothing_is_claimed():
    assert learning.held_out([]) == ("", "There is no held-out score.")
    assert learning.held_out([{"step": 0, "greedy_reward": 0.5}])[0] == learning.trained(np.full(4, 0.5))[0] == ""
    assert learning.verdict("", "") == "Too early to say"


def test_trained_rewards_are_compared_with_their_noise_and_held_out_ones_outrank_them():
    noise = np.random.default_rng(0).normal(size=400)
    slopes = {"unclear": 0, "yes": 9, "no": -9}
    assert {learning.trained(noise + np.linspace(0, slope, 400))[0]: slope for slope in slopes.values()} == slopes
    assert learning.verdict("no", "yes") == "It gets worse" and learning.verdict("yes", "no") == "It learns"
    assert learning.verdict("unclear", "yes") == "The trained reward rises"


def test_waits_name_whom_a_role_waits_for():
    shares = {"trainer": {"wait_rows": 0.6, "update": 0.3, "other": 0.1}, "searcher-0": {"decode": 0.9, "wait_policy": 0.1}}
    heading, sentences = learning.waits(shares)
    assert heading == "trainer waits most: 60% for rows from searchers"
    assert "trainer waited 60% of its time for rows" in sentences[0] and "update 30%" in sentences[0]
    assert learning.waits({"trainer": {"update": 1.0}})[0] == "Neither trainer nor searchers wait"
    assert learning.waits({}) == ("Nothing is known of waits yet", [])
