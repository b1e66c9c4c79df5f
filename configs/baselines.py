"""The settings that the papers of the baselines give: one row for each name that a recipe takes after a colon.

`apply(c, NAME)` sets the objective and its numbers in a recipe. Task, model, batch and learning rate stay as the recipe has
them. Ratios to the sampler and means over a group are of rows as they were drawn, so no baseline gets rows that are merged,
repeated or chosen by their rewards. Where an objective reads no reference, nobody scores one for it; the evaluator keeps the
initial policy. A β belongs to the rewards of its paper: the β of RLOO and Proximal RLOO to TL;DR, the β of VinePPO, PPO and
Online DPO to GSM8K, where a right answer is worth 1. A baseline without a β in its row keeps the β of the recipe. Trajectory
balance and TBA′ have their own recipes, and `frozen_log_z` needs a file (learner.log_z_path). The numbers of AsymRE and TOPR are
for rewards of 0 and 1: with the scores of a reward model, as those of TL;DR, they are to be chosen anew.

OAPL and A*-PO have two temperatures in their papers, one in the value and one before the log-ratio. There is one β here, for
which neither paper gives a number: these rows keep the recipe's.
"""

import difflib
from collections.abc import Sequence
from typing import Any

_CLIP = {"clip_low": 0.2, "clip_high": 0.2}  # Schulman et al. 2017; the other papers take it over


def _beta(beta: float) -> dict[str, float]:
    return {"beta_start": beta, "beta_end": beta}


# Settings learner.*
BASELINES: dict[str, dict[str, float]] = {
    "reinforce": {},
    "rloo": _beta(0.03),  # Ahmadian et al. 2024, appendix C
    "optimal_baseline": {"importance_clip": 8.0},
    "proximal_rloo": {**_CLIP, **_beta(0.05)},  # Noukhovitch et al. 2024
    # β: Noukhovitch et al. 2024; λ: Schulman et al. 2017; the coefficient: the code of Ziegler et al. 2019.
    "ppo": {**_CLIP, **_beta(0.05), "gae_lambda": 0.95, "value_coefficient": 0.1},
    # Kazemnejad et al. 2024. The recipe says by task.step_ends what ends a step.
    "vine_ppo": {**_CLIP, **_beta(1e-4)},
    "grpo": {**_CLIP, **_beta(0.04)},  # Shao et al. 2024, section 4.2
    "dr_grpo": {**_CLIP, **_beta(0.0)},  # Liu et al. 2025: no KL term
    "online_dpo": _beta(0.1),  # Rafailov et al. 2023, appendix B; Noukhovitch et al. 2024
    "raft": {},
    "maxrl": {},
    "icepop": {"icepop_low": 0.5, "icepop_high": 5.0},  # Ling team 2025
    "gspo": {"sequence_clip_low": 3e-4, "sequence_clip_high": 4e-4},  # Zheng et al. 2025, section 5.1
    "cispo": {"clip_high": 0.2},  # the paper gives no number; public implementations have 0.2 to 4
    "oapl": {},
    "pmd_mean": _beta(0.01),  # τ in the code of Xu et al. 2026
    "tpo": _beta(1.0),  # η of Kaddour 2026, of standardised rewards
    "f_trajectory_balance": {"divergence_alpha": 1.0},
    # After arXiv 2607.13394, at its best β of 8, which is 1/β here; the bounds of the flow gap are this project's.
    "gflowrl": {**_beta(1 / 8), "clip_high": 0.2, "flow_gap_low": 2.0, "flow_gap_high": 4.0},
    "flowrl_linear_z": {**_CLIP, **_beta(1 / 15)},  # the code of Zhu et al. 2025: β = 15, which is 1/β here
    "a_star_po": {},
    "asymre": {"asymre_delta": -0.1},  # Arnal et al. 2025 give the sign; the number is this project's
    "topr": {"topr_baseline": 0.5},  # right and wrong answers, worth 1 and 0, become ±1/2: Le Roux et al. 2025 have ±1
}
# They read no reference, Dr. GRPO because its β is 0.
WITHOUT_REFERENCE = ("dr_grpo", "raft", "gspo", "cispo", "oapl", "pmd_mean", "asymre", "topr", "tpo", "maxrl")


def apply(c: Any, name: str, *, besides: Sequence[str] = ()) -> None:
    """Sets learner.objective to `name`, the settings of its row, and how its rows are drawn.

    Args:
      c: a config of configs/base.py; name: the text after the colon in --config, "" without one; besides: further names that the
        recipe takes, which the error lists too.

    Raises:
      ValueError: there is no such baseline; the sentence names the nearest one.
    """
    if name not in BASELINES:
        names = [*BASELINES, *besides]
        close = difflib.get_close_matches(name, names, n=1)
        given = f"no baseline {name!r}" + (f" (did you mean {close[0]!r}?)" if close else "") if name else "no baseline is named"
        raise ValueError(f"{given}: --config=RECIPE:NAME takes one of {', '.join(names)}")
    c.learner.objective = name
    c.learner.update(BASELINES[name])
    if name in WITHOUT_REFERENCE:
        c.learner.reference.update(kind="none", offload=False)
    c.replay.update(
        strategy="uniform",
        recent_fill="wait",
        merge_duplicates=False,
        merge_keep="newest",
        merge_edit_distance=0.0,
        merge_cosine_distance=0.0,
    )
    if name == "a_star_po":  # no row may be truncated
        c.sampling.explore_top_p_probability = 0.0
