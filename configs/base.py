"""The defaults of all settings of a run, locked: a misspelt key fails. Every recipe begins with them.

A recipe is a file beside this one: `c = base.get_config()`, then it sets leaves. Every leaf is also a flag:
`--config.learner.learning_rate=3e-4`. tba_jax/experiment/schema.py lists all settings, what they mean and their limits.
"""

from ml_collections.config_dict import ConfigDict

from tba_jax.experiment.schema import SCHEMA


def get_config() -> ConfigDict:
    return SCHEMA.defaults()
