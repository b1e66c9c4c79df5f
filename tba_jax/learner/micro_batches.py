"""Micro-batches: a batch in parts that go through the model one after the other, and the sum of their gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tba_jax import sharding
from tba_jax.models.parameters import Params
from tba_jax.packing.row_layout import Limits

# What a forward pass costs beside a forward and a backward pass, by what the backward pass computes again.
SCORING_SHARE = {"none": 1 / 3, "dots": 1 / 3, "full": 1 / 4}


def limits(tokens: int, *, prompt: int, response: int, queries: int, completions: int, ways: int, shares: bool) -> Limits:
    """What micro-batches hold.

    Args:
      tokens: learner.micro_batch_tokens, 0: the whole batch, whatever its rows' lengths. prompt, response: P and R.
      ways: see sharding.row_ways. shares: see row_layout.Limits.

    Raises:
      ValueError: the mesh does not divide the batch, or `tokens` do not hold a row for each data way; names the setting.
    """
    batch = queries * completions
    sharding.check_ways(batch, ways, what="learner.queries × learner.completions", mesh="learner.mesh")
    row_tokens = prompt + response
    if tokens and tokens < ways * row_tokens:
        each = f" for each of the {ways} ways of learner.mesh" if ways > 1 else ""
        raise ValueError(
            f"learner.micro_batch_tokens={tokens} does not hold one row{each}: a row has task.prompt_length + "
            f"task.response_length = {row_tokens} tokens; at least {ways * row_tokens}, or 0 for the whole batch"
        )
    sizes = dict(rows=batch, group=completions, prompt=prompt, response=response)
    return Limits(**sizes, shares=shares, tokens=tokens // ways, ways=ways)


def split(tree: Any, rows: int) -> Any:
    """[B, ...] -> [B / rows, rows, ...]: micro-batches of `rows` rows.

    Rows are dealt out with a stride, so that each micro-batch takes its share from every device that rows are split over.
    """
    return jax.tree.map(lambda x: x.reshape(rows, -1, *x.shape[1:]).swapaxes(0, 1), tree)


def join(tree: Any) -> Any:
    """The inverse of `split`: [B / rows, rows, ...] -> [B, ...]."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), tree)


def accumulate(gradient: Callable[[Any], tuple[Params, Any]], params: Params, micros: Any) -> tuple[Params, Any]:
    """Sums the gradients of micro-batches; only one micro-batch's gradient is in memory.

    Args:
      gradient: micro-batch -> (gradient like params, whatever else is kept of it).
      micros: see `split`.

    Returns:
      the sum, and what is kept of each micro-batch, stacked.
    """

    def add(sums: Params, micro: Any) -> tuple[Params, Any]:
        of_micro, kept = gradient(micro)
        return jax.tree.map(jnp.add, sums, of_micro), kept

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), micros)
