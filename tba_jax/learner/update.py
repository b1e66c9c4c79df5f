"""The learner's mathematics: one update on Q queries × K completions, in micro-batches of any size, and the moving reference.

An objective couples the K rows of a query, but a micro-batch need not hold them all. Both ways are exact:

- whole groups: a micro-batch evaluates the objective on its own groups, and gradients are added;
- any split: a first pass scores all rows, the objective's gradient with respect to log-probs and values [B, R] is taken on the
  whole batch, and a second pass pulls it back through the model one micro-batch at a time.

The functions `make_…` take the section `learner` of a config.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tba_jax import packing, sharding, trajectory
from tba_jax.learner import optimizer
from tba_jax.learner.optimizer import Optimizers, Schedule, TrainState
from tba_jax.models import hardware, parameters, scoring
from tba_jax.models.decoder import Decoder
from tba_jax.models.experts import Routing
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.advantages import step_advantages
from tba_jax.objectives.objective import Objective, ObjectiveInputs, ObjectiveSettings, PolicyOutputs, diagnostics
from tba_jax.packing import Limits, Packed, Sequences
from tba_jax.programs import Program, shaped
from tba_jax.storage.contract import Contract

# What a forward pass costs beside a forward and a backward pass, by what the backward pass computes again.
SCORING_SHARE = {"none": 1 / 3, "dots": 1 / 3, "full": 1 / 4}
# Values of learner.reference.kind with a reference that the trainer holds, and checkpoints.
HELD_REFERENCES = ("reset", "ema")
_NEVER = 1 << 62  # steps


@flax.struct.dataclass
class Batch:
    """B = Q·K rows on the device, rows of one query consecutive. Shapes and units as in trajectory.Rows.

    ref_logprobs: log-probs under the run's initial reference. moving_ref_logprobs: log-probs under the reference of the step;
    None where the reference does not move. state_values: see ObjectiveInputs; None where rows have no column of that name.
    log_z: float32[B], nats, of the rows' queries; None where the objective is not given it. trained: bool[B, R], see
    trajectory.trained; None where no environment answers, and all tokens of responses are trained on.
    """

    tokens: chex.Array
    prompt_length: chex.Array
    response_length: chex.Array
    ref_logprobs: chex.Array
    behavior_logprobs: chex.Array
    reward: chex.Array
    moving_ref_logprobs: chex.Array | None = None
    state_values: chex.Array | None = None
    log_z: chex.Array | None = None
    trained: chex.Array | None = None

    @property
    def R(self) -> int:
        return self.ref_logprobs.shape[-1]


def batch_from_rows(rows: trajectory.Rows, *, log_z: np.ndarray | None = None) -> Batch:
    """The columns that an update needs, still on the host."""
    columns = {field.name for field in dataclasses.fields(Batch)} - {"moving_ref_logprobs", "log_z", "trained"}
    if "state_values" not in rows:
        columns.remove("state_values")
    trained = trajectory.trained(rows) if "environment" in rows else None
    return Batch(**{name: np.asarray(rows[name]) for name in columns}, log_z=log_z, trained=trained)


InputsOf = Callable[[Batch], ObjectiveInputs]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """Static settings of an update.

    limits: of micro-batches; logit_bytes: the most bytes of logits at a time, over all devices; space: the run's response space;
    remat: a name of layers.REMAT; router_aux_loss_coef: the weight of _balance in the loss; has_reference: whether there is a
    reference policy, from which the distance is measured; stored_reference: whether all rows hold its log-probs.
    """

    policy: Policy
    objective: Objective
    settings: ObjectiveSettings
    limits: Limits
    logit_bytes: int
    space: scoring.ResponseSpace
    remat: str
    router_aux_loss_coef: float = 0.0
    has_reference: bool = True
    stored_reference: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedules:
    """β, γ and τ of ObjectiveInputs, by trainer step."""

    beta: Schedule
    ref_temperature: Schedule
    reward_temperature: Schedule


def score(policy: Decoder, batch: Batch, *, config: LearnerConfig) -> tuple[jax.Array, jax.Array]:
    """policy_logprobs float32[B, R] and entropy float32[B, R] of the batch within the response space."""
    return scoring.response_logprobs(
        policy,
        batch.tokens,
        batch.prompt_length,
        batch.response_length,
        R=batch.R,
        space=config.space,
        logit_bytes=config.logit_bytes,
        remat=config.remat,
    )


# What the loss of a micro-batch is differentiated by: policy_logprobs, values or None, and Routing.probabilities or None.
Differentiated = tuple[jax.Array, jax.Array | None, jax.Array | None]


def scored(
    policy: Decoder, value_head: Any, micro: Sequences, batch: Batch, *, config: LearnerConfig
) -> tuple[Differentiated, tuple[jax.Array, Routing | None]]:
    """((policy_logprobs, values, probabilities), (entropy, routing)) of the rows of a micro-batch from one forward pass.
    Log-probs, values and entropy are float32[B, R], 0 in other rows.

    Args: value_head: policy.PolicyWithHeads.value_head; None: there are no values.
    """
    B, R = batch.ref_logprobs.shape
    rows = functools.partial(scoring.by_row, numbers=micro.numbers, B=B, R=R)
    hidden, routing = scoring.packed_hidden_states(policy, micro, remat=config.remat, none=B * R)
    limits: dict[str, Any] = dict(space=config.space, logit_bytes=config.logit_bytes)
    logprobs, entropy = scoring.packed_logprobs(policy, hidden, micro, R=R, none=B * R, **limits)
    values = None if value_head is None else rows(value_head(hidden)[..., 0])
    probabilities = None if routing is None else routing.probabilities
    return (rows(logprobs), values, probabilities), (rows(entropy), jax.lax.stop_gradient(routing))


@jax.named_scope("update")
def train_step(
    state: TrainState,
    frozen: Params,
    batch: Batch,
    packed: Packed,
    *,
    whole_groups: bool,
    optimizers: Optimizers,
    schedules: Schedules,
    config: LearnerConfig,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update. Jit it once with `state` donated and `whole_groups` static.

    Args:
      frozen: the part of the policy that is not trained (Policy.initial).
      packed: the rows of the batch. whole_groups: whether each micro-batch holds all rows of its queries.

    Returns:
      the new state and float32[] measurements, see optimizer.step. `row_finite`, bool[B], says which rows are finite: a row that
      is not refuses the step. Others: see diagnostics; _of_routing, where there are experts; kl_to_initial, nats per response,
      where the reference moves; value_error, the root of the mean over tokens of (V − r)², where values are learned.
    """
    settings: dict[str, Any] = dict(whole_groups=whole_groups, schedules=schedules, config=config)
    gradient_of = functools.partial(_gradient, **settings)
    return optimizer.step(state, frozen, (batch, packed), gradient_of=gradient_of, optimizers=optimizers)


