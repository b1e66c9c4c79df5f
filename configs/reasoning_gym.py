"""A task of reasoning-gym, by default words to be spelled backward: from a short warm start to TBA with two searchers.

Command:   python -m tba_jax.main --config=configs/reasoning_gym.py --workdir=runs/gym --config.task.reasoning_gym.dataset=NAME
           Longer questions, or a pretrained model, need other lengths (task.prompt_length, task.response_length), and other
           data sets other parameters.
Hardware:  2 CPU cores. Time: about 4 minutes, warm start included. Score: of samples 0.59 -> 0.84 (measured;
           benchmarks/RESULTS.md).
"""

from configs import base, small


def get_config(variant: str = ""):
    c = base.get_config()
    c.task.name = "reasoning_gym"
    c.task.reasoning_gym.dataset = "spell_backward"
    c.task.reasoning_gym.parameters = '{"min_word_len": 3, "max_word_len": 6}'
    c.task.prompt_length = 56
    c.task.response_length = 8
    c.warm_start.steps = 220
    c.warm_start.batch_size = 64
    c.warm_start.learning_rate = 2e-3
    c.searchers.slots = 96
    c.replay.merge_duplicates = False
    c.replay.max_draws_per_row = 4
    c.learner.learning_rate = 5e-4
    c.learner.schedule = "linear"
    c.learner.steps = 500
    c.learner.beta_start = c.learner.beta_end = 0.05
    c.publish.keep = 5
    c.evaluation.greedy_temperature = 1.0  # the score is of samples
    return small.shrink(c, {}) if small.is_the(variant) else c
