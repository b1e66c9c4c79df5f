"""Trajectory balance with a log Z of each query that was estimated before training and stays (after DISA, arXiv 2605.17295)."""

import dataclasses

import jax

from tba_jax.objectives.objective import ObjectiveInputs, PolicyOutputs
from tba_jax.objectives.trajectory_balance import learned_log_z


def frozen_log_z(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """L = mean_{i,j} ( log Ẑ(x_i) + log π_θ(y_ij|x_i) − log p̃(y_ij|x_i) )²,  log Ẑ(x) = log mean_k p̃(y_k|x)/μ(y_k|x); K may be 1.

    The y_k are rows of a log that exists, weighed by who drew them (replay/log_z.py). The loss is that of `learned_log_z`, with
    nothing learned in log Z.

    Optimum on rows of one fixed μ: p* = p̃ / Z where log Ẑ is exact. Where it is too small, as it is on average of few rows, the
    responses that μ rarely draws get too little probability (benchmarks/siblings.py has the equation).

    Second hand: DISA's abstract and notes on it. It fits a network to estimates of prompts and freezes that; here each query has
    its own estimate, and a query without one is refused.
    """
    return learned_log_z(dataclasses.replace(outputs, log_z=jax.lax.stop_gradient(outputs.log_z)), inputs)
