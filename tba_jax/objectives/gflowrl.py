"""GFlowRL without its length normalisation: trajectory balance as a step from who drew the rows (after arXiv 2607.13394)."""

import jax
import jax.numpy as jnp

from tba_jax.objectives.advantages import sequence_ratios
from tba_jax.objectives.objective import ObjectiveInputs, PolicyOutputs
from tba_jax.objectives.trajectory_balance import vargrad_log_z


def gflowrl(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = mean_{i,j} w ( clip(g_ij, −flow_gap_low, flow_gap_high) + log π_θ/μ )²,  g = log Ẑ + log μ − log p̃,

    log Ẑ = mean_j ( log p̃ − log μ ), w = min( π_θ/μ, 1 + clip_high ) of the response, detached; μ is the policy that drew the
    row. g, the flow gap, is the residual of trajectory balance at μ: with π_θ = μ, and no gap beyond the bounds, the gradient is
    that of `trajectory_balance`.

    Optimum: p* = p̃ / Z on rows of the policy itself. On rows of one fixed μ of full support, where no bound is met:
    μ^(1/K) p̃^(1 − 1/K) / Z, which is p* as K grows; where gaps meet their bounds, μ·exp(−E[clipped g|y]) / Z: a step from μ.

    Second hand: equations 4 to 8 as notes on the paper and another implementation have them. The paper divides log-probs by the
    length of the response, which moves the optimum, and is left out here. Its β multiplies the reward and is 1/β here.
    """
    behavior, policy = (inputs.grouped(inputs.token_sum(x)) for x in (inputs.behavior_logprobs, outputs.logprobs))
    target, s = inputs.grouped(inputs.log_target()), inputs.settings
    gap = jnp.clip(vargrad_log_z(behavior, target)[:, None] + behavior - target, -s.flow_gap_low, s.flow_gap_high)
    weight = jax.lax.stop_gradient(jnp.minimum(sequence_ratios(outputs.logprobs, inputs), 1 + s.clip_high))
    return jnp.mean(inputs.grouped(weight) * (gap + policy - behavior) ** 2)
