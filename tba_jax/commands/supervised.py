"""Trains an SFT policy or a reward model from JSON lines, and writes it as a Hugging Face folder.

python -m tba_jax supervised --config=configs/supervised.py --workdir=DIR --output=DIR [--config.kind=reward ...]

The same command resumes a run that was stopped or killed. The examples of a step depend on the seed and the step alone.
"""

import contextlib
import logging
import math
import os
import sys
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from tba_jax import outputs
from tba_jax.commands import command_line, recipes
from tba_jax.run import processes
from tba_jax.schemas import Mistakes, flatten, require
from tba_jax.storage import layout, places
from tba_jax.supervised.schema import SCHEMA

if TYPE_CHECKING:  # what imports JAX is imported late: a mistyped flag is answered at once
    from tba_jax.models.config import DecoderConfig
    from tba_jax.supervised.tuning import Plan
    from tba_jax.text.tokenizers import HuggingFaceTokenizer

log = logging.getLogger("tba_jax.supervised")


def check(config: Any) -> None:
    """Checks every rule that the config can break by itself. Raises ValueError: sentences with value, limit and setting."""
    from tba_jax.learner.optimizer import DECAYS, SCHEDULES
    from tba_jax.models import layers
    from tba_jax.supervised import tuning
    from tba_jax.telemetry import metrics

    d, t, found = config.data, config.training, Mistakes()
    registries: dict[str, Collection[str]] = dict(schedules=SCHEDULES, decays=DECAYS, remat=layers.REMAT)
    registries |= dict(kinds=tuning.OBJECTIVES, sinks=metrics.TRACKERS)
    found.add(SCHEMA.refusals(config, registries).values())
    found.add(metrics.refused_names(config.metrics))
    fields = (d.prompt_field, d.response_field) if config.kind == "sft" else (d.prompt_field, d.chosen_field, d.rejected_field)
    found.require(len(set(fields)) == len(fields), f"the fields of an example must differ: data.*_field are {', '.join(fields)}")
    told = f"data.heldout={d.heldout!r} is data.train: what is trained on cannot be held out; leave it empty for a share"
    found.require(not d.heldout or Path(d.heldout).resolve() != Path(d.train).resolve(), told)
    divides = t.micro_batch_rows < 1 or t.batch_size % t.micro_batch_rows == 0
    found.require(divides, f"training.micro_batch_rows={t.micro_batch_rows} does not divide training.batch_size={t.batch_size}")
    found.end()


def prepare(config: Any, run: layout.RunDir, output: Path) -> "Plan":
    """Checks everything that a user's mistake can break, then makes or compares the workdir's config.json.

    Raises ValueError: one sentence about the first thing that is wrong.
    """
    from tba_jax import sharding
    from tba_jax.experiment import sizes
    from tba_jax.models import decoder, hardware, parameters
    from tba_jax.models.hugging_face import load
    from tba_jax.roles import gpus
    from tba_jax.supervised import tuning

    check(config)
    outputs.check_folder(output, outside=(run.root,))
    t, reward = config.training, config.kind == "reward"
    with load.named("model.path", config.model.path):
        folder = load.resolve_folder(config.model.path)
        model, tokenizer = _model_and_tokenizer(config, folder)
    gpus.jax_devices()
    mesh = sharding.make_mesh(tuple(t.mesh.values()), setting="training.mesh")
    micro_rows, ways = t.micro_batch_rows or t.batch_size, mesh.shape["data"] * mesh.shape["fsdp"]
    sharding.check_ways(micro_rows, ways, what="training.micro_batch_rows or training.batch_size", mesh="training.mesh")
    decoder.define(model).shardings(mesh)  # refuses a mesh that does not divide the parameters
    model = hardware.on_device(model, mesh.devices.flat[0], section="model")
    if not config.model.random_init:
        with load.named("model.path", config.model.path):
            load.check_weights(folder, model, new_heads=reward)
    data = tuning.load(config.data, config.kind, tokenizer)
    steps = _steps(t, len(data.train))
    if not places.exists(run.config):
        trained = parameters.count(decoder.define(model).specs)
        sizes.check_disk(sizes.demands_of_supervised(run.root, config.checkpoint, trained=trained, steps=steps))
    _join(run, config, data.fingerprint)
    made = dict(config=config, run=run, output=output, folder=folder, model=model, tokenizer=tokenizer, data=data)
    return tuning.Plan(**made, mesh=mesh, steps=steps, micro_rows=micro_rows)


