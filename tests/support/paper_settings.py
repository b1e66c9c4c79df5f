"""What the TBA paper and its authors' code set, for each recipe of a row of the paper: written down here, not read from recipes.

`python -m tests.support.paper_settings` prints the table of docs/recipes.md: each setting that decides about a run beside the
recipe's, and the reason where they differ.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from configs import gsm8k_rho1b, math_qwen2_5_7b, red_team_gpt2, red_team_llama3_2_1b, tldr_pythia
from tba_jax.experiment.schema import SCHEMA
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

_ADAM = flatten({"learner": dict(adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8)})
_SUMS = flatten(
    {
        "learner": dict(objective="trajectory_balance", reference=dict(kind="initial"), weight_decay=0.0, clip_norm=0.0),
        "sampling": dict(scoring_temperature=0.7, temperature=0.7),
        "replay": dict(merge_duplicates=True, merge_keep="newest", capacity_per_query=100),
        "lora": dict(rank=0),
    }
)
_GSM8K = {
    **_ADAM,
    **_SUMS,
    **flatten(
        {
            "task": dict(prompt_length=512, response_length=512),
            "learner": dict(
                **dict(decay="cosine", warmup_steps=50, decay_steps=500, queries=7, completions=20, steps=1000),
                **dict(beta_start=0.012, beta_end=0.004, beta_steps=500),
            ),
            "searchers": dict(samples_per_query=24),
            "replay": dict(recent_probability=0.95, recent_fill="repeat", strategy="uniform", min_rows=500),
            "publish": dict(every_steps=2),
        }
    ),
}
_TLDR = {
    **_ADAM,
    **_SUMS,
    **flatten(
        {
            "task": dict(prompt_length=512, response_length=128, missing_eos_reward=-1.0),
            "learner": dict(
                **dict(learning_rate=3e-6, warmup_steps=0, queries=8, completions=20, steps=256),
                **dict(beta_start=1.0, beta_end=0.05),
            ),
            "searchers": dict(samples_per_query=20),
            "replay": dict(recent_probability=0.5, recent_fill="repeat", strategy="softmax", min_rows=10_000),
            "publish": dict(every_steps=10),
        }
    ),
}
_MATH = {
    **_ADAM,
    **flatten(
        {
            "learner": dict(
                **dict(adam_beta2=0.99, weight_decay=0.01, objective="tba_prime", importance_clip=8.0, log_ratio_clip=10.0),
                **dict(reference=dict(kind="reset", reset_steps=50), learning_rate=1e-6, schedule="constant"),
                **dict(queries=32, completions=16, steps=400, beta_start=0.005, beta_end=0.005),
            ),
            "task": dict(prompt_length=1024, response_length=3072),
            "sampling": dict(scoring_temperature=1.0, temperature=1.0),
            "searchers": dict(samples_per_query=16),
            "lora": dict(rank=0),
        }
    ),
}
_RED_TEAM = {
    **_ADAM,
    **flatten(
        {
            "learner": dict(
                **dict(weight_decay=0.1, objective="trajectory_balance", reference=dict(kind="initial"), learning_rate=1e-4),
                **dict(schedule_steps=40_000, warmup_steps=100, queries=1, completions=128, steps=5000),
                **dict(beta_start=0.05, beta_end=0.05, ref_temperature_start=1.0, ref_temperature_end=1.0),
                **dict(reward_temperature_start=2.0, reward_temperature_end=1.0, reward_temperature_steps=500),
            ),
            "task": dict(
                **dict(response_length=21, force_eos=True),
                red_team=dict(replies=5, victim_temperature=0.7, victim_top_p=0.92, victim_reply_length=30),
            ),
            "lora": dict(rank=32, alpha=16.0),
            "sampling": dict(
                **dict(scoring_temperature=1.0, temperature=1.0),
                **dict(explore_temperature_low_factor=0.5, explore_temperature_factor=2.0),
            ),
            "replay": dict(merge_duplicates=True, capacity=100_000, recent_probability=0.5, strategy="softmax"),
            "publish": dict(every_steps=10),
        }
    ),
}
PAPER: dict[str, Values] = {
    "gsm8k_rho1b": _GSM8K,
    "gsm8k_rho1b:700_steps": _GSM8K
    | flatten({"learner": dict(steps=700, schedule_steps=1000, decay_steps=600, beta_start=0.014)}),
    "tldr_pythia:410m": _TLDR,
    "math_qwen2_5_7b:async2": _MATH | {"searchers.lag": 2},
    "math_qwen2_5_7b:async10": _MATH | {"searchers.lag": 10},
    "red_team_gpt2": _RED_TEAM,
    "red_team_llama3_2_1b": _RED_TEAM
    | flatten(
        {
            "task": dict(red_team=dict(victim_temperature=0.1, victim_top_p=0.9, victim_reply_length=64)),
            "lora": dict(targets=("layers.attention.query", "layers.attention.value")),
            "replay": dict(merge_edit_distance=0.0, capacity=150_000),
            "sampling": dict(explore_temperature_low_factor=0.7),
            "learner": dict(ref_temperature_end=1.2, ref_temperature_steps=2000, reward_temperature_steps=1000),
        }
    ),
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


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"`{item}`" for item in value)
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def table() -> Iterator[str]:
    """The lines of the tables of docs/recipes.md: what recipes share with the paper, and where they differ from it."""
    yield from ("", "## Equal", "", f"| setting | {' | '.join(PAPER)} |", f"|---|{'---|' * len(PAPER)}")
    for name in dict.fromkeys(name for paper in PAPER.values() for name in SCHEMA.rules if name in paper):
        cells = [
            "differs" if name in DEPARTURES[recipe] else _shown(paper[name]) if name in paper else ""
            for recipe, paper in PAPER.items()
        ]
        yield f"| `{name}` | {' | '.join(cells)} |"
    yield from (
        "",
        "## Different",
        "",
        "| recipe | setting | paper and its code | recipe | why they differ |",
        "|---|---|---|---|---|",
    )
    rows: dict[tuple[str, Departure], list[str]] = {}
    for recipe, departures in DEPARTURES.items():
        for name in (name for name in SCHEMA.rules if name in departures):
            rows.setdefault((name, departures[name]), []).append(recipe)
    for (name, (theirs, ours, why)), recipes in rows.items():
        yield f"| {', '.join(recipes)} | `{name}` | {_shown(theirs)} | {_shown(ours)} | {why} |"


if __name__ == "__main__":
    print("\n".join(table()))
