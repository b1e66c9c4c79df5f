"""The embedded demo: sums worked out in steps, from a minute of supervised training to TBA with two searchers.

Command:   python -m tba_jax.main --config=configs/arithmetic.py --workdir=runs/arithmetic
"""

from configs import base


def get_config():
    c = base.get_config()
    c.task.name = "arithmetic"
    c.warm_start.steps = 1000
    c.warm_start.target_accuracy = 0.35
    return c
