"""The machines that a recipe has a variant for, and what the variant sets: --config=RECIPE.py:MACHINE.

`--for_this_machine` picks one by the table in tba_jax/experiment/topologies.py. A recipe has all of them by one line,
`machines.apply(c, variant)` at the end of its `get_config(variant="")`, as configs/own_task.py. They are made for models of 0.5
to 1.5 billion parameters and rows of up to 1,024 tokens; flags change what does not go with another model.
"""

from typing import Any

Settings = dict[str, Any]

# A quarter of what all weights take, a hundredth of their disk. Adapters learn at about ten times the rate of whole matrices.
_ADAPTERS: Settings = {"lora.rank": 16, "lora.alpha": 32.0}
_FASTER = 10
# A host's TPU cannot be divided between processes: one process searches and trains in turn, on all chips.
_IN_TURN: Settings = {"schedule.mode": "interleaved"}
_KEPT: Settings = {"publish.dtype": "bfloat16", "publish.keep": 5, "checkpoint.keep": 2}


def _shared(trainer: float, each: float) -> Settings:
    """What roles that share one GPU may take of its memory; 0.75 GiB for each process are left for CUDA."""
    return {"learner.memory_fraction": trainer, "searchers.memory_fraction": each, "evaluation.memory_fraction": each}


def _rows(rows: int) -> Settings:
    """At most so many rows of 1,024 tokens in a micro-batch, and as many more elsewhere as take about the same memory."""
    return {
        "learner.micro_batch_tokens": 1024 * rows,
        "searchers.count": 1,
        "searchers.slots": 12 * rows,
        "searchers.score_tokens": 2048 * rows,
        "evaluation.score_tokens": 2048 * rows,
        "evaluation.batch_size": 8 * rows,
    }


# Machine -> what it sets, and what is at most so much, where 0 stands for all.
MACHINES: dict[str, tuple[Settings, Settings]] = {
    "8x80gb": (_KEPT, {}),
    "1x80gb": (_KEPT | _shared(0.53, 0.2), _rows(8)),
    "1x24gb": (_KEPT | _shared(0.28, 0.28) | _ADAPTERS, _rows(4)),
    "1x16gb": (_KEPT | _shared(0.25, 0.28) | _ADAPTERS, _rows(2)),
    "v5p-8": (_KEPT | _IN_TURN, {}),
    "v5e-8": (_KEPT | _IN_TURN | _ADAPTERS | {"learner.queries": 8}, _rows(8)),
    "v5e-1": (_KEPT | _IN_TURN | _ADAPTERS, _rows(2)),
    # A CPU computes a hundredth of what a GPU does: short rows, small batches, few steps at a constant rate.
    "cpu": (
        _KEPT
        | _ADAPTERS
        | {"model.compute_dtype": "float32", "task.long_prompts": "skip", "learner.schedule": "constant"}
        | {"learner.warmup_steps": 0, "learner.decay_steps": 0, "learner.schedule_steps": 0, "learner.decay": "linear"},
        _rows(2)
        | {"task.prompt_length": 256, "task.response_length": 256, "learner.steps": 200, "learner.beta_steps": 100}
        | {"learner.queries": 4, "learner.completions": 8, "searchers.queries_per_batch": 4, "searchers.samples_per_query": 8}
        | {"replay.min_rows": 64, "evaluation.queries": 64, "evaluation.every_steps": 20}
        | {"checkpoint.every_steps": 20},
    ),
}
# Settings whose 0 stands for all there is.
_ZERO_IS_ALL = ("learner.micro_batch_tokens", "searchers.slots", "searchers.score_tokens", "evaluation.score_tokens")


def apply(c: Any, machine: str) -> Any:
    """Makes a recipe's config fit a machine, and returns it. Args: machine: of MACHINES; "": none.

    Raises:
      ValueError: there is no such machine.
    """
    if not machine:
        return c
    if machine not in MACHINES:
        raise ValueError(f"no variant {machine!r}: this recipe has those of the machines {', '.join(MACHINES)}")
    settings, most = MACHINES[machine]
    found = dict(settings)
    if c.lora.rank:
        found = {name: value for name, value in found.items() if name not in _ADAPTERS}
    elif "lora.rank" in found:
        found["learner.learning_rate"] = _FASTER * c.learner.learning_rate
    for name, limit in most.items():
        section, _, leaf = name.rpartition(".")
        value = c[section][leaf]
        is_all = name in (*_ZERO_IS_ALL, "evaluation.queries") and value == 0
        found[name] = limit if is_all else min(value, limit)
    c.update_from_flattened_dict(found)
    return c
