"""When a reward model has learned too little to be of use."""

import pytest
from tba_jax.supervised.alarm_rules import reward_model_guesses

from configs import supervised


@pytest.mark.parametrize(
    ("first", "last", "pairs", "told"),
    [
        (0.426, 0.936, 40, False),  # the run of docs/supervised.md
        (0.5, 0.52, 100, True),
        (0.5, 0.58, 100, True),  # within two standard errors of a guess
        (0.5, 0.58, 1000, False),
        (0.5, 0.54, 100_000, True),  # better than a guess, and of no use
        (0.8, 0.8, 100, False),  # it was good before
        (0.62, 0.63, 1000, True),  # better than a guess, and as it was before
        (0.62, 0.67, 1000, False),
        (0.6, 0.3, 100, True),
    ],
)
def test_what_guessing_would_give_is_told(first, last, pairs, told):
    training = supervised.get_config().training
    found = reward_model_guesses({"pair_accuracy": first}, {"pair_accuracy": last}, pairs=pairs, training=training, steps=9)
    assert (found is not None) == told
    assert found is None or f"from {first:.3f} to {last:.3f} on {pairs:,} pairs" in found.sentence


@pytest.mark.parametrize(("steps", "flag"), [(0, "--config.training.epochs=4 "), (300, "--config.training.steps=1200 ")])
def test_the_advice_names_flags_and_what_the_run_had(steps, flag):
    training = supervised.get_config().training
    training.steps = steps
    figures = {"pair_accuracy": 0.5}
    found = reward_model_guesses(figures, figures, pairs=100, training=training, steps=steps or 9)
    assert flag in found.advice and f"it did {steps or 9} steps" in found.advice
    assert "--config.training.learning_rate=0.0001 (it had 1e-05)" in found.advice
