"""The task of the demo under TBA′: token-level objective, constant β, and a reference that is reset to the policy every 50 steps.

Paper:     β, ρ and the clips of its TBA′ row (MATH, Qwen2.5-7B). Task, K, learning rate and its schedule are those of the demo.
Command:   python -m tba_jax.main --config=configs/demo_tba_prime.py --workdir=runs/demo_tba_prime
Hardware:  2 CPU cores. Time: 158 s, warm start included. Score: accuracy 0.49 -> 0.83 (measured; with other references:
           benchmarks/RESULTS.md). Task, model and score of the row: not measured here.
"""

from configs import demo, small


def get_config(variant: str = ""):
    c = demo.get_config()
    c.learner.objective = "tba_prime"
    c.learner.reference.kind = "reset"
    c.learner.beta_start = 0.005
    c.learner.beta_end = 0.005
    c.learner.steps = 300
    return small.shrink(c, {}) if small.is_the(variant) else c
