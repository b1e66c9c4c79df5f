"""What a supervised run tells as an alarm at its end."""

import math
from collections.abc import Mapping

from tba_jax.run.alarms import Finding

REWARD_MODEL_GUESSES = "reward_model_guesses"

# A guess is right in half of the pairs. What is this good, or within two standard errors of a guess, orders no responses.
_GUESS, _OF_USE = 0.5, 0.55


def reward_model_guesses(first: Mapping[str, float], last: Mapping[str, float], *, pairs: int) -> Finding | None:
    """Whether a reward model orders held-out pairs hardly better than chance.

    Args: first, last: figures of the evaluations before and after training. pairs: that were held out and evaluated.
    """
    error = _GUESS / math.sqrt(pairs)
    before, after = first["pair_accuracy"], last["pair_accuracy"]
    if after > max(_OF_USE, _GUESS + 2 * error):
        return None
    return Finding(
        sentence=f"the reward model hardly learned: its held-out pair accuracy went from {before:.3f} to {after:.3f} on "
        f"{pairs:,} pairs, where guessing has {_GUESS:g} with a standard error of {error:.3f}",
        advice="train longer (training.epochs) or with another training.learning_rate, from a model that has seen such texts "
        "(kind=sft first); look whether data.chosen_field and data.rejected_field are the right ones; more held-out pairs give a "
        "surer figure (data.heldout_share)",
    )