def _model_and_tokenizer(config: Any, folder: Path) -> "tuple[DecoderConfig, HuggingFaceTokenizer]":
    """Config and tokenizer of the checkpoint in `folder`. Raises ValueError if it cannot be trained as the config says."""
    from tba_jax.models.hugging_face import load
    from tba_jax.text.tokenizers import HuggingFaceTokenizer

    head = "score" if config.kind == "reward" else "language_model"
    kernels = dict(compute_dtype=config.model.compute_dtype, attention=config.model.attention)
    model: DecoderConfig = load.read_config(folder, **kernels, head=head)
    require(model.head != "score" or model.labels == 1, f"it scores {model.labels} labels, a reward model scores one")
    tokenizer = HuggingFaceTokenizer(folder, vocab=model.vocab)
    d, total = config.data, config.data.prompt_length + config.data.response_length
    told = f"data.prompt_length={d.prompt_length} + data.response_length={d.response_length} = {total}"
    require(total <= model.max_positions, f"{told} exceed the model's {model.max_positions} positions")
    return model, tokenizer


def _steps(training: Any, examples: int) -> int:
    """The steps of training. Raises ValueError where the examples do not make a batch, or the schedule is longer."""
    n, size = f"{training.epochs:g}", training.batch_size
    require(size <= examples, f"training.batch_size={size} is more than the {examples} examples to train on")
    steps = training.steps or math.ceil(training.epochs * examples / size)
    made = "" if training.steps else f", which training.epochs={n} of {examples} examples in training.batch_size={size} makes"
    asked = f"training.warmup_steps={training.warmup_steps} + training.decay_steps={training.decay_steps}"
    fits = training.warmup_steps + training.decay_steps <= steps
    require(fits, f"{asked} exceed the {steps} steps of training{made}")
    return steps


def _join(run: layout.RunDir, config: Any, fingerprint: str) -> None:
    """Writes the workdir's config.json, or compares config and examples with the existing one."""
    from tba_jax.storage import contract as contract_lib

    plain = contract_lib.plain(config.to_dict())
    if not places.exists(run.config):
        layout.check_can_be_made(run)
        contract = {"supervised": config.kind, "examples": fingerprint}
        mine = {"format": contract_lib.FORMAT, "id": uuid.uuid4().hex, "config": plain, "contract": contract}
        run.root.mkdir(parents=True, exist_ok=True)
        layout.write_json(run.config, mine)
        return
    stored = contract_lib.read(run)
    if "supervised" not in stored["contract"]:
        raise ValueError(f"workdir {str(run.root)!r} belongs to an RL run")
    theirs, ours = flatten(stored["config"]), flatten(plain)
    changed = [name for name, rule in SCHEMA.rules.items() if theirs.get(name) != ours[name] and not rule.free]
    if changed:
        listed = "; ".join(f"{name}: {theirs.get(name)!r} there, {ours[name]!r} here" for name in changed)
        raise ValueError(f"workdir {str(run.root)!r} belongs to a run of other settings; {listed}")
    if stored["contract"]["examples"] != fingerprint:
        of = f"the examples of data.train {config.data.train} and data.heldout {config.data.heldout!r}"
        raise ValueError(f"{of} are not those that the run in workdir {str(run.root)!r} began with")


def execute(plan: "Plan", stop: Callable[[], bool]) -> int:
    """Trains, saves and exports. Returns the exit code."""
    from tba_jax.supervised import tuning

    counts = len(plan.data.train), len(plan.data.heldout), plan.data.skipped, plan.steps
    log.info("%d examples to train on, %d held out, %d left out, %d steps", *counts)
    with contextlib.closing(tuning.Tuning(plan)) as run:
        if not run.train(stop):
            print(f"stopped at step {run.step} of {plan.steps}; the same command resumes {plan.run.root}", file=sys.stderr)
            return processes.STOPPED
        with command_line.mistakes():
            run.export()
        print(run.conclusion())
    return 0


def add_flags(values: flags.FlagValues) -> recipes.Program:
    recipes.add_flag(values)
    command_line.add_workdir(values)
    what = "where the trained model goes: a Hugging Face folder that does not exist yet"
    command_line.add_path(values, "output", what, required=True)
    return recipes.SUPERVISED


def run(given: command_line.Given) -> command_line.Job:
    """Checks what a user's mistake can break; the job trains."""
    config = recipes.load(given.config, given.overrides, program=recipes.SUPERVISED)
    folder = layout.RunDir(given.workdir)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder.compilation_cache / processes.cpu_type()))
    from tba_jax.storage.lease import EpochLease

    EpochLease.refuse_if_held(folder.lease)
    plan = prepare(config, folder, given.output)
    lease = EpochLease.acquire(folder.lease)

    def job() -> int:
        try:
            return execute(plan, processes.StopSignal())
        finally:
            lease.release()

    return job
