"""The demo's task under VinePPO: a step of the working has an advantage of its own, by sampling on from before and after it.

Paper:     9 continuations of a state, as in VinePPO (Kazemnejad et al. 2024); β, K, clips and learning rate are the demo's. A
           step ends with `,` or `#`: a digit of the sum is worked out, or all of them are.
Command:   python -m tba_jax.main --config=configs/demo_vine_ppo.py --workdir=runs/demo_vine_ppo
Hardware:  2 CPU cores. Time and score: not measured here. A response of 32 tokens that works its sum out has three states between
           steps, after which 42 tokens are left in all: searchers generate about 9 × 42 tokens to value them.
"""

from configs import demo


def get_config():
    c = demo.get_config()
    c.task.step_ends = (",", "#")
    c.learner.objective = "vine_ppo"
    c.learner.steps = 300
    return c
