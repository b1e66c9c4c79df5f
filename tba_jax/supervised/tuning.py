"""Supervised training: objectives, likelihood of responses (SFT) and preferences between two of them (reward models), and their
update; the warm start of a run on worked examples of its task; the examples of JSON lines; and a run of its own, with metrics,
evaluations, checkpoints and a final model.

An objective is a sum over examples divided by a size of the whole batch, so gradients of micro-batches add up to that of the
batch.
"""

import dataclasses
import functools
import hashlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
from tba_jax.models.hugging_face import export as export_lib
from tba_jax.models.hugging_face import load as load_lib
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.programs import Program, shaped
from tba_jax.storage import layout
from tba_jax.storage.checkpoints import Checkpoints
from tba_jax.tasks import data
from tba_jax.tasks.interface import Task
from tba_jax.telemetry import metrics
from tba_jax.text.prompts import encode_pair
from tba_jax.text.tokenizers import Tokenizer

log = logging.getLogger(__name__)

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


class Data(NamedTuple):
    """The examples of a run. skipped: number of examples left out of both splits."""

    train: list[Encoded]
    heldout: list[Encoded]
    skipped: int

    @property
    def fingerprint(self) -> str:
        """Hex digest of all token ids in their order: examples of another file, tokenizer or split have another one."""
        digest = hashlib.blake2b(digest_size=16)
        for split in (self.train, self.heldout):
            digest.update(f"{len(split)} examples".encode())
            for example in split:
                digest.update(repr([ids.tolist() for ids in example]).encode())
        return digest.hexdigest()


def load(config: Any, kind: str, tokenizer: Tokenizer) -> Data:
    """Reads what the section `data` names, for OBJECTIVES' `kind`. Raises ValueError: a sentence with file, line and field, or
    about examples that do not fit."""
    train, skipped = _read("train", config, kind, tokenizer)
    if config.heldout:
        heldout, more = _read("heldout", config, kind, tokenizer)
        return Data(train, heldout, skipped + more)
    # Examples of one prompt stand on one side, unless there is no other (attacks of red-teaming, say). A hash of the tokens alone
    # chooses, so that an example stays on its side in a longer file.
    several = any(not np.array_equal(example[0], train[0][0]) for example in train)
    sides: dict[bool, list[Encoded]] = {False: [], True: []}
    for example in train:
        tokens = (example[0] if several else np.concatenate(example)).tolist()
        sides[trajectory.query_id(tokens) / 2**64 < config.heldout_share].append(example)
    if not all(sides.values()):
        raise ValueError(
            f"data.heldout_share={config.heldout_share} splits the examples of data.train {config.train} into "
            f"{len(sides[False])} to train on and {len(sides[True])} held out; change it, give more examples, or name a file in "
            "data.heldout"
        )
    return Data(sides[False], sides[True], skipped)


def _read(name: str, config: Any, kind: str, tokenizer: Tokenizer) -> tuple[list[Encoded], int]:
    """The examples of data.NAME, and how many were left out."""
    setting = f"data.{name} {config[name]}"
    answers = (config.response_field,) if kind == "sft" else (config.chosen_field, config.rejected_field)
    fields = (config.prompt_field, *answers)
    kept, unfit = list[Encoded](), list[str]()
    for row in data.read_lines(Path(config[name]), fields=dict.fromkeys(fields, str), where=setting):
        example = _encoded(row, fields, tokenizer)
        if why := _misfit(example, fields, config):
            unfit.append(f"{row.where.removeprefix(f'{setting} ')}: {why}")
        else:
            kept.append(example)
    if unfit and (not kept or config.unfit == "refuse"):
        advice = "" if config.unfit == "skip" else "; data.unfit=skip leaves such examples out"
        raise ValueError(
            f"{len(unfit)} of the {len(unfit) + len(kept)} examples of {setting} are unfit, first {unfit[0]}{advice}"
        )
    if not kept:
        raise ValueError(f"{setting} holds no examples")
    return kept, len(unfit)


def _encoded(row: data.Row, fields: Sequence[str], tokenizer: Tokenizer) -> Encoded:
    prompt, ids = row[fields[0]], list[list[int]]()
    for field in fields:
        try:
            ids.append(encode_pair(prompt, row[field], tokenizer)[1] if ids else tokenizer.encode(prompt))
        except ValueError as error:
            raise ValueError(f"{row.where}: field {field!r}: {error}") from error
    if not ids[0]:
        raise ValueError(f"{row.where}: field {fields[0]!r} is empty, and the tokenizer puts nothing before it")
    return tuple(np.array(part, np.int32) for part in ids)


