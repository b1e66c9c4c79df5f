"""Supervised objectives and their one update: likelihood of responses (SFT), and preferences between two (reward models).

A batch is split into micro-batches of any size: every objective is a sum over examples divided by a size of the whole batch,
so gradients of micro-batches add up to that of the batch.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from tba_jax import sharding as sharding_lib
from tba_jax import trajectory
from tba_jax.learner import optimizer as optimizer_lib
from tba_jax.models import decoder, heads, parameters, scoring
from tba_jax.models.config import DecoderConfig
from tba_jax.models.decoder import Decoder
from tba_jax.models.parameters import Definition, Params
from tba_jax.tasks.interface import Task
from tba_jax.text.encoding import encode_pair
from tba_jax.text.tokenizers import Tokenizer


@flax.struct.dataclass
class Examples:
    """tokens int32[B, T], prompt_length int32[B], response_length int32[B], as in trajectory.

    A row whose response_length is 0 fills a batch up and counts nothing; a response ends with the end of sequence, so no other
    row has length 0.
    """

    tokens: Any
    prompt_length: Any
    response_length: Any

    @property
    def size(self) -> jax.Array:
        """float32[]: what the objective is a mean over, response tokens."""
        return jnp.sum(self.response_length).astype(jnp.float32)


@flax.struct.dataclass
class Preferences:
    """As Examples, with two rows for each prompt, that of the chosen and that of the rejected response: tokens int32[B, 2, T],
    prompt_length and response_length int32[B, 2]."""

    tokens: Any
    prompt_length: Any
    response_length: Any

    @property
    def size(self) -> jax.Array:
        """float32[]: what the objective is a mean over, pairs."""
        return jnp.sum(self.response_length[:, 0] > 0).astype(jnp.float32)


Batch = Examples | Preferences


@flax.struct.dataclass
class TuningState:
    """step: int32[], updates done; params: float32 master weights; opt_state: the optimiser's; graphdef: of the decoder."""

    step: chex.Array
    params: Params
    opt_state: Any
    graphdef: nnx.GraphDef = flax.struct.field(pytree_node=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
    """Static settings of an update.

    R: the most tokens of a response; micro_batch_rows: examples (pairs) per forward and backward pass, a divisor of B;
    logit_bytes: see scoring.response_logprobs; remat: a name of layers.REMAT.
    """

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
    scores = pair_scores(model, pairs, config)
    margin = scores[:, 0] - scores[:, 1]
    real = pairs.response_length[:, 0] > 0
    terms = {"loss": -jax.nn.log_sigmoid(margin), "pair_accuracy": (margin > 0).astype(jnp.float32), "margin": margin}
    return {name: jnp.sum(jnp.where(real, values, 0.0)) for name, values in terms.items()}


OBJECTIVES: dict[str, Objective] = {"sft": likelihood, "reward": preference}


def pair_scores(model: Decoder, pairs: Preferences, config: StepConfig) -> jax.Array:
    """float32[B, 2]: scores of prompt + response + end of sequence, chosen and rejected."""
    chex.assert_rank([pairs.tokens, pairs.prompt_length, pairs.response_length], [3, 2, 2])
    B, _, T = pairs.tokens.shape
    length = (pairs.prompt_length + pairs.response_length).reshape(2 * B)
    return heads.sequence_scores(model, pairs.tokens.reshape(2 * B, T), length, remat=config.remat).reshape(B, 2)


def init_state(params: Params, *, graphdef: nnx.GraphDef, optimizer: optax.GradientTransformation) -> TuningState:
    return TuningState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params), graphdef=graphdef)


def state_shapes(model: Definition[Decoder], optimizer: optax.GradientTransformation, mesh: Mesh) -> TuningState:
    """The state as jax.ShapeDtypeStruct with shardings: the optimiser's moments are sharded as their parameters."""
    init = functools.partial(init_state, graphdef=model.graphdef, optimizer=optimizer)
    shapes = jax.eval_shape(init, parameters.shapes(model.specs))
    shardings = model.shardings(mesh)
    everywhere = sharding_lib.replicated(mesh)
    opt_shardings = optax.tree_map_params(
        optimizer, lambda _, sharding: sharding, shapes.opt_state, shardings, transform_non_params=lambda _: everywhere
    )
    all_shardings = dataclasses.replace(shapes, step=everywhere, params=shardings, opt_state=opt_shardings)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, all_shardings)