def _gradient(
    state: TrainState,
    frozen: Params,
    rows: tuple[Batch, Packed],
    *,
    whole_groups: bool,
    schedules: Schedules,
    config: LearnerConfig,
) -> optimizer.Gradient:
    batch, packed = rows
    inputs_of = functools.partial(objective_inputs, step=state.step, schedules=schedules, config=config)
    log_z, pull_back_log_z = _log_z(state, frozen, batch, config)
    # The balance of experts is that of the whole batch, which the first of two passes finds.
    accumulate = _whole_groups if whole_groups and not config.router_aux_loss_coef else _any_split
    grads, log_z_cotangent, outputs, (entropy, routing) = accumulate(state, frozen, batch, packed, log_z, inputs_of, config)
    grads |= pull_back_log_z(log_z_cotangent)
    inputs = inputs_of(batch)
    loss = config.objective.loss(outputs, inputs)
    if routing is not None and config.router_aux_loss_coef:
        loss += _balance_weight(inputs, config) * _balance(routing.probabilities, routing)
    row_finite = _row_finite(outputs, inputs)
    measurements = {
        "row_finite": row_finite,
        **{field.name: getattr(inputs, field.name) for field in dataclasses.fields(schedules)},
        **diagnostics(outputs.logprobs, entropy, inputs, has_reference=config.has_reference),
    }
    if batch.moving_ref_logprobs is not None and config.stored_reference:
        measurements["kl_to_initial"] = jnp.mean(inputs.token_sum(outputs.logprobs - batch.ref_logprobs))
    if config.objective.clipped is not None:
        measurements["ratio_clipped"] = config.objective.clipped(outputs.logprobs, inputs)
    if "log_z_head" in state.params:
        measurements["learned_log_z"] = jnp.mean(log_z)
    if batch.log_z is not None:
        measurements["frozen_log_z"] = jnp.mean(log_z)
    if outputs.values is not None:
        squares = inputs.masked((outputs.values - inputs.reward[:, None]) ** 2)
        measurements["value_error"] = jnp.sqrt(jnp.sum(squares) / jnp.maximum(jnp.sum(inputs.mask), 1))
    if routing is not None:
        measurements |= _of_routing(routing)
    unit = _reward_unit(inputs, config)
    return optimizer.Gradient(loss=loss, by_part=grads, finite=jnp.all(row_finite), measurements=measurements, unit=unit)


