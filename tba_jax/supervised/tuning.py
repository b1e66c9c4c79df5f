"""A supervised run: the examples of its JSON lines, and its training, metrics, evaluations, checkpoints and final model."""

import functools
import hashlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tba_jax import sharding, trajectory
from tba_jax.learner import optimizer as optimizer_lib
from tba_jax.models.config import DecoderConfig
from tba_jax.models.hugging_face import export as export_lib
from tba_jax.models.hugging_face import load as load_lib
from tba_jax.models.policy import Policy
from tba_jax.storage import layout
from tba_jax.storage.checkpoints import Checkpoints
from tba_jax.supervised import objectives
from tba_jax.supervised.objectives import Encoded
from tba_jax.tasks import data
from tba_jax.telemetry import metrics
from tba_jax.text.prompts import encode_pair
from tba_jax.text.tokenizers import Tokenizer

log = logging.getLogger(__name__)


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
        self._schedule = optimizer_lib.make_schedule(t, peak=t.learning_rate, steps=plan.steps)
        optimizers = {"policy": optimizer_lib.make_adamw(t, self._schedule, weight_decay=t.weight_decay)}
        config = objectives.StepConfig(
            objective=objectives.OBJECTIVES[plan.config.kind],
            R=plan.config.data.response_length,
            micro_batch_rows=plan.micro_rows,
            logit_bytes=(t.logit_megabytes << 20) * plan.mesh.size,
            remat=t.remat,
        )
        policy = Policy(model=plan.model)
        self._update, shapes = objectives.jitted(policy, plan.mesh, optimizers=optimizers, config=config)
        totals = functools.partial(objectives.totals, config=config)
        self._totals = sharding.on_mesh(plan.mesh, jax.jit(totals, out_shardings=sharding.replicated(plan.mesh)))
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
        return sharding.put_rows(self._plan.mesh, objectives.make_batch(rows, rows=count, **lengths, pad_id=pad_id))

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


def _initial_state(plan: Plan, policy: Policy, optimizers: optimizer_lib.Optimizers, shardings: Any) -> optimizer_lib.TrainState:
    key, of_params = jax.random.key(plan.config.seed), shardings.params["policy"]
    if plan.config.model.random_init:
        params = jax.jit(policy.base.init, out_shardings=of_params)(key)
    else:
        params = load_lib.load_params(plan.folder, plan.model, of_params, fresh=key)
    init = functools.partial(optimizer_lib.init_state, policy, optimizers=optimizers)
    return sharding.on_mesh(plan.mesh, jax.jit(init, out_shardings=shardings))(params)
