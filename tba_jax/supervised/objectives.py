"""Supervised objectives, likelihood of responses (SFT) and preferences between two of them (reward models); their update; and the
warm start of a run on worked examples of its task.

Each is a sum over examples divided by a size of the whole batch, so gradients of micro-batches add up to that of the batch.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tba_jax import sharding, trajectory
from tba_jax.learner import optimizer
from tba_jax.learner.optimizer import Optimizers, TrainState
from tba_jax.models import scoring
from tba_jax.models.config import DecoderConfig
from tba_jax.models.decoder import Decoder
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.programs import Program, shaped
from tba_jax.tasks.interface import Task
from tba_jax.text.prompts import encode_pair
from tba_jax.text.tokenizers import Tokenizer

# Token ids int32[n] of a prompt and of what may follow it: one response, or the chosen and the rejected one.
Encoded = tuple[np.ndarray, ...]


@flax.struct.dataclass
class Batch:
    """tokens int32[B, T], prompt_length int32[B], response_length int32[B], as in trajectory; of pairs int32[B, 2, T] and
    int32[B, 2], the chosen response first. A row whose response_length is 0 fills a batch up and counts nothing."""

    tokens: Any
    prompt_length: Any
    response_length: Any

    @property
    def size(self) -> jax.Array:
        """float32[]: what the objective is a mean over, response tokens or pairs."""
        counted = self.response_length if self.response_length.ndim == 1 else self.response_length[:, 0] > 0
        return jnp.sum(counted).astype(jnp.float32)


def make_batch(examples: Sequence[Encoded], *, rows: int, prompt_length: int, response_length: int, pad_id: int) -> Batch:
    """Pads examples to `rows` rows, see Batch."""
    filling = rows - len(examples)
    prompts = [*(example[0].tolist() for example in examples), *[[pad_id]] * filling]
    sizes = dict(prompt_length=prompt_length, response_length=response_length, pad_id=pad_id)
    by_answer = [
        trajectory.token_columns(prompts, [*responses, *[[]] * filling], **sizes)
        for responses in zip(*(example[1:] for example in examples), strict=True)
    ]
    if len(by_answer) == 1:
        return Batch(**by_answer[0])
    return Batch(**{name: np.stack([columns[name] for columns in by_answer], axis=1) for name in by_answer[0]})


def encode_examples(pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer, *, prompt_length: int, response_length: int) -> Batch:
    """Tokenises (prompt, response) pairs; end of sequence is added to the responses. Raises ValueError where one does not fit."""
    encoded = [tuple(np.array(ids, np.int32) for ids in encode_pair(*pair, tokenizer)) for pair in pairs]
    lengths = dict(prompt_length=prompt_length, response_length=response_length)
    return make_batch(encoded, rows=len(pairs), **lengths, pad_id=tokenizer.pad_id)


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
Objective = Callable[[Decoder, Batch, StepConfig], dict[str, jax.Array]]


def likelihood(model: Decoder, examples: Batch, config: StepConfig) -> dict[str, jax.Array]:
    """−Σ log π(response | prompt), nats, over response tokens, end of sequence included. Prompts are not learned."""
    columns = examples.tokens, examples.prompt_length, examples.response_length
    settings: dict[str, Any] = dict(R=config.R, logit_bytes=config.logit_bytes, remat=config.remat)
    logprobs, _ = scoring.response_logprobs(model, *columns, space=_WHOLE_VOCABULARY, **settings)
    return {"loss": -jnp.sum(logprobs)}


def preference(model: Decoder, pairs: Batch, config: StepConfig) -> dict[str, jax.Array]:
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStart:
    """The warm start of a run: random weights are trained on worked examples of the task, which makes a policy to begin with.

    model and mesh of the policy, and the settings of warm_start. learning_rate: peak of a linear schedule."""

    model: DecoderConfig
    mesh: Mesh
    seed: int
    prompt_length: int
    response_length: int
    steps: int
    batch_size: int
    learning_rate: float
    warmup_steps: int
    report_every_steps: int

    def _jitted(self) -> tuple[sharding.OnMesh, sharding.OnMesh, TrainState]:
        """The programs () -> state and (state, Batch) -> (state, measurements), and the state as jax.ShapeDtypeStruct."""
        schedule = optimizer.linear(peak=self.learning_rate, steps=self.steps, warmup_steps=self.warmup_steps)
        adamw = optimizer.adamw(schedule, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.01, clip_norm=1.0)
        optimizers, policy = {"policy": adamw}, Policy(model=self.model)
        sizes = dict(R=self.response_length, micro_batch_rows=self.batch_size, logit_bytes=1 << 30)
        config = StepConfig(objective=likelihood, **sizes, remat="none")
        update, shapes = jitted(policy, self.mesh, optimizers=optimizers, config=config)

        def init() -> TrainState:
            return optimizer.init_state(policy, policy.base.init(jax.random.key(self.seed)), optimizers)

        shardings = jax.tree.map(lambda x: x.sharding, shapes)
        return sharding.on_mesh(self.mesh, jax.jit(init, out_shardings=shardings)), update, shapes

    def programs(self) -> dict[str, Program]:
        """Name -> the programs of `train`. Nothing else is on the devices then."""
        init, update, state = self._jitted()
        lengths = dict(prompt_length=self.prompt_length, response_length=self.response_length, pad_id=0)
        columns = trajectory.token_columns([[0]] * self.batch_size, [[]] * self.batch_size, **lengths)
        batch = shaped(Batch(**columns), sharding.rows_sharding(self.mesh))
        room = {"temporaries": ("warm_start.batch_size",), "arguments": ("learner.mesh.fsdp",)}
        return {
            "init of the warm start": Program(function=init, arguments=(), room=room),
            "update of the warm start": Program(function=update, arguments=(state, batch), room=room),
        }

    def train(self, task: Task, tokenizer: Tokenizer, *, report: Callable[[int, float], None]) -> Params:
        """Trains random parameters on fresh worked examples of a task and returns them.

        Args: report: called as report(step, mean loss since the last report, nats per response token).
        """
        init, update, _ = self._jitted()
        lengths = dict(prompt_length=self.prompt_length, response_length=self.response_length)
        state, rng, losses = init(), np.random.default_rng([self.seed, 1]), list[jax.Array]()
        for step in range(1, self.steps + 1):
            batch = encode_examples(task.worked_examples(rng, self.batch_size), tokenizer, **lengths)
            state, measurements = update(state, sharding.put_rows(self.mesh, batch))
            losses.append(measurements["loss"])
            if step % self.report_every_steps == 0 or step == self.steps:
                report(step, float(np.mean(losses)))
                losses.clear()
        return state.params["policy"]
