"""A task of reasoning-gym, by default sums of two numbers: from a short warm start on its answers to TBA with two searchers.

Command:   python -m tba_jax.main --config=configs/reasoning_gym.py --workdir=runs/gym --config.task.reasoning_gym.dataset=NAME
           Longer questions, or a pretrained model, need other lengths (task.prompt_length, task.response_length).
Hardware:  2 CPU cores.
"""

from configs import base, small


def get_config(variant: str = ""):
    c = base.get_config()
    c.task.name = "reasoning_gym"
    c.task.reasoning_gym.dataset = "chain_sum"
    c.task.reasoning_gym.parameters = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}'
    c.task.prompt_length = 80
    c.task.response_length = 8
    c.warm_start.steps = 600
    c.warm_start.batch_size = 64
    c.warm_start.learning_rate = 2e-3
    c.searchers.slots = 96
    c.replay.merge_duplicates = False
    c.replay.max_draws_per_row = 4
    c.learner.learning_rate = 2e-4
    c.learner.schedule = "linear"
    c.learner.steps = 200
    c.learner.beta_start = c.learner.beta_end = 0.05
    c.publish.keep = 5
    return small.shrink(c, {}) if small.is_the(variant) else c
