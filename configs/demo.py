"""The embedded demo: sums worked out in steps, from a supervised warm start to TBA with two searchers.

Command:   python -m tba_jax.main --config=configs/demo.py --workdir=runs/demo
"""

from configs import base


def get_config():
    c = base.get_config()
    c.task.name = "arithmetic"
    c.task.prompt_length = 10
    c.task.response_length = 32
    c.warm_start.steps = 650
    c.warm_start.batch_size = 64
    c.warm_start.learning_rate = 3e-3
    c.learner.learning_rate = 1e-4
    c.learner.steps = 300
    c.publish.keep = 5
    return c
