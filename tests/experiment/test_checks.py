"""Every rule of a config: what breaks it is refused with one sentence that names value, limit and setting."""

import dataclasses
import errno
import math
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from ml_collections import config_dict

from configs import base, baselines, demo_baselines
from tba_jax import main, sharding
from tba_jax.commands import command_line
from tba_jax.experiment import checks, composition
from tba_jax.experiment.mistakes import Mistakes, Refused
from tba_jax.experiment.schema import SCHEMA
from tba_jax.objectives import OBJECTIVES
from tba_jax.run.processes import BadInput
from tba_jax.schemas import Rule, flatten
from tests.support import small_recipes, tiny_run

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
DEFAULTS = flatten(SCHEMA.defaults().to_dict())
UNBOUNDED = ("learner.asymre_delta", "learner.topr_baseline", "task.missing_eos_reward")


def test_every_setting_has_a_rule_or_needs_none():
    without = SCHEMA.rules.keys() - LIMITED.keys()
    checked = {name for name in without if name.startswith(CHECKED_BY_TASKS)}
    bounded = {name for name in without if isinstance(DEFAULTS[name], bool) or name in UNBOUNDED}
    assert without - checked - bounded == FREE


def outside(rule: Rule, default: Any) -> list[Any]:
    """Values of the default's type just beyond each limit."""
    if rule.one_of or rule.registry:
        return [("another",) if isinstance(default, tuple) else "another"]
    step = 1 if isinstance(default, int) else 1e-3
    limits = ((rule.above, 0), (rule.below, 0), (rule.at_least, -step), (rule.at_most, step))
    values = [type(default)(limit + beyond) for limit, beyond in limits if limit is not None]
    return values if isinstance(default, int) else [*values, math.inf, math.nan]


def test_every_value_outside_of_its_limits_is_refused():
    """All settings are wrong together, and each has a sentence that names setting, value and limit."""
    wrong = {name: outside(rule, DEFAULTS[name]) for name, rule in LIMITED.items()}
    wrong |= {name: [-math.inf, math.nan] for name in UNBOUNDED}
    assert all(wrong.values())
    for number in range(max(map(len, wrong.values()))):
        values = {name: each[number] for name, each in wrong.items() if number < len(each)}
        with pytest.raises(Refused) as refused:
            checks.check(tiny_run.config_with(values))
        assert len(refused.value.sentences) == len(values)
        for (name, value), sentence in zip(sorted(values.items()), sorted(refused.value.sentences), strict=True):
            assert sentence.startswith(f"{name}={value!r} "), sentence
            rule = SCHEMA.rules[name]
            assert ("finite" if name in UNBOUNDED else "" if rule.one_of or rule.registry else rule.limits()) in sentence


def test_a_text_that_is_no_utf_8_is_refused(tmp_path, capsys):
    texts = {name: value for name, value in DEFAULTS.items() if isinstance(value, str | tuple) and name != "task.banned_tokens"}
    values = {name: ("a", "say \udcff") if isinstance(value, tuple) else "say \ud800" for name, value in texts.items()}
    values["task.custom.prefix"] = "say \ud800"
    with pytest.raises(Refused) as refused:
        checks.check(tiny_run.config(**values))
    for (name, value), sentence in zip(sorted(values.items()), sorted(refused.value.sentences), strict=True):
        assert sentence.startswith(f"{name}={value!r} holds half of a UTF-16 surrogate pair"), sentence
    arguments = tiny_run.command(tmp_path / "run", os.fsdecode(b"--config.task.system_prompt=Be \xff"))
    with pytest.raises(SystemExit, match="2"):
        command_line.execute(main, arguments[3:])
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(r"error: task.system_prompt='Be \udcff' holds half of a UTF-16 surrogate pair")
    assert not (tmp_path / "run").exists()


def test_a_config_without_a_setting_is_refused():
    stored = base.get_config().to_dict()
    del stored["learner"]["steps"]
    with pytest.raises(ValueError, match=r"no setting learner\.steps: .* this version"):
        composition.build(config_dict.ConfigDict(stored))


def test_the_schema_loads_without_jax():
    code = "import sys; from configs import base, supervised; base.get_config(); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tiny_run.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


