"""Settings that a new run would not use: whoever gives one expects something that does not happen."""

from collections.abc import Callable
from typing import Any

from tba_jax.experiment.schema import SCHEMA
from tba_jax.learner.settings import HELD_REFERENCES
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.objective import TEMPERATURES
from tba_jax.schemas import flatten

# Setting -> the other setting that decides whether a run uses it, and the values of that one with which it does.
_USED_WITH: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "learner.decay": ("learner.schedule", lambda schedule: schedule == "wsd"),
    "learner.decay_steps": ("learner.schedule", lambda schedule: schedule == "wsd"),
    "learner.schedule_steps": ("learner.schedule", lambda schedule: schedule in ("linear", "wsd")),
    "learner.reference.reset_steps": ("learner.reference.kind", lambda kind: kind == "reset"),
    "learner.reference.ema_decay": ("learner.reference.kind", lambda kind: kind == "ema"),
    "learner.reference.reset_optimizer": ("learner.reference.kind", lambda kind: kind == "reset"),
    "learner.reference.offload": ("learner.reference.kind", lambda kind: kind in HELD_REFERENCES),
    "searchers.lag": ("schedule.mode", lambda mode: mode == "asynchronous"),
    "searchers.value_samples": ("task.step_ends", bool),
    "searchers.value_states": ("task.step_ends", bool),
    "searchers.target_success_rate": ("searchers.prompt_selection", lambda selection: selection == "posterior"),
    "searchers.prompt_candidates": ("searchers.prompt_selection", lambda selection: selection == "posterior"),
    "replay.merge_keep": ("replay.merge_duplicates", bool),
    "replay.recent_window": ("replay.recent_probability", bool),
    "replay.recent_fill": ("replay.recent_probability", bool),
    "replay.strategy": ("replay.recent_probability", lambda share: share < 1),
    "replay.inverse_temperature": ("replay.strategy", lambda strategy: strategy == "softmax"),
    "schedule.lag": ("schedule.mode", lambda mode: mode == "interleaved"),
    "schedule.updates_per_search": ("schedule.mode", lambda mode: mode == "interleaved"),
}


def check(config: Any, require: Callable[[object, str], None]) -> None:
    """Refuses a setting that differs from its default although the run would not use it.

    Such settings are those that only other objectives declare to read (Objective.settings), and those of _USED_WITH. A wsd
    schedule without its decay is refused likewise. β is not among them: it scales a metric of every run. This check is for new
    runs and for --dry_run, since a run that exists goes on as it began.
    """
    learner, values, defaults = config.learner, flatten(config.to_dict()), flatten(SCHEMA.defaults().to_dict())

    def refuse(name: str, why: str) -> None:
        value, default = values[name], defaults[name]
        require(value == default, f"{name}={value} would not be used {why}; leave it at {default}")

    of_any = {name for objective in OBJECTIVES.values() for name in objective.settings}
    for name in sorted(of_any - {"beta", *OBJECTIVES[learner.objective].settings}):
        for each in (f"{name}_start", f"{name}_end") if name in TEMPERATURES else (name,):
            refuse(f"learner.{each}", f"with learner.objective={learner.objective}, which does not read it")
    for name, (other, uses) in _USED_WITH.items():
        if not uses(values[other]) and values[name] != "wait":  # recent_fill=wait also says which queries are drawn
            refuse(name, f"with {other}={values[other]}")
    require(
        learner.schedule != "wsd" or learner.decay_steps > 0,
        f"learner.decay_steps={learner.decay_steps} must be at least 1 with learner.schedule=wsd, whose rate would never decay: "
        "take learner.schedule=constant for that",
    )
