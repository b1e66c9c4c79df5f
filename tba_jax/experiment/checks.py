"""Rules that a config can break by itself: every setting against its limits, and settings against each other.

Every sentence names the values, the limit and the settings. Nothing is compiled or written before all rules hold.
"""

import dataclasses
import itertools
from collections.abc import Collection
from typing import Any

from tba_jax.experiment import flow
from tba_jax.experiment.schema import SCHEMA
from tba_jax.learner.optimizer import SCHEDULES
from tba_jax.learner.settings import HELD_REFERENCES
from tba_jax.models import layers
from tba_jax.models.presets import PRESETS
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.inputs import ObjectiveSettings
from tba_jax.objectives.objective import TEMPERATURES, Objective
from tba_jax.replay.selection import STRATEGIES
from tba_jax.schemas import require
from tba_jax.tasks import TASKS, custom_task


def check(config: Any, *, weights: bool = True) -> None:
    """Checks every rule that one config can break by itself.

    Args: weights: False: for a dry run, where model.preset may say the shape in place of the weights of model.path.

    Raises:
      ValueError: one sentence about the first rule that does not hold.
    """
    SCHEMA.check(config, _registries(config.task.name))
    _check_responses(config.task)
    _check_policy(config, weights=weights)
    _check_batch(config)
    _check_coefficients(config.learner)
    _check_replay(config)
    _check_reference(config)
    _check_objective(config, OBJECTIVES[config.learner.objective])
    _check_interleaved(config)
    _check_searchers(config)
    require(not (stuck := flow.refusal(config)), stuck)


def _registries(task: str) -> dict[str, Collection[str]]:
    """The names that experiment/schema.py calls by their registry; `task`, where it is FILE.py:CLASS, is a name too."""
    return {
        "tasks": [*TASKS, *([task] if custom_task.is_named(task) else [])],
        "objectives": OBJECTIVES,
        "schedules": SCHEDULES,
        "strategies": STRATEGIES,
        "presets": ["", *PRESETS],
        "remat": layers.REMAT,
    }


def _check_responses(task: Any) -> None:
    require(
        task.min_response_length <= task.response_length,
        f"task.min_response_length={task.min_response_length} is more than task.response_length={task.response_length}",
    )
    for token in task.banned_tokens:
        require(
            isinstance(token, int) and not isinstance(token, bool) and token >= 0,
            f"task.banned_tokens={tuple(task.banned_tokens)} must hold token ids, whole numbers from 0, not {token!r}",
        )
    for name in ("stop_strings", "step_ends"):
        for text in task[name]:
            require(
                isinstance(text, str) and text != "",
                f"task.{name}={tuple(task[name])} must hold texts of at least one character, not {text!r}",
            )
    for stop, step in itertools.product(task.stop_strings, task.step_ends):
        require(
            stop not in step,
            f"task.step_ends={tuple(task.step_ends)} holds {step!r}, which ends no step: by then {stop!r} of task.stop_strings "
            "has ended the response",
        )


def _check_policy(config: Any, *, weights: bool) -> None:
    model, lora = config.model, config.lora
    require(
        not (model.path and config.warm_start.steps),
        f"model.path={model.path!r} and warm_start.steps={config.warm_start.steps} exclude each other: a pretrained policy needs "
        "no warm start",
    )
    require(
        not (model.path and model.preset and weights),
        f"model.path={model.path!r} and model.preset={model.preset!r} exclude each other, but for a dry run, "
        "which takes the tokenizer of the one and the shape of the other",
    )
    style = config.task.countdown.style
    require(
        model.path or config.task.name != "countdown" or style == "characters",
        f"task.countdown.style={style} needs a pretrained model: set model.path to its folder",
    )
    require(not lora.rank or lora.targets, f"lora.rank={lora.rank} needs lora.targets, names or patterns of linear maps")


def _check_batch(config: Any) -> None:
    """The rows of an update, and its steps."""
    learner, mesh = config.learner, config.learner.mesh
    rows, tokens, ways = learner.queries * learner.completions, learner.micro_batch_tokens, mesh.data * max(mesh.fsdp, 1)
    row_tokens = config.task.prompt_length + config.task.response_length
    require(
        config.searchers.samples_per_query >= learner.completions,
        f"searchers.samples_per_query={config.searchers.samples_per_query} is less than "
        f"learner.completions={learner.completions}",
    )
    require(
        not tokens or tokens >= row_tokens,
        f"learner.micro_batch_tokens={tokens} does not hold one row of task.prompt_length + task.response_length = {row_tokens} "
        "tokens; 0 takes the whole batch at once",
    )
    require(
        mesh.data == -1 or rows % max(ways, 1) == 0,
        f"the batch of {rows} rows does not divide by learner.mesh data={mesh.data} × fsdp={max(mesh.fsdp, 1)} = {ways}",
    )
    require(
        learner.warmup_steps + learner.decay_steps <= learner.steps,
        f"learner.warmup_steps={learner.warmup_steps} + learner.decay_steps={learner.decay_steps} exceed "
        f"learner.steps={learner.steps}",
    )


def _check_coefficients(learner: Any) -> None:
    """β, γ and τ."""
    for name in ("beta", "ref_temperature", "reward_temperature"):
        start, end, steps = (learner[f"{name}_{part}"] for part in ("start", "end", "steps"))
        require(
            steps > 0 or start == end,
            f"learner.{name}_start={start} would not be used: learner.{name}_steps=0 means {end}, its end, at every step",
        )


