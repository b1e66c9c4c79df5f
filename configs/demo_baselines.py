"""The task of the demo under a baseline, with the numbers that its paper gives: --config=configs/demo_baselines.py:[small-]NAME.

Paper:     the baselines of Figure 1 (GSM8K: VinePPO, GRPO, Online DPO, …; 700 steps) and of Table 1 (TL;DR, about 15 steps
           off-policy: Online DPO, PPO, RLOO, Proximal RLOO), with the settings of configs/baselines.py. From the GSM8K row come
           Q 7, K 20, S 24, m 0.95, k 2, T 0.7, and β from 0.012 towards 0.004 over 500 steps for baselines without a β in
           configs/baselines.py. The TL;DR row has Q 8, S 20, m 0.5 and k 10. Task, model and learning rate are those of the demo;
           the learning rate is tuned for none of the baselines.
Command:   python -m tba_jax.main --config=configs/demo_baselines.py:rloo --workdir=runs/demo_rloo
Hardware:  2 CPU cores. Time and score: not measured here, except vine_ppo (configs/demo_vine_ppo.py). The tasks of the paper's
           rows: not measured here. On rows of a fixed age: python -m benchmarks.staleness --workdir=DIR --arms=NAME,…
"""

from configs import baselines, demo, demo_vine_ppo, small


def get_config(name: str = ""):
    """The recipe of the objective `name`, the text after the colon in --config. Raises ValueError if there is none."""
    is_small, name = small.asked(name)
    c = demo_vine_ppo.get_config() if name == "vine_ppo" else demo.get_config()
    baselines.apply(c, name, besides=["small-NAME"])
    return small.shrink(c, {}) if is_small else c