def train_step(
    state: TuningState,
    batch: Batch,
    *,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    config: StepConfig,
) -> tuple[TuningState, dict[str, jax.Array]]:
    """One update. Jit it once with `state` donated, and call it by mesh.on_mesh.

    Returns:
      the new state and float32[] measurements: the objective's means, `grad_norm`, and `finite`, which is 0 where loss or
      gradient is not; the state is then left as it was.
    """
    size = batch.size

    def micro_loss(params: Params, micro: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        model = parameters.module(state.graphdef, params)
        shares = {name: total / size for name, total in objective(model, micro, config).items()}
        return shares["loss"], shares

    def gradient(micro: Batch) -> Any:
        (_, shares), grads = jax.value_and_grad(micro_loss, has_aux=True)(state.params, micro)
        return grads, shares

    micros = _split(batch, config.micro_batch_rows)
    first = jax.tree.map(lambda x: x[0], micros)
    if micros.prompt_length.shape[0] == 1:
        grads, shares = gradient(first)
    else:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(gradient, first))
        (grads, shares), _ = jax.lax.scan(lambda sums, micro: (jax.tree.map(jnp.add, sums, gradient(micro)), None), zeros, micros)
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(shares["loss"]) & jnp.isfinite(grad_norm)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    new = dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state)
    new = jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, state)
    return new, shares | {"grad_norm": grad_norm, "finite": finite.astype(jnp.float32)}


def totals(state: TuningState, batch: Batch, *, objective: Objective, config: StepConfig) -> dict[str, jax.Array]:
    """The objective's sums over one micro-batch, and `size`: for means over more rows than go through the model at a time."""
    return objective(parameters.module(state.graphdef, state.params), batch, config) | {"size": batch.size}


def _split(tree: Any, rows: int) -> Any:
    """[B, ...] -> [B / rows, rows, ...], dealt out with a stride: each micro-batch takes its share from every device."""
    return jax.tree.map(lambda x: x.reshape(rows, x.shape[0] // rows, *x.shape[1:]).swapaxes(0, 1), tree)


def encode_examples(pairs: list[tuple[str, str]], tokenizer: Tokenizer, *, prompt_length: int, response_length: int) -> Examples:
    """Tokenises (prompt, response) pairs; the response ends with the end-of-sequence token.

    Raises:
      ValueError: a prompt or a response with its end does not fit; names the setting.
    """
    encoded = [encode_pair(prompt, response, tokenizer) for prompt, response in pairs]
    columns = trajectory.token_columns(
        [prompt for prompt, _ in encoded],
        [response for _, response in encoded],
        prompt_length=prompt_length,
        response_length=response_length,
        pad_id=tokenizer.pad_id,
    )
    return Examples(**columns)


def warm_start(
    task: Task,
    tokenizer: Tokenizer,
    *,
    config: DecoderConfig,
    mesh: Mesh,
    seed: int,
    prompt_length: int,
    response_length: int,
    steps: int,
    batch_size: int,
    learning_rate: float,
    warmup_steps: int,
    report_every_steps: int,
    report: Callable[[int, float], None],
) -> Params:
    """Trains random parameters on fresh worked examples of a task and returns them.

    Args:
      learning_rate: peak of a linear schedule, after warmup_steps.
      report: called as report(step, mean loss since the last report, nats per response token).
    """
    schedule = optimizer_lib.linear(peak=learning_rate, steps=steps, warmup_steps=warmup_steps, decay_steps=0)
    optimizer = optimizer_lib.adamw(schedule, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.01, clip_norm=1.0)
    step_config = StepConfig(R=response_length, micro_batch_rows=batch_size, logit_bytes=1 << 30, remat="none")
    model = decoder.define(config)
    shardings = jax.tree.map(lambda x: x.sharding, state_shapes(model, optimizer, mesh))

    def init(key: jax.Array) -> TuningState:
        return init_state(model.init(key), graphdef=model.graphdef, optimizer=optimizer)

    state = sharding_lib.on_mesh(mesh, jax.jit(init, out_shardings=shardings))(jax.random.key(seed))
    step_fn = functools.partial(train_step, objective=likelihood, optimizer=optimizer, config=step_config)
    out_shardings = (shardings, sharding_lib.replicated(mesh))
    update = sharding_lib.on_mesh(mesh, jax.jit(step_fn, donate_argnums=0, out_shardings=out_shardings))
    rng = np.random.default_rng([seed, 1])
    losses: list[jax.Array] = []
    for step in range(1, steps + 1):
        pairs = task.worked_examples(rng, batch_size)
        examples = encode_examples(pairs, tokenizer, prompt_length=prompt_length, response_length=response_length)
        state, measurements = update(state, sharding_lib.put_rows(mesh, examples))
        losses.append(measurements["loss"])
        if step % report_every_steps == 0 or step == steps:
            report(step, float(np.mean(losses)))
            losses.clear()
    return state.params
