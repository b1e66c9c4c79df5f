"""Countdown: four numbers to a target, searched in the open, from a supervised warm start to TBA with two searchers.

Paper:     the settings of its GSM8K row (m 0.95, k 2, T 0.7, β 0.012 to 0.004), at a size that runs on a laptop.
Command:   python -m tba_jax.main --config=configs/countdown.py --workdir=runs/countdown
Hardware:  2 CPU cores. Time: about 355 s of warm start and 395 s. Score: accuracy 0.45 -> 0.67 (measured, one seed,
           benchmarks/RESULTS.md).
"""

from configs import base, small


def get_config(variant: str = ""):
    c = base.get_config()
    c.task.name = "countdown"
    c.task.prompt_length = 13
    c.task.response_length = 136
    c.warm_start.steps = 700
    c.warm_start.batch_size = 64
    c.warm_start.learning_rate = 3e-3
    c.sampling.scoring_temperature = 0.7
    c.sampling.temperature = 0.7
    # As in the demo: fewer slots make fresher rows, and the number of equal short answers tells a habit from an accident.
    c.searchers.slots = 96
    c.searchers.queries_per_batch = 12
    c.searchers.samples_per_query = 12
    c.replay.merge_duplicates = False
    c.learner.queries = 12
    c.learner.completions = 10
    c.learner.learning_rate = 1e-4
    c.learner.schedule = "linear"
    c.learner.steps = 200
    c.learner.beta_steps = 200
    c.publish.keep = 5
    c.evaluation.every_steps = 50
    return small.shrink(c, {}) if small.is_the(variant) else c
