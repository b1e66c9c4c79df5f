"""Rules that a config can break by itself: every setting against its limits, and settings against each other.

Every sentence names the values, the limit and the settings. Nothing is compiled or written before all rules hold.
"""

import itertools
from collections.abc import Callable, Collection
from typing import Any

from tba_jax.experiment import flow, meshes
from tba_jax.experiment.mistakes import Mistakes
from tba_jax.experiment.schema import SCHEMA
from tba_jax.learner.optimizer import DECAYS, SCHEDULES
from tba_jax.learner.settings import HELD_REFERENCES
from tba_jax.models import hardware, layers
from tba_jax.models.presets import PRESETS
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.objective import TEMPERATURES, Objective
from tba_jax.replay.selection import STRATEGIES
from tba_jax.schemas import flatten
from tba_jax.tasks import TASKS, custom_task
from tba_jax.telemetry import trackers

# Keeps the sentence as a mistake unless the condition holds, see Mistakes.require.
Require = Callable[[object, str], None]


def check(config: Any, *, weights: bool = True, new: bool = False) -> None:
    """Checks every setting by itself, and where all hold, settings against each other.

    Args:
      weights: False: for a dry run, where model.preset may say the shape in place of the weights of model.path.
      new: for a new run and for a dry run: a setting that the run would not use is a mistake too. A run that is there goes on.

    Raises:
      ValueError: a sentence about each rule that is broken.
    """
    found = Mistakes()
    _check_each(config, found.require)
    found.end()
    _check_model(config, found.require, weights=weights)
    for rule in (_check_responses, _check_update, _check_replay, _check_objective, _check_interleaved, _check_searchers):
        rule(config, found.require)
    for sentence in (*flow.refusals(config), *trackers.refused_names(config.metrics)):
        found.require(False, sentence)
    mesh = config.learner.mesh
    found.attempt(meshes.micro_batch_rows, config, ways=max(mesh.data, 1) * max(mesh.fsdp, 1))
    if new:
        _check_used(config, found.require)
    found.end()


def _check_each(config: Any, require: Require) -> None:
    """Every setting, whatever the others are."""
    for sentence in SCHEMA.refusals(config, _registries(config.task.name)).values():
        require(False, sentence)
    texts = (lambda value: isinstance(value, str) and value != "", "texts of at least one character")
    for name, (allowed, what) in {
        "task.banned_tokens": (lambda value: type(value) is int and value >= 0, "token ids, whole numbers from 0"),
        "task.stop_strings": texts,
        "task.step_ends": texts,
        # Not a tuple whose texts have lost their quotes to the shell.
        "replay.mount": (
            lambda value: isinstance(value, str) and value != "" and value[0] != "(",
            'folders of runs, such as \'("runs/first", "runs/second")\'',
        ),
    }.items():
        section, _, setting = name.partition(".")
        values = tuple(config[section][setting])
        wrong = [value for value in values if not allowed(value)]
        require(not wrong, f"{name}={values} must hold {what}, not {wrong[0] if wrong else ''!r}")
    for section in ("learner", "searchers", "evaluation"):
        for axis, size in config[section].mesh.items():
            other = {"data": -1, "fsdp": 0 if section == "learner" else 1}.get(axis, 1)
            also = {-1: ", or -1 for all devices that are left", 0: ", or 0 for as many as the state needs"}.get(other, "")
            require(size >= 1 or size == other, f"{section}.mesh.{axis}={size} must be at least 1{also}")


def _registries(task: str) -> dict[str, Collection[str]]:
    """The names that experiment/schema.py calls by their registry; `task`, where it is FILE.py:CLASS, is a name too."""
    return {
        "tasks": [*TASKS, *([task] if custom_task.is_named(task) else [])],
        "objectives": OBJECTIVES,
        "schedules": SCHEDULES,
        "decays": DECAYS,
        "strategies": STRATEGIES,
        "presets": ["", *PRESETS],
        "remat": (*layers.REMAT, hardware.AUTO),
        "sinks": tuple(trackers.TRACKERS),
    }


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


def _check_used(config: Any, require: Require) -> None:
    """A setting that differs from its default is one that the run uses: objectives declare those of theirs that they read
    (Objective.settings). β scales a metric of every run."""
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
        f"learner.decay_steps={learner.decay_steps} must be at least 1 with learner.schedule=wsd, whose rate would never decay",
    )


