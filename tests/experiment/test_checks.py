"""Every rule of a config: what breaks it is refused with one sentence that names value, limit and setting."""

import dataclasses
import errno
import math
import re
from typing import Any

import pytest

from configs import baselines
from tba_jax.experiment import checks, composition
from tba_jax.experiment.schema import SCHEMA
from tba_jax.objectives import OBJECTIVES
from tba_jax.run.processes import BadInput, is_storage_failure
from tba_jax.schemas import Mistakes, Refused, Rule, flatten
from tests.support import small_recipes, tiny_run

LIMITED = {
    name: rule for name, rule in SCHEMA.rules.items() if dataclasses.replace(rule, path="", free=False, fixed=False) != Rule()
}
DEFAULTS = flatten(SCHEMA.defaults().to_dict())
UNBOUNDED = ("learner.asymre_delta", "learner.topr_baseline", "task.missing_eos_reward")


def outside(rule: Rule, default: Any) -> list[Any]:
    if rule.one_of or rule.registry:
        return [("another",) if isinstance(default, tuple) else "another"]
    step = 1 if isinstance(default, int) else 1e-3
    limits = ((rule.above, 0), (rule.below, 0), (rule.at_least, -step), (rule.at_most, step))
    values = [type(default)(limit + beyond) for limit, beyond in limits if limit is not None]
    return values if isinstance(default, int) else [*values, math.inf, math.nan]


def test_every_value_outside_of_its_limits_is_refused():
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


def test_a_text_that_is_no_utf_8_is_refused():
    texts = {name: value for name, value in DEFAULTS.items() if isinstance(value, str | tuple) and name != "task.banned_tokens"}
    values = {name: ("a", "say \udcff") if isinstance(value, tuple) else "say \ud800" for name, value in texts.items()}
    values["task.custom.prefix"] = "say \ud800"
    with pytest.raises(Refused) as refused:
        checks.check(tiny_run.config(**values))
    for (name, value), sentence in zip(sorted(values.items()), sorted(refused.value.sentences), strict=True):
        assert sentence.startswith(f"{name}={value!r} holds half of a UTF-16 surrogate pair"), sentence


def test_a_secret_of_a_new_config_is_refused_and_not_told():
    secrets = {f"task.custom.{name}": "canary" for name in ("api_key", "judge_Password")}
    secrets["task.custom.server"] = "http://me:canary@host"
    harmless = {"task.custom.end_tokens": 7, "task.custom.url": "http://host/a@b", "task.banned_tokens": (1,)}
    config = tiny_run.config(**secrets, **harmless)
    checks.check(config)
    with pytest.raises(Refused) as refused:
        checks.check(config, new=True)
    assert "canary" not in str(refused.value)
    assert {sentence.split()[0] for sentence in refused.value.sentences} >= set(secrets)
    assert not [sentence for sentence in refused.value.sentences if sentence.startswith(tuple(harmless))]


INTERLEAVED = {"schedule.mode": "interleaved"}
STALE = {"learner.steps": 7, "replay.max_staleness": 2}
# Settings that do not go together, and how the sentence about them begins.
TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"metrics.project": "a/b"}, "metrics.project='a/b' must be 1 to 100 letters, digits"),
    ({"lora.rank": 129}, "lora.rank=129 is more than layers.attention.key can have, which maps 128 to 128 numbers"),
    ({"learner.ref_temperature_end": 1.2}, "learner.ref_temperature_start=1.0 would not be used: learner.ref_temp"),
    ({"learner.micro_batch_tokens": 47}, "learner.micro_batch_tokens=47 does not hold one row: a row has task.prompt_length"),
    ({"learner.schedule": "wsd", "learner.decay_steps": 491}, "learner.warmup_steps=10 + learner.decay_steps=491 exceed learner"),
    ({"model.attention": "cudnn"}, "model.attention=cudnn needs model.compute_dtype=bfloat16, not float32"),
    ({"lora.rank": 4, "lora.targets": ("layers.attention.qery",)}, "lora.targets: 'layers.attention.qery' matches no linear map"),
    ({"replay.recent_fill": "wait"}, "replay.recent_fill=wait draws no query before it has learner.completions rows"),
    ({"replay.mount": ("a", 3)}, "replay.mount=('a', 3) must hold folders of runs, such as '(\"runs/first\","),
    ({"searchers.swap_memory": "in_place", "lora.rank": 2}, "searchers.swap_memory=in_place takes up snapshots as they are"),
    ({"searchers.count": 0, "replay.mount": ("a",), **INTERLEAVED}, "searchers.count=0 needs replay.mount, whose rows"),
    (STALE | {"publish.every_steps": 2, "searchers.lag": 4}, "replay.max_staleness=2 lets rows be drawn in 3 steps, and"),
    (STALE | {"searchers.count": 0, "replay.mount": ("a",)}, "searchers.count=0 leaves only rows of replay.mount, which count"),
    (STALE | INTERLEAVED | {"schedule.lag": 3}, "schedule.lag=3 makes every row 3 steps old, more than replay.max_staleness=2"),
    (INTERLEAVED | {"searchers.task_devices": 1}, "evaluation.task_devices=0 must be searchers.task_devices=1 with sch"),
    ({"searchers.prompt_selection": "posterior", "searchers.queries_per_batch": 6}, "searchers.queries_per_batch=6 is less than"),
    ({"task.arithmetic.train_queries": 6}, "learner.queries=7 is more than the 6 train queries of the task"),
    ({"task.banned_tokens": (4, "5")}, "task.banned_tokens=(4, '5') must hold token ids, whole numbers from 0, not '5'"),
    ({"task.banned_tokens": tuple(range(3, 17))}, "task.banned_tokens holds 14 ids and leaves no token"),
    ({"task.step_ends": ("=", "so")}, "task.step_ends holds 'so', which no response can contain"),
    ({"task.step_ends": ("1#2",), "task.stop_strings": ("#",)}, "task.step_ends=('1#2',) holds '1#2', which ends no step"),
]


