"""A supervised run in progress: state on a mesh, batches, metrics, evaluations, checkpoints, and the model it ends with."""

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.learner import optimizer as optimizer_lib
from tba_jax.learner import settings
from tba_jax.models.config import DecoderConfig
from tba_jax.models.hugging_face import export as export_lib
from tba_jax.models.hugging_face import load
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.storage import layout
from tba_jax.storage.checkpoints import Checkpoints
from tba_jax.supervised import examples, objectives
from tba_jax.telemetry import metrics
from tba_jax.text.tokenizers import Tokenizer

log = logging.getLogger(__name__)

# Measurements of a step that say whether it was refused; a refused step ends the run.
_REFUSALS = ("finite", "skipped_steps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A checked run. folder: of the model to begin with; micro_rows: examples that go through the model at a time."""

    config: Any
    run: layout.RunDir
    output: Path
    folder: Path
    model: DecoderConfig
    tokenizer: Tokenizer
    data: examples.Data
    mesh: Mesh
    steps: int
    micro_rows: int


class Tuning:
    """A run in progress on its mesh; `train` goes on to the end. Constructing it restores the newest checkpoint, if any.

    The examples of a step are a function of seed and step alone, so that a resumed run is the uninterrupted one.
    """

    def __init__(self, plan: Plan):
        self._plan, t = plan, plan.config.training
        self.schedule = settings.make_schedule(t, peak=t.learning_rate, steps=plan.steps)
        optimizers = {"policy": settings.make_adamw(t, self.schedule, weight_decay=t.weight_decay)}
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
        # The first and the newest evaluation, and seconds of training: what the last line tells, kept with the checkpoints.
        self._first: dict[str, float] = {}
        self._newest: dict[str, float] = {}
        self._seconds, self._begin, self.step = 0.0, time.monotonic(), self._checkpoints.latest_step() or 0
        self._pending: list[Any] = []
        self._evaluated = plan.data.heldout[: plan.config.evaluation.examples or None]
        if self._checkpoints.latest_step() is None:
            self.state = _initial_state(plan, policy, optimizers, jax.tree.map(lambda x: x.sharding, shapes))
        else:
            trees, host = self._checkpoints.restore(self.step, {"state": shapes})
            self.state, self._first, self._newest = trees["state"], host["first"], host["newest"]
            self._seconds = host["seconds"]
            log.info("resumed at step %d of %d", self.step, plan.steps)

    @property
    def seconds(self) -> float:
        """Seconds spent in training and evaluation by all processes of the run."""
        return self._seconds + time.monotonic() - self._begin

    def close(self) -> None:
        self._checkpoints.close()
        self._writer.close()

    def train(self, stop: Callable[[], bool]) -> bool:
        """Trains until all steps are done or `stop` says so, and leaves a checkpoint. Returns whether all steps are done.

        Raises:
          FloatingPointError: names the step; the newest checkpoint is from before it.
        """
        c, steps = self._plan.config, self._plan.steps
        due = ((c.metrics, self._record), (c.evaluation, self.evaluate), (c.checkpoint, self._save))
        if not self._first:
            self._first = self.evaluate()
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
        order = np.concatenate(
            [np.random.default_rng([self._plan.config.seed, epoch]).permutation(len(rows)) for epoch in epochs]
        )
        first = step * size - epochs[0] * len(rows)
        return self._on_mesh([rows[i] for i in order[first : first + size]], size)

    def _on_mesh(self, rows: Sequence[Any], count: int) -> Any:
        d, pad_id = self._plan.config.data, self._plan.tokenizer.pad_id
        lengths = dict(prompt_length=d.prompt_length, response_length=d.response_length)
        return sharding.put_rows(self._plan.mesh, examples.make_batch(rows, rows=count, **lengths, pad_id=pad_id))

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
        means = {name: float(np.mean([measured[name] for measured in pending])) for name in pending[0] if name not in _REFUSALS}
        rate = float(self.schedule(jax.numpy.int32(self.step - 1)))
        epoch = self.step * self._plan.config.training.batch_size / len(self._plan.data.train)
        self._write(means, {**means, "learning_rate": rate, "epoch": epoch, "seconds": self.seconds})

    def _write(self, told: dict[str, float], point: dict[str, float]) -> None:
        self._writer.write(self.step, point)
        figures = ", ".join(f"{name} {value:.4g}" for name, value in told.items())
        log.info("step %d of %d: %s", self.step, self._plan.steps, figures)

    def evaluate(self) -> dict[str, float]:
        """Means over the held-out examples: loss, and perplexity (sft) or pair_accuracy and margin (reward)."""
        self._record()
        rows, sums = self._plan.micro_rows, dict[str, float]()
        for begin in range(0, len(self._evaluated), rows):
            batch = self._on_mesh(self._evaluated[begin : begin + rows], rows)
            for name, value in jax.device_get(self._totals(self.state, batch)).items():
                sums[name] = sums.get(name, 0.0) + float(value)
        size = sums.pop("size")
        self._newest = {name: total / size for name, total in sums.items()}
        if not math.isfinite(self._newest["loss"]):
            raise FloatingPointError(f"step {self.step}: the held-out loss is {self._newest['loss']}")
        if self._plan.config.kind == "sft":
            self._newest["perplexity"] = math.exp(min(self._newest["loss"], 700.0))
        point = {f"heldout_{name}": value for name, value in self._newest.items()}
        self._write(point, point)
        return self._newest

    def _save(self) -> None:
        """Starts an asynchronous checkpoint, unless this step has one."""
        self._record()
        if self._checkpoints.latest_step() != self.step:
            host = {"first": self._first, "newest": self._newest, "seconds": self.seconds}
            self._checkpoints.save({"state": self.state}, host, step=self.step)

    def export(self) -> None:
        """Writes the Hugging Face folder, which is whole or absent."""
        plan = self._plan
        token_ids: dict[str, int | None] = {}
        if plan.config.kind == "reward":
            # transformers reads a score at the last token that is not padding. Where padding is spelt as the end of sequence it
            # would read before the end: without an id it refuses batches instead.
            pad_id, eos_id = plan.tokenizer.pad_id, plan.tokenizer.eos_id
            token_ids["pad_token_id"] = pad_id if pad_id != eos_id else None
            if pad_id == eos_id:
                log.warning("the tokenizer has no padding token of its own: transformers will score one row at a time only")
        export_lib.save(
            plan.output,
            plan.model,
            self.state.params["policy"],
            dtype=plan.config.output.dtype,
            source=plan.folder,
            token_ids=token_ids,
            more=[functools.partial(export_lib.copy_tokenizer, plan.folder)],
        )

    def conclusion(self, *, seconds: float) -> str:
        """The last line of a run."""
        kind, first, last = self._plan.config.kind, self._first, self._newest
        name = {"sft": "perplexity", "reward": "pair_accuracy"}[kind]
        change = f"{name.replace('_', ' ')} {first[name]:.3g} -> {last[name]:.3g}"
        loss = f"loss {first['loss']:.3f} -> {last['loss']:.3f}"
        if kind == "reward":  # with the standard error of as many guesses
            loss += f"; guesses: 0.5 ± {0.5 / math.sqrt(len(self._evaluated)):.2g}"
        return f"{kind}: held-out {change} ({loss}) in {seconds:.0f} s, model in {self._plan.output}"


def _initial_state(plan: Plan, policy: Policy, optimizers: optimizer_lib.Optimizers, shardings: Any) -> optimizer_lib.TrainState:
    key, of_params = jax.random.key(plan.config.seed), shardings.params["policy"]
    if plan.config.model.random_init:
        params = jax.jit(policy.base.init, out_shardings=of_params)(key)
    else:
        params = load.load_params(plan.folder, plan.model, of_params, fresh=key)

    def init(params: Params) -> optimizer_lib.TrainState:
        return optimizer_lib.init_state(policy, params, optimizers)

    return sharding.on_mesh(plan.mesh, jax.jit(init, out_shardings=shardings))(params)
