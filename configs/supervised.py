"""The defaults of supervised training, SFT policies and reward models, locked: a misspelt key fails.

    python -m tba_jax supervised --config=configs/supervised.py --workdir=DIR --output=DIR --config.model.path=FOLDER \\
        --config.data.train=pairs.jsonl --config.kind=reward

A recipe is a file beside this one: `c = supervised.get_config()`, then it sets leaves. tba_jax/supervised/schema.py lists all
settings, what they mean, their limits and which of them a resumed run may change.
"""

from ml_collections.config_dict import ConfigDict

from tba_jax.supervised.schema import SCHEMA


def get_config() -> ConfigDict:
    return SCHEMA.defaults()
