"""What a config would run: its settings, the shapes of parameters and batches, and each role's memory."""

import json
import math

import numpy as np

from tba_jax.decoding import sizes
from tba_jax.experiment.composition import Experiment
from tba_jax.models import heads, kv_cache, parameters
from tba_jax.objectives import OBJECTIVES
from tba_jax.rewards import models as models_lib
from tba_jax.run import contract

_GIB = 1 << 30
_SIZES = {"float32": 4, "bfloat16": 2}


def describe(experiment: Experiment) -> str:
    """The text that --dry_run prints."""
    config = experiment.config
    lines = ["config:", json.dumps(config.to_dict(), indent=1, sort_keys=True), "", "parameters:"]
    lines += _table(experiment.policy.model_specs)
    if experiment.policy.lora is not None:
        lines += ["", "trained and published (adapters):", *_table(experiment.policy.trained_specs)]
    objective = OBJECTIVES[config.learner.objective]
    if objective.log_z_head or objective.value_head:  # heads of one shape
        lines += ["", f"head of {config.learner.objective}, trained beside the policy:"]
        lines += _table(heads.define(experiment.policy, log_z_head=True, value_head=True).specs["value_head"])
    lines += ["", "rows (one column each, per row):"]
    lines += [f"  {name:24} {dtype}{list(shape)}" for name, (dtype, shape) in experiment.contract.row_shape().columns().items()]
    c, s = config.learner, config.searchers
    P, R = experiment.contract.prompt_length, experiment.contract.response_length
    micro = c.micro_batch_rows or c.queries * c.completions
    lines += [
        "",
        "batches:",
        f"  trainer    Q={c.queries} × K={c.completions} rows of {P} + {R} tokens, {micro} at a time",
        f"  searcher   {s.queries_per_batch} queries × {s.samples_per_query} samples: rows of {P} + {R} tokens"
        + (f", {s.value_samples} more from each state between steps" if experiment.contract.step_ends else ""),
        f"  evaluator  {config.evaluation.batch_size} rows of {P} + {R} tokens",
        *(
            f"  {use.name:10} {use.rows} texts at a time of up to {use.length or P + R} tokens, on each device "
            f"({', '.join(use.roles)})"
            for use in models_lib.uses(experiment.task)
            if use.kind != "linear"
        ),
        "",
        "queries:",
        *(
            f"  {split:10} {len(queries)} ({experiment.skipped[split]} too long, left out)"
            for split, queries in experiment.queries.items()
        ),
        "",
        "memory on one device of each role's mesh (data=-1 counts as 1), from shapes (GiB; sums are without (host)):",
    ]
    for role, parts in memory(experiment).items():
        listed = ", ".join(f"{name} {size / _GIB:.3f}" for name, size in parts.items())
        on_device = sum(size for name, size in parts.items() if not name.endswith("(host)"))
        lines.append(f"  {role:15} {on_device / _GIB:8.3f}  ({listed})")
    return "\n".join(lines)


def _table(specs: parameters.Specs) -> list[str]:
    rows = [f"  {name:32} float32{list(spec.shape)}" for name, spec in parameters.flatten(specs).items()]
    return [*rows, f"  {'total':32} {parameters.count(specs):,}"]