def _misfit(example: Encoded, fields: Sequence[str], config: Any) -> str:
    """Why nothing can be learned of an example; "" if something can."""
    for number, (ids, field) in enumerate(zip(example, fields, strict=True)):
        setting, end = ("response_length", ", end of sequence included") if number else ("prompt_length", "")
        if len(ids) > config[setting]:
            return f"field {field!r} has {len(ids)} tokens{end}, data.{setting}={config[setting]}"
    same = len(example) > 2 and np.array_equal(example[1], example[2])
    return f"fields {fields[1]!r} and {fields[2]!r} hold the same text" if same else ""


class Plan(NamedTuple):
    """A checked run. folder: of the model to begin with; micro_rows: examples that go through the model at a time."""

    config: Any
    run: layout.RunDir
    output: Path
    folder: Path
    model: DecoderConfig
    tokenizer: Tokenizer
    data: Data
    mesh: Mesh
    steps: int
    micro_rows: int


class Tuning:
    """A run in progress on its mesh; `train` goes on to the end. Constructing it restores the newest checkpoint, if any.

    The examples of a step are a function of seed and step alone, so that a resumed run is the uninterrupted one.
    """

    def __init__(self, plan: Plan):
        self._plan, t = plan, plan.config.training
        self._schedule = optimizer.make_schedule(t, peak=t.learning_rate, steps=plan.steps)
        optimizers = {"policy": optimizer.make_adamw(t, self._schedule, weight_decay=t.weight_decay)}
        config = StepConfig(
            objective=OBJECTIVES[plan.config.kind],
            R=plan.config.data.response_length,
            micro_batch_rows=plan.micro_rows,
            logit_bytes=(t.logit_megabytes << 20) * plan.mesh.size,
            remat=t.remat,
        )
        policy = Policy(model=plan.model)
        self._update, shapes = jitted(policy, plan.mesh, optimizers=optimizers, config=config)
        measure = jax.jit(functools.partial(totals, config=config), out_shardings=sharding.replicated(plan.mesh))
        self._totals = sharding.on_mesh(plan.mesh, measure)
        self._writer = metrics.open_writer(plan.config, plan.run, "supervised", role="supervised")
        self._checkpoints = Checkpoints(plan.run.checkpoints, keep=plan.config.checkpoint.keep)
        self._begin, self._pending = time.monotonic(), list[Any]()
        self._evaluated = plan.data.heldout[: plan.config.evaluation.examples or None]
        if newest := self._checkpoints.latest_step():
            self.step, self.state = newest, self._checkpoints.restore(newest, {"state": shapes})[0]["state"]
            log.info("resumed at step %d of %d", self.step, plan.steps)
        else:
            self.step, self.state = 0, _initial_state(plan, policy, optimizers, jax.tree.map(lambda x: x.sharding, shapes))

    def close(self) -> None:
        self._checkpoints.close()
        self._writer.close()

    def train(self, stop: Callable[[], bool]) -> bool:
        """Trains until all steps are done or `stop` says so, and leaves a checkpoint. Returns whether all steps are done.

        Raises FloatingPointError: names the step; the newest checkpoint is from before it.
        """
        c, steps = self._plan.config, self._plan.steps
        due = ((c.metrics, self._record), (c.evaluation, self._evaluate), (c.checkpoint, self._save))
        if not self._evaluations():
            self._evaluate()
        while self.step < steps and not stop():
            self.state, measurements = self._update(self.state, self._batch(self.step))
            self.step += 1
            self._pending.append(measurements)
            for section, follow in due:
                if self.step == steps or self.step % section.every_steps == 0:
                    follow()
        self._save()
        self._checkpoints.wait()
        return self.step == steps

    def _batch(self, step: int) -> Any:
        """The examples of a step: all of them in an order of their own in each epoch, one epoch after the other."""
        rows, size = self._plan.data.train, self._plan.config.training.batch_size
        epochs = range(step * size // len(rows), ((step + 1) * size - 1) // len(rows) + 1)
        orders = [np.random.default_rng([self._plan.config.seed, epoch]).permutation(len(rows)) for epoch in epochs]
        first = step * size - epochs[0] * len(rows)
        return self._on_mesh([rows[i] for i in np.concatenate(orders)[first : first + size]], size)

    def _on_mesh(self, rows: Sequence[Encoded], count: int) -> Any:
        d, pad_id = self._plan.config.data, self._plan.tokenizer.pad_id
        lengths = dict(prompt_length=d.prompt_length, response_length=d.response_length)
        return sharding.put_rows(self._plan.mesh, make_batch(rows, rows=count, **lengths, pad_id=pad_id))

    def _record(self) -> None:
        """Writes means over the steps since the last call. Raises FloatingPointError where one of them was not finite."""
        pending, self._pending = jax.device_get(self._pending), []
        if not pending:
            return
        for step, measured in enumerate(pending, start=self.step - len(pending) + 1):
            if not measured["finite"]:
                raise FloatingPointError(
                    f"step {step}: loss {measured['loss']} or gradient norm {measured['grad_norm']} is not finite; a lower "
                    "training.learning_rate or training.clip_norm may help"
                )
        # A step that the optimiser refuses has ended the run.
        told = pending[0].keys() - {"finite", "skipped_steps"}
        means = {name: float(np.mean([measured[name] for measured in pending])) for name in sorted(told)}
        epoch = self.step * self._plan.config.training.batch_size / len(self._plan.data.train)
        self._write(means, learning_rate=float(self._schedule(jax.numpy.int32(self.step - 1))), epoch=epoch)

    def _write(self, told: dict[str, float], **more: float) -> None:
        self._writer.write(self.step, told | more)
        figures = ", ".join(f"{name} {value:.4g}" for name, value in told.items())
        log.info("step %d of %d: %s", self.step, self._plan.steps, figures)

    def _evaluate(self) -> None:
        """Means over the held-out examples: loss, and perplexity (sft) or pair_accuracy and margin (reward)."""
        self._record()
        rows, sums = self._plan.micro_rows, dict[str, float]()
        for begin in range(0, len(self._evaluated), rows):
            batch = self._on_mesh(self._evaluated[begin : begin + rows], rows)
            for name, value in jax.device_get(self._totals(self.state, batch)).items():
                sums[name] = sums.get(name, 0.0) + float(value)
        size = sums.pop("size")
        means = {f"heldout_{name}": total / size for name, total in sums.items()}
        if not math.isfinite(means["heldout_loss"]):
            raise FloatingPointError(f"step {self.step}: the held-out loss is {means['heldout_loss']}")
        if self._plan.config.kind == "sft":
            means["heldout_perplexity"] = math.exp(min(means["heldout_loss"], 700.0))
        self._write(means)

    def _evaluations(self) -> list[dict[str, Any]]:
        lines = metrics.each_line(self._plan.run.metrics("supervised"))
        return [line for line in lines if "heldout_loss" in line]

    def _save(self) -> None:
        """Starts an asynchronous checkpoint, unless this step has one."""
        self._record()
        if self._checkpoints.latest_step() != self.step:
            self._checkpoints.save({"state": self.state}, {}, step=self.step)

    def export(self) -> None:
        """Writes the Hugging Face folder, which is whole or absent."""
        plan = self._plan
        pad_id, token_ids = plan.tokenizer.pad_id, dict[str, int | None]()
        if plan.config.kind == "reward":
            # transformers reads a score at the last token that is not padding. Where padding is spelt as the end of sequence it
            # would read before the end: without an id it refuses batches instead.
            token_ids["pad_token_id"] = pad_id if pad_id != plan.tokenizer.eos_id else None
            if token_ids["pad_token_id"] is None:
                log.warning("the tokenizer has no padding token of its own: transformers will score one row at a time only")
        written: dict[str, Any] = dict(dtype=plan.config.output.dtype, source=plan.folder, token_ids=token_ids)
        copy = functools.partial(export_lib.copy_tokenizer, plan.folder)
        export_lib.save(plan.output, plan.model, self.state.params["policy"], **written, more=[copy])

    def conclusion(self) -> str:
        """The last line of a run, from its first and its newest evaluation."""
        kind, found = self._plan.config.kind, self._evaluations()
        name = {"sft": "perplexity", "reward": "pair_accuracy"}[kind]
        before, after = (each[f"heldout_{name}"] for each in (found[0], found[-1]))
        loss = f"loss {found[0]['heldout_loss']:.3f} -> {found[-1]['heldout_loss']:.3f}"
        if kind == "reward":  # with the standard error of as many guesses
            loss += f"; guesses: 0.5 ± {0.5 / math.sqrt(len(self._evaluated)):.2g}"
        change = f"{name.replace('_', ' ')} {before:.3g} -> {after:.3g} ({loss})"
        return f"{kind}: held-out {change} in {time.monotonic() - self._begin:.0f} s, model in {self._plan.output}"


def _initial_state(plan: Plan, policy: Policy, optimizers: Optimizers, shardings: Any) -> TrainState:
    key, of_params = jax.random.key(plan.config.seed), shardings.params["policy"]
    if plan.config.model.random_init:
        params = jax.jit(policy.base.init, out_shardings=of_params)(key)
    else:
        params = load_lib.load_params(plan.folder, plan.model, of_params, fresh=key)
    init = functools.partial(optimizer.init_state, policy, optimizers=optimizers)
    return sharding.on_mesh(plan.mesh, jax.jit(init, out_shardings=shardings))(params)