INTERLEAVED, POSTERIOR = {"schedule.mode": "interleaved"}, {"searchers.prompt_selection": "posterior"}
IN_PLACE, CUDNN = {"searchers.swap_memory": "in_place", "lora.rank": 2}, {"model.attention": "cudnn"}
TEMPERED = {"learner.ref_temperature_start": 1.2, "learner.ref_temperature_end": 1.2}
QUOTA = {"searchers.count": 1, "searchers.queries_per_batch": 2, "searchers.max_rows_per_snapshot": 144}
ONE_SAMPLE = {"learner.objective": "learned_log_z", "learner.completions": 1, "searchers.samples_per_query": 1}
MISSPELT = ("layers.attention.query", "layers.feed_forward.gat")
# Settings that do not go together, and how the sentence about them begins.
TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"task.name": "aritmetic"}, "task.name='aritmetic' is not one of arithmetic, "),
    ({"metrics.sinks": ("wandbb",)}, "metrics.sinks=('wandbb',) holds 'wandbb', which is not one of tensorboard, wandb, trackio"),
    ({"metrics.project": "a/b"}, "metrics.project='a/b' must be 1 to 100 letters, digits"),
    ({"metrics.group": "\x1b[31m"}, "metrics.group='\\x1b[31m' must be 1 to 100 letters, digits"),
    (
        {"learner.reference.kind": "none", **TEMPERED},
        "learner.ref_temperature_start=1.2 would not be used: learner.reference.kind",
    ),
    (
        {"learner.ref_temperature_end": 1.2},
        "learner.ref_temperature_start=1.0 would not be used: learner.ref_temperature_steps=0",
    ),
    ({"learner.reference.kind": "ema", "lora.rank": 4}, "lora.rank=4 trains adapters"),
    ({"learner.micro_batch_tokens": 47}, "learner.micro_batch_tokens=47 does not hold one row: a row has task.prompt_length"),
    ({"learner.schedule": "wsd", "learner.decay_steps": 491}, "learner.warmup_steps=10 + learner.decay_steps=491 exceed learner"),
    ({"learner.schedule_steps": 499}, "learner.schedule_steps=499 is less than learner.steps=500"),
    (
        {"learner.mesh.data": 3},
        "learner.queries × learner.completions = 140 rows are not divisible by the 3 ways of learner.mesh",
    ),
    ({"learner.objective": "vine_ppo"}, "learner.objective=vine_ppo needs rows with the values of the states between steps"),
    ({"model.path": "/x", "model.preset": "gpt2"}, "model.path='/x' and model.preset='gpt2' exclude each other"),
    ({"model.path": "x", "warm_start.steps": 5}, "model.path='x' and warm_start.steps=5 exclude each other"),
    (CUDNN, "model.attention=cudnn needs model.compute_dtype=bfloat16, not float32"),
    (CUDNN | {"model.compute_dtype": "bfloat16", "model.preset": "pythia-1b"}, "model.attention=cudnn takes heads of a multiple"),
    ({"lora.rank": 129}, "lora.rank=129 is more than layers.attention.key can have, which maps 128 to 128 numbers"),
    ({"lora.rank": 4, "lora.targets": ()}, "lora.rank=4 needs lora.targets, names or patterns of linear maps"),
    ({"lora.rank": 4, "lora.targets": MISSPELT}, "lora.targets: 'layers.feed_forward.gat' matches no linear map of the model"),
    ({"lora.rank": 4, "lora.targets": (",".join(MISSPELT),)}, "lora.targets"),
    ({"replay.merge_edit_distance": 0.1, "replay.merge_duplicates": False}, "replay.merge_edit_distance=0.1 and"),
    ({"replay.merge_cosine_distance": 0.1}, "replay.merge_cosine_distance=0.1 compares embeddings"),
    ({"replay.capacity": 139}, "replay.capacity=139 cannot hold the 168 responses to learner.queries=7 queries"),
    ({"replay.capacity_per_query": 19}, "replay.capacity_per_query=19 is less than learner.completions=20"),
    ({"replay.recent_fill": "wait"}, "replay.recent_fill=wait draws no query before it has learner.completions rows"),
    ({"replay.mount": ("a", 3)}, "replay.mount=('a', 3) must hold folders of runs, such as '(\"runs/first\","),
    ({"sampling.top_p": 0.9}, "sampling.top_p=0.9 would truncate every row; learner.objective=trajectory_balance needs full"),
    (IN_PLACE, "searchers.swap_memory=in_place takes up snapshots as they are"),
    ({"evaluation.swap_memory": "in_place", "lora.rank": 2}, "evaluation.swap_memory=in_place takes up"),
    ({"searchers.samples_per_query": 19}, "searchers.samples_per_query=19 is less than learner.completions=20"),
    ({"searchers.count": 0}, "searchers.count=0 needs replay.mount, whose rows are trained on"),
    ({"searchers.count": 0, "replay.mount": ("a",), **INTERLEAVED}, "searchers.count=0 needs replay.mount, whose rows"),
    (QUOTA, "searchers.max_rows_per_snapshot=144 lets searchers.count=1 searchers ask 6 queries before the first update, which"),
    ({"searchers.lag": 5, "publish.every_steps": 2}, "searchers.lag=5 must be a multiple of publish.every_steps=2"),
    (
        {"searchers.lag": 8, "publish.every_steps": 2, "publish.keep": 6},
        "searchers.lag=8 needs publish.keep=6 to be 0 (all) or at",
    ),
    (POSTERIOR | {"searchers.queries_per_batch": 6}, "searchers.queries_per_batch=6 is less than learner.queries=7: with"),
    (POSTERIOR | {"task.missing_eos_reward": -1.0}, "task.missing_eos_reward=-1.0 must be within [0, 1] with searchers.prompt"),
    ({"publish.keep": 1}, "publish.keep=1 must be 0 or at least 3"),
    (INTERLEAVED | {"publish.keep": 4, "schedule.lag": 4}, "publish.keep=4 must be 0 (all) or more than schedule.lag=4"),
    (
        INTERLEAVED | {"searchers.task_devices": 1},
        "evaluation.task_devices=0 must be searchers.task_devices=1 with schedule.mode",
    ),
    (INTERLEAVED | {"trainer.processes": 2}, "trainer.processes=2 must be 1 with schedule.mode=interleaved"),
    ({"task.prompt_length": 7}, "4000 of 4000 train prompts are longer than task.prompt_length=7 tokens (longest: 9)"),
    ({"task.prompt_length": 7, "task.long_prompts": "skip"}, "4000 of 4000 train prompts are longer than task.prompt_length=7"),
    ({"task.arithmetic.digits": 1}, "task.arithmetic.train_queries=4000 + heldout_queries=256 exceed half of the 81 sums"),
    ({"task.arithmetic.train_queries": 6}, "learner.queries=7 is more than the 6 train queries of the task"),
    ({"task.min_response_length": 33}, "task.min_response_length=33 is more than task.response_length=32"),
    ({"task.response_length": 1, "task.force_eos": True}, "task.response_length=1 must be at least 2 with task.force_eos"),
    ({"task.banned_tokens": (4, "5")}, "task.banned_tokens=(4, '5') must hold token ids, whole numbers from 0, not '5'"),
    ({"task.banned_tokens": (4, 17)}, "task.banned_tokens holds 17, which is not below the vocabulary of 17 ids"),
    ({"task.banned_tokens": (2,)}, "task.banned_tokens holds 2, the end-of-sequence"),
    ({"task.banned_tokens": tuple(range(3, 17))}, "task.banned_tokens holds 14 ids and leaves no token"),
    ({"task.stop_strings": ("=", "")}, "task.stop_strings=('=', '') must hold texts of at least one character, not ''"),
    ({"task.stop_strings": ("=", "so")}, "task.stop_strings holds 'so', which no response can contain"),
    ({"task.step_ends": ("=", "so")}, "task.step_ends holds 'so', which no response can contain"),
    (
        {"task.step_ends": (",", "1#2"), "task.stop_strings": ("#",)},
        "task.step_ends=(',', '1#2') holds '1#2', which ends no step",
    ),
    ({"task.step_ends": (",",), **ONE_SAMPLE}, "searchers.samples_per_query=1 must be at least 2 with task.step_ends"),
    ({"task.name": "story_sentiment"}, "task.name='story_sentiment' needs a pretrained model: set model.path"),
]


