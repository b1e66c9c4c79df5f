"""Policy mirror descent with the mean reward in the place of log Z (Kimi k1.5, section 2.3.2; PMD-mean: Xu et al. 2026)."""

import jax
import jax.numpy as jnp

from tba_jax.objectives.advantages import centred
from tba_jax.objectives.inputs import ObjectiveInputs, PolicyOutputs
from tba_jax.objectives.ratios import sequence_log_ratios


def pmd_mean(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = mean_{i,j} ( r_ij − r̄_i − β log π_θ(y_ij|x_i)/π_old(y_ij|x_i) )².  The papers' τ is β here.

    Reference: π_old is the policy that drew the row: its behaviour log-probs. γ, τ and π_ref are not read.

    Optimum, on rows of one fixed π_old: π_old·exp(a − W(c·exp(a))) with a = (r − E r)/β, Lambert's W, and the c at which it is a
    distribution. That is a mirror step with a mixed KL–χ² regulariser, shorter than π_old·exp(r/β) / Z. With K rows, a is
    (1 − 1/K) of that, since r̄ holds the row's own reward. If the sampler follows the policy there is no fixed optimum.

    The authors' code takes the mean of the other rows for r̄ and divides by response lengths; this loss is the papers' equation.

    Needs: behaviour log-probs, K at least 2, β above 0. Returns:
      float32[] loss, in squared units of the reward.
    """
    log_ratio = inputs.grouped(sequence_log_ratios(outputs.logprobs, inputs))
    return jnp.mean((centred(inputs.grouped(inputs.reward)) - inputs.beta * log_ratio) ** 2)
