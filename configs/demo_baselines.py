"""The demo's task under a baseline, each with the numbers that its paper gives: --config=configs/demo_baselines.py:NAME.

Paper:     the baselines of Figure 1 (GSM8K: VinePPO, GRPO, Online DPO, …; 700 steps) and of Table 1 (TL;DR, about 15 steps
           off-policy: Online DPO, PPO, RLOO, Proximal RLOO). Of the GSM8K row carry over Q 7, K 20, S 24, m 0.95, k 2, T 0.7 and,
           where a baseline has no β of its own, β from 0.012 towards 0.004 over 500 steps; the TL;DR row has Q 8, S 20, m 0.5 and
           k 10. Task, model and learning rate are the demo's; the latter is tuned for none of them.
Command:   python -m tba_jax.main --config=configs/demo_baselines.py:rloo --workdir=runs/demo_rloo
Hardware:  2 CPU cores. Time and score: not measured here, nor are the rows' own tasks. At equal age of the rows:
           python -m benchmarks.staleness --workdir=DIR.
"""

import difflib

from configs import demo, demo_vine_ppo

_CLIP = {"clip_low": 0.2, "clip_high": 0.2}  # Schulman et al. 2017; taken over by the others

# Settings learner.*; trajectory balance and TBA′ have recipes of their own.
BASELINES: dict[str, dict[str, float]] = {
    "reinforce": {},
    "rloo": {},
    "proximal_rloo": _CLIP,
    "ppo": {**_CLIP, "gae_lambda": 0.95, "value_coefficient": 0.1},
    "vine_ppo": _CLIP,  # the rest: demo_vine_ppo
    "grpo": {**_CLIP, "beta_start": 0.04, "beta_end": 0.04},  # β: Shao et al. 2024
    "dr_grpo": {**_CLIP, "beta_start": 1e-6, "beta_end": 1e-6},  # none in the paper, and here it must be above 0
    "online_dpo": {"beta_start": 0.1, "beta_end": 0.1},  # Rafailov et al. 2023
    "raft": {},
    "icepop": {"icepop_low": 0.5, "icepop_high": 5.0},  # Ling team 2025
    "gspo": {"sequence_clip_low": 3e-4, "sequence_clip_high": 4e-4},  # Zheng et al. 2025
    "cispo": {"clip_high": 0.2},  # the paper gives no number
}


def get_config(name: str = ""):
    """The recipe of the objective `name`, which stands behind a colon in --config. Raises ValueError where there is none."""
    if name not in BASELINES:
        close = difflib.get_close_matches(name, BASELINES, n=1)
        given = f"no baseline {name!r}" + (f" (did you mean {close[0]!r}?)" if close else "") if name else "no baseline is named"
        raise ValueError(f"{given}: --config=configs/demo_baselines.py:NAME takes one of {', '.join(BASELINES)}")
    c = demo_vine_ppo.get_config() if name == "vine_ppo" else demo.get_config()
    c.learner.objective = name
    c.learner.update(BASELINES[name])
    return c