@pytest.mark.parametrize("overrides, sentence", TOGETHER, ids=lambda x: " ".join(x) if isinstance(x, dict) else "")
def test_values_that_do_not_go_together_are_refused(overrides, sentence):
    with pytest.raises(ValueError) as refused:
        composition.build(tiny_run.config_with(overrides))
    assert any(each.startswith(sentence) for each in getattr(refused.value, "sentences", [str(refused.value)])), refused.value


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
            any_support and name not in ("online_dpo", "oapl", "pmd_mean"),
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


def test_a_gradient_of_unknown_unit_is_not_clipped(monkeypatch):
    unknown = dataclasses.replace(OBJECTIVES["rloo"], reward_unit=None)
    monkeypatch.setitem(OBJECTIVES, "rloo", unknown)
    with pytest.raises(ValueError, match=r"learner\.clip_norm=1\.0 is in units of the reward, and learner\.objective=rloo"):
        checks.check(tiny_run.config_with({"learner.objective": "rloo"}))
    checks.check(tiny_run.config_with({"learner.objective": "rloo", "learner.clip_norm": 0.0}))


# Setting of the learner -> a value that breaks no rule but that of the objectives that do not read it.
NOT_READ_BY_ALL = {
    **dict(importance_clip=3.0, log_ratio_clip=7.0, row_divisor="row_length", clip_low=0.1, clip_high=0.3),
    **dict(sequence_clip_low=1e-3, sequence_clip_high=1e-3, icepop_low=0.2, icepop_high=2.0, gae_lambda=1.0),
    **dict(value_coefficient=0.5, ref_temperature_end=1.2, reward_temperature_start=2.0, log_z_learning_rate=0.5),
    **dict(value_learning_rate=0.5, asymre_delta=-0.3, topr_baseline=0.5),
}
TEMPERATURES, CLIP = {"ref_temperature_end", "reward_temperature_start"}, {"clip_low", "clip_high"}
READ: dict[str, set[str]] = {
    "trajectory_balance": TEMPERATURES,
    "learned_log_z": TEMPERATURES | {"log_z_learning_rate"},
    "tba_prime": TEMPERATURES | {"importance_clip", "log_ratio_clip", "row_divisor"},
    **dict.fromkeys(("proximal_rloo", "vine_ppo", "grpo", "dr_grpo"), CLIP),
    "ppo": CLIP | {"gae_lambda", "value_coefficient", "value_learning_rate"},
    "gspo": {"sequence_clip_low", "sequence_clip_high"},
    "cispo": {"clip_high"},
    "icepop": {"icepop_low", "icepop_high"},
    **{name: set() for name in ("reinforce", "rloo", "online_dpo", "raft", "oapl", "pmd_mean", "a_star_po")},
    "flowrl": CLIP | {"log_z_learning_rate"},
    "asymre": {"asymre_delta"},
    "topr": {"topr_baseline"},
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_settings_that_an_objective_does_not_read_are_refused(name):
    """All of them at once, in a new run alone."""
    steps = {"learner.ref_temperature_steps": 5, "learner.reward_temperature_steps": 5}
    given = {f"learner.{setting}": value for setting, value in NOT_READ_BY_ALL.items()}
    config = tiny_run.config_with({"learner.objective": name, **given, **steps, **NEEDED.get(name, {})})
    checks.check(config)
    with pytest.raises(Refused) as refused:
        checks.check(config, new=True)
    unread = f"would not be used with learner.objective={name}, which does not read it; leave it at"
    told = {sentence.partition("=")[0] for sentence in refused.value.sentences if unread in sentence}
    assert told == {f"learner.{setting}" for setting in NOT_READ_BY_ALL.keys() - READ[name]}
    assert len(told) == len(refused.value.sentences)


@pytest.mark.parametrize(
    "changes, read_with",
    [
        ({"learner.decay": "cosine", "learner.schedule": "linear"}, {"learner.schedule": "wsd", "learner.decay_steps": 2}),
        ({"learner.decay_steps": 3, "learner.schedule": "linear"}, {"learner.schedule": "wsd"}),
        ({"learner.schedule_steps": 600}, {"learner.schedule": "linear"}),
        ({"learner.schedule_steps": 600}, {"learner.schedule": "wsd", "learner.decay_steps": 2}),
        ({"searchers.target_success_rate": 0.3}, POSTERIOR),
        ({"searchers.prompt_candidates": 4}, POSTERIOR),
        ({"replay.strategy": "softmax", "replay.recent_probability": 1.0}, {"replay.recent_probability": 0.9}),
        ({"replay.inverse_temperature": 3.0}, {"replay.strategy": "softmax"}),
        ({"learner.reference.reset_steps": 3}, {"learner.reference.kind": "reset"}),
        ({"learner.reference.ema_decay": 0.5}, {"learner.reference.kind": "ema"}),
        ({"learner.reference.reset_optimizer": True}, {"learner.reference.kind": "reset"}),
        ({"learner.reference.offload": True}, {"learner.reference.kind": "reset"}),
        ({"replay.merge_keep": "best", "replay.merge_duplicates": False}, {"replay.merge_duplicates": True}),
        ({"searchers.lag": 4, **INTERLEAVED}, {"schedule.mode": "asynchronous"}),
        ({"schedule.lag": 2}, INTERLEAVED),
        ({"schedule.updates_per_search": 4}, INTERLEAVED),
        ({"replay.recent_window": 3, "replay.recent_probability": 0.0}, {"replay.recent_probability": 0.5}),
        ({"replay.recent_fill": "older", "replay.recent_probability": 0.0}, {"replay.recent_probability": 0.5}),
        ({"searchers.value_samples": 3}, {"task.step_ends": (",",)}),
        ({"searchers.value_states": 1}, {"task.step_ends": (",",)}),
    ],
)
def test_settings_of_choices_that_nobody_makes_are_refused(changes, read_with):
    (name, value), *_ = changes.items()
    checks.check(tiny_run.config_with(changes))
    with pytest.raises(ValueError, match=re.escape(f"{name}={value} would not be used")):
        checks.check(tiny_run.config_with(changes), new=True)
    checks.check(tiny_run.config_with(changes | read_with), new=True)


def test_a_schedule_that_never_decays_is_refused():
    config = tiny_run.config_with({"learner.schedule": "wsd"})
    checks.check(config)  # a run that exists goes on
    with pytest.raises(ValueError, match=r"learner\.decay_steps=0 must be at least 1 with learner\.schedule=wsd"):
        checks.check(config, new=True)


def test_the_recipe_of_every_baseline_sets_what_its_objective_reads():
    assert set(baselines.BASELINES) == set(OBJECTIVES) - {"trajectory_balance", "learned_log_z", "tba_prime"}
    for name, settings in baselines.BASELINES.items():
        checks.check(demo_baselines.get_config(name), new=True)
        published = {setting for setting in settings if not setting.startswith("beta_")}
        assert published == READ[name] - {"value_learning_rate", "log_z_learning_rate"}, name


@pytest.mark.parametrize("recipe", ["demo_baselines", "gsm8k_rho1b", "math_qwen2_5_7b", "tldr_pythia"])
def test_a_baseline_gets_rows_as_they_were_drawn_and_no_reference_that_it_does_not_read(recipe):
    for name in baselines.BASELINES:
        c, objective = small_recipes.config(f"{recipe}:{'410m-' if recipe == 'tldr_pythia' else ''}{name}"), OBJECTIVES[name]
        reads = objective.reads_reference and not (objective.k3 and c.learner.beta_start == c.learner.beta_end == 0)
        assert c.learner.reference.kind == ("initial" if reads else "none")
        rows = c.replay
        assert not rows.merge_duplicates and rows.recent_fill == "wait" and rows.strategy == "uniform"
        assert c.searchers.samples_per_query >= c.learner.completions
        assert not (objective.as_drawn and c.sampling.explore_top_p_probability)
        checks.check(c, new=True)


def test_mistakes_are_told_together_each_once_and_one_alone_as_it_was():
    def fail(error: ValueError) -> None:
        raise error

    found, mistake = Mistakes(), BadInput("lower steps")
    assert found.attempt(lambda: 3) == 3 and not found
    found.end()
    assert found.attempt(fail, mistake) is None and found
    with pytest.raises(BadInput) as alone:
        found.end()
    assert alone.value is mistake
    found.require(True, "nothing")
    for sentences in (["c=3", "d=4"], ["d=4"]):
        found.attempt(fail, Refused(sentences))
    with pytest.raises(Refused) as raised:
        found.end()
    assert raised.value.sentences == ("lower steps", "c=3", "d=4")
    assert str(raised.value) == "3 mistakes: (1) lower steps; (2) c=3; (3) d=4"

    def full() -> None:
        raise ValueError("cannot write") from OSError(errno.ENOSPC, "no space")

    with pytest.raises(ValueError, match="cannot write"):  # a failure of storage is no mistake
        found.attempt(full)
