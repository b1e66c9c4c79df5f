"""The trainer's mathematics: state, and one update on Q queries × K completions, in micro-batches of any size.

An objective couples the K rows of a query, a micro-batch need not hold them all. Both ways are exact:

- whole groups: a micro-batch of a multiple of K rows evaluates the objective on its own groups; gradients are averaged;
- any split: a first pass scores all rows, the objective's gradient with respect to the log-probs [B, R] is taken on the
  whole batch, and a second pass pulls it back through the model one micro-batch at a time.
"""

import dataclasses
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tba_jax import trajectory
from tba_jax.models import scoring
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.objectives import Objective
from tba_jax.objectives.inputs import ObjectiveInputs
from tba_jax.optimizer import Schedule


@flax.struct.dataclass
class TrainState:
    """step: int32[], updates done; params: what is trained, float32 master weights (Policy); opt_state: the optimiser's."""

    step: chex.Array
    params: Params
    opt_state: Any


@flax.struct.dataclass
class Batch:
    """B = Q·K rows on the device, rows of one query consecutive. Shapes and units as in trajectory.Rows."""

    prompt_tokens: chex.Array
    prompt_length: chex.Array
    response_tokens: chex.Array
    response_length: chex.Array
    ref_logprobs: chex.Array
    behavior_logprobs: chex.Array
    reward: chex.Array


def batch_from_rows(rows: trajectory.Rows) -> Batch:
    """The columns that an update needs, still on the host."""
    return Batch(**{field.name: np.asarray(rows[field.name]) for field in dataclasses.fields(Batch)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """Static settings of an update.

    micro_batch_rows: rows per forward and backward pass, a divisor of B; logit_bytes: what logits may take at a time, over
    all devices, see scoring.token_logprobs; temperature: the run's scoring temperature; remat: a name of layers.REMAT.
    """

    policy: Policy
    completions: int
    micro_batch_rows: int
    logit_bytes: int
    temperature: float
    banned_tokens: tuple[int, ...]
    remat: str


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))


def score(params: Params, batch: Batch, *, config: LearnerConfig) -> tuple[jax.Array, jax.Array]:
    """policy_logprobs float32[B, R] and entropy float32[B, R] of the batch at the scoring temperature.

    Args:
      params: all that the decoder computes with (Policy.for_training or for_sampling).
    """
    return scoring.response_logprobs(
        params,
        batch.prompt_tokens,
        batch.prompt_length,
        batch.response_tokens,
        batch.response_length,
        config=config.policy.model,
        temperature=config.temperature,
        banned_tokens=config.banned_tokens,
        logit_bytes=config.logit_bytes,
        remat=config.remat,
    )