def _check_responses(config: Any, require: Require) -> None:
    task = config.task
    require(
        task.min_response_length <= task.response_length,
        f"task.min_response_length={task.min_response_length} is more than task.response_length={task.response_length}",
    )
    require(
        task.response_length > 1 or not task.force_eos,
        f"task.response_length={task.response_length} must be at least 2 with task.force_eos, which makes the last token the end",
    )
    for stop, step in itertools.product(task.stop_strings, task.step_ends):
        require(
            stop not in step,
            f"task.step_ends={tuple(task.step_ends)} holds {step!r}, which ends no step: by then {stop!r} of task.stop_strings "
            "has ended the response",
        )
    require(
        config.searchers.samples_per_query >= 2 or not task.step_ends,
        f"searchers.samples_per_query={config.searchers.samples_per_query} must be at least 2 with task.step_ends: the value of "
        "the state before a response is the mean reward of the query's other samples",
    )


def _check_model(config: Any, require: Require, *, weights: bool) -> None:
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
    # Merged adapters and rounded weights are made on the devices, from the whole of the policy.
    made = [f"the adapters of lora.rank={lora.rank} are merged"] if lora.rank else []
    rounded = [f"searchers.weights={config.searchers.weights} rounds them"] if config.searchers.weights != "full" else []
    for section, first in {"searchers": rounded + made, "evaluation": made}.items():
        told = f"{section}.swap_memory=in_place takes up snapshots as they are, but {' and '.join(first)} first; use beside"
        require(config[section].swap_memory == "beside" or not first, told)


def _check_update(config: Any, require: Require) -> None:
    """The rows of an update, its learning rate and its coefficients."""
    learner = config.learner
    require(
        config.searchers.samples_per_query >= learner.completions,
        f"searchers.samples_per_query={config.searchers.samples_per_query} is less than "
        f"learner.completions={learner.completions}",
    )
    require(
        not learner.schedule_steps or learner.schedule_steps >= learner.steps,
        f"learner.schedule_steps={learner.schedule_steps} is less than learner.steps={learner.steps}: the last updates would "
        "have a learning rate of 0",
    )
    steps = "learner.schedule_steps" if learner.schedule_steps else "learner.steps"
    most = learner.schedule_steps or learner.steps
    require(
        learner.warmup_steps + learner.decay_steps <= most,
        f"learner.warmup_steps={learner.warmup_steps} + learner.decay_steps={learner.decay_steps} exceed {steps}={most}",
    )
    for name in ("beta", *TEMPERATURES):
        start, end, over = (learner[f"{name}_{part}"] for part in ("start", "end", "steps"))
        require(
            over > 0 or start == end,
            f"learner.{name}_start={start} would not be used: learner.{name}_steps=0 means {end}, its end, at every step",
        )


def _check_replay(config: Any, require: Require) -> None:
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
    require(
        replay.recent_fill != "wait" or not replay.merge_duplicates,
        "replay.recent_fill=wait draws no query before it has learner.completions rows, and a query whose responses are merged "
        "may never have them: it needs replay.merge_duplicates=False",
    )


def _check_objective(config: Any, require: Require) -> None:
    """What the objective and its reference need."""
    learner, reference = config.learner, config.learner.reference.kind
    objective, named = OBJECTIVES[learner.objective], f"learner.objective={learner.objective}"
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
    require(
        not learner.clip_norm or objective.reward_unit is not None,
        f"learner.clip_norm={learner.clip_norm} is in units of the reward, and {named} does not say what a gradient of its loss "
        "is in that unit (reward_unit in tba_jax/objectives/__init__.py): set it to 0",
    )
    require(
        objective.reads_reference or reference in ("initial", "none"),
        f"learner.reference.kind={reference} moves a reference that {named} does not read: leave it at initial",
    )
    require(
        reference != "none" or not objective.k3 or learner.beta_start == learner.beta_end == 0,
        f"learner.beta_start={learner.beta_start} and learner.beta_end={learner.beta_end} must be 0 with "
        f"learner.reference.kind=none: {named} would estimate the KL from a reference that is not there",
    )
    for name in ("ref_temperature_start", "ref_temperature_end"):
        require(
            reference != "none" or learner[name] == 1,
            f"learner.{name}={learner[name]} would not be used: learner.reference.kind=none has no reference to temper; "
            "leave it at 1",
        )
    require(
        reference != "ema" or not config.lora.rank,
        f"lora.rank={config.lora.rank} trains adapters, and the product of averages of A and B is not the average of A B: "
        "learner.reference.kind=ema needs lora.rank=0; take learner.reference.kind=reset",
    )
    require(
        not objective.state_values or config.task.step_ends,
        f"{named} needs rows with the values of the states between steps: say by task.step_ends what ends a step",
    )
    _check_rows_of(objective, config, named, require)


