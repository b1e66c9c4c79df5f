"""The demo's task under VinePPO: a step of the working has an advantage of its own, by sampling on from before and after it.

Paper:     VinePPO on GSM8K (Kazemnejad et al. 2024): β, clips and the 8 responses to a query. It continues each state 9 times;
           here two states of a response at most are continued, 4 times each. A step ends with `,` or `#`: a digit of the sum is
           worked out, or all of them are. The learning rate is the demo's.
Command:   python -m tba_jax.main --config=configs/demo_vine_ppo.py --workdir=runs/demo_vine_ppo
Hardware:  2 CPU cores. Time: 494 s on a machine in heavy shared use, about 300 s of it until the first update. Score: accuracy
           0.50 -> 0.95 (measured; 0.95 at step 100; a run from the same warm start: 0.94). For a token of a row searchers
           generate 4.5 to value its states, in 91 % of their time; the trainer waits for rows 59 % of its own. Mean staleness
           10.7 steps.
"""

from configs import baselines, demo


def get_config():
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
    # Rows are slow to make; drawn again while the trainer waits for others, they would grow old.
    c.replay.max_draws_per_row = 1
    return c
