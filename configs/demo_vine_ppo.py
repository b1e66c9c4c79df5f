"""The demo's task under VinePPO: each step of the working has the advantage of its own outcome, by sampling on from between steps.

Paper:     K = 9 continuations of a state, as in VinePPO (Kazemnejad et al. 2024); β, clips, learning rate and schedule are the
           demo's and the defaults'. A step ends with `,` or `#`: a digit of the sum is worked out, or all of them are.
Command:   python -m tba_jax.main --config=configs/demo_vine_ppo.py --workdir=runs/demo_vine_ppo
Hardware:  2 CPU cores. Time and score: not measured here. Searchers decode about 27 responses more for each row that works its sum
           out: from three states, on average half of a response each.
"""

from configs import demo


def get_config():
    c = demo.get_config()
    c.task.step_ends = (",", "#")
    c.learner.objective = "vine_ppo"
    c.learner.steps = 300
    return c
