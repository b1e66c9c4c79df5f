"""Every rule of a config: what breaks it is refused with one sentence that names value, limit and setting."""

import dataclasses
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ml_collections import config_dict

from configs import base
from tba_jax import main, sharding
from tba_jax.commands import command_line
from tba_jax.experiment import checks, composition
from tba_jax.experiment.schema import SCHEMA
from tba_jax.objectives import OBJECTIVES
from tba_jax.schemas import Rule, flatten
from tests.support import tiny_run

ROOT = Path(__file__).parent.parent.parent

# Settings without a rule: any text, any numbers in a tuple, or a size of a mesh, which the mesh itself checks.
FREE = {
    *(f"task.{name}" for name in ("banned_tokens", "stop_strings", "step_ends", "system_prompt", "embedding_path")),
    *("model.path", "lora.targets", "replay.mount", "metrics.project", "metrics.group"),
    *(f"{section}.mesh.{axis}" for section in ("learner", "searchers", "evaluation") for axis in sharding.MESH_AXES),
}
# Tasks whose constructors check settings that have no rule.
CHECKED_BY_TASKS = ("task.countdown.", "task.story_sentiment.", "task.gsm8k.", "task.math.", "task.red_team.", "task.tldr.")
LIMITED = {
    name: rule for name, rule in SCHEMA.rules.items() if dataclasses.replace(rule, path="", free=False, fixed=False) != Rule()
}


def test_every_setting_has_a_rule_or_needs_none():
    without = SCHEMA.rules.keys() - LIMITED.keys()
    checked = {name for name in without if name.startswith(CHECKED_BY_TASKS)}
    leaves = flatten(SCHEMA.defaults().to_dict())
    any_number = ("task.missing_eos_reward", "learner.topr_baseline")
    bounded = {name for name in without if isinstance(leaves[name], bool) or name in any_number}
    assert without - checked - bounded == FREE


def outside(rule: Rule, default: Any) -> list[Any]:
    """Values of the default's type just beyond each limit."""
    if rule.one_of or rule.registry:
        return [("another",) if isinstance(default, tuple) else "another"]
    step = 1 if isinstance(default, int) else 1e-3
    limits = ((rule.above, 0), (rule.below, 0), (rule.at_least, -step), (rule.at_most, step))
    values = [type(default)(limit + beyond) for limit, beyond in limits if limit is not None]
    return values if isinstance(default, int) else [*values, math.inf, math.nan]


@pytest.mark.parametrize("name", ["learner.asymre_delta", "learner.topr_baseline", "task.missing_eos_reward"])
@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_a_number_without_a_lower_limit_must_still_be_finite(name, value):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}={value} ')}.*finite"):
        checks.check(tiny_run.config_with({name: value}))


def test_a_value_outside_of_its_limits_is_refused():
    """The sentence names the setting, the value and the limit."""
    defaults = flatten(SCHEMA.defaults().to_dict())
    for name, rule in LIMITED.items():
        values = outside(rule, defaults[name])
        assert values, name
        for value in values:
            with pytest.raises(ValueError, match=f"^{re.escape(f'{name}={value!r} ')}") as refused:
                checks.check(tiny_run.config_with({name: value}))
            limit = "" if rule.one_of or rule.registry else rule.limits()
            assert limit in str(refused.value), (limit, str(refused.value))


def test_a_config_without_a_setting_is_refused():
    stored = base.get_config().to_dict()
    del stored["learner"]["steps"]
    with pytest.raises(ValueError, match=r"no setting learner\.steps: .* this version"):
        composition.build(config_dict.ConfigDict(stored))


