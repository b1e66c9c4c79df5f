"""The task of the demo under VinePPO: each step of the working gets its own advantage, from continuations before and after it.

Paper:     VinePPO on GSM8K (Kazemnejad et al. 2024): β, clips and 8 responses to a query. The paper continues each state 9 times.
           Here at most two states of a response are continued, 4 times each. A step ends with `,`, after each digit of the sum,
           or with `#`, after the last. The learning rate is that of the demo.
Command:   python -m tba_jax.main --config=configs/demo_vine_ppo.py --workdir=runs/demo_vine_ppo
Hardware:  2 CPU cores. Time: 494 s on a machine in heavy shared use, about 300 s of it until the first update. Score: accuracy
           0.50 -> 0.95 (measured; 0.95 at step 100; a second run from the same warm start: 0.94). Searchers generate 4.5 tokens
           of continuations for a token of a row, in 91 % of their time. The trainer waits for rows in 59 % of its time. Mean
           staleness: 10.7 steps.
"""

from configs import baselines, demo, small


def get_config(variant: str = ""):
    c = demo.get_config()
    baselines.apply(c, "vine_ppo")
    c.task.step_ends = (",", "#")
    c.learner.queries = 8
    c.learner.completions = 8
    c.learner.steps = 150
    c.searchers.samples_per_query = 8
    c.searchers.slots = 64
    c.searchers.value_samples = 4
    c.searchers.value_states = 2
    # Rows take long to generate. If the trainer drew the same rows again meanwhile, they would grow old.
    c.replay.max_draws_per_row = 1
    return small.shrink(c, {}) if small.is_the(variant) else c
