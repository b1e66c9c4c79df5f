"""The recipe of tba_jax's runs in benchmarks.peers: the defaults, and the task of the comparison. See tba_run for the rest."""

from pathlib import Path

from configs import base


def get_config():
    c = base.get_config()
    c.task.name = f"{Path(__file__).with_name('task.py')}:Prompts"
    c.task.custom.path, c.task.custom.reward_seconds = "", 0.0
    return c
