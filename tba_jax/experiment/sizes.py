"""What a config would run, from shapes alone: parameters and batches, the memory of each role, and the disk of the run."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from tba_jax.decoding.slots import lane_sizes
from tba_jax.experiment import meshes
from tba_jax.experiment.composition import Experiment
from tba_jax.learner.update import holds_reference
from tba_jax.models import hardware, kv_cache, parameters
from tba_jax.programs import in_words
from tba_jax.rewards import task_models
from tba_jax.storage import deltas, file_systems, layout

_GIB = 1 << 30
_BASE = "base of deltas (host)"


def describe(experiment: Experiment) -> str:
    """The config and the shapes that --dry_run=full prints."""
    config, contract = experiment.config, experiment.contract
    lines = ["config:", json.dumps(config.to_dict(), indent=1, sort_keys=True), "", "parameters:"]
    lines += _table(experiment.policy.model_specs)
    if experiment.policy.lora is not None:
        lines += ["", "trained and published (adapters):", *_table(experiment.policy.trained_specs)]
    micro = meshes.micro_batch_rows(config, ways=math.prod(meshes.shape(experiment, role="trainer", devices=None)[:2]))
    lines += ["", f"rows of {contract.prompt_length} + {contract.response_length} tokens, {micro} full ones in a micro-batch"]
    for use in task_models.uses(experiment.task):
        if use.kind != "linear":
            length = use.length or contract.prompt_length + contract.response_length
            lines += [
                f"  {use.name}: {use.rows} texts at a time of up to {length} tokens, on each device ({', '.join(use.roles)})"
            ]
    lines += ["", "queries:"]
    for split, queries in experiment.queries.items():
        lines += [f"  {split:10} {len(queries)} ({experiment.skipped[split]} too long, left out)"]
    return "\n".join(lines)


def describe_memory(memory: Mapping[str, Mapping[str, int]]) -> str:
    """The parts of an estimate, see `memory`."""
    lines = ["memory on one device of each role's mesh, from shapes (GiB; sums are without (host)):"]
    for role, parts in memory.items():
        listed = ", ".join(f"{name} {size / _GIB:.3f}" for name, size in parts.items() if size)
        lines.append(f"  {role:15} {on_device(parts) / _GIB:8.3f}  ({listed})")
    return "\n".join(lines)


def on_device(parts: Mapping[str, int]) -> int:
    """Bytes on each device, of the parts of a role."""
    return sum(size for name, size in parts.items() if not name.endswith("(host)"))


def _table(specs: parameters.Specs) -> list[str]:
    rows = [f"  {name:32} float32{list(spec.shape)}" for name, spec in parameters.flatten(specs).items()]
    return [*rows, f"  {'total':32} {parameters.count(specs):,}"]


def memory(experiment: Experiment, devices: Mapping[str, int] | None = None) -> dict[str, dict[str, int]]:
    """role -> part -> bytes on one device of the role's mesh, from shapes alone, without temporary arrays of XLA inside a layer.

    "ROLE, task" is each of the role's task_devices, if it has them. Args: devices: role -> how many it has; a role that is not
    named has as few as its mesh can make up (data=-1 counts as 1).
    """
    config, bytes_of = experiment.config, _Memory(experiment, devices or {})
    s, samples = config.searchers, config.evaluation.batch_size
    batch = s.queries_per_batch * s.samples_per_query
    # Prompts of continuations from a state, and of later turns, hold part of a response.
    given, is_alone = experiment.contract.given_length, bool(experiment.contract.turns)
    turns, together = given if is_alone else 0, 1 if is_alone else s.samples_per_query
    slots = meshes.slots_of(config)
    searcher = bytes_of.decoding("searchers", slots=slots, samples=together, batch=batch, weights=s.weights, given=given)
    evaluator = bytes_of.decoding("evaluation", slots=samples, samples=1, batch=samples, weights="full", given=turns)
    return {
        "trainer": bytes_of.trainer(),
        **bytes_of.with_task_models("searcher", "searchers", searcher),
        **bytes_of.with_task_models("evaluator", "evaluation", evaluator),
    }


class _Memory:
    """Bytes on one device, from the shapes of an experiment."""

    def __init__(self, experiment: Experiment, devices: Mapping[str, int]):
        # Section of the config -> sizes (data, fsdp, tensor) of its mesh.
        self._meshes = {
            section: meshes.shape(experiment, role=role, devices=devices.get(role)) for role, section in meshes.SECTIONS.items()
        }
        self._experiment, self._config, policy = experiment, experiment.config, experiment.policy
        self._model, self._adapters = policy.model, policy.lora is not None
        self._P, self._R = experiment.contract.prompt_length, experiment.contract.response_length
        self._compute = jnp.dtype(policy.model.compute_dtype).itemsize  # bytes of a number
        self._params, self._trained = parameters.count(policy.model_specs), parameters.count(policy.trained_specs)

    def _fed(self, tokens: int, tensor: int) -> int:
        """Bytes of the feed-forward of a layer on a device, with its gathered weights where there are experts: each device has
        places for all tokens, whichever of their experts it holds."""
        model = self._model
        if not model.experts:
            return tokens * model.ffn * self._compute * 3 // tensor
        of_token = 3 * model.ffn * self._compute + model.width * (2 * self._compute + 4)
        return tokens * model.experts_per_token * of_token + 3 * model.experts * model.width * model.ffn * self._compute // tensor

    def trainer(self) -> dict[str, int]:
        learner, model, T = self._config.learner, self._model, self._P + self._R
        data, fsdp, _ = self._meshes["learner"]
        ways = data * fsdp
        parts, rows, tensor = self._on_device("learner", meshes.micro_batch_rows(self._config, ways=ways))
        remat = hardware.value("learner.remat", learner.remat, "gpu")  # an estimate is made before there are devices
        layers_kept = model.layers * {"full": 1, "dots": 8, "none": 12}[remat]
        within_layer = rows * model.heads * T * T * 4 // tensor + self._fed(rows * T, tensor)
        # A moving average is float32.
        of_reference = (4 if learner.reference.kind == "ema" else self._compute) * self._trained // parts
        held, offloaded = holds_reference(self._config), learner.reference.offload
        row_bytes = self._experiment.contract.row_shape().row_bytes
        return {
            "weights, gradient, update, AdamW": 5 * 4 * self._trained // parts,
            "frozen weights": self._compute * self._params // parts if self._adapters else 0,
            # One snapshot is being written while the next one waits.
            "snapshots to be written": 2 * jnp.dtype(self._config.publish.dtype).itemsize * self._trained // parts,
            # A full one, and the difference from it that is being written.
            _BASE: 2 * self._base() // parts,
            # An offloaded one is on the device only while it is used.
            "moving reference": of_reference if held and not offloaded else 0,
            "moving reference (host)": of_reference if offloaded else 0,
            "activations": rows * T * model.width * self._compute * layers_kept + within_layer,
            "logits": 2 * self._logits(rows, tensor, learner.logit_megabytes),
            "replay (host)": self._config.replay.capacity * row_bytes + (self._config.replay.arrival_megabytes << 20),
        }

    def decoding(self, section: str, *, slots: int, samples: int, batch: int, weights: str, given: int) -> dict[str, int]:
        """Args: weights: as searchers.weights; given: most response tokens that the cache of a prompt holds as well."""
        model, (data, fsdp, _) = self._model, self._meshes[section]
        parts, rows, tensor = self._on_device(section, batch)
        lockstep = self._config.schedule.mode == "interleaved"
        lane = lane_sizes(slots, samples, data, lockstep=lockstep, what=f"the {slots} slots of {section}")

        def share(rows: int) -> int:
            return rows // fsdp if rows % fsdp == 0 else rows

        prompts = share(lane.groups) * lane.buffers * (self._P + given)
        entries = prompts + share(lane.groups * lane.width) * max(self._R - 1, 1)
        drawn = max(lane.groups * lane.width, lane.arrivals * samples)  # by a decode step, by a prefill
        policy = sampled = self._compute * self._params
        if weights == "int8":  # one byte of each rounded weight
            specs = kv_cache.define(model, "int8", unstacked=False).specs
            rounded = parameters.count(parameters.select(lambda spec: spec.dtype == "int8", specs))
            sampled = policy - (self._compute - 1) * rounded
        if tokens := self._config[section].score_tokens:
            rows = min(rows, max(1, tokens // (self._P + self._R)))
        scores = section == "evaluation" or self._experiment.contract.has_reference
        teacher = self._experiment.teacher if section == "searchers" else None
        kept = scores and teacher is None
        width = model.width if teacher is None else teacher.model.width
        scored = rows * (self._P + self._R) * width * self._compute * 4
        scoring_bytes = scored + 2 * self._logits(rows, tensor, self._config[section].logit_megabytes)
        return {
            "reference" if kept else "frozen weights": policy // parts if kept or self._adapters else 0,
            "teacher": self._compute * parameters.count(teacher.model_specs) // parts if teacher else 0,
            "policies": self._policies(section, sampled) // parts,
            "KV cache": 2 * model.layers * entries * model.kv_heads * model.head_size * self._compute // tensor,
            "logits": 3 * drawn * model.vocab * 4 // tensor,
            "scoring": scoring_bytes if scores else 0,
            # Evaluated snapshots are full.
            _BASE: self._base() // parts if section == "searchers" else 0,
        }

    def with_task_models(self, role: str, section: str, parts: dict[str, int]) -> dict[str, dict[str, int]]:
        """The role's parts, and the models of its task on the same devices or on devices of their own."""
        length = self._P + self._R
        models = {use.name: task_models.memory(use, length=length) for use in task_models.uses(self._experiment.task, role=role)}
        apart = self._config[section].task_devices
        return {role: parts, f"{role}, task": models} if apart else {role: parts | models}

    def _policies(self, section: str, sampled: int) -> int:
        """Of the policy in use, and of the next one while it is loaded. Args: sampled: of one as decoding takes it."""
        if self._config[section].swap_memory == "in_place":
            return sampled
        # Adapters and weights that are to be rounded lie beside the policy that is made of them.
        taken = not self._adapters and sampled == self._compute * self._params
        return 2 * sampled + (0 if taken else (4 * self._trained if self._adapters else self._compute * self._params))

    def _base(self) -> int:
        """Of the full snapshot of which deltas are made."""
        publish = self._config.publish
        return jnp.dtype(publish.dtype).itemsize * self._trained if deltas.are_written(publish) else 0

    def _on_device(self, section: str, rows: int) -> tuple[int, int, int]:
        """Parts that parameters are divided into, rows of one device, parts that heads and vocabulary are divided into."""
        data, fsdp, tensor = self._meshes[section]
        return fsdp * tensor, -(-rows // (data * fsdp)), tensor

    def _logits(self, rows: int, tensor: int, megabytes: int) -> int:
        step = rows * self._model.vocab * 4 // tensor
        return max(min(megabytes << 20, self._R * step), step)


# Disk


class Files(NamedTuple):
    """what: files of one kind in words, with the settings that say how many and how large; size: bytes of all of them."""

    what: str
    size: int


class Demand(NamedTuple):
    """What a run writes to one file system: weights, beside which all else is small. size, free: bytes."""

    size: int
    free: int
    numbers: str


def _demands(folder: Path, files: Sequence[Files]) -> list[Demand]:
    """What files take of the file system of a folder; nothing where that does not say what is free."""
    if (free := file_systems.free(folder)) is None:
        return []
    size, there = sum(each.size for each in files), f"{in_words(free)} left on the file system of {folder}"
    return [Demand(size, free, f"about {in_words(size)} of the {there}: {', '.join(each.what for each in files)}")]


def snapshot_count(config: Any) -> int:
    """The snapshots that are there at the end of the run, one that is being written, and the base of the oldest delta."""
    steps, keep, evaluated_every = config.learner.steps, config.publish.keep, config.evaluation.every_steps
    every, evaluated = 1 if config.schedule.mode == "interleaved" else config.publish.every_steps, _evaluated(config)
    both = steps // math.lcm(every, evaluated_every)
    published = steps // every + steps // evaluated_every - both + 1 + (steps % every > 0 and steps % evaluated_every > 0)
    return min(published, evaluated + keep + 1 + deltas.are_written(config.publish)) if keep else published


def _evaluated(config: Any) -> int:
    """Step 0, multiples, and the last step."""
    steps, every = config.learner.steps, config.evaluation.every_steps
    return steps // every + 1 + (steps % every > 0)


def _snapshots(experiment: Experiment) -> Files:
    """A delta counts as half a snapshot, which is more than most take."""
    c, count = experiment.config, snapshot_count(experiment.config)
    size = jnp.dtype(c.publish.dtype).itemsize * parameters.count(experiment.policy.trained_specs)
    differences = max(0, count - _evaluated(c)) * (c.publish.full_every - 1) // c.publish.full_every
    differences *= deltas.are_written(c.publish)
    kept = f"publish.keep={c.publish.keep}{'' if c.publish.keep else ', all'}, evaluation.every_steps={c.evaluation.every_steps}"
    told = f", of {differences:,} at most half for publish.full_every={c.publish.full_every}" if differences else ""
    what = f"{count:,} snapshots of {in_words(size)} ({kept}, publish.dtype={c.publish.dtype}{told})"
    return Files(what, (2 * count - differences) * size // 2)


def _checkpoints(settings: Any, *, trained: int, steps: int, moving_reference: bool = False) -> Files:
    """The checkpoints that are kept, and one that is being written: weights and Adam's two moments, in float32."""
    size, count = (3 + moving_reference) * 4 * trained, min(settings.keep + 1, steps // settings.every_steps + 1)
    return Files(f"{count} checkpoints of {in_words(size)} (checkpoint.keep={settings.keep})", count * size)


def demands(experiment: Experiment, run: layout.RunDir, *, trains: bool = True) -> list[Demand]:
    """What a new run takes of each file system that it writes to. Object stores do not say what is free, and are left out.

    Args: trains: whether this workdir is that of the trainer, which has its checkpoints.
    """
    c, policy, by_system = experiment.config, experiment.policy, dict[int, tuple[Path, list[Files]]]()
    size = 4 * parameters.count(policy.model_specs)
    reference = Files(f"the reference policy of {in_words(size)}", size)
    moving, trained = holds_reference(c), parameters.count(policy.trained_specs)
    own = [_checkpoints(c.checkpoint, trained=trained, steps=c.learner.steps, moving_reference=moving)] if trains else []
    for folder, files in ((run.shared, [_snapshots(experiment), reference]), (run.root, own)):
        if files and isinstance(folder, Path):
            by_system.setdefault(file_systems.existing(folder).stat().st_dev, (folder, []))[1].extend(files)
    return [demand for folder, files in by_system.values() for demand in _demands(folder, files)]


def demands_of_supervised(folder: Path, settings: Any, *, trained: int, steps: int) -> list[Demand]:
    """What the checkpoints of supervised training take. Args: settings: `checkpoint`; trained: parameters."""
    return _demands(folder, [_checkpoints(settings, trained=trained, steps=steps)])


def check_disk(asked: Iterable[Demand]) -> None:
    """Raises ValueError where a new run would fill its disk."""
    for demand in asked:
        if demand.size > demand.free:
            raise ValueError(
                f"this run would fill its disk, {demand.numbers}; keep fewer of them by these settings, store or train less "
                "(publish.dtype=bfloat16, lora.rank), free some disk, or name another --workdir or --shared"
            )
