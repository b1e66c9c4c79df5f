"""Supervised objectives: likelihood of responses (SFT), and preferences between two of them (reward models).

Each is a sum over examples divided by a size of the whole batch, so gradients of micro-batches add up to that of the batch.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.learner import optimizer
from tba_jax.learner.optimizer import Optimizers, TrainState
from tba_jax.models import scoring
from tba_jax.models.decoder import Decoder
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy


@flax.struct.dataclass
class Examples:
    """tokens int32[B, T], prompt_length int32[B], response_length int32[B], as in trajectory. A row whose response_length is 0
    fills a batch up and counts nothing; other responses have an end of sequence at least."""

    tokens: Any
    prompt_length: Any
    response_length: Any

    @property
    def size(self) -> jax.Array:
        """float32[]: what the objective is a mean over, response tokens."""
        return jnp.sum(self.response_length).astype(jnp.float32)


@flax.struct.dataclass
class Preferences(Examples):
    """As Examples, with two rows for each prompt, that of the chosen and that of the rejected response: tokens int32[B, 2, T],
    prompt_length and response_length int32[B, 2]."""

    @property
    def size(self) -> jax.Array:
        """float32[]: what the objective is a mean over, pairs."""
        return jnp.sum(self.response_length[:, 0] > 0).astype(jnp.float32)


Batch = Examples | Preferences


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Static settings of an update. objective: a value of OBJECTIVES; R: most tokens of a response; micro_batch_rows: examples
    (pairs) per pass, a divisor of B; logit_bytes: see scoring.response_logprobs; remat: a name of layers.REMAT."""

    objective: "Objective"
    R: int
    micro_batch_rows: int
    logit_bytes: int
    remat: str


# Examples are learned as they are, whatever responses a run allows.
_WHOLE_VOCABULARY = scoring.ResponseSpace(temperature=1.0, banned_tokens=(), eos_id=-1)

# (model, batch, config) -> sums float32[] over the batch; `loss` is the one to descend, all of them are to be divided by `size`.
Objective = Callable[[Decoder, Any, StepConfig], dict[str, jax.Array]]


def likelihood(model: Decoder, examples: Examples, config: StepConfig) -> dict[str, jax.Array]:
    """−Σ log π(response | prompt), nats, over response tokens, end of sequence included. Prompts are not learned."""
    logprobs, _ = scoring.response_logprobs(
        model,
        examples.tokens,
        examples.prompt_length,
        examples.response_length,
        R=config.R,
        space=_WHOLE_VOCABULARY,
        logit_bytes=config.logit_bytes,
        remat=config.remat,
    )
    return {"loss": -jnp.sum(logprobs)}


def preference(model: Decoder, pairs: Preferences, config: StepConfig) -> dict[str, jax.Array]:
    """−Σ log σ(s_chosen − s_rejected) (Bradley & Terry 1952; Ouyang et al. 2022, eq. 1), s the model's score of a whole row.

    Both responses to a prompt go through the model in one pass. pair_accuracy: pairs with s_chosen > s_rejected.
    """
    chex.assert_rank([pairs.tokens, pairs.prompt_length, pairs.response_length], [3, 2, 2])
    B, _, T = pairs.tokens.shape
    length = (pairs.prompt_length + pairs.response_length).reshape(2 * B)
    scores = scoring.sequence_scores(model, pairs.tokens.reshape(2 * B, T), length, remat=config.remat).reshape(B, 2)
    margin = scores[:, 0] - scores[:, 1]
    real = pairs.response_length[:, 0] > 0
    terms = {"loss": -jax.nn.log_sigmoid(margin), "pair_accuracy": (margin > 0).astype(jnp.float32), "margin": margin}
    return {name: jnp.sum(jnp.where(real, values, 0.0)) for name, values in terms.items()}


OBJECTIVES: dict[str, Objective] = {"sft": likelihood, "reward": preference}


@jax.named_scope("update")
def train_step(
    state: TrainState, batch: Batch, *, optimizers: Optimizers, config: StepConfig
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update: the new state, and float32[] measurements, the objective's means and those of optimizer.step. Jit it once with
    `state`, of the part "policy" alone, donated."""
    size = batch.size

    def share(params: Params, micro: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        sums = config.objective(state.model(params, {}).policy, micro, config)
        shares = {name: total / size for name, total in sums.items()}
        return shares["loss"], shares

    def gradient(micro: Batch) -> tuple[Params, dict[str, jax.Array]]:
        (_, shares), grads = jax.value_and_grad(share, has_aux=True)(state.params, micro)
        return grads, shares

    def gradient_of(state: TrainState, frozen: Params, batch: Batch) -> optimizer.Gradient:
        grads, shares = optimizer.accumulate(gradient, state.params, optimizer.split(batch, config.micro_batch_rows))
        means = jax.tree.map(jnp.sum, shares)
        return optimizer.Gradient(loss=means["loss"], by_part=grads, measurements=means)

    return optimizer.step(state, {}, batch, gradient_of=gradient_of, optimizers=optimizers)


def jitted(policy: Policy, mesh: Mesh, *, optimizers: Optimizers, config: StepConfig) -> tuple[sharding.OnMesh, TrainState]:
    """`train_step` on a mesh, and the state as jax.ShapeDtypeStruct."""
    shapes = optimizer.state_shapes(policy, optimizers, mesh)
    out_shardings = (jax.tree.map(lambda x: x.sharding, shapes), sharding.replicated(mesh))
    step = functools.partial(train_step, optimizers=optimizers, config=config)
    return sharding.on_mesh(mesh, jax.jit(step, donate_argnums=0, out_shardings=out_shardings)), shapes


def totals(state: TrainState, batch: Batch, *, config: StepConfig) -> dict[str, jax.Array]:
    """The objective's sums over one micro-batch, and `size`: for means over more rows than go through the model at a time."""
    return config.objective(state.model(state.params, {}).policy, batch, config) | {"size": batch.size}
