"""What a config would run: its settings, the shapes of parameters and batches, and each role's memory."""

import json
import math

import numpy as np

from tba_jax.experiment import Experiment
from tba_jax.models import parameters, quantize

_GIB = 1 << 30
_SIZES = {"float32": 4, "bfloat16": 2}


def describe(experiment: Experiment) -> str:
    """The text that --dry_run prints."""
    config = experiment.config
    lines = ["config:", json.dumps(config.to_dict(), indent=1, sort_keys=True), "", "parameters:"]
    lines += _table(experiment.policy.model_specs)
    if experiment.policy.lora is not None:
        lines += ["", "trained and published (adapters):", *_table(experiment.policy.trained_specs)]
    lines += ["", "rows (one column each, per row):"]
    lines += [f"  {name:24} {dtype}{list(shape)}" for name, (dtype, shape) in experiment.contract.row_shape().columns().items()]
    c, s = config.learner, config.searchers
    P, R = experiment.contract.prompt_length, experiment.contract.response_length
    micro = c.micro_batch_rows or c.queries * c.completions
    lines += [
        "",
        "batches:",
        f"  trainer    Q={c.queries} × K={c.completions} rows of {P} + {R} tokens, {micro} at a time",
        f"  searcher   {s.queries_per_batch} queries × {s.samples_per_query} samples: rows of {P} + {R} tokens",
        f"  evaluator  {config.evaluation.batch_size} rows of {P} + {R} tokens",
        "",
        "queries:",
        *(
            f"  {split:10} {len(queries)} ({experiment.skipped[split]} too long, left out)"
            for split, queries in experiment.queries.items()
        ),
        "",
        "memory of one role on one device, from shapes (GiB); meshes divide parameters by fsdp × tensor, rows by data × fsdp:",
    ]
    for role, parts in memory(experiment).items():
        listed = ", ".join(f"{name} {size / _GIB:.3f}" for name, size in parts.items())
        lines.append(f"  {role:10} {sum(parts.values()) / _GIB:8.3f}  ({listed})")
    return "\n".join(lines)


def _table(specs: parameters.Specs) -> list[str]:
    rows = [f"  {name:32} float32{list(spec.shape)}" for name, spec in parameters.flatten(specs).items()]
    return [*rows, f"  {'total':32} {parameters.count(specs):,}"]


def memory(experiment: Experiment) -> dict[str, dict[str, int]]:
    """role -> part -> bytes, from shapes alone; what XLA adds for temporaries inside a layer is not in it."""
    config, policy = experiment.config, experiment.policy
    model = policy.model
    P, R = experiment.contract.prompt_length, experiment.contract.response_length
    T, compute = P + R, _SIZES[model.compute_dtype]
    params, trained = parameters.count(policy.model_specs), parameters.count(policy.trained_specs)
    micro = config.learner.micro_batch_rows or config.learner.queries * config.learner.completions
    layers_kept = model.layers * {"full": 1, "dots": 8, "none": 12}[config.learner.remat]
    attention = micro * model.heads * T * T * 4
    row_bytes = sum(
        np.dtype(dtype).itemsize * max(1, math.prod(shape)) for dtype, shape in experiment.contract.row_shape().columns().values()
    )
    search_rows = config.searchers.queries_per_batch * config.searchers.samples_per_query

    flat = parameters.flatten(policy.model_specs)
    rounded = sum(math.prod(spec.shape) for name, spec in flat.items() if quantize.is_quantized(name, spec))

    def logits(rows: int, megabytes: int) -> int:
        return max(min(megabytes << 20, rows * R * model.vocab * 4), rows * model.vocab * 4)

    def decoding(rows: int, megabytes: int, weights: str) -> dict[str, int]:
        return {
            "reference": compute * params,
            # The policy in use, and the next one while it is loaded.
            "policies": compute * (2 * params - (rounded if weights == "int8" else 0)) + (rounded if weights == "int8" else 0),
            "KV cache": 2 * model.layers * rows * model.kv_heads * T * model.head_size * compute,
            "logits": 3 * rows * model.vocab * 4,
            "scoring": rows * T * model.width * compute * 4 + 2 * logits(rows, megabytes),
        }

    return {
        "trainer": {
            "weights, gradient, update, AdamW": 5 * 4 * trained,
            "frozen weights": 0 if policy.lora is None else compute * params,
            "copies to publish and to checkpoint": 4 * 4 * trained,
            "activations": micro * T * model.width * compute * layers_kept + attention + micro * T * model.ffn * compute * 3,
            "logits": 2 * logits(micro, config.learner.logit_megabytes),
            "replay (host)": config.replay.capacity * row_bytes,
        },
        "searcher": decoding(search_rows, config.searchers.logit_megabytes, config.searchers.weights),
        "evaluator": decoding(config.evaluation.batch_size, config.evaluation.logit_megabytes, "full"),
    }
