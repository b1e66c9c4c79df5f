"""Settings that a new run would not use: whoever gives one expects something that does not happen."""

import dataclasses
from collections.abc import Callable
from typing import Any

from tba_jax.experiment.schema import SCHEMA
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.inputs import ObjectiveSettings
from tba_jax.objectives.objective import TEMPERATURES


def check(config: Any, require: Callable[[object, str], None]) -> None:
    """Refuses a setting that differs from its default although the run would not use it.

    Such settings are those of other objectives and learning-rate schedules; those of state values, without task.step_ends; those
    of prompt selection, with searchers.prompt_selection=uniform; and replay.age_decay_steps, where every query draws its newest
    rows. β is not among them: it scales a metric of every run. This check is for new runs and for --dry_run, since a run that
    exists goes on as it began.
    """
    learner, objective, defaults = config.learner, OBJECTIVES[config.learner.objective], SCHEMA.defaults()
    heads = {"log_z_learning_rate": objective.log_z_head, "value_learning_rate": objective.value_head}
    read = {"completions", *objective.settings, *(name for name, learned in heads.items() if learned)}
    names = [*(field.name for field in dataclasses.fields(ObjectiveSettings)), *heads]
    names += [f"{name}_{part}" for name in TEMPERATURES for part in ("start", "end")]
    for name in names:
        require(
            name.removesuffix("_start").removesuffix("_end") in read or learner[name] == defaults.learner[name],
            f"learner.{name}={learner[name]} would not be used: learner.objective={learner.objective} does not read it; leave it "
            f"at {defaults.learner[name]}",
        )
    require(
        learner.schedule != "wsd" or learner.decay_steps > 0,
        f"learner.decay_steps={learner.decay_steps} must be at least 1 with learner.schedule=wsd, whose rate would never decay; "
        "learner.schedule=constant is meant to",
    )
    for name, readers in (("decay", ("wsd",)), ("decay_steps", ("wsd",)), ("schedule_steps", ("linear", "wsd"))):
        require(
            learner.schedule in readers or learner[name] == defaults.learner[name],
            f"learner.{name}={learner[name]} would not be used: learner.schedule={learner.schedule} does not read it; leave it "
            f"at {defaults.learner[name]}",
        )
    for name in ("value_samples", "value_states"):
        value, default = config.searchers[name], defaults.searchers[name]
        require(
            config.task.step_ends or value == default,
            f"searchers.{name}={value} would not be used without task.step_ends; leave it at {default}",
        )
    for name in ("target_success_rate", "prompt_candidates"):
        value, default = config.searchers[name], defaults.searchers[name]
        require(
            config.searchers.prompt_selection == "posterior" or value == default,
            f"searchers.{name}={value} would not be used with searchers.prompt_selection={config.searchers.prompt_selection}; "
            f"leave it at {default}",
        )
    for name in ("recent_window", "recent_fill"):
        value, default = config.replay[name], defaults.replay[name]
        require(
            config.replay.recent_probability > 0 or value == default,
            f"replay.{name}={value} would not be used with replay.recent_probability=0; leave it at {default}",
        )
    for name in ("lag", "updates_per_search"):
        value, default = config.schedule[name], defaults.schedule[name]
        require(
            config.schedule.mode == "interleaved" or value == default,
            f"schedule.{name}={value} would not be used with schedule.mode=asynchronous; leave it at {default}, or set "
            "schedule.mode=interleaved",
        )
    require(
        config.replay.recent_probability < 1 or not config.replay.age_decay_steps,
        f"replay.age_decay_steps={config.replay.age_decay_steps} would not be used: with replay.recent_probability=1 every query "
        "draws its newest rows; leave it at 0",
    )
