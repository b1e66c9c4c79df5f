"""The variant `small` of every recipe: the same run, tiny, so that it can be tried from end to end before it is given hardware.

    python -m tba_jax.main --config=configs/gsm8k_rho1b.py:small --workdir=runs/small

takes about a minute on two CPU cores and needs neither network nor data. Where a recipe has variants, :small-VARIANT is one of
them, made small. Models and data are those of configs/small_data: random weights of the recipe's kind of model, a tokenizer with
an id for each byte, and a few hand-written rows of the recipe's format. Objective, sampling, schedule, replay and prompts are the
recipe's own. Such a run shows that everything works together. It learns nothing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "small_data"

STEPS = 2
_SIZES: dict[str, Any] = {
    "learner.steps": STEPS,
    "learner.queries": 2,
    "learner.completions": 4,
    "learner.warmup_steps": 0,
    "learner.schedule_steps": 0,
    "searchers.count": 1,
    "searchers.queries_per_batch": 2,
    "searchers.samples_per_query": 4,
    "searchers.slots": 8,
    "searchers.max_updates_ahead": 2,
    "replay.min_rows": 0,
    "evaluation.queries": 4,
    "evaluation.batch_size": 4,
    "evaluation.every_steps": STEPS,
    "evaluation.samples_per_query": 2,
    "metrics.every_steps": 1,
    "model.compute_dtype": "float32",  # bfloat16 is slow on CPUs
    **{f"{section}.mesh.{axis}": 1 for section in ("learner", "searchers", "evaluation") for axis in ("fsdp", "tensor")},
}
_SIZES_OF_MODEL: dict[str, Any] = {
    "task.response_length": 8,
    # Random weights are never right. Rewards differ all the same, because about half of the responses end in time.
    "task.missing_eos_reward": -1.0,
}
_SIZES_OF_WARM_START: dict[str, Any] = {"warm_start.steps": 10, "warm_start.batch_size": 16, "warm_start.warmup_steps": 0}


def asked(variant: str) -> tuple[bool, str]:
    """Whether the text after the colon in --config is `small` or begins with `small-`, and the rest of it."""
    word, _, rest = variant.partition("-")
    return (True, rest) if word == "small" else (False, variant)


def is_the(variant: str) -> bool:
    """Whether the text after the colon is `small`, for a recipe without other variants. Raises ValueError for other texts."""
    if variant not in ("", "small"):
        raise ValueError(f"no variant {variant!r}: this recipe has one, `small`, a tiny run for trials")
    return variant == "small"


def shrink(c: Any, inputs: Mapping[str, str], **sizes: Any) -> Any:
    """Makes a recipe's config small, and returns it.

    Args:
      c: a config of configs/base.py.
      inputs: setting -> name of a file or of a model in configs/small_data; {} for a recipe that makes its own policy.
      sizes: further settings, with double underscores in place of dots.
    """
    of_policy = _SIZES_OF_MODEL if inputs else _SIZES_OF_WARM_START
    paths = {setting: str(FOLDER / name) for setting, name in inputs.items()}
    c.update_from_flattened_dict(_SIZES | of_policy | paths | {name.replace("__", "."): size for name, size in sizes.items()})
    c.learner.decay_steps = min(c.learner.decay_steps, STEPS)
    c.learner.micro_batch_tokens = c.learner.completions * (c.task.prompt_length + c.task.response_length)
    if c.learner.reference.kind == "reset":
        c.learner.reference.reset_steps = 1  # so that it is reset at all
    return c