def memory(experiment: Experiment) -> dict[str, dict[str, int]]:
    """role -> part -> bytes on one device of the role's mesh (data=-1 counts as 1), from shapes alone.

    "ROLE, task": on each of its task_devices, where it has such.

    What XLA adds for temporaries inside a layer is not in it.
    """
    config, policy = experiment.config, experiment.policy
    model, L = policy.model, policy.model.layers
    P, R = experiment.contract.prompt_length, experiment.contract.response_length
    T, compute = P + R, _SIZES[model.compute_dtype]
    params, trained = parameters.count(policy.model_specs), parameters.count(policy.trained_specs)
    rounded = parameters.count(
        parameters.select(lambda spec: spec.dtype == "int8", kv_cache.define(model, "int8", unstacked=False).specs)
    )
    row_bytes = sum(
        np.dtype(dtype).itemsize * max(1, math.prod(shape)) for dtype, shape in experiment.contract.row_shape().columns().values()
    )

    def on_device(section: str, rows: int) -> tuple[int, int, int]:
        """Parts that parameters are divided into, rows of one device, parts that heads and vocabulary are divided into."""
        mesh = config[section].mesh
        return max(mesh.fsdp * mesh.tensor, 1), -(-rows // max(abs(mesh.data) * mesh.fsdp, 1)), max(mesh.tensor, 1)

    def logits(rows: int, tensor: int, megabytes: int) -> int:
        step = rows * model.vocab * 4 // tensor
        return max(min(megabytes << 20, R * step), step)

    def decoding(section: str, slots: int, samples: int, batch: int, weights: str, *, given: int = 0) -> dict[str, int]:
        """given: response tokens that a prompt's cache also holds, at most."""
        parts, rows, tensor = on_device(section, batch)
        ways = max(abs(config[section].mesh.data), 1)
        lane = sizes.lane_sizes(slots, samples, ways, what=f"the {slots} slots of {section}")
        fsdp = max(config[section].mesh.fsdp, 1)

        def share(rows: int) -> int:
            return rows // fsdp if rows % fsdp == 0 else rows

        entries = share(lane.groups) * lane.buffers * (P + given) + share(lane.groups * lane.width) * max(R - 1, 1)
        drawn = max(lane.groups * lane.width, lane.arrivals * samples)  # by a decode step, by a prefill
        sampled = compute * params if weights == "full" else compute * (params - rounded) + rounded
        return {
            "reference": compute * params // parts,
            # The policy in use; and the next one while it is loaded, as it was published and as it is decoded with.
            "policies": (2 * sampled + compute * params) // parts,
            "KV cache": 2 * L * entries * model.kv_heads * model.head_size * compute // tensor,
            "logits": 3 * drawn * model.vocab * 4 // tensor,
            "scoring": rows * T * model.width * compute * 4 + 2 * logits(rows, tensor, config[section].logit_megabytes),
        }

    def models(role: str) -> dict[str, int]:
        return {use.name: models_lib.memory(use, length=T) for use in models_lib.uses(experiment.task, role=role)}

    def with_models(role: str, section: str, parts: dict[str, int]) -> dict[str, dict[str, int]]:
        own = config[section].task_devices > 0
        return {role: parts, f"{role}, task": models(role)} if own else {role: parts | models(role)}

    s = config.searchers
    batch = s.queries_per_batch * s.samples_per_query
    micro = config.learner.micro_batch_rows or config.learner.queries * config.learner.completions
    parts, rows, tensor = on_device("learner", micro)
    layers_kept = L * {"full": 1, "dots": 8, "none": 12}[config.learner.remat]
    reference = config.learner.reference
    holds_reference = reference.kind in contract.HELD_REFERENCES
    given = R - 1 if experiment.contract.step_ends else 0  # of responses that go on from states
    within_layer = rows * (model.heads * T * T * 4 + T * model.ffn * compute * 3) // tensor
    return {
        "trainer": {
            "weights, gradient, update, AdamW": 5 * 4 * trained // parts,
            "frozen weights": 0 if policy.lora is None else compute * params // parts,
            "copies to publish and to checkpoint": 4 * 4 * trained // parts,
            # One, and a copy to checkpoint it; in host memory, but for the time of its use.
            "moving reference": 0 if reference.offload or not holds_reference else 2 * 4 * trained // parts,
            "moving reference (host)": 4 * trained // parts if reference.offload else 0,
            "activations": rows * T * model.width * compute * layers_kept + within_layer,
            "logits": 2 * logits(rows, tensor, config.learner.logit_megabytes),
            "replay (host)": config.replay.capacity * row_bytes,
        },
        **with_models(
            "searcher",
            "searchers",
            decoding("searchers", s.slots or batch, s.samples_per_query, batch, s.weights, given=given),
        ),
        **with_models(
            "evaluator",
            "evaluation",
            decoding("evaluation", config.evaluation.batch_size, 1, config.evaluation.batch_size, "full"),
        ),
    }
