"""The embedded demo: sums worked out in steps, from a supervised warm start to TBA with two searchers.

Command:   python -m tba_jax.main --config=configs/demo.py --workdir=runs/demo
"""

from configs import base


def get_config():
    c = base.get_config()
    c.task.name = "arithmetic"
    c.warm_start.steps = 1000
    c.warm_start.target_accuracy = 0.2
    c.learner.learning_rate = 5e-4
    c.learner.steps = 300
    c.publish.keep = 5
    return c
