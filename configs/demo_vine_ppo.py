"""The demo's task under VinePPO: a step of the working has an advantage of its own, by sampling on from before and after it.

Command:   python -m tba_jax.main --config=configs/demo_vine_ppo.py --workdir=runs/demo_vine_ppo
"""

from configs import baselines, demo


def get_config():
    c = demo.get_config()
    baselines.apply(c, "vine_ppo")
    c.task.step_ends = (",", "#")
    c.searchers.samples_per_query = 8
    c.searchers.slots = 64
    c.searchers.value_samples = 4
    c.searchers.value_states = 2
    c.learner.queries = 8
    c.learner.completions = 8
    c.replay.max_draws_per_row = 1
    c.learner.steps = 150
    return c
