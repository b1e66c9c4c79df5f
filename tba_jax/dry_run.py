"""What a config would run: its settings, the shapes of parameters and batches, and each role's memory."""

import json
import math

import jax

from tba_jax.experiment import Experiment
from tba_jax.models import decoder

_GIB = 1 << 30
_SIZES = {"float32": 4, "bfloat16": 2}


def describe(experiment: Experiment) -> str:
    """The text that --dry_run prints."""
    config, model = experiment.config, experiment.model
    lines = ["config:", json.dumps(config.to_dict(), indent=1, sort_keys=True), "", "parameters:"]
    shapes = jax.tree_util.tree_flatten_with_path(decoder.param_shapes(model))[0]
    lines += [f"  {'.'.join(str(entry.key) for entry in path):24} float32{list(leaf.shape)}" for path, leaf in shapes]
    lines.append(f"  {'total':24} {decoder.param_count(model):,}")
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
        "memory of one role over all of its devices, estimated (GiB):",
    ]
    for role, parts in memory(experiment).items():
        listed = ", ".join(f"{name} {size / _GIB:.3f}" for name, size in parts.items())
        lines.append(f"  {role:10} {sum(parts.values()) / _GIB:8.3f}  ({listed})")
    return "\n".join(lines)


def memory(experiment: Experiment) -> dict[str, dict[str, int]]:
    """role -> part -> bytes, from shapes alone; what XLA adds for temporaries inside a layer is not in it."""
    config, model = experiment.config, experiment.model
    P, R = experiment.contract.prompt_length, experiment.contract.response_length
    T, compute = P + R, _SIZES[model.compute_dtype]
    params = decoder.param_count(model)
    micro = config.learner.micro_batch_rows or config.learner.queries * config.learner.completions
    block = config.learner.logit_block_rows or micro
    layers_kept = model.layers if config.learner.remat else model.layers * 12
    attention = micro * model.heads * T * T * 4
    row_bytes = sum(
        jax.numpy.dtype(dtype).itemsize * max(1, math.prod(shape))
        for dtype, shape in experiment.contract.row_shape().columns().values()
    )
    search_rows = config.searchers.queries_per_batch * config.searchers.samples_per_query

    def decoding(rows: int, block: int) -> dict[str, int]:
        return {
            "policy and reference": 2 * 4 * params,
            "compute copy": compute * params if compute != 4 else 0,
            "KV cache": 2 * model.layers * rows * model.kv_heads * T * model.head_size * compute,
            "logits": 3 * rows * model.vocab * 4,
            "scoring": rows * T * model.width * compute * 4 + (block or rows) * R * model.vocab * 4 * 2,
        }

    return {
        "trainer": {
            "weights, gradient, AdamW": 4 * 4 * params,
            "copies to publish and to checkpoint": 4 * 4 * params,
            "activations": micro * T * model.width * compute * layers_kept + attention + micro * T * model.ffn * compute * 3,
            "logits": block * R * model.vocab * 4 * 3,
            "replay (host)": config.replay.capacity * row_bytes,
        },
        "searcher": decoding(search_rows, config.searchers.logit_block_rows),
        "evaluator": decoding(config.evaluation.batch_size, config.evaluation.logit_block_rows),
    }
