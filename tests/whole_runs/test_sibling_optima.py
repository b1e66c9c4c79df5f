"""Training with a sibling of trajectory balance reaches that objective's own optimum on the enumerated space.

The optimum is computed from the objective's equation for groups of K rows (benchmarks/siblings.py).
"""

import pytest

from benchmarks import posterior, siblings
from benchmarks.siblings import distance, log_ref, optimum, p_star, rewards, train

BOUND = 0.07


def test_a_reward_below_the_baseline_has_no_such_optimum():
    for of_query, arguments in ((siblings.asymre, {"delta": -0.1, "K": posterior.K}), (siblings.topr, {"baseline": 0.0})):
        with pytest.raises(ValueError, match="below 0"):
            of_query(rewards(0)[0], siblings.uniform_log_probs(), log_ref(0)[0], **arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", siblings.FORMS)
def test_uniform_rows_lead_to_the_objectives_own_optimum(name):
    found, policy = train(name, "uniform", optimum(name, 0))
    assert found[0] > 0.2, "π_ref is far from it"
    assert found[-1] <= BOUND, found
    others = {other: distance(policy, optimum(other, 0)).mean() for other in siblings.FORMS if other != name}
    if name in ("asymre", "topr"):  # see above
        others = {other: value for other, value in others.items() if other not in ("asymre", "topr")}
    assert found[-1] < min(others.values()), (found[-1], others)


@pytest.mark.slow
@pytest.mark.parametrize("behavior", ["on-policy", posterior.STALE])
@pytest.mark.parametrize("name", ["oapl", "pmd_mean"])
def test_rows_of_a_sampler_that_follows_lead_away_from_p_star(name, behavior):
    """Nothing holds the policy near π_ref: it ends on few responses, with the rewards of old rows on good ones."""
    found, policy = train(name, behavior, p_star(0))
    assert found[0] < 0.6 and found[-1] > 0.8, found
    if behavior != "on-policy":
        best = rewards(0) == rewards(0).max(axis=-1, keepdims=True)
        reached, at_p_star, largest = ((p * rewards(0)).sum(axis=-1).mean() for p in (policy, p_star(0), best))
        assert reached > at_p_star + 0.5 * (largest - at_p_star), (reached, at_p_star, largest)


@pytest.mark.slow
@pytest.mark.parametrize("behavior, bound", [("on-policy", 0.07), (posterior.STALE, 0.1)])
def test_rows_of_the_policy_lead_a_star_po_to_p_star(behavior, bound):
    found, _ = train("a_star_po", behavior, p_star(0))
    assert found[0] > 0.3 and found[-1] <= bound, found
