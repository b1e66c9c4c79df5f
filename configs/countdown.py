"""Countdown: three numbers to a target, searched in the open, from a supervised warm start to TBA with two searchers."""

from configs import base


def get_config():
    c = base.get_config()
    c.task.name = "countdown"
    c.task.prompt_length = 10
    c.task.response_length = 44
    c.warm_start.steps = 500
    c.warm_start.batch_size = 64
    c.warm_start.learning_rate = 3e-3
    c.sampling.scoring_temperature = 0.7
    c.sampling.temperature = 0.7
    c.searchers.slots = 96
    c.replay.merge_duplicates = False
    c.learner.queries = 8
    c.learner.learning_rate = 1e-4
    c.learner.schedule = "linear"
    c.learner.steps = 200
    c.publish.keep = 5
    c.evaluation.every_steps = 50
    return c
