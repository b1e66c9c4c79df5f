"""The recipe of tba_jax's runs in benchmarks.peers: the defaults, and the task of the comparison. See tba_run for the rest."""

from pathlib import Path

from configs import base


def get_config():
    c = base.get_config()
    c.task.name = f"{Path(__file__).with_name('task.py')}:Prompts"
    c.task.custom.path, c.task.custom.reward_seconds = "", 0.0
    # As in the peers' updates: nothing is computed twice to save memory, and the logits of a batch may exist at a time.
    c.learner.remat, c.learner.logit_megabytes = "none", 512
    return c