def _reward_unit(inputs: ObjectiveInputs, config: LearnerConfig) -> jax.Array | float:
    """The factor that brings the objective's gradient into units of the reward."""
    return config.objective.reward_unit(inputs) if config.objective.reward_unit is not None else 1.0


def _balance_weight(inputs: ObjectiveInputs, config: LearnerConfig) -> jax.Array | float:
    """The weight of `_balance` beside the objective, so that the setting means the same for all: it is in units of the reward."""
    return config.router_aux_loss_coef / _reward_unit(inputs, config)


def _balance(probabilities: jax.Array, routing: Routing) -> jax.Array:
    """float32[]: the load-balancing loss of Fedus et al., 2021 (arXiv:2101.03961, equations 4 to 6), the mean over layers, of the
    states of the whole batch that response tokens are predicted from. It is k where experts have equal loads.

        L = e · Σ_i f_i P_i,  f_i the share of states that go through expert i,  P_i the mean of the router's probability of it

    Args: probabilities: float32[L, e], sums over states, by which it is differentiated; routing: of the batch.
    """
    L, e = probabilities.shape
    counted = jnp.maximum(routing.counted, 1)[:, None]
    return e / L * jnp.sum(routing.tokens / counted * probabilities / counted)


def _of_routing(routing: Routing) -> dict[str, jax.Array]:
    """router_load_max: the tokens of the expert that has most of them in its layer, over the mean of the layer; router_load_min:
    likewise, of the one that has fewest; router_entropy: nats, of the router's softmax, the mean over tokens and layers;
    router_aux_loss: see _balance."""
    loads = routing.tokens / jnp.maximum(jnp.mean(routing.tokens, axis=1, keepdims=True), 1e-9)
    return {
        "router_load_max": jnp.max(loads),
        "router_load_min": jnp.min(loads),
        "router_entropy": jnp.mean(routing.entropy / jnp.maximum(routing.counted, 1)),
        "router_aux_loss": _balance(routing.probabilities, routing),
    }


