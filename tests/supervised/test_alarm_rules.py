"""When a reward model has learned too little to be of use."""

import pytest

from tba_jax.supervised.alarm_rules import reward_model_guesses


@pytest.mark.parametrize(
    ("first", "last", "pairs", "told"),
    [
        (0.426, 0.936, 40, False),  # the run of docs/supervised.md
        (0.5, 0.52, 100, True),
        (0.5, 0.58, 100, True),  # within two standard errors of a guess
        (0.5, 0.58, 1000, False),
        (0.5, 0.54, 100_000, True),  # better than a guess, and of no use
        (0.8, 0.8, 100, False),  # it was good before
        (0.6, 0.3, 100, True),
    ],
)
def test_what_guessing_would_give_is_told(first, last, pairs, told):
    found = reward_model_guesses({"pair_accuracy": first}, {"pair_accuracy": last}, pairs=pairs)
    assert (found is not None) == told
    assert found is None or f"from {first:.3f} to {last:.3f} on {pairs:,} pairs" in found.sentence