def test_the_schema_loads_without_jax():
    code = "import sys; from configs import base, supervised; base.get_config(); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        (
            {"task.name": "aritmetic"},
            "task.name='aritmetic' is not one of arithmetic, ",
        ),
        (
            {"metrics.sinks": ("tensorboard", "wandbb")},
            "holds 'wandbb', which is not one of tensorboard, wandb, trackio (did you mean 'wandb'?)",
        ),
        ({"metrics.project": "a/b"}, "metrics.project='a/b' must be 1 to 100 letters, digits"),
        ({"metrics.group": "\x1b[31m"}, "metrics.group='\\x1b[31m' must be 1 to 100 letters, digits"),
        (
            {"learner.completions": 1},
            "learner.completions=1 must be at least 2: learner.objective=trajectory_balance compares the completions",
        ),
        (
            {"learner.reference.kind": "none", "learner.ref_temperature_start": 1.2, "learner.ref_temperature_end": 1.2},
            "learner.ref_temperature_end=1.2 would not be used: learner.reference.kind=none has no reference to temper",
        ),
        (
            {"learner.ref_temperature_end": 1.2},
            "learner.ref_temperature_start=1.0 would not be used: learner.ref_temperature_steps=0 means 1.2",
        ),
        (
            {"learner.reference.kind": "ema", "lora.rank": 4},
            "lora.rank=4 trains adapters, and the product of averages of A and B is not the average of A B",
        ),
        (
            {"learner.micro_batch_tokens": 47},
            "micro_batch_tokens=47 does not hold one row: a row has task.prompt_length + task.response_length = 48 tokens",
        ),
        ({"model.path": "/x", "model.preset": "gpt2"}, "model.path='/x' and model.preset='gpt2' exclude each other"),
        (
            {"replay.merge_edit_distance": 0.1, "replay.merge_duplicates": False},
            "merge near-duplicates, which replay.merge_duplicates=False forbids",
        ),
        ({"lora.rank": 129}, "lora.rank=129 is more than layers.attention.key can have, which maps 128 to 128 numbers"),
        (
            {"lora.rank": 4, "lora.targets": ("layers.attention.query,layers.attention.value",)},
            """'("layers.attention.query", "layers.attention.value")')""",
        ),
        ({"model.attention": "cudnn"}, "model.attention=cudnn needs model.compute_dtype=bfloat16, not float32"),
        (
            {"model.attention": "cudnn", "model.compute_dtype": "bfloat16", "model.preset": "pythia-1b"},
            "model.attention=cudnn takes heads of a multiple of 8 up to 128, the model's are 256",
        ),
        ({"lora.rank": 4, "lora.targets": ()}, "lora.rank=4 needs lora.targets, names or patterns of linear maps"),
        (
            {"lora.rank": 4, "lora.targets": ("layers.attention.query", "layers.feed_forward.gat")},
            "lora.targets: 'layers.feed_forward.gat' matches no linear map of the model; there are ['layers.attention.key', ",
        ),
        (
            {"learner.schedule": "wsd", "learner.decay_steps": 491},
            "learner.warmup_steps=10 + learner.decay_steps=491 exceed learner.steps=500",
        ),
        ({"learner.schedule_steps": 499}, "learner.schedule_steps=499 is less than learner.steps=500: the last updates"),
        ({"replay.capacity": 139}, "replay.capacity=139 cannot hold the 168 responses to learner.queries=7 queries"),
        (
            {"searchers.count": 1, "searchers.queries_per_batch": 2, "searchers.max_rows_per_snapshot": 144},
            "searchers.max_rows_per_snapshot=144 lets searchers.count=1 searchers ask 6 queries before the first update, which",
        ),
        ({"task.arithmetic.train_queries": 6}, "learner.queries=7 is more than the 6 train queries of the task"),
        ({"replay.capacity_per_query": 19}, "replay.capacity_per_query=19 is less than learner.completions=20"),
        (
            {"replay.recent_fill": "wait"},
            "replay.recent_fill=wait draws no query before it has learner.completions rows",
        ),
        ({"sampling.top_p": 0.9}, "sampling.top_p=0.9 would truncate every row; learner.objective=trajectory_balance needs full"),
        ({"searchers.swap_memory": "in_place", "lora.rank": 2}, "searchers.swap_memory=in_place takes up"),
        (
            {"evaluation.swap_memory": "in_place", "lora.rank": 2},
            "evaluation.swap_memory=in_place takes up",
        ),
        ({"searchers.count": 0}, "searchers.count=0 needs replay.mount, whose rows are trained on"),
        ({"searchers.count": 0, "replay.mount": ("a",), "schedule.mode": "interleaved"}, "and schedule.mode=asynchronous"),
        ({"replay.mount": ("a", 3)}, "replay.mount=('a', 3) must hold folders of runs, such as '(\"runs/first\","),
        ({"publish.keep": 1}, "publish.keep=1 must be 0 or at least 3"),
        (
            {"searchers.lag": 5, "publish.every_steps": 2},
            "searchers.lag=5 must be a multiple of publish.every_steps=2",
        ),
        (
            {"searchers.lag": 8, "publish.every_steps": 2, "publish.keep": 6},
            "searchers.lag=8 needs publish.keep=6 to be 0 (all) or at least 7",
        ),
        (
            {"publish.keep": 4, "schedule.mode": "interleaved", "schedule.lag": 4},
            "publish.keep=4 must be 0 (all) or more than schedule.lag=4",
        ),
        (
            {"searchers.task_devices": 1, "schedule.mode": "interleaved"},
            "evaluation.task_devices=0 must be searchers.task_devices=1 with schedule.mode=interleaved",
        ),
        ({"model.path": "x", "warm_start.steps": 5}, "model.path='x' and warm_start.steps=5 exclude each other"),
        (
            {"learner.mesh.data": 3},
            "learner.queries × learner.completions = 140 rows are not divisible by the 3 ways of learner.mesh.data",
        ),
        ({"task.prompt_length": 7}, "4000 of 4000 train prompts are longer than task.prompt_length=7 tokens (longest: 9)"),
        (
            {"task.prompt_length": 7, "task.long_prompts": "skip"},
            "4000 of 4000 train prompts are longer than task.prompt_length=7 tokens",
        ),
        (
            {"task.arithmetic.digits": 1},
            "task.arithmetic.train_queries=4000 + heldout_queries=256 exceed half of the 81 sums that task.arithmetic.digits=1",
        ),
        ({"task.min_response_length": 33}, "task.min_response_length=33 is more than task.response_length=32"),
        (
            {"task.response_length": 1, "task.force_eos": True},
            "task.response_length=1 must be at least 2 with task.force_eos, which makes the last token the end",
        ),
        ({"task.banned_tokens": (4, "5")}, "task.banned_tokens=(4, '5') must hold token ids, whole numbers from 0, not '5'"),
        ({"task.banned_tokens": (4, 17)}, "task.banned_tokens holds 17, which is not below the vocabulary of 17 ids"),
        ({"task.banned_tokens": (2,)}, "task.banned_tokens holds 2, the end-of-sequence"),
        ({"task.banned_tokens": tuple(range(3, 17))}, "task.banned_tokens holds 14 ids and leaves no token"),
        ({"task.stop_strings": ("=", "")}, "task.stop_strings=('=', '') must hold texts of at least one character, not ''"),
        (
            {"task.step_ends": ("=", "so")},
            "task.step_ends holds 'so', which no response can contain: the tokenizer (CharacterTokenizer)",
        ),
        (
            {"task.step_ends": (",", "1#2"), "task.stop_strings": ("#",)},
            "task.step_ends=(',', '1#2') holds '1#2', which ends no step: by then '#' of task.stop_strings has ended the",
        ),
        (
            {
                "task.step_ends": (",",),
                "learner.objective": "learned_log_z",
                "learner.completions": 1,
                "searchers.samples_per_query": 1,
            },
            "searchers.samples_per_query=1 must be at least 2 with task.step_ends: the value of the state before a response is",
        ),
        (
            {"searchers.prompt_selection": "posterior", "searchers.queries_per_batch": 6},
            "searchers.queries_per_batch=6 is less than learner.queries=7: with searchers.prompt_selection=posterior",
        ),
        (
            {"searchers.prompt_selection": "posterior", "task.missing_eos_reward": -1.0},
            "task.missing_eos_reward=-1.0 must be within [0, 1] with searchers.prompt_selection=posterior",
        ),
        (
            {"learner.objective": "vine_ppo"},
            "learner.objective=vine_ppo needs rows with the values of the states between steps: say by task.step_ends what ends",
        ),
        (
            {"task.stop_strings": ("=", "so")},
            "task.stop_strings holds 'so', which no response can contain: the tokenizer (CharacterTokenizer)",
        ),
        ({"task.name": "story_sentiment"}, "task.name='story_sentiment' needs a pretrained model: set model.path"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_values_that_do_not_go_together_are_refused(overrides, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        composition.build(tiny_run.config_with(overrides))


# What the base config lacks.
NEEDED: dict[str, dict[str, object]] = {
    "vine_ppo": {"task.step_ends": (",",)},
    "a_star_po": {"replay.recent_fill": "wait", "replay.merge_duplicates": False},
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_an_objective_needs_is_refused_where_it_is_missing(name):
    """Completions to compare with, full support, and a reference that it reads, where it has need of them."""
    any_support = name not in ("trajectory_balance", "learned_log_z", "tba_prime", "flowrl", "a_star_po")
    without_reference = ("raft", "gspo", "cispo", "oapl", "pmd_mean", "asymre", "topr")
    cases = {
        "one completion": ({"learner.completions": 1}, name in ("learned_log_z", "ppo", "vine_ppo", "topr")),
        "two completions": ({"learner.completions": 2}, True),
        "all rows truncated": ({"sampling.top_p": 0.9}, any_support),
        "all rows explored": ({"sampling.explore_top_p_probability": 1.0}, any_support),
        "some rows explored": ({"sampling.explore_top_p_probability": 0.3}, name != "a_star_po"),
        "ends forced": ({"task.force_eos": True}, name != "a_star_po"),
        "rows drawn by reward": ({"replay.strategy": "softmax"}, name != "a_star_po"),
        "rows repeated": ({"replay.recent_fill": "repeat"}, name != "a_star_po"),
        "no β": (
            {"learner.beta_start": 0.0, "learner.beta_end": 0.0},
            name
            not in ("trajectory_balance", "learned_log_z", "tba_prime", "online_dpo", "oapl", "pmd_mean", "flowrl", "a_star_po"),
        ),
        "a moving reference": ({"learner.reference.kind": "ema"}, name not in without_reference),
        "no reference": ({"learner.reference.kind": "none"}, name not in ("grpo", "dr_grpo", "vine_ppo", "icepop")),
    }
    for what, (settings, allowed) in cases.items():
        config = tiny_run.config_with({"learner.objective": name, **NEEDED.get(name, {}), **settings})
        try:
            checks.check(config)
        except ValueError as error:
            assert not allowed and f"learner.objective={name}" in str(error), what
        else:
            assert allowed, what


TEXTS = [
    name
    for name, value in flatten(SCHEMA.defaults().to_dict()).items()
    if isinstance(value, str | tuple) and name != "task.banned_tokens"
]


def test_a_text_that_is_no_utf_8_is_refused():
    defaults = flatten(tiny_run.config().to_dict())
    for name in (*TEXTS, "task.custom.prefix"):
        value = ("a", "say \udcff") if isinstance(defaults.get(name), tuple) else "say \ud800"
        sentence = rf"{re.escape(f'{name}={value!r}')} holds half of a UTF-16 surrogate pair"
        with pytest.raises(ValueError, match=sentence) as refused:
            checks.check(tiny_run.config(**{name: value}))
        assert str(refused.value).count(f"{name}=") == 1


def test_a_byte_of_the_command_line_that_is_no_utf_8_is_refused_by_its_setting(tmp_path, capsys):
    arguments = tiny_run.command(tmp_path / "run", os.fsdecode(b"--config.task.system_prompt=Be \xff"))
    with pytest.raises(SystemExit, match="2"):
        command_line.execute(main, arguments[3:])
    assert not (tmp_path / "run").exists()
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(r"error: task.system_prompt='Be \udcff' holds half of a UTF-16 surrogate pair")


def test_a_gradient_of_unknown_unit_is_not_clipped(monkeypatch):
    unknown = dataclasses.replace(OBJECTIVES["rloo"], reward_unit=None)
    monkeypatch.setitem(OBJECTIVES, "rloo", unknown)
    with pytest.raises(ValueError, match=r"learner\.clip_norm=1\.0 is in units of the reward, and learner\.objective=rloo"):
        checks.check(tiny_run.config_with({"learner.objective": "rloo"}))
    checks.check(tiny_run.config_with({"learner.objective": "rloo", "learner.clip_norm": 0.0}))
