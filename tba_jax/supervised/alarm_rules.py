"""What a supervised run tells as an alarm at its end."""

import math
from collections.abc import Mapping
from typing import Any

from tba_jax.run.alarms import Finding

REWARD_MODEL_GUESSES = "reward_model_guesses"

# Pair accuracies. A guess is right in half of the pairs. A model below _OF_USE, or within two standard errors of a guess, orders
# no responses. A model above _OF_USE before training that is not clearly better afterwards has learned nothing, unless it is
# above _GOOD.
_GUESS, _OF_USE, _GOOD = 0.5, 0.55, 0.75
_RAISE = 10.0  # a learning rate to try next, in place of one that hardly moved the model


def reward_model_guesses(
    first: Mapping[str, float], last: Mapping[str, float], *, pairs: int, training: Any, steps: int
) -> Finding | None:
    """Whether a reward model orders held-out pairs hardly better than chance, or than before its training.

    Args: first, last: figures of the evaluations before and after training. pairs: that were held out and evaluated. training:
      the section of the config. steps: that were done.
    """
    error = _GUESS / math.sqrt(pairs)
    before, after = first["pair_accuracy"], last["pair_accuracy"]
    is_guess = after <= max(_OF_USE, _GUESS + 2 * error)
    if not is_guess and (after >= _GOOD or after - before > 2 * error):
        return None
    length = f"steps={4 * steps}" if training.steps else f"epochs={4 * training.epochs:g}"
    now = f"it did {steps:,} steps" + ("" if training.steps else f", epochs={training.epochs:g}")
    rate = training.learning_rate
    return Finding(
        sentence=f"the reward model hardly learned: its held-out pair accuracy went from {before:.3f} to {after:.3f} on "
        f"{pairs:,} pairs, where guessing has {_GUESS:g} with a standard error of {error:.3f}",
        advice=f"in a new --workdir train longer, as with --config.training.{length} ({now}), or at a higher rate, as with "
        f"--config.training.learning_rate={_RAISE * rate:g} (it had {rate:g}), from a model that has seen such texts "
        "(--config.kind=sft first); look whether data.chosen_field and data.rejected_field are the right ones; more held-out "
        "pairs give a surer figure (data.heldout_share)",
    )
