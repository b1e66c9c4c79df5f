"""The demo's task under a baseline, each with the numbers that its paper gives: --config=configs/demo_baselines.py:NAME.

Paper:     the baselines of Figure 1 (GSM8K: VinePPO, GRPO, Online DPO, …; 700 steps) and of Table 1 (TL;DR, about 15 steps
           off-policy: Online DPO, PPO, RLOO, Proximal RLOO), with the settings of configs/baselines.py. Of the GSM8K row carry
           over Q 7, K 20, S 24, m 0.95, k 2, T 0.7 and, where a baseline has no β of its own, β from 0.012 towards 0.004 over 500
           steps; the TL;DR row has Q 8, S 20, m 0.5 and k 10. Task, model and learning rate are the demo's; the latter is tuned
           for none of them.
Command:   python -m tba_jax.main --config=configs/demo_baselines.py:rloo --workdir=runs/demo_rloo
Hardware:  2 CPU cores. Time and score: not measured here (but for vine_ppo, see configs/demo_vine_ppo.py), nor are the rows' own
           tasks. At equal age of the rows: python -m benchmarks.staleness --workdir=DIR.
"""

from configs import baselines, demo, demo_vine_ppo


def get_config(name: str = ""):
    """The recipe of the objective `name`, which stands behind a colon in --config. Raises ValueError where there is none."""
    c = demo_vine_ppo.get_config() if name == "vine_ppo" else demo.get_config()
    baselines.apply(c, name)
    return c
