"""A supervised run in progress: state on a mesh, batches, metrics, evaluations, checkpoints, and the model it ends with.

The examples of a step are a function of seed and step alone, so that a resumed run is the uninterrupted one.
"""

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
from tba_jax.learner import settings
from tba_jax.learner import state as state_lib
from tba_jax.models.config import DecoderConfig
from tba_jax.models.hugging_face import export as export_lib
from tba_jax.models.hugging_face import load
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.storage import layout
from tba_jax.storage.checkpoints import Checkpoints
from tba_jax.supervised import examples, objectives
from tba_jax.telemetry import metrics
from tba_jax.telemetry.alarms import Alarms
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
    """A run in progress on its mesh; `train` goes on to the end. Constructing it restores the newest checkpoint, if any."""

    def __init__(self, plan: Plan):
        self._plan, t = plan, plan.config.training
        self.schedule = settings.make_schedule(t, peak=t.learning_rate, steps=plan.steps)
        self._optimizers = {"policy": settings.make_adamw(t, self.schedule, weight_decay=t.weight_decay)}
        objective = objectives.OBJECTIVES[plan.config.kind]
        step_config = objectives.StepConfig(
            R=plan.config.data.response_length,
            micro_batch_rows=plan.micro_rows,
            logit_bytes=(t.logit_megabytes << 20) * plan.mesh.size,
            remat=t.remat,
        )
        update = functools.partial(objectives.train_step, objective=objective, optimizers=self._optimizers, config=step_config)
        totals = functools.partial(objectives.totals, objective=objective, config=step_config)
        self._policy = Policy(model=plan.model)
        shapes = state_lib.state_shapes(self._policy, self._optimizers, plan.mesh)
        self._shardings = jax.tree.map(lambda x: x.sharding, shapes)
        everywhere = sharding.replicated(plan.mesh)
        self._update = sharding.on_mesh(plan.mesh, jax.jit(update, donate_argnums=0, out_shardings=(self._shardings, everywhere)))
        self._totals = sharding.on_mesh(plan.mesh, jax.jit(totals, out_shardings=everywhere))
        self._writer = metrics.open_writer(plan.config, plan.run, "supervised", role="supervised")
        self._checkpoints = Checkpoints(plan.run.checkpoints, keep=plan.config.checkpoint.keep)
        # The first and the newest evaluation, and seconds of training: what the last line tells, kept with the checkpoints.
        self.first: dict[str, float] = {}
        self.newest: dict[str, float] = {}
        self._seconds, self._begin = 0.0, time.monotonic()
        self._pending: list[Any] = []
        self._orders: dict[int, np.ndarray] = {}
        step = self._checkpoints.latest_step()
        if step is None:
            self.step, self.state = 0, self._initial_state()
        else:
            trees, host = self._checkpoints.restore(step, {"state": shapes})
            self.state = trees["state"]
            self.step, self.first, self.newest, self._seconds = step, host["first"], host["newest"], host["seconds"]
            log.info("resumed at step %d of %d", step, plan.steps)

    def _initial_state(self) -> state_lib.TrainState:
        plan, key = self._plan, jax.random.key(self._plan.config.seed)
        shardings = self._shardings.params["policy"]
        if plan.config.model.random_init:
            params = jax.jit(self._policy.base.init, out_shardings=shardings)(key)
        else:
            params = load.load_params(plan.folder, plan.model, shardings, fresh=key)

        def init(params: Params) -> state_lib.TrainState:
            return state_lib.init_state(self._policy, params, self._optimizers)

        return sharding.on_mesh(plan.mesh, jax.jit(init, out_shardings=self._shardings))(params)

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
        if not self.step and not self.first:
            self.first = self.evaluate()
        while self.step < steps and not stop():
            self.state, measurements = self._update(self.state, self._batch(self.step))
            self.step += 1
            self._pending.append(measurements)
            last = self.step == steps
            if last or self.step % c.metrics.every_steps == 0:
                self._record()
            if last or self.step % c.evaluation.every_steps == 0:
                self.evaluate()
            if last or self.step % c.checkpoint.every_steps == 0:
                self.save()
        self.save()
        self._checkpoints.wait()
        if self.step == steps and c.kind == "reward":
            self._tell_what_it_learned()
        return self.step == steps

    def _tell_what_it_learned(self) -> None:
        """Tells an alarm where a reward model has learned nothing of use."""
        pairs, before, after = len(self._evaluated), self.first["pair_accuracy"], self.newest["pair_accuracy"]
        error = 0.5 / math.sqrt(pairs)  # of a guess, which is right in half of the pairs
        if after > max(0.55, 0.5 + 2 * error) and (after >= 0.75 or after - before > 2 * error):
            return
        Alarms(self._plan.run.metrics("supervised")).tell(
            kind="reward_model_guesses",
            sentence=f"the reward model hardly learned: its held-out pair accuracy went from {before:.3f} to {after:.3f} on "
            f"{pairs:,} pairs, where guessing has 0.5 with a standard error of {error:.3f}",
            advice="in a new --workdir train longer (training.epochs) or at a higher training.learning_rate, from a model that "
            "has seen such texts (--config.kind=sft first); look whether data.chosen_field and data.rejected_field are the right "
            "ones; more held-out pairs give a surer figure (data.heldout_share)",
            step=self.step,
        )

    @property
    def _evaluated(self) -> Sequence[Any]:
        """The held-out examples that evaluations look at."""
        return self._plan.data.heldout[: self._plan.config.evaluation.examples or None]

    def _batch(self, step: int) -> Any:
        """The examples of a step: all of them in an order of their own in each epoch, one epoch after the other."""
        plan, count = self._plan, len(self._plan.data.train)
        first = step * plan.config.training.batch_size
        places = range(first, first + plan.config.training.batch_size)
        rows = [plan.data.train[self._order(place // count)[place % count]] for place in places]
        return sharding.put_rows(plan.mesh, self._padded(rows, len(rows)))

    def _order(self, epoch: int) -> np.ndarray:
        """int64[examples]: the order of an epoch, a function of seed and epoch alone."""
        if epoch not in self._orders:
            rng = np.random.default_rng([self._plan.config.seed, epoch])
            self._orders = {epoch: rng.permutation(len(self._plan.data.train))}
        return self._orders[epoch]

    def _padded(self, rows: Sequence[Any], count: int) -> Any:
        d = self._plan.config.data
        return examples.make_batch(
            rows,
            rows=count,
            prompt_length=d.prompt_length,
            response_length=d.response_length,
            pad_id=self._plan.tokenizer.pad_id,
        )

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
        self._writer.write(self.step, {**means, "learning_rate": rate, "epoch": epoch, "seconds": self.seconds})
        log.info("step %d of %d: %s", self.step, self._plan.steps, _told(means))

    def evaluate(self) -> dict[str, float]:
        """Means over the held-out examples: loss, and perplexity (sft) or pair_accuracy and margin (reward)."""
        self._record()
        heldout, rows, sums = self._evaluated, self._plan.micro_rows, dict[str, float]()
        for begin in range(0, len(heldout), rows):
            batch = sharding.put_rows(self._plan.mesh, self._padded(heldout[begin : begin + rows], rows))
            for name, value in jax.device_get(self._totals(self.state, batch)).items():
                sums[name] = sums.get(name, 0.0) + float(value)
        size = sums.pop("size")
        self.newest = {name: total / size for name, total in sums.items()}
        if not math.isfinite(self.newest["loss"]):
            raise FloatingPointError(f"step {self.step}: the held-out loss is {self.newest['loss']}")
        if self._plan.config.kind == "sft":
            self.newest["perplexity"] = math.exp(min(self.newest["loss"], 700.0))
        self._writer.write(self.step, {f"heldout_{name}": value for name, value in self.newest.items()})
        log.info("step %d of %d: held-out %s", self.step, self._plan.steps, _told(self.newest))
        return self.newest

    def save(self) -> None:
        """Starts an asynchronous checkpoint, unless this step has one."""
        self._record()
        if self._checkpoints.latest_step() != self.step:
            host = {"first": self.first, "newest": self.newest, "seconds": self.seconds}
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


def _told(means: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in means.items())


def conclusion(kind: str, first: dict[str, float], last: dict[str, float], *, seconds: float, output: Path) -> str:
    """The last line of a run."""
    name = {"sft": "perplexity", "reward": "pair_accuracy"}[kind]
    change = f"{first[name]:.3g} -> {last[name]:.3g}"
    loss = f"loss {first['loss']:.3f} -> {last['loss']:.3f}"
    return f"{kind}: held-out {name.replace('_', ' ')} {change} ({loss}) in {seconds:.0f} s, model in {output}"
