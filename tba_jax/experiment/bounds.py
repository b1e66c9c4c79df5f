"""Bounds on the rates of a role: what its devices could do at most, by the operations and the bytes that its work needs.

A bound is not an estimate. It counts what cannot be left out, at the stated peaks of the devices: no communication between
devices, no padding of layouts, no activations, no waiting.
"""

import dataclasses

import jax.numpy as jnp

from tba_jax.decoding import sizes
from tba_jax.experiment import meshes
from tba_jax.experiment.meshes import HasPolicy
from tba_jax.learner.settings import HELD_REFERENCES
from tba_jax.models import flops, kv_cache, parameters
from tba_jax.models.config import DecoderConfig
from tba_jax.models.policy import Policy
from tba_jax.telemetry.device_peaks import Peaks

# Bytes of the optimiser for each trained parameter: float32 weight and two moments, each read and written.
_OPTIMIZER_BYTES = 6 * 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """work: "update", "scoring" or "decoding"; rows, tokens: a second, at most. Tokens are positions of rows, padding included,
    and those that are drawn in decoding. by: what the bound comes from, "FLOP/s" or "bytes/s"."""

    work: str
    rows: float
    tokens: float
    by: str


def bounds(experiment: HasPolicy, *, role: str, devices: int, peaks: Peaks) -> list[Bound]:
    """The bounds of a role. Args: devices: of the role; peaks: of one device."""
    data, fsdp, tensor = meshes.shape(experiment, role=role, devices=devices)
    at = _Devices(peaks, count=data * fsdp * tensor, data=data)
    if role == "trainer":
        return [_update(experiment, at)]
    section = experiment.config[meshes.SECTIONS[role]]
    batch = section.batch_size if role == "evaluator" else section.queries_per_batch * section.samples_per_query
    weights = "full" if role == "evaluator" else section.weights
    samples = 1 if role == "evaluator" else section.samples_per_query
    slots = batch if role == "evaluator" else meshes.slots_of(experiment.config)
    decoding = _decoding(experiment, at, slots=slots, samples=samples, weights=weights)
    if role == "searcher" and experiment.config.learner.reference.kind == "none":
        return [decoding]
    return [decoding, _scoring(experiment, at, batch, queries=-(-batch // section.samples_per_query))]


@dataclasses.dataclass(frozen=True)
class _Devices:
    """The devices of a mesh. data: its data ways, each of which reads all weights."""

    peaks: Peaks
    count: int
    data: int

    def bound(self, work: str, *, rows: float, tokens: float, operations: float, read: float) -> Bound:
        """Args: rows, tokens, operations and bytes read: of the same piece of work, by all devices together."""
        seconds = {
            "FLOP/s": operations / (self.count * self.peaks.flops),
            "bytes/s": read / (self.count * self.peaks.bandwidth),
        }
        by = max(seconds, key=lambda name: seconds[name])
        return Bound(work=work, rows=rows / seconds[by], tokens=tokens / seconds[by], by=by)


def _lengths(experiment: HasPolicy) -> tuple[int, int]:
    return experiment.config.task.prompt_length, experiment.config.task.response_length


def _update(experiment: HasPolicy, at: _Devices) -> Bound:
    config, policy, (P, R) = experiment.config, experiment.policy, _lengths(experiment)
    learner = config.learner
    rows = learner.queries * learner.completions
    # Without the reference that moves, rows bring the log-probs of the reference with them.
    passes = flops.passes(adapters=policy.lora is not None, held_reference=learner.reference.kind in HELD_REFERENCES)
    operations = passes * flops.scoring(policy.model, rows=rows, queries=learner.queries, prompt=P, response=R)
    held, trained = parameters.count(policy.model_specs), parameters.count(policy.trained_specs)
    micro_batches = -(-rows // meshes.micro_batch_rows(config, ways=at.data * max(learner.mesh.fsdp, 1)))
    read = 2 * micro_batches * held * jnp.dtype(policy.model.compute_dtype).itemsize + _OPTIMIZER_BYTES * trained
    return at.bound("update", rows=rows, tokens=rows * (P + R), operations=operations, read=at.data * read)


def _scoring(experiment: HasPolicy, at: _Devices, rows: int, *, queries: int) -> Bound:
    model, (P, R) = experiment.policy.model, _lengths(experiment)
    read = parameters.count(experiment.policy.model_specs) * jnp.dtype(model.compute_dtype).itemsize
    operations = flops.scoring(model, rows=rows, queries=queries, prompt=P, response=R)
    return at.bound("scoring", rows=rows, tokens=rows * (P + R), operations=operations, read=at.data * read)


def _decoding(experiment: HasPolicy, at: _Devices, *, slots: int, samples: int, weights: str) -> Bound:
    """Of rows that fill their prompts and their responses: R steps in which each slot draws a token."""
    policy, (P, R) = experiment.policy, _lengths(experiment)
    model = policy.model
    lockstep = experiment.config.schedule.mode == "interleaved"
    lane = sizes.lane_sizes(slots, samples, at.data, lockstep=lockstep)
    entry = 2 * model.kv_heads * model.head_size * jnp.dtype(model.compute_dtype).itemsize
    prompts, own = _cached(model, P, R)
    # A step reads all weights, the prompt of each group of slots once, and half of each full response.
    step = at.data * (sampled_bytes(policy, weights) - _looked_up(model) + entry * lane.groups * prompts) + entry * slots * own
    operations = slots * flops.decoding(model, prompt=P, response=R)
    return at.bound("decoding", rows=slots, tokens=slots * R, operations=operations, read=R * step)


def _cached(model: DecoderConfig, P: int, R: int) -> tuple[int, int]:
    """Entries of caches that a step reads, over all layers: of a prompt, and of a response that is half done."""
    prompts = own = 0
    for local in model.local_layers:
        seen = min(R // 2, model.window) if local else R // 2
        own += seen
        prompts += min(P, model.window - seen) if local else P
    return prompts, own


def _looked_up(model: DecoderConfig) -> int:
    """Bytes of the embedding where a step reads a row of it for each token only, not all of it as a head."""
    return 0 if model.tied_embedding else model.vocab * model.width * jnp.dtype(model.compute_dtype).itemsize


def sampled_bytes(policy: Policy, weights: str) -> int:
    """Bytes of the policy as it is decoded with. Args: weights: as searchers.weights: "full", or "int8": a byte of each rounded
    weight."""
    held, compute = parameters.count(policy.model_specs), jnp.dtype(policy.model.compute_dtype).itemsize
    if weights == "full":
        return compute * held
    specs = kv_cache.define(policy.model, "int8", unstacked=False).specs
    rounded = parameters.count(parameters.select(lambda spec: spec.dtype == "int8", specs))
    return compute * (held - rounded) + rounded
