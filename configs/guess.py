"""Guess the number: four turns to find one of 15 letters by the environment's hints, from a warm start to TBA with two searchers.

Command:   python -m tba_jax.main --config=configs/guess.py --workdir=runs/guess
Hardware:  2 CPU cores. Time: about 5 minutes, warm start included. Score: success of samples 0.38 -> 0.93, the mean of three
           seeds; where the environment answers after 5 seconds (--config.task.guess.latency=5
           --config.searchers.conversations=1536), 0.97 of the best of them (measured; benchmarks/RESULTS.md).
"""

from configs import base, small


def get_config(variant: str = ""):
    c = base.get_config()
    c.task.name = "guess"
    c.task.prompt_length = 7
    c.task.response_length = 16
    c.task.stop_strings = ("\n",)
    c.warm_start.steps = 1000
    c.warm_start.batch_size = 64
    c.warm_start.learning_rate = 3e-3
    # Few responses at a time make fresh rows.
    c.searchers.slots = 48
    c.searchers.conversations = 64
    c.searchers.decode_chunk = 4
    c.replay.merge_duplicates = False
    c.replay.max_draws_per_row = 4
    c.learner.learning_rate = 2e-4
    c.learner.schedule = "linear"
    c.learner.steps = 400
    c.learner.beta_start = c.learner.beta_end = 0.05
    c.publish.keep = 5
    # The score is of samples: the likeliest game of a policy that seldom halves is to halve.
    c.evaluation.greedy_temperature = 1.0
    return small.shrink(c, {}) if small.is_the(variant) else c
