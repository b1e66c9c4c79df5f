"""The objectives by name, each with its requirements."""

from tba_jax.objectives.a_star_po import a_star_po
from tba_jax.objectives.asymre import asymre
from tba_jax.objectives.cispo import cispo
from tba_jax.objectives.flowrl import flowrl
from tba_jax.objectives.grpo import dr_grpo, grpo
from tba_jax.objectives.gspo import gspo
from tba_jax.objectives.icepop import icepop
from tba_jax.objectives.oapl import oapl
from tba_jax.objectives.objective import (
    TEMPERATURES,
    Objective,
    advantage_in_rewards,
    advantage_over_temperature,
    preference,
    residual_in_nats,
    residual_in_rewards,
)
from tba_jax.objectives.online_dpo import online_dpo
from tba_jax.objectives.pmd_mean import pmd_mean
from tba_jax.objectives.ppo import ppo
from tba_jax.objectives.proximal_rloo import proximal_rloo
from tba_jax.objectives.raft import raft
from tba_jax.objectives.reinforce import reinforce, rloo
from tba_jax.objectives.tba_prime import tba_prime
from tba_jax.objectives.topr import topr
from tba_jax.objectives.trajectory_balance import learned_log_z, trajectory_balance
from tba_jax.objectives.vine_ppo import vine_ppo

_CLIP = ("clip_low", "clip_high")

OBJECTIVES: dict[str, Objective] = {
    "trajectory_balance": Objective(
        loss=trajectory_balance,
        reward_unit=residual_in_nats,
        positive_beta=True,
        full_support=True,
        settings=("beta", *TEMPERATURES),
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
    "tba_prime": Objective(
        loss=tba_prime,
        reward_unit=advantage_over_temperature,
        behavior_logprobs=True,
        positive_beta=True,
        full_support=True,
        settings=("beta", *TEMPERATURES, "importance_clip", "log_ratio_clip", "row_divisor"),
    ),
    "reinforce": Objective(loss=reinforce, reward_unit=advantage_in_rewards, settings=("beta",)),
    "rloo": Objective(loss=rloo, reward_unit=advantage_in_rewards, settings=("beta",)),
    "proximal_rloo": Objective(
        loss=proximal_rloo, reward_unit=advantage_in_rewards, behavior_logprobs=True, settings=("beta", *_CLIP)
    ),
    "ppo": Objective(
        loss=ppo,
        reward_unit=advantage_in_rewards,
        min_completions=1,
        behavior_logprobs=True,
        value_head=True,
        settings=("beta", *_CLIP, "gae_lambda", "value_coefficient", "value_learning_rate"),
    ),
    "vine_ppo": Objective(
        loss=vine_ppo,
        reward_unit=advantage_in_rewards,
        min_completions=1,
        behavior_logprobs=True,
        state_values=True,
        k3=True,
        settings=("beta", *_CLIP),
    ),
    "grpo": Objective(loss=grpo, reward_unit=advantage_in_rewards, behavior_logprobs=True, k3=True, settings=("beta", *_CLIP)),
    "dr_grpo": Objective(
        loss=dr_grpo, reward_unit=advantage_in_rewards, behavior_logprobs=True, k3=True, settings=("beta", *_CLIP)
    ),
    "online_dpo": Objective(loss=online_dpo, reward_unit=preference, positive_beta=True, settings=("beta",)),
    "raft": Objective(loss=raft, reward_unit=advantage_in_rewards, reads_reference=False),
    "icepop": Objective(
        loss=icepop,
        reward_unit=advantage_in_rewards,
        behavior_logprobs=True,
        k3=True,
        settings=("beta", "icepop_low", "icepop_high"),
    ),
    "gspo": Objective(
        loss=gspo,
        reward_unit=advantage_in_rewards,
        behavior_logprobs=True,
        reads_reference=False,
        settings=("sequence_clip_low", "sequence_clip_high"),
    ),
    "cispo": Objective(
        loss=cispo, reward_unit=advantage_in_rewards, behavior_logprobs=True, reads_reference=False, settings=("clip_high",)
    ),
    "oapl": Objective(
        loss=oapl,
        reward_unit=residual_in_rewards,
        behavior_logprobs=True,
        positive_beta=True,
        reads_reference=False,
        settings=("beta",),
    ),
    "pmd_mean": Objective(
        loss=pmd_mean,
        reward_unit=residual_in_rewards,
        behavior_logprobs=True,
        positive_beta=True,
        reads_reference=False,
        settings=("beta",),
    ),
    "flowrl": Objective(
        loss=flowrl,
        reward_unit=residual_in_nats,
        behavior_logprobs=True,
        positive_beta=True,
        full_support=True,
        log_z_head=True,
        settings=("beta", *_CLIP, "log_z_learning_rate"),
    ),
    "a_star_po": Objective(
        loss=a_star_po,
        reward_unit=residual_in_rewards,
        behavior_logprobs=True,
        positive_beta=True,
        full_support=True,
        as_drawn=True,
        settings=("beta",),
    ),
    "asymre": Objective(loss=asymre, reward_unit=advantage_in_rewards, reads_reference=False, settings=("asymre_delta",)),
    "topr": Objective(
        loss=topr,
        reward_unit=advantage_in_rewards,
        min_completions=1,
        behavior_logprobs=True,
        reads_reference=False,
        settings=("topr_baseline",),
    ),
}
