"""Settings that a new run would not use are refused, and recipes of baselines set those that their objectives read."""

import re

import pytest

from configs import baselines, demo_baselines
from tba_jax.experiment import checks
from tba_jax.learner.optimizer import SCHEDULES
from tba_jax.objectives import OBJECTIVES
from tests.experiment.test_checks import NEEDED
from tests.support import small_recipes, tiny_run

# Setting of the learner -> a value that breaks no rule but that of the objectives that do not read it.
NOT_READ_BY_ALL = {
    "importance_clip": 3.0,
    "log_ratio_clip": 7.0,
    "row_divisor": "row_length",
    "clip_low": 0.1,
    "clip_high": 0.3,
    "sequence_clip_low": 1e-3,
    "sequence_clip_high": 1e-3,
    "icepop_low": 0.2,
    "icepop_high": 2.0,
    "gae_lambda": 1.0,
    "value_coefficient": 0.5,
    "ref_temperature_end": 1.2,
    "reward_temperature_start": 2.0,
    "log_z_learning_rate": 0.5,
    "value_learning_rate": 0.5,
    "asymre_delta": -0.3,
    "topr_baseline": 0.5,
}
READ = {
    "trajectory_balance": {"ref_temperature_end", "reward_temperature_start"},
    "learned_log_z": {"ref_temperature_end", "reward_temperature_start", "log_z_learning_rate"},
    "tba_prime": {"ref_temperature_end", "reward_temperature_start", "importance_clip", "log_ratio_clip", "row_divisor"},
    **dict.fromkeys(("proximal_rloo", "vine_ppo", "grpo", "dr_grpo"), frozenset({"clip_low", "clip_high"})),
    "ppo": {"clip_low", "clip_high", "gae_lambda", "value_coefficient", "value_learning_rate"},
    "gspo": {"sequence_clip_low", "sequence_clip_high"},
    "cispo": {"clip_high"},
    "icepop": {"icepop_low", "icepop_high"},
    **dict.fromkeys(("reinforce", "rloo", "online_dpo", "raft"), frozenset()),
    **dict.fromkeys(("oapl", "pmd_mean", "a_star_po"), frozenset()),
    "flowrl": {"clip_low", "clip_high", "log_z_learning_rate"},
    "asymre": {"asymre_delta"},
    "topr": {"topr_baseline"},
}


@pytest.mark.parametrize("name", READ)
def test_settings_that_an_objective_does_not_read_are_refused(name):
    assert set(READ) == set(OBJECTIVES)
    for setting, value in NOT_READ_BY_ALL.items():
        steps = {f"learner.{setting.rpartition('_')[0]}_steps": 5} if "temperature" in setting else {}
        config = tiny_run.config_with({"learner.objective": name, f"learner.{setting}": value, **steps, **NEEDED.get(name, {})})
        checks.check(config)
        if setting in READ[name]:
            checks.check(config, new=True)
            continue
        sentence = f"learner.{setting}={value} would not be used with learner.objective={name}, which does not read it; leave"
        with pytest.raises(ValueError, match=re.escape(sentence)):
            checks.check(config, new=True)


@pytest.mark.parametrize(
    "setting, value, read_by",
    [("decay", "cosine", {"wsd"}), ("schedule_steps", 600, {"linear", "wsd"}), ("decay_steps", 3, {"wsd"})],
    ids=["decay", "steps", "decay steps"],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_settings_that_a_schedule_does_not_read_are_refused(schedule, setting, value, read_by):
    of_wsd = {"learner.decay_steps": 2} if schedule == "wsd" else {}
    config = tiny_run.config_with({"learner.schedule": schedule, **of_wsd, f"learner.{setting}": value})
    checks.check(config)
    if schedule in read_by:
        checks.check(config, new=True)
        return
    sentence = rf"learner\.{setting}={value} would not be used with learner\.schedule={schedule}; leave it at "
    with pytest.raises(ValueError, match=sentence):
        checks.check(config, new=True)


def test_a_schedule_that_never_decays_is_refused():
    config = tiny_run.config_with({"learner.schedule": "wsd"})
    checks.check(config)  # a run that exists goes on
    with pytest.raises(ValueError, match=r"learner\.decay_steps=0 must be at least 1 with learner\.schedule=wsd"):
        checks.check(config, new=True)


@pytest.mark.parametrize(
    "changes, read_with",
    [
        ({"searchers.target_success_rate": 0.3}, {"searchers.prompt_selection": "posterior"}),
        ({"searchers.prompt_candidates": 4}, {"searchers.prompt_selection": "posterior"}),
        ({"replay.strategy": "softmax", "replay.recent_probability": 1.0}, {"replay.recent_probability": 0.9}),
        ({"replay.inverse_temperature": 3.0}, {"replay.strategy": "softmax"}),
        ({"learner.reference.reset_steps": 3}, {"learner.reference.kind": "reset"}),
        ({"learner.reference.ema_decay": 0.5}, {"learner.reference.kind": "ema"}),
        ({"learner.reference.reset_optimizer": True}, {"learner.reference.kind": "reset"}),
        ({"learner.reference.offload": True}, {"learner.reference.kind": "reset"}),
        ({"replay.merge_keep": "best", "replay.merge_duplicates": False}, {"replay.merge_duplicates": True}),
        ({"searchers.lag": 4, "schedule.mode": "interleaved"}, {"schedule.mode": "asynchronous"}),
        ({"schedule.lag": 2, "schedule.mode": "asynchronous"}, {"schedule.mode": "interleaved"}),
        ({"schedule.updates_per_search": 4, "schedule.mode": "asynchronous"}, {"schedule.mode": "interleaved"}),
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


@pytest.mark.parametrize("name", baselines.BASELINES)
def test_the_recipe_of_every_baseline_is_allowed(name):
    config = demo_baselines.get_config(name)
    checks.check(config)
    checks.check(config, new=True)
    assert config.learner.objective == name
    published = {setting for setting in baselines.BASELINES[name] if not setting.startswith("beta_")}
    paces = {"value_learning_rate", "log_z_learning_rate"}
    assert published == READ[name] - paces, "a number for each setting that it reads but the pace of heads"


def test_every_baseline_has_a_recipe():
    assert set(baselines.BASELINES) == set(OBJECTIVES) - {"trajectory_balance", "learned_log_z", "tba_prime"}


@pytest.mark.parametrize("recipe", ["demo_baselines", "gsm8k_rho1b", "math_qwen2_5_7b", "tldr_pythia"])
@pytest.mark.parametrize("name", baselines.BASELINES)
def test_a_baseline_gets_rows_as_they_were_drawn_and_no_reference_that_it_does_not_read(recipe, name):
    c, objective = small_recipes.config(f"{recipe}:{'410m-' if recipe == 'tldr_pythia' else ''}{name}"), OBJECTIVES[name]
    reads = objective.reads_reference and not (objective.k3 and c.learner.beta_start == c.learner.beta_end == 0)
    assert c.learner.reference.kind == ("initial" if reads else "none")
    rows = c.replay
    assert not rows.merge_duplicates and rows.recent_fill == "wait" and rows.strategy == "uniform"
    assert c.searchers.samples_per_query >= c.learner.completions
    assert not (objective.as_drawn and c.sampling.explore_top_p_probability)
    checks.check(c, new=True)
