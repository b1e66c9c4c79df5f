"""What the TBA paper and its authors' code set, for each recipe of a row of the paper: written down here, not read from recipes.

`python -m tests.support.paper_settings` prints the table of docs/recipes.md: each setting that decides about a run beside the
recipe's, and the reason where they differ. UNSTATED pins what neither the paper nor its code speaks of, so that another default
moves no recipe.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from configs import gsm8k_rho1b, math_qwen2_5_7b, red_team_gpt2, red_team_llama3_2_1b, tldr_pythia
from tba_jax.experiment.schema import SCHEMA
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.inputs import ObjectiveSettings
from tba_jax.schemas import flatten

Values = Mapping[str, Any]


class Departure(NamedTuple):
    """theirs: what the authors' code does, in words or as a value; ours: the recipe's value; why: one clause."""

    theirs: Any
    ours: Any
    why: str


CONFIGS = {
    "gsm8k_rho1b": lambda: gsm8k_rho1b.get_config(),
    "gsm8k_rho1b:700_steps": lambda: gsm8k_rho1b.get_config("700_steps"),
    "tldr_pythia:410m": lambda: tldr_pythia.get_config("410m"),
    "math_qwen2_5_7b:async2": lambda: math_qwen2_5_7b.get_config("async2"),
    "math_qwen2_5_7b:async10": lambda: math_qwen2_5_7b.get_config("async10"),
    "red_team_gpt2": lambda: red_team_gpt2.get_config(),
    "red_team_llama3_2_1b": lambda: red_team_llama3_2_1b.get_config(),
}

_ADAM = {"learner.adam_beta1": 0.9, "learner.adam_beta2": 0.999, "learner.adam_epsilon": 1e-8}
_SUMS = {
    "learner.objective": "trajectory_balance",
    "learner.reference.kind": "initial",
    "sampling.scoring_temperature": 0.7,
    "sampling.temperature": 0.7,
    "learner.weight_decay": 0.0,
    "learner.clip_norm": 0.0,
    "replay.merge_duplicates": True,
    "replay.merge_keep": "newest",
    "replay.capacity_per_query": 100,
    "lora.rank": 0,
}
_GSM8K = {
    **_ADAM,
    **_SUMS,
    "task.prompt_length": 512,
    "task.response_length": 512,
    "learner.decay": "cosine",
    "learner.warmup_steps": 50,
    "learner.decay_steps": 500,
    "learner.queries": 7,
    "learner.completions": 20,
    "learner.steps": 1000,
    "learner.beta_start": 0.012,
    "learner.beta_end": 0.004,
    "learner.beta_steps": 500,
    "searchers.samples_per_query": 24,
    "replay.recent_probability": 0.95,
    "replay.recent_fill": "repeat",
    "replay.strategy": "uniform",
    "replay.min_rows": 500,
    "publish.every_steps": 2,
}
_TLDR = {
    **_ADAM,
    **_SUMS,
    "task.prompt_length": 512,
    "task.response_length": 128,
    "task.missing_eos_reward": -1.0,
    "learner.learning_rate": 3e-6,
    "learner.warmup_steps": 0,
    "learner.queries": 8,
    "learner.completions": 20,
    "learner.steps": 256,
    "learner.beta_start": 1.0,
    "learner.beta_end": 0.05,
    "searchers.samples_per_query": 20,
    "replay.recent_probability": 0.5,
    "replay.recent_fill": "repeat",
    "replay.strategy": "softmax",
    "replay.min_rows": 10_000,
    "publish.every_steps": 10,
}
_MATH = {
    **_ADAM,
    "learner.adam_beta2": 0.99,
    "learner.weight_decay": 0.01,
    "learner.objective": "tba_prime",
    "learner.importance_clip": 8.0,
    "learner.log_ratio_clip": 10.0,
    "learner.reference.kind": "reset",
    "learner.reference.reset_steps": 50,
    "task.prompt_length": 1024,
    "task.response_length": 3072,
    "sampling.scoring_temperature": 1.0,
    "sampling.temperature": 1.0,
    "learner.learning_rate": 1e-6,
    "learner.schedule": "constant",
    "learner.queries": 32,
    "learner.completions": 16,
    "learner.steps": 400,
    "learner.beta_start": 0.005,
    "learner.beta_end": 0.005,
    "searchers.samples_per_query": 16,
    "lora.rank": 0,
}
_RED_TEAM = {
    **_ADAM,
    "learner.weight_decay": 0.1,
    "learner.objective": "trajectory_balance",
    "learner.reference.kind": "initial",
    "task.response_length": 21,
    "task.force_eos": True,
    "task.red_team.replies": 5,
    "task.red_team.victim_temperature": 0.7,
    "task.red_team.victim_top_p": 0.92,
    "task.red_team.victim_reply_length": 30,
    "lora.rank": 32,
    "lora.alpha": 16.0,
    "sampling.scoring_temperature": 1.0,
    "sampling.temperature": 1.0,
    "sampling.explore_temperature_low_factor": 0.5,
    "sampling.explore_temperature_factor": 2.0,
    "learner.learning_rate": 1e-4,
    "learner.schedule_steps": 40_000,
    "learner.warmup_steps": 100,
    "learner.queries": 1,
    "learner.completions": 128,
    "learner.steps": 5000,
    "learner.beta_start": 0.05,
    "learner.beta_end": 0.05,
    "learner.ref_temperature_start": 1.0,
    "learner.ref_temperature_end": 1.0,
    "learner.reward_temperature_start": 2.0,
    "learner.reward_temperature_end": 1.0,
    "learner.reward_temperature_steps": 500,
    "replay.merge_duplicates": True,
    "replay.capacity": 100_000,
    "replay.recent_probability": 0.5,
    "replay.strategy": "softmax",
    "publish.every_steps": 10,
}
PAPER: dict[str, Values] = {
    "gsm8k_rho1b": _GSM8K,
    "gsm8k_rho1b:700_steps": _GSM8K
    | {"learner.steps": 700, "learner.schedule_steps": 1000, "learner.decay_steps": 600, "learner.beta_start": 0.014},
    "tldr_pythia:410m": _TLDR,
    "math_qwen2_5_7b:async2": _MATH | {"searchers.lag": 2},
    "math_qwen2_5_7b:async10": _MATH | {"searchers.lag": 10},
    "red_team_gpt2": _RED_TEAM,
    "red_team_llama3_2_1b": _RED_TEAM
    | {
        "task.red_team.victim_temperature": 0.1,
        "task.red_team.victim_top_p": 0.9,
        "task.red_team.victim_reply_length": 64,
        "lora.targets": ("layers.attention.query", "layers.attention.value"),
        "replay.merge_edit_distance": 0.0,
        "sampling.explore_temperature_low_factor": 0.7,
        "learner.ref_temperature_end": 1.2,
        "learner.ref_temperature_steps": 2000,
        "learner.reward_temperature_steps": 1000,
        "replay.capacity": 150_000,
    },
}

_ENDS = "0 in the last update"
_LAST = "the last update learns too; theirs does nothing"
_SNAPSHOTS = Departure("float32", "bfloat16", "searchers compute in bfloat16 on both sides")
_OF_GSM8K = {
    "learner.learning_rate": Departure(
        "1e-05, of bfloat16 weights and moments", 1e-5, "float32 ones take every step whole, see above; `lr3e-6` and `lr1e-6`"
    ),
    "learner.schedule": Departure(f"wsd, {_ENDS}", "wsd", _LAST),
    "publish.dtype": _SNAPSHOTS,
}
_OF_RED_TEAM = {
    "learner.schedule": Departure("linear, 0 in the first update", "linear", "the first update learns too; theirs does nothing"),
    "task.min_response_length": Departure(
        "log π_ref is −500 below 5 tokens", 5, "no sample is spent on an attack that is refused"
    ),
    "sampling.explore_temperature_probability": Departure(
        "half of the batches", 0.5, "rows have temperatures of their own; the shares are the same"
    ),
    "replay.merge_keep": Departure(
        "best, of equal ones the older; log π_ref may count", "best", "of equal ones the newer one is closer to the policy"
    ),
}


def _of_math(level: int) -> dict[str, Departure]:
    at_most = Departure(f"exactly {level}", level + 2, "searchers sample the next batch while the trainer learns from the last")
    known = "their public commit; whether the paper's figures were made with it is not known"
    return {
        "learner.row_divisor": Departure("row_length", "row_length", known),
        "replay.max_staleness": at_most,
        "publish.dtype": _SNAPSHOTS,
    }


DEPARTURES: dict[str, dict[str, Departure]] = {
    "gsm8k_rho1b": _OF_GSM8K,
    "gsm8k_rho1b:700_steps": _OF_GSM8K,
    "tldr_pythia:410m": {
        "learner.schedule": Departure(f"linear, {_ENDS}", "linear", _LAST),
        "learner.beta_steps": Departure(
            "towards step 128, cut to 0.05 at step 32", 32, "no jump of the loss from one update to the next"
        ),
        "publish.dtype": _SNAPSHOTS,
    },
    "math_qwen2_5_7b:async2": _of_math(2),
    "math_qwen2_5_7b:async10": _of_math(10),
    "red_team_gpt2": _OF_RED_TEAM
    | {
        "lora.targets": Departure(
            "query, key and value as one map",
            tuple(f"layers.attention.{name}" for name in ("query", "key", "value")),
            "each is a map of its own here",
        ),
        "replay.merge_edit_distance": Departure(
            "0.25, of the first that is near, without the end",
            0.25,
            "the nearest one does not depend on an order; tokens are compared",
        ),
    },
    "red_team_llama3_2_1b": _OF_RED_TEAM
    | {
        "replay.merge_cosine_distance": Departure(
            "0.7 in the commands for Gemma and Llama 2", 0.7, "that for Llama 3 is not public"
        ),
        "publish.dtype": _SNAPSHOTS,
    },
}

# Of a recipe unless OWN has another value.
UNSTATED: dict[str, Any] = {
    "task.long_prompts": "refuse",
    "task.missing_eos_reward": None,
    "task.min_response_length": 0,
    "task.force_eos": False,
    "task.banned_tokens": (),
    "task.stop_strings": (),
    "task.step_ends": (),
    "lora.rank": 0,
    "lora.alpha": 16.0,
    "lora.targets": ("layers.*",),
    "sampling.top_k": 0,
    "sampling.top_p": 1.0,
    "sampling.min_p": 0.0,
    "sampling.explore_temperature_probability": 0.0,
    "sampling.explore_temperature_low_factor": 1.0,
    "sampling.explore_temperature_factor": 1.1 / 0.7,
    "sampling.explore_top_p_probability": 0.0,
    "sampling.explore_top_p_low": 0.7,
    "searchers.prompt_selection": "uniform",
    "searchers.weights": "full",
    "searchers.lag": 0,
    "replay.capacity": 50_000,
    "replay.merge_edit_distance": 0.0,
    "replay.merge_cosine_distance": 0.0,
    "replay.merge_keep": "newest",
    "replay.recent_window": 0,
    "replay.recent_fill": "repeat",
    "replay.inverse_temperature": 1.0,
    "replay.max_draws_per_row": 0,
    "replay.max_staleness": 0,
    "replay.success_decay": 0.5,
    "replay.retention": "all",
    "replay.mount": (),
    "learner.decay": "linear",
    "learner.decay_steps": 0,
    "learner.schedule_steps": 0,
    "learner.beta_steps": 500,
    "learner.ref_temperature_start": 1.0,
    "learner.ref_temperature_end": 1.0,
    "learner.ref_temperature_steps": 0,
    "learner.reward_temperature_start": 1.0,
    "learner.reward_temperature_end": 1.0,
    "learner.reward_temperature_steps": 0,
    "learner.reference.reset_steps": 50,
    "learner.reference.reset_optimizer": False,
    "learner.reference.ema_decay": 0.95,
    "learner.non_finite": "stop",
    "learner.clip_norm": 1.0,
    "publish.dtype": "float32",
    "schedule.mode": "asynchronous",
    "schedule.lag": 0,
    "schedule.updates_per_search": 1,
}


_OWN_OF_MATH = {
    "task.long_prompts": "skip",
    "task.stop_strings": ("<|im_end|>",),
    "learner.warmup_steps": 0,
    "replay.recent_probability": 1.0,
    "replay.max_draws_per_row": 1,
    "replay.merge_duplicates": False,
    "replay.strategy": "uniform",
    "replay.capacity_per_query": 100,
    "replay.min_rows": 0,
    "publish.every_steps": 1,
}
_OWN_OF_RED_TEAM = {
    "task.prompt_length": 64,
    "searchers.samples_per_query": 128,
    "replay.min_rows": 1024,
    "replay.capacity_per_query": 100_000,
}
OWN: dict[str, dict[str, Any]] = {
    "tldr_pythia:410m": {"task.long_prompts": "skip"},
    "math_qwen2_5_7b:async2": _OWN_OF_MATH,
    "math_qwen2_5_7b:async10": _OWN_OF_MATH,
    "red_team_gpt2": _OWN_OF_RED_TEAM,
    "red_team_llama3_2_1b": _OWN_OF_RED_TEAM | {"replay.capacity_per_query": 150_000},
}

_SECTIONS = ("learner.", "replay.", "sampling.", "lora.", "publish.", "schedule.")
_BESIDES = (
    *(
        "searchers.samples_per_query",
        "searchers.prompt_selection",
        "searchers.weights",
        "searchers.lag",
        "task.prompt_length",
        "task.response_length",
        "task.long_prompts",
    ),
    *("task.min_response_length", "task.force_eos", "task.missing_eos_reward"),
    *("task.banned_tokens", "task.stop_strings", "task.step_ends"),
)
# Of the task, for recipes that have it.
_VICTIM = ("victim_temperature", "victim_top_p", "victim_reply_length")
_OF_TASK = {"red_team": tuple(f"task.red_team.{name}" for name in ("replies", *_VICTIM))}


def deciding(config: Any) -> dict[str, Any]:
    """The settings of a config that decide about updates and rows, but for those that its objective does not read."""
    objective = OBJECTIVES[config.learner.objective]
    of_objectives = {field for field in ObjectiveSettings.__dataclass_fields__ if field != "completions"}
    unread = {f"learner.{name}" for name in of_objectives - set(objective.settings)}
    unread |= {f"learner.{name}" for name in ("log_z_learning_rate", "value_learning_rate")}
    leaves = flatten(config.to_dict())
    besides = _BESIDES + _OF_TASK.get(config.task.name, ())
    names = [name for name in SCHEMA.rules if name.startswith(_SECTIONS) or name in besides]
    return {name: leaves[name] for name in names if not SCHEMA.rules[name].free and name not in unread}


def stated(recipe: str) -> tuple[Values, Mapping[str, Departure], Values]:
    """What the paper or its code says and the recipe follows; the departures; and what nobody states."""
    paper, departures = PAPER[recipe], DEPARTURES[recipe]
    unstated = UNSTATED | OWN.get(recipe, {})
    return paper, departures, {name: value for name, value in unstated.items() if name not in paper and name not in departures}


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value)
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def table() -> Iterator[str]:
    """The lines of the tables of docs/recipes.md: what recipes share with the paper, and where they differ from it."""
    there = {recipe: (*stated(recipe)[:2], deciding(get_config())) for recipe, get_config in CONFIGS.items()}
    yield from ("", "## Equal", "", f"| setting | {' | '.join(there)} |", f"|---|{'---|' * len(there)}")
    for name in dict.fromkeys(name for paper, departures, values in there.values() for name in values if name in paper):
        cells = [
            "differs" if name in departures else _shown(paper[name]) if name in paper and name in values else ""
            for paper, departures, values in there.values()
        ]
        yield f"| `{name}` | {' | '.join(cells)} |"
    yield from (
        "",
        "## Different",
        "",
        "| recipe | setting | paper and its code | recipe | why they differ |",
        "|---|---|---|---|---|",
    )
    for recipe, (_, departures, values) in there.items():
        for name, value in values.items():
            if name in departures:
                yield f"| {recipe} | `{name}` | {_shown(departures[name].theirs)} | {_shown(value)} | {departures[name].why} |"


if __name__ == "__main__":
    print("\n".join(table()))
