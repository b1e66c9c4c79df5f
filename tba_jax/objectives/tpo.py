"""Target policy optimisation: the policy on a group is fitted to a tilted softmax of the sampler (Kaddour 2026)."""

import jax
import jax.numpy as jnp

from tba_jax.objectives.advantages import standardised
from tba_jax.objectives.objective import ObjectiveInputs, PolicyOutputs


def tpo(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = mean_i KL( q_i ‖ p_i ) / K,  p = softmax_j( log π_θ(y_j) ),  q = softmax_j( log π_behaviour(y_j) + (r_j − r̄)/(β std) ).

    Target policy optimisation (Kaddour 2026, eq. 1-3): p and q are distributions over the K rows of a query, and q is fixed. The
    paper's loss is the cross-entropy, whose gradient is K times this one's. Its temperature η, which is 1, is β here. log π(y) is
    a sum over the response.

    Optimum, on rows of one fixed μ and as K grows: μ·exp((r − E r)/(β std))/Z. On rows of the policy itself it is the best
    response.
    """
    behavior, policy = (inputs.grouped(inputs.token_sum(x)) for x in (inputs.behavior_logprobs, outputs.logprobs))
    target = jax.nn.log_softmax(behavior + standardised(inputs.grouped(inputs.reward)) / inputs.beta)
    return jnp.mean(jnp.exp(target) * (target - jax.nn.log_softmax(policy)))