def _check_replay(config: Any) -> None:
    learner, replay = config.learner, config.replay
    kept = learner.queries * min(replay.capacity_per_query, config.searchers.samples_per_query)
    require(
        replay.capacity >= kept,
        f"replay.capacity={replay.capacity} cannot hold the {kept} responses to learner.queries={learner.queries} queries",
    )
    require(
        replay.capacity_per_query >= learner.completions,
        f"replay.capacity_per_query={replay.capacity_per_query} is less than learner.completions={learner.completions}",
    )
    share, distance = replay.merge_edit_distance, replay.merge_cosine_distance
    both = f"replay.merge_edit_distance={share} and replay.merge_cosine_distance={distance}"
    require(not (share and distance), f"{both} exclude each other")
    require(
        not distance or config.task.embedding_path,
        f"replay.merge_cosine_distance={distance} compares embeddings, which need task.embedding_path",
    )
    require(
        not (share or distance) or replay.merge_duplicates,
        f"{both} merge near-duplicates, which replay.merge_duplicates=False forbids",
    )
    mount = tuple(replay.mount)
    require(
        all(isinstance(folder, str) and folder for folder in mount),
        f'replay.mount={mount} must hold folders of runs, such as \'("runs/first", "runs/second")\'',
    )


def _check_reference(config: Any) -> None:
    reference = config.learner.reference
    require(
        not reference.reset_optimizer or reference.kind == "reset",
        f"learner.reference.reset_optimizer=True needs learner.reference.kind=reset, not {reference.kind}",
    )
    require(
        not reference.offload or reference.kind in HELD_REFERENCES,
        f"learner.reference.offload=True needs a reference that the learner holds: learner.reference.kind=reset or ema, not "
        f"{reference.kind}",
    )
    require(
        reference.kind != "surrogate" or not config.replay.mount,
        "learner.reference.kind=surrogate compares with the policy of an earlier step of this run, which rows of "
        f"replay.mount={tuple(config.replay.mount)} do not come from",
    )


def _check_objective(config: Any, objective: Objective) -> None:
    """What the objective needs, and what it does not read."""
    learner, named = config.learner, f"learner.objective={config.learner.objective}"
    require(
        learner.completions >= objective.min_completions,
        f"learner.completions={learner.completions} must be at least {objective.min_completions}: {named} compares the "
        "completions of a query with each other",
    )
    for name in ("beta_start", "beta_end"):
        require(
            learner[name] > 0 or not objective.positive_beta,
            f"learner.{name}={learner[name]} must be above 0: {named} has no optimum, or nothing to learn from, without β",
        )
    if objective.full_support:
        _check_full_support(config.sampling, named)
    require(
        objective.moving_reference or learner.reference.kind == "initial",
        f"learner.reference.kind={learner.reference.kind} moves a reference that {named} does not read: leave it at initial",
    )
    require(
        not objective.state_values or config.task.step_ends,
        f"{named} needs rows with the values of the states between steps: say by task.step_ends what ends a step",
    )


def _check_full_support(sampling: Any, named: str) -> None:
    advice = f"{named} needs full support: truncate a share of the rows by sampling.explore_top_p_probability below 1"
    for name, on in (("top_k", sampling.top_k > 0), ("top_p", sampling.top_p < 1), ("min_p", sampling.min_p > 0)):
        require(not on, f"sampling.{name}={sampling[name]} would truncate every row; {advice}")
    require(sampling.explore_top_p_probability < 1, f"sampling.explore_top_p_probability=1 would truncate every row; {advice}")


def _check_interleaved(config: Any) -> None:
    """What schedule.mode=interleaved asks of the snapshots and of the one process."""
    keep, lag = config.publish.keep, config.schedule.lag
    searchers, evaluation = config.searchers, config.evaluation
    if config.schedule.mode != "interleaved":
        return
    require(keep == 0 or keep > lag, f"publish.keep={keep} must be 0 (all) or more than schedule.lag={lag}")
    require(
        evaluation.task_devices == searchers.task_devices or not evaluation.enabled,
        f"evaluation.task_devices={evaluation.task_devices} must be searchers.task_devices={searchers.task_devices} with "
        "schedule.mode=interleaved, where both use one process' models",
    )


def _check_searchers(config: Any) -> None:
    searchers = config.searchers
    require(
        searchers.samples_per_query >= 2 or not config.task.step_ends,
        f"searchers.samples_per_query={searchers.samples_per_query} must be at least 2 with task.step_ends: the value of the "
        "state before a response is the mean reward of the query's other samples",
    )
    require(
        searchers.count > 0 or (config.replay.mount and config.schedule.mode == "asynchronous"),
        f"searchers.count={searchers.count} needs replay.mount, whose rows are trained on, and schedule.mode=asynchronous",
    )


def check_all_are_read(config: Any) -> None:
    """Refuses a setting that differs from its default although the run would not use it.

    These are settings of objectives other than the config's own, and settings of the values of states without task.step_ends. β
    is not among them: it scales a metric of every run. A run that exists goes on as it
    began: this check is for new runs and for --dry_run.

    Raises:
      ValueError: one sentence about the first such setting.
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
    for name in ("value_samples", "value_states"):
        value, default = config.searchers[name], defaults.searchers[name]
        require(
            config.task.step_ends or value == default,
            f"searchers.{name}={value} would not be used without task.step_ends; leave it at {default}",
        )