@pytest.mark.parametrize("overrides, sentence", TOGETHER, ids=lambda x: " ".join(x) if isinstance(x, dict) else "")
def test_values_that_do_not_go_together_are_refused(overrides, sentence):
    with pytest.raises(ValueError) as refused:
        composition.build(tiny_run.config_with(overrides))
    assert any(each.startswith(sentence) for each in getattr(refused.value, "sentences", [str(refused.value)])), refused.value


# What the base config lacks.
NEEDED: dict[str, dict[str, object]] = {
    "vine_ppo": {"task.step_ends": (",",)},
    "frozen_log_z": {"learner.log_z_path": "log_z.json"},
    "a_star_po": {"replay.recent_fill": "wait", "replay.merge_duplicates": False},
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_an_objective_needs_is_refused_where_it_is_missing(name):
    of_p_star = ("trajectory_balance", "f_trajectory_balance", "learned_log_z", "frozen_log_z", "gflowrl", "tba_prime")
    any_support = name not in (*of_p_star, "flowrl_linear_z", "a_star_po")
    no_beta = {"learner.beta_start": 0.0, "learner.beta_end": 0.0}
    without_reference = ("tpo", "maxrl", "raft", "gspo", "cispo", "oapl", "pmd_mean", "asymre", "topr")
    cases = {
        "one completion": ({"learner.completions": 1}, name in ("learned_log_z", "frozen_log_z", "ppo", "vine_ppo", "topr")),
        "two completions": ({"learner.completions": 2}, True),
        "all rows truncated": ({"sampling.top_p": 0.9}, any_support),
        "all rows explored": ({"sampling.explore_top_p_probability": 1.0}, any_support),
        "some rows explored": ({"sampling.explore_top_p_probability": 0.3}, name != "a_star_po"),
        "ends forced": ({"task.force_eos": True}, name != "a_star_po"),
        "rows drawn by reward": ({"replay.strategy": "softmax"}, name != "a_star_po"),
        "rows repeated": ({"replay.recent_fill": "repeat"}, name != "a_star_po"),
        "no β": (no_beta, any_support and name not in ("online_dpo", "oapl", "pmd_mean", "tpo")),
        "a moving reference": ({"learner.reference.kind": "ema"}, name not in (*without_reference, "frozen_log_z")),
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


UNUSED: list[tuple[dict[str, Any], dict[str, Any]]] = [  # settings, and what has them used
    ({"learner.clip_low": 0.1}, {"learner.objective": "grpo"}),
    ({"learner.gae_lambda": 1.0}, {"learner.objective": "ppo"}),
    ({"learner.decay": "cosine", "learner.schedule": "linear"}, {"learner.schedule": "wsd", "learner.decay_steps": 2}),
    ({"learner.schedule": "wsd"}, {"learner.decay_steps": 2}),
    ({"learner.reference.reset_steps": 3}, {"learner.reference.kind": "reset"}),
    ({"searchers.lag": 4, **INTERLEAVED}, {"schedule.mode": "asynchronous"}),
    ({"searchers.value_samples": 3}, {"task.step_ends": (",",)}),
    ({"searchers.prompt_candidates": 4}, {"searchers.prompt_selection": "posterior"}),
    ({"replay.strategy": "softmax", "replay.recent_probability": 1.0}, {"replay.recent_probability": 0.9}),
]


@pytest.mark.parametrize("changes, used_with", UNUSED, ids=" ".join)
def test_settings_that_would_not_be_used_are_refused_in_a_new_run(changes, used_with):
    (name, value), *_ = changes.items()
    told = "decay_steps=0 must be at least 1 with learner.schedule=wsd" if value == "wsd" else f"{name}={value} would not be used"
    checks.check(tiny_run.config_with(changes))  # a run that exists goes on
    with pytest.raises(ValueError, match=re.escape(told)):
        checks.check(tiny_run.config_with(changes), new=True)
    checks.check(tiny_run.config_with(changes | used_with), new=True)


@pytest.mark.parametrize("recipe", ["demo_baselines", "gsm8k_rho1b", "math_qwen2_5_7b", "tldr_pythia"])
def test_a_baseline_gets_rows_as_they_were_drawn_and_no_reference_that_it_does_not_read(recipe):
    assert set(baselines.BASELINES) == set(OBJECTIVES) - {"trajectory_balance", "learned_log_z", "frozen_log_z", "tba_prime"}
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
    def fail(error: ValueError, cause: OSError | None = None) -> None:
        raise error from cause

    found, mistake = Mistakes(), BadInput("lower steps")
    assert found.attempt(lambda: 3) == 3 and not found and found.attempt(fail, mistake) is None
    with pytest.raises(BadInput) as alone:
        found.end()
    assert alone.value is mistake
    for error in (Refused(["c=3", "d=4"]), Refused(["d=4"])):
        found.attempt(fail, error)
    with pytest.raises(Refused, match=r"^3 mistakes: \(1\) lower steps; \(2\) c=3; \(3\) d=4$") as told:
        found.end()
    assert not is_storage_failure(told.value)
    found.attempt(fail, ValueError("cannot write"), OSError(errno.ENOSPC, "no space"))
    with pytest.raises(Refused) as told:
        found.end()
    assert is_storage_failure(told.value)  # after which a role is started again
