"""Settings that a new run would not use: whoever gives one expects something that does not happen."""

import dataclasses
from collections.abc import Callable
from typing import Any

from tba_jax.experiment.schema import SCHEMA
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.inputs import ObjectiveSettings
from tba_jax.objectives.objective import TEMPERATURES
from tba_jax.schemas import flatten


def check(config: Any, require: Callable[[object, str], None]) -> None:
    """Refuses a setting that differs from its default although the run would not use it.

    Such settings are those of other objectives, references and learning-rate schedules; those of state values, without
    task.step_ends; those of prompt selection, with searchers.prompt_selection=uniform; those of recent rows, or of older ones,
    where none are drawn; and those of search and training in turn. A wsd schedule without its decay is refused likewise. β is
    not among them: it scales a metric of every run. This check is for new runs and for --dry_run, since a run that exists goes
    on as it began.
    """
    values, defaults = flatten(config.to_dict()), flatten(SCHEMA.defaults().to_dict())

    def used(name: str, where: object, otherwise: str) -> None:
        """Args: where: whether the run uses the setting. otherwise: why it does not, the sentence after "would not be used"."""
        value, default = values[name], defaults[name]
        require(where or value == default, f"{name}={value} would not be used{otherwise}; leave it at {default}")

    learner, replay, objective = config.learner, config.replay, OBJECTIVES[config.learner.objective]
    heads = {"log_z_learning_rate": objective.log_z_head, "value_learning_rate": objective.value_head}
    read = {"completions", *objective.settings, *(name for name, learned in heads.items() if learned)}
    names = [*(field.name for field in dataclasses.fields(ObjectiveSettings)), *heads]
    names += [f"{name}_{part}" for name in TEMPERATURES for part in ("start", "end")]
    for name in names:
        is_read = name.removesuffix("_start").removesuffix("_end") in read
        used(f"learner.{name}", is_read, f": learner.objective={learner.objective} does not read it")
    for name, readers in (("decay", ("wsd",)), ("decay_steps", ("wsd",)), ("schedule_steps", ("linear", "wsd"))):
        used(f"learner.{name}", learner.schedule in readers, f": learner.schedule={learner.schedule} does not read it")
    for name in ("value_samples", "value_states"):
        used(f"searchers.{name}", config.task.step_ends, " without task.step_ends")
    selection = config.searchers.prompt_selection
    for name in ("target_success_rate", "prompt_candidates"):
        used(f"searchers.{name}", selection == "posterior", f" with searchers.prompt_selection={selection}")
    recent = replay.recent_probability > 0
    used("replay.recent_window", recent, " with replay.recent_probability=0")
    used("replay.recent_fill", recent or replay.recent_fill == "wait", " with replay.recent_probability=0")
    every_query = " with replay.recent_probability=1: every query draws its newest rows"
    used("replay.strategy", replay.recent_probability < 1, every_query)
    used("replay.inverse_temperature", replay.strategy == "softmax", f" with replay.strategy={replay.strategy}")
    kind = learner.reference.kind
    used("learner.reference.reset_steps", kind == "reset", f" with learner.reference.kind={kind}")
    used("learner.reference.ema_decay", kind == "ema", f" with learner.reference.kind={kind}")
    for name in ("lag", "updates_per_search"):
        used(f"schedule.{name}", config.schedule.mode == "interleaved", " without schedule.mode=interleaved")
    require(
        learner.schedule != "wsd" or learner.decay_steps > 0,
        f"learner.decay_steps={learner.decay_steps} must be at least 1 with learner.schedule=wsd, whose rate would never decay: "
        "take learner.schedule=constant for that",
    )