def _log_z(state: TrainState, frozen: Params, batch: Batch, config: LearnerConfig) -> tuple[jax.Array, Any]:
    """log Z(x) of each row's query, float32[B], and a function that maps the cotangent of log Z to the gradient
    {"log_z_head": …}. Without a head they are what the batch gives, or zeros, and {}.
    """
    K = config.settings.completions
    model = state.model(state.params, frozen)
    if model.log_z_head is None:
        given = jnp.zeros(batch.reward.shape, jnp.float32) if batch.log_z is None else batch.log_z
        return given, lambda cotangent: {}
    P = batch.tokens.shape[1] - batch.R
    prompts = batch.tokens[::K, :P], batch.prompt_length[::K]
    at_a_time = math.gcd(len(prompts[0]), max(1, config.limits.full_rows // K))
    micros = optimizer.split(prompts, at_a_time)
    states = optimizer.join(jax.lax.map(lambda micro: scoring.mean_prompt_states(model.policy, *micro), micros))

    def of_rows(head: Params) -> jax.Array:
        model = state.model(state.params | head, frozen)
        return jnp.repeat(model.log_z_head(states)[:, 0], K)

    log_z, pull_back = jax.vjp(of_rows, {"log_z_head": state.params["log_z_head"]})
    return log_z, lambda cotangent: pull_back(cotangent)[0]


def objective_inputs(batch: Batch, *, step: jax.Array, schedules: Schedules, config: LearnerConfig) -> ObjectiveInputs:
    """What the objective reads of a batch. Args: step: updates done before, of which β, γ and τ are functions."""
    real = jnp.arange(batch.R)[None, :] < batch.response_length[:, None]
    return ObjectiveInputs(
        ref_logprobs=batch.ref_logprobs if batch.moving_ref_logprobs is None else batch.moving_ref_logprobs,
        behavior_logprobs=batch.behavior_logprobs,
        mask=real if batch.trained is None else real & batch.trained,
        reward=batch.reward,
        beta=jnp.asarray(schedules.beta(step), jnp.float32),
        ref_temperature=jnp.asarray(schedules.ref_temperature(step), jnp.float32),
        reward_temperature=jnp.asarray(schedules.reward_temperature(step), jnp.float32),
        settings=config.settings,
        state_values=batch.state_values if config.objective.state_values else None,
        prompt_length=batch.prompt_length,
    )


def _row_finite(outputs: PolicyOutputs, inputs: ObjectiveInputs) -> jax.Array:
    """bool[B]: whether a row's log-probs, log Z, values and reward, and the squares of differences, are finite."""
    ref_and_reward = inputs.token_sum(inputs.ref_logprobs) + inputs.reward
    target = jnp.where(inputs.beta > 0, inputs.log_target(), ref_and_reward)  # β = 0 has no p̃
    difference = target - inputs.token_sum(outputs.logprobs) - outputs.log_z
    finite = jnp.isfinite(difference**2) & jnp.isfinite(inputs.token_sum(inputs.behavior_logprobs))
    if outputs.values is not None:
        finite &= jnp.isfinite(jnp.sum((outputs.values - inputs.reward[:, None]) ** 2, axis=1))
    if inputs.state_values is not None:
        advantage = step_advantages(inputs.state_values, inputs.reward, inputs.mask)
        finite &= jnp.isfinite(jnp.sum(advantage**2, axis=1))
    return finite


def _trained(state: TrainState) -> Params:
    """The parts that a pass through the policy differentiates by: all but the head of log Z, which reads prompts alone."""
    return {part: params for part, params in state.params.items() if part != "log_z_head"}


def _whole_groups(
    state: TrainState, frozen: Params, batch: Batch, packed: Packed, log_z: jax.Array, inputs_of: InputsOf, config: LearnerConfig
) -> tuple[Any, ...]:
    """One pass: the objective is a mean over groups, and its gradient the sum over micro-batches of whole groups.

    In the objective of a micro-batch, groups of other micro-batches have no tokens and no reward: their gradient is 0.

    Returns gradient by part (see _trained), cotangent of log_z, PolicyOutputs, and (entropy, routing) of the batch, see `scored`.
    """
    trained = _trained(state)

    def micro_loss(trained: Params, log_z: jax.Array, micro: Sequences, there: jax.Array) -> tuple[jax.Array, Any]:
        """there: bool[B], the rows of the micro-batch."""
        rows = _of_rows(batch, there)
        model = state.model(state.params | trained, frozen)
        (policy_logprobs, values, _), measured = scored(model.policy, model.value_head, micro, rows, config=config)
        outputs = PolicyOutputs(logprobs=policy_logprobs, log_z=jnp.where(there, log_z, 0.0), values=values)
        return config.objective.loss(outputs, inputs_of(rows)), (policy_logprobs, values, measured)

    def gradient(micro: Sequences, number: jax.Array) -> Any:
        differentiated = jax.grad(micro_loss, argnums=(0, 1), has_aux=True)
        return differentiated(trained, log_z, micro, packed.of_row == number)

    (grads, cotangent), (logprobs, values, measured) = packing.summed(gradient, packed)
    return grads, cotangent, PolicyOutputs(logprobs=logprobs, log_z=log_z, values=values), measured


def _of_rows(batch: Batch, there: jax.Array) -> Batch:
    """The batch in which other rows have no tokens and no reward. Args: there: bool[B]."""
    return dataclasses.replace(
        batch,
        response_length=jnp.where(there, batch.response_length, 0),
        reward=jnp.where(there, batch.reward, 0.0),
        state_values=None if batch.state_values is None else jnp.where(there[:, None], batch.state_values, 0.0),
    )


def _any_split(
    state: TrainState, frozen: Params, batch: Batch, packed: Packed, log_z: jax.Array, inputs_of: InputsOf, config: LearnerConfig
) -> tuple[Any, ...]:
    """Two passes: ∇_θ L = Σ_micro (∂ outputs / ∂θ)ᵀ ∂L / ∂ outputs, with the inner gradient taken on the whole batch."""
    trained = _trained(state)

    def outputs_of(trained: Params, micro: Sequences) -> tuple[Differentiated, Any]:
        model = state.model(state.params | trained, frozen)
        return scored(model.policy, model.value_head, micro, batch, config=config)

    (policy_logprobs, values, probabilities), measured = packing.summed(lambda micro, _: outputs_of(trained, micro), packed)
    outputs = PolicyOutputs(logprobs=policy_logprobs, log_z=log_z, values=values)
    cotangent = jax.grad(config.objective.loss)(outputs, inputs_of(batch))
    of_router = None
    if probabilities is not None:
        of_router = _balance_weight(inputs_of(batch), config) * jax.grad(_balance)(probabilities, measured[1])

    def gradient(micro: Sequences, _: jax.Array) -> Params:
        pull_back = jax.vjp(lambda t: outputs_of(t, micro)[0], trained)[1]
        return pull_back((cotangent.logprobs, cotangent.values, of_router))[0]

    return packing.summed(gradient, packed), cotangent.log_z, outputs, measured


def ref_logprobs(reference: Params, frozen: Params, batch: Batch, packed: Packed, *, config: LearnerConfig) -> jax.Array:
    """float32[B, R], nats at the scoring temperature, 0 where masked. reference: like what is trained of the policy."""
    policy = config.policy.for_training(reference, frozen)
    return packing.summed(lambda micro, _: scored(policy, None, micro, batch, config=config)[0][0], packed)


def moved(reference: Params, params: Params, *, decay: float) -> Params:
    """ref ← α·ref + (1 − α)·θ, α = decay."""
    return jax.tree.map(lambda ref, param: decay * ref + (1 - decay) * param, reference, params)


class MovingReference:
    """A reference that moves with the policy (TBA′; TBA paper, method): reset to it every ρ updates, or its moving average.

    Rows carry the log-probs of the initial reference, so a batch is scored again with the reference of its step. A moving average
    is float32, since its small steps would be lost in fewer bits; a reset reference rests in the model's compute dtype. The
    initial reference, for rows that have not its log-probs, is one that is never reset.
    """

    def __init__(self, config: LearnerConfig, mesh: Mesh, *, every_steps: int, decay: float, offload: bool):
        """Args: every_steps: updates between two moves; decay: see `moved`, 0: reset; offload: it rests in host memory between
        uses."""
        policy = config.policy
        self._every_steps, self._resets = every_steps, decay == 0
        self._in_use = policy.trained_shardings(mesh)
        in_host_memory = jax.tree.map(lambda each: each.with_memory_kind(sharding.PINNED_HOST), self._in_use)
        self._at_rest = in_host_memory if offload else self._in_use
        dtype = policy.model.compute_dtype if self._resets else "float32"
        self.shapes = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, dtype, sharding=s), parameters.shapes(policy.trained_specs), self._at_rest
        )
        self.params: Params = {}
        copy = functools.partial(jax.tree.map, lambda x: jax.numpy.array(x, dtype, copy=True))
        self._copy = jax.jit(copy, out_shardings=self._in_use)
        self._move = jax.jit(functools.partial(moved, decay=decay), out_shardings=self._in_use, donate_argnums=0)
        score = functools.partial(ref_logprobs, config=config)
        self._score = sharding.on_mesh(mesh, jax.jit(score, out_shardings=sharding.rows_sharding(mesh)))

    def start(self, params: Params) -> None:
        """The reference is the policy, as at step 0. Args: params: float32, not donated."""
        self.params = {}  # at a reset, the memory holds one reference, not two
        self.params = jax.device_put(self._copy(params), self._at_rest)

    def rescore(self, frozen: Params, batch: Batch, packed: Packed) -> Batch:
        """The batch with moving_ref_logprobs."""
        reference = jax.device_put(self.params, self._in_use)
        return dataclasses.replace(batch, moving_ref_logprobs=self._score(reference, frozen, batch, packed))

    def programs(self, params: Params, frozen: Params, batch: Batch, packed: Packed) -> dict[str, Program]:
        """Name -> the programs of `start`, `rescore` and `advance`. Args: shapes of what these take."""
        reference = self.shapes if self._at_rest is self._in_use else shaped(self.shapes, self._in_use)
        found = {
            "copy to the moving reference": Program(function=self._copy, arguments=(params,)),
            "scoring by the moving reference": Program(function=self._score, arguments=(reference, frozen, batch, packed)),
        }
        if not self._resets:
            found["move of the reference"] = Program(function=self._move, arguments=(reference, params))
        return found

    def advance(self, params: Params, step: int) -> bool:
        """Moves the reference if it is due after `step` updates, and returns whether it was."""
        due = step % self._every_steps == 0
        if due and self._resets:
            self.start(params)
        elif due:
            self.params = jax.device_put(self._move(jax.device_put(self.params, self._in_use), params), self._at_rest)
        return due