def train_step(
    state: TrainState,
    frozen: Params,
    batch: Batch,
    *,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    beta: Schedule,
    config: LearnerConfig,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update. Jit it once with `state` donated.

    Args:
      frozen: the part of the policy that is not trained (Policy.initial).

    Returns:
      the new state and float32[] measurements; `finite` is 0 where loss or gradient is not, and the state is then
      left as it was.
    """
    beta_now = beta(state.step)
    accumulate = _whole_groups if config.micro_batch_rows % config.completions == 0 else _any_split
    loss, grads, measurements, policy_logprobs, entropy = accumulate(
        state.params, frozen, batch, beta_now, objective=objective, config=config
    )
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    new = TrainState(step=state.step + 1, params=optax.apply_updates(state.params, updates), opt_state=opt_state)
    new = jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, state)
    measurements |= {"loss": loss, "grad_norm": grad_norm, "beta": beta_now, "finite": finite.astype(jnp.float32)}
    return new, measurements | _diagnostics(policy_logprobs, entropy, batch)


def _inputs(batch: Batch, beta: jax.Array, config: LearnerConfig) -> ObjectiveInputs:
    R = batch.response_tokens.shape[1]
    return ObjectiveInputs(
        ref_logprobs=batch.ref_logprobs,
        behavior_logprobs=batch.behavior_logprobs,
        mask=jnp.arange(R)[None, :] < batch.response_length[:, None],
        reward=batch.reward,
        beta=beta,
        completions=config.completions,
    )


def _split(tree: Any, rows: int, unit: int) -> Any:
    """[B, ...] -> [B / rows, rows, ...]: micro-batches of `rows` rows that keep every `unit` consecutive rows together.

    Units are dealt out with a stride, so that each micro-batch takes its share from every device that rows are split over.
    """

    def split(x: jax.Array) -> jax.Array:
        count = x.shape[0] // rows
        return x.reshape(rows // unit, count, unit, *x.shape[1:]).swapaxes(0, 1).reshape(count, rows, *x.shape[1:])

    return jax.tree.map(split, tree)


def _join(x: jax.Array, unit: int) -> jax.Array:
    """The inverse of `_split`: [B / rows, rows, ...] -> [B, ...]."""
    count, rows = x.shape[:2]
    return x.reshape(count, rows // unit, unit, *x.shape[2:]).swapaxes(0, 1).reshape(count * rows, *x.shape[2:])


def _whole_groups(
    params: Params, frozen: Params, batch: Batch, beta: jax.Array, *, objective: Objective, config: LearnerConfig
) -> tuple[Any, ...]:
    """One pass: the objective is a mean over groups, so the batch's is the mean over micro-batches of whole groups."""

    def micro_loss(params: Any, micro: Batch) -> tuple[jax.Array, Any]:
        policy_logprobs, entropy = score(config.policy.for_training(params, frozen), micro, config=config)
        loss, measurements = objective(policy_logprobs, _inputs(micro, beta, config))
        return loss, (measurements, policy_logprobs, entropy)

    def add(grads: Any, micro: Batch) -> tuple[Any, Any]:
        (loss, aux), micro_grads = jax.value_and_grad(micro_loss, has_aux=True)(params, micro)
        return jax.tree.map(jnp.add, grads, micro_grads), (loss, *aux)

    K = config.completions
    micros = _split(batch, config.micro_batch_rows, K)
    count = micros.reward.shape[0]
    grads, (losses, measurements, *per_token) = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), micros)
    grads = jax.tree.map(lambda g: g / count, grads)
    means = {name: jnp.mean(values) for name, values in measurements.items()}
    return jnp.mean(losses), grads, means, *(_join(x, K) for x in per_token)


def _any_split(
    params: Params, frozen: Params, batch: Batch, beta: jax.Array, *, objective: Objective, config: LearnerConfig
) -> tuple[Any, ...]:
    """Two passes: ∇_θ L = Σ_micro (∂ log π / ∂θ)ᵀ ∂L / ∂ log π, with the inner gradient taken on the whole batch."""
    micros = _split(batch, config.micro_batch_rows, 1)
    per_token = jax.lax.map(lambda micro: score(config.policy.for_training(params, frozen), micro, config=config), micros)
    policy_logprobs, entropy = (_join(x, 1) for x in per_token)
    (loss, measurements), cotangent = jax.value_and_grad(objective, has_aux=True)(policy_logprobs, _inputs(batch, beta, config))

    def add(grads: Any, micro: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        rows, row_cotangent = micro
        pull_back = jax.vjp(lambda p: score(config.policy.for_training(p, frozen), rows, config=config)[0], params)[1]
        return jax.tree.map(jnp.add, grads, pull_back(row_cotangent)[0]), None

    grads, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), (micros, _split(cotangent, config.micro_batch_rows, 1)))
    return loss, grads, measurements, policy_logprobs, entropy


def _diagnostics(policy_logprobs: jax.Array, entropy: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    """Of the batch as drawn, which need not be on-policy.

    kl_to_ref: nats per response, the mean of log π_θ − log π_ref over rows; entropy: nats per real token.
    """
    return {
        "entropy": jnp.sum(entropy) / jnp.maximum(jnp.sum(batch.response_length), 1),
        "reward": jnp.mean(batch.reward),
        "kl_to_ref": jnp.mean(jnp.sum(policy_logprobs - batch.ref_logprobs, axis=1)),
        "response_length": jnp.mean(batch.response_length.astype(jnp.float32)),
    }