def _check_rows_of(objective: Objective, config: Any, named: str, require: Require) -> None:
    """How the rows of an objective must be drawn, which reads π_behaviour or needs its support."""
    sampling, replay, share = config.sampling, config.replay, config.sampling.explore_top_p_probability
    if objective.as_drawn:
        weighs = f"{named} weighs rows by π_ref/π_behaviour, as π_behaviour drew them"
        require(
            replay.recent_fill == "wait",
            f"replay.recent_fill={replay.recent_fill} must be wait: {weighs}, and a row that is repeated would "
            "have its own reward in its estimate of V*",
        )
        require(not config.task.force_eos, f"task.force_eos=True must be False: {weighs}, and a forced end was not drawn")
        for name, value in {"strategy": "softmax", "merge_keep": "best"}.items():
            require(replay[name] != value, f"replay.{name}={value} chooses rows by their rewards: {weighs}")
        advice = f"{named} weighs rows by π_ref/π_behaviour, and a truncated row tells nothing of what it could not have been"
        require(share == 0, f"sampling.explore_top_p_probability={share} must be 0: {advice}")
    elif objective.full_support:
        advice = f"{named} needs full support: truncate a share of the rows by sampling.explore_top_p_probability below 1"
        require(share < 1, f"sampling.explore_top_p_probability=1 would truncate every row; {advice}")
    else:
        return
    for name, on in (("top_k", sampling.top_k > 0), ("top_p", sampling.top_p < 1), ("min_p", sampling.min_p > 0)):
        require(not on, f"sampling.{name}={sampling[name]} would truncate every row; {advice}")


def _check_interleaved(config: Any, require: Require) -> None:
    """What schedule.mode=interleaved asks of the snapshots and of the one process."""
    keep, lag = config.publish.keep, config.schedule.lag
    searchers, evaluation = config.searchers, config.evaluation
    if config.schedule.mode != "interleaved":
        return
    require(
        config.trainer.processes == 1,
        f"trainer.processes={config.trainer.processes} must be 1 with schedule.mode=interleaved, which runs in one process",
    )
    require(keep == 0 or keep > lag, f"publish.keep={keep} must be 0 (all) or more than schedule.lag={lag}")
    require(
        evaluation.task_devices == searchers.task_devices or not evaluation.enabled,
        f"evaluation.task_devices={evaluation.task_devices} must be searchers.task_devices={searchers.task_devices} with "
        "schedule.mode=interleaved, where both use one process' models",
    )


def _check_searchers(config: Any, require: Require) -> None:
    searchers, publish, asynchronous = config.searchers, config.publish, config.schedule.mode == "asynchronous"
    require(
        searchers.count > 0 or (config.replay.mount and asynchronous),
        f"searchers.count={searchers.count} needs replay.mount, whose rows are trained on, and schedule.mode=asynchronous",
    )
    posterior, missing_eos = searchers.prompt_selection == "posterior", config.task.missing_eos_reward
    require(
        not posterior or searchers.queries_per_batch >= config.learner.queries,
        f"searchers.queries_per_batch={searchers.queries_per_batch} is less than learner.queries={config.learner.queries}: with "
        "searchers.prompt_selection=posterior a batch must have the queries of an update, since the next may have the same ones",
    )
    require(
        not posterior or missing_eos is None or 0 <= missing_eos <= 1,
        f"task.missing_eos_reward={missing_eos} must be within [0, 1] with searchers.prompt_selection=posterior, which counts "
        "successes",
    )
    lag, least = searchers.lag, flow.least_kept(config)
    if lag and asynchronous:
        require(
            lag % publish.every_steps == 0,
            f"searchers.lag={lag} must be a multiple of publish.every_steps={publish.every_steps}: other steps have no snapshot",
        )
        require(
            publish.keep == 0 or publish.keep >= least,
            f"searchers.lag={lag} needs publish.keep={publish.keep} to be 0 (all) or at least {least}: a snapshot is taken up "
            "when searchers.lag / publish.every_steps newer ones are there, and two more may come while it is read",
        )