def holds_reference(config: Any) -> bool:
    """Whether the trainer holds a reference beside the policy. Args: config: of the run."""
    kind = config.learner.reference.kind
    return kind in HELD_REFERENCES or (kind == "initial" and not config.searchers.scores_reference)


def make_schedules(c: Any) -> Schedules:
    def schedule(name: str) -> Schedule:
        return optimizer.linear_then_constant(**{part: c[f"{name}_{part}"] for part in ("start", "end", "steps")})

    return Schedules(**{field.name: schedule(field.name) for field in dataclasses.fields(Schedules)})


def limits(tokens: int, *, prompt: int, response: int, queries: int, completions: int, ways: int, shares: bool) -> Limits:
    """What micro-batches hold. Raises ValueError: the mesh does not divide the batch, or `tokens` hold no row for each data way.

    Args: tokens: learner.micro_batch_tokens, 0: the whole batch. prompt, response: P and R. ways: see sharding.row_ways.
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


def make_learner_config(
    c: Any, contract: Contract, policy: Policy, mesh: Mesh, *, stored_reference: bool = True
) -> LearnerConfig:
    return LearnerConfig(
        policy=policy,
        objective=OBJECTIVES[c.objective],
        settings=ObjectiveSettings(**{field.name: c[field.name] for field in dataclasses.fields(ObjectiveSettings)}),
        limits=limits(
            c.micro_batch_tokens,
            prompt=contract.prompt_length,
            response=contract.response_length,
            queries=c.queries,
            completions=c.completions,
            ways=sharding.row_ways(mesh),
            shares=scoring.shares_prompts(policy.model, mesh),
        ),
        logit_bytes=(c.logit_megabytes << 20) * mesh.size,
        space=contract.response_space(),
        remat=hardware.value("learner.remat", c.remat, mesh.devices.flat[0].platform),
        router_aux_loss_coef=c.router_aux_loss_coef,
        has_reference=contract.has_reference,
        stored_reference=stored_reference,
    )


def make_moving_reference(c: Any, learner_config: LearnerConfig, mesh: Mesh) -> MovingReference | None:
    """The reference that the trainer holds: one that moves with the policy, or where rows lack the initial one's log-probs, that;
    None if rows have all that is needed."""
    r = c.reference
    moves = {"reset": (r.reset_steps, 0.0), "ema": (1, r.ema_decay)}
    if not learner_config.stored_reference:
        moves["initial"] = (_NEVER, 0.0)
    if r.kind not in moves:
        return None
    every_steps, decay = moves[r.kind]
    return MovingReference(learner_config, mesh, every_steps=every_steps, decay=decay, offload=r.offload)
