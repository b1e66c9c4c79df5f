"""The objectives by name, each with its requirements."""

import math

from tba_jax.objectives import policy_gradient, regression
from tba_jax.objectives.advantages import mean_ratios, sequence_ratios, share_beyond, token_ratios
from tba_jax.objectives.f_trajectory_balance import f_trajectory_balance
from tba_jax.objectives.frozen_log_z import frozen_log_z
from tba_jax.objectives.gflowrl import gflowrl
from tba_jax.objectives.maxrl import maxrl
from tba_jax.objectives.objective import (
    TEMPERATURES,
    Objective,
    advantage_in_rewards,
    advantage_over_temperature,
    preference,
    residual_in_nats,
    residual_in_rewards,
)
from tba_jax.objectives.optimal_baseline import optimal_baseline
from tba_jax.objectives.tpo import tpo
from tba_jax.objectives.trajectory_balance import learned_log_z, trajectory_balance

_CLIP = ("clip_low", "clip_high")
_TOKENS_CLIPPED = share_beyond(token_ratios, lambda s: (1 - s.clip_low, 1 + s.clip_high))
_ROWS_CLIPPED = share_beyond(sequence_ratios, lambda s: (1 - s.clip_low, 1 + s.clip_high))

OBJECTIVES: dict[str, Objective] = {
    "trajectory_balance": Objective(
        loss=trajectory_balance,
        reward_unit=residual_in_nats,
        positive_beta=True,
        full_support=True,
        settings=("beta", *TEMPERATURES),
    ),
    "f_trajectory_balance": Objective(
        loss=f_trajectory_balance,
        reward_unit=residual_in_nats,
        positive_beta=True,
        full_support=True,
        settings=("beta", *TEMPERATURES, "divergence_alpha"),
    ),
    "learned_log_z": Objective(
        loss=learned_log_z,
        reward_unit=residual_in_nats,
        min_completions=1,
        positive_beta=True,
        full_support=True,
        log_z_head=True,
        settings=("beta", *TEMPERATURES, "log_z_learning_rate"),
    ),
    "frozen_log_z": Objective(
        loss=frozen_log_z,
        reward_unit=residual_in_nats,
        min_completions=1,
        positive_beta=True,
        full_support=True,
        given_log_z=True,
        settings=("beta", *TEMPERATURES, "log_z_path"),
    ),
    "gflowrl": Objective(
        loss=gflowrl,
        reward_unit=residual_in_nats,
        behavior_logprobs=True,
        positive_beta=True,
        full_support=True,
        clipped=share_beyond(sequence_ratios, lambda s: (0.0, 1 + s.clip_high)),
        settings=("beta", *TEMPERATURES, "clip_high", "flow_gap_low", "flow_gap_high"),
    ),
    "tba_prime": Objective(
        loss=policy_gradient.tba_prime,
        reward_unit=advantage_over_temperature,
        behavior_logprobs=True,
        positive_beta=True,
        full_support=True,
        clipped=share_beyond(token_ratios, lambda s: (0.0, s.importance_clip or math.inf)),
        settings=("beta", *TEMPERATURES, "importance_clip", "log_ratio_clip", "row_divisor"),
    ),
    "reinforce": Objective(loss=policy_gradient.reinforce, reward_unit=advantage_in_rewards, settings=("beta",)),
    "rloo": Objective(loss=policy_gradient.rloo, reward_unit=advantage_in_rewards, settings=("beta",)),
    "optimal_baseline": Objective(
        loss=optimal_baseline,
        reward_unit=advantage_in_rewards,
        behavior_logprobs=True,
        clipped=share_beyond(sequence_ratios, lambda s: (0.0, s.importance_clip or math.inf)),
        settings=("beta", "importance_clip"),
    ),
    "proximal_rloo": Objective(
        loss=policy_gradient.proximal_rloo,
        reward_unit=advantage_in_rewards,
        behavior_logprobs=True,
        clipped=_ROWS_CLIPPED,
        settings=("beta", *_CLIP),
    ),
    "ppo": Objective(
        loss=policy_gradient.ppo,
        reward_unit=advantage_in_rewards,
        min_completions=1,
        behavior_logprobs=True,
        value_head=True,
        clipped=_TOKENS_CLIPPED,
        settings=("beta", *_CLIP, "gae_lambda", "value_coefficient", "value_learning_rate"),
    ),
    "vine_ppo": Objective(
        loss=policy_gradient.vine_ppo,
        reward_unit=advantage_in_rewards,
        min_completions=1,
        behavior_logprobs=True,
        state_values=True,
        k3=True,
        clipped=_TOKENS_CLIPPED,
        settings=("beta", *_CLIP),
    ),
    **{
        name: Objective(
            loss=loss,
            reward_unit=advantage_in_rewards,
            behavior_logprobs=True,
            k3=True,
            clipped=_TOKENS_CLIPPED,
            settings=("beta", *_CLIP),
        )
        for name, loss in {"grpo": policy_gradient.grpo, "dr_grpo": policy_gradient.dr_grpo}.items()
    },
    "online_dpo": Objective(loss=regression.online_dpo, reward_unit=preference, positive_beta=True, settings=("beta",)),
    "raft": Objective(loss=policy_gradient.raft, reward_unit=advantage_in_rewards, reads_reference=False),
    "maxrl": Objective(loss=maxrl, reward_unit=advantage_in_rewards, reads_reference=False),
    "icepop": Objective(
        loss=policy_gradient.icepop,
        reward_unit=advantage_in_rewards,
        behavior_logprobs=True,
        k3=True,
        clipped=share_beyond(token_ratios, lambda s: (s.icepop_low, s.icepop_high)),
        settings=("beta", "icepop_low", "icepop_high"),
    ),
    "gspo": Objective(
        loss=policy_gradient.gspo,
        reward_unit=advantage_in_rewards,
        behavior_logprobs=True,
        reads_reference=False,
        clipped=share_beyond(mean_ratios, lambda s: (1 - s.sequence_clip_low, 1 + s.sequence_clip_high)),
        settings=("sequence_clip_low", "sequence_clip_high"),
    ),
    "cispo": Objective(
        loss=policy_gradient.cispo,
        reward_unit=advantage_in_rewards,
        behavior_logprobs=True,
        reads_reference=False,
        clipped=share_beyond(token_ratios, lambda s: (0.0, 1 + s.clip_high)),
        settings=("clip_high",),
    ),
    "oapl": Objective(
        loss=regression.oapl,
        reward_unit=residual_in_rewards,
        behavior_logprobs=True,
        positive_beta=True,
        reads_reference=False,
        settings=("beta",),
    ),
    "pmd_mean": Objective(
        loss=regression.pmd_mean,
        reward_unit=residual_in_rewards,
        behavior_logprobs=True,
        positive_beta=True,
        reads_reference=False,
        settings=("beta",),
    ),
    "tpo": Objective(
        loss=tpo,
        reward_unit=advantage_in_rewards,
        behavior_logprobs=True,
        positive_beta=True,
        reads_reference=False,
        settings=("beta",),
    ),
    "flowrl_linear_z": Objective(
        loss=regression.flowrl_linear_z,
        reward_unit=residual_in_nats,
        behavior_logprobs=True,
        positive_beta=True,
        full_support=True,
        log_z_head=True,
        clipped=_ROWS_CLIPPED,
        settings=("beta", *_CLIP, "log_z_learning_rate"),
    ),
    "a_star_po": Objective(
        loss=regression.a_star_po,
        reward_unit=residual_in_rewards,
        behavior_logprobs=True,
        positive_beta=True,
        full_support=True,
        as_drawn=True,
        settings=("beta",),
    ),
    "asymre": Objective(
        loss=policy_gradient.asymre, reward_unit=advantage_in_rewards, reads_reference=False, settings=("asymre_delta",)
    ),
    "topr": Objective(
        loss=policy_gradient.topr,
        reward_unit=advantage_in_rewards,
        min_completions=1,
        behavior_logprobs=True,
        reads_reference=False,
        settings=("topr_baseline",),
    ),
}
