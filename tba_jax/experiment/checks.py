"""Rules that one config can break by itself, each refused with one sentence."""

import dataclasses
import itertools
import math
from typing import Any

from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.inputs import ObjectiveSettings
from tba_jax.objectives.objective import TEMPERATURES, Objective
from tba_jax.run.contract import HELD_REFERENCES, flatten


def check(config: Any) -> None:
    """Checks every rule that one config can break by itself, before anything is compiled or written.

    Raises:
      ValueError: one sentence that names the values, the limit and the setting.
    """
    leaves = flatten(config.to_dict())
    for name in _AT_LEAST_ONE:
        _require(leaves[name] >= 1, f"{name}={leaves[name]} must be at least 1")
    for name in _AT_LEAST_ZERO:
        _require(leaves[name] >= 0, f"{name}={leaves[name]} must not be negative")
    for name, allowed in _CHOICES.items():
        _require(leaves[name] in allowed, f"{name}={leaves[name]!r} is not one of {list(allowed)}")
    for name in _PROBABILITIES:
        _require(0 <= leaves[name] <= 1, f"{name}={leaves[name]} must be within [0, 1]")
    for name in _POSITIVE:
        _require(0 < leaves[name] < math.inf, f"{name}={leaves[name]} must be above 0 and finite")
    _require(leaves["seed"] < 2**32, f"seed={leaves['seed']} must be below 2**32")
    _check_responses(config.task)
    _check_learner(config)
    _check_reference(config)
    _check_sampling(config.sampling)
    _check_ratios(config.learner)
    if config.learner.objective in OBJECTIVES:  # an unknown name is refused where names are, with the closest one
        _check_objective(config, OBJECTIVES[config.learner.objective])
    _check_run(config)


_AT_LEAST_ONE = (
    "task.prompt_length",
    "task.response_length",
    "task.arithmetic.digits",
    "task.arithmetic.train_queries",
    "task.arithmetic.heldout_queries",
    "task.countdown.largest",
    "task.countdown.largest_target",
    "task.countdown.train_queries",
    "task.countdown.heldout_queries",
    "task.story_sentiment.opening_words",
    "task.story_sentiment.heldout_queries",
    "task.tldr.batch_rows",
    "model.layers",
    "model.width",
    "model.heads",
    "model.kv_heads",
    "model.head_size",
    "model.ffn",
    "searchers.queries_per_batch",
    "searchers.samples_per_query",
    "searchers.value_samples",
    "searchers.reward_batches",
    "evaluation.samples_per_query",
    "searchers.decode_chunk",
    "searchers.cpu_devices",
    "learner.queries",
    "learner.completions",
    "learner.steps",
    "learner.reference.reset_steps",
    "replay.capacity",
    "replay.segment_appends",
    "publish.every_steps",
    "checkpoint.every_steps",
    "checkpoint.keep",
    "evaluation.every_steps",
    "evaluation.queries",
    "evaluation.batch_size",
    "learner.logit_megabytes",
    "searchers.logit_megabytes",
    "evaluation.logit_megabytes",
    "metrics.every_steps",
    "warm_start.batch_size",
    "warm_start.report_every_steps",
)
_AT_LEAST_ZERO = (
    "seed",
    "task.min_response_length",
    "task.arithmetic.seed",
    "task.countdown.seed",
    "lora.rank",
    "warm_start.steps",
    "warm_start.warmup_steps",
    "searchers.count",
    "searchers.value_states",
    "searchers.task_devices",
    "evaluation.task_devices",
    "searchers.slots",
    "searchers.max_rows_per_snapshot",
    "searchers.stop_seconds",
    "replay.recent_window",
    "replay.max_draws_per_row",
    "replay.max_staleness",
    "replay.min_rows",
    "learner.micro_batch_rows",
    "learner.warmup_steps",
    "learner.decay_steps",
    "learner.beta_steps",
    "learner.ref_temperature_steps",
    "learner.reward_temperature_steps",
    "learner.weight_decay",
    "learner.clip_norm",
    "learner.logprob_gap_every_steps",
    "learner.logprob_gap_limit",
    "schedule.lag",
    "publish.keep",
    "supervisor.max_restarts",
    "evaluation.samples",
)
_POSITIVE = (
    "lora.alpha",
    "learner.ref_temperature_start",
    "learner.ref_temperature_end",
    "learner.reward_temperature_start",
    "learner.reward_temperature_end",
    "learner.log_ratio_clip",
    "learner.adam_epsilon",
    "learner.learning_rate",
    "learner.log_z_learning_rate",
    "learner.value_learning_rate",
    "learner.value_coefficient",
    "learner.clip_high",
    "learner.sequence_clip_high",
    "sampling.scoring_temperature",
    "sampling.temperature",
    "searchers.poll_seconds",
    "replay.poll_seconds",
    "replay.inverse_temperature",
    "supervisor.stop_seconds",
    "warm_start.learning_rate",
)
_PROBABILITIES = (
    "replay.recent_probability",
    "learner.gae_lambda",
    "sampling.explore_temperature_probability",
    "sampling.explore_top_p_probability",
    "searchers.memory_fraction",
    "learner.memory_fraction",
    "evaluation.memory_fraction",
)
_CHOICES: dict[str, tuple[str, ...]] = {
    "task.long_prompts": ("refuse", "skip"),
    "task.countdown.style": ("text", "characters"),
    "task.tldr.compute_dtype": ("float32", "bfloat16"),
    "model.compute_dtype": ("float32", "bfloat16"),
    "model.attention": ("auto", "xla", "cudnn"),
    "searchers.weights": ("full", "int8"),
    "searchers.swap": ("at_once", "new_sequences"),
    "learner.remat": ("none", "dots", "full"),
    "learner.reference.kind": ("initial", "reset", "ema", "surrogate"),
    "learner.non_finite": ("stop", "skip"),
    "replay.drop": ("oldest", "lowest_reward"),
    "replay.retention": ("all", "checkpoints"),
    "publish.dtype": ("float32", "bfloat16"),
    "schedule.mode": ("asynchronous", "interleaved"),
}


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


def _check_responses(task: Any) -> None:
    _require(
        task.min_response_length <= task.response_length,
        f"task.min_response_length={task.min_response_length} is more than task.response_length={task.response_length}",
    )
    for token in task.banned_tokens:
        _require(
            isinstance(token, int) and not isinstance(token, bool) and token >= 0,
            f"task.banned_tokens={tuple(task.banned_tokens)} must hold token ids, whole numbers from 0, not {token!r}",
        )
    for name in ("stop_strings", "step_ends"):
        for text in task[name]:
            _require(
                isinstance(text, str) and text != "",
                f"task.{name}={tuple(task[name])} must hold texts of at least one character, not {text!r}",
            )
    for stop, step in itertools.product(task.stop_strings, task.step_ends):
        _require(
            stop not in step,
            f"task.step_ends={tuple(task.step_ends)} holds {step!r}, which ends no step: by then {stop!r} of task.stop_strings "
            "has ended the response",
        )


def _check_learner(config: Any) -> None:
    learner = config.learner
    rows = learner.queries * learner.completions
    _require(
        config.searchers.samples_per_query >= learner.completions,
        f"searchers.samples_per_query={config.searchers.samples_per_query} is less than "
        f"learner.completions={learner.completions}",
    )
    for name in ("beta", "ref_temperature", "reward_temperature"):
        start, end, steps = (learner[f"{name}_{part}"] for part in ("start", "end", "steps"))
        _require(
            steps > 0 or start == end,
            f"learner.{name}_start={start} would not be used: learner.{name}_steps=0 means {end}, its end, at every step",
        )
    for name in ("beta_start", "beta_end"):
        _require(0 <= learner[name] < math.inf, f"learner.{name}={learner[name]} must be at least 0 and finite")
    for name in ("adam_beta1", "adam_beta2"):
        _require(0 <= learner[name] < 1, f"learner.{name}={learner[name]} must be within [0, 1)")
    clip = learner.importance_clip
    _require(
        clip == 0 or 1 < clip < math.inf,
        f"learner.importance_clip={clip} must be 0 (no importance weights) or above 1: on-policy every ratio is 1",
    )
    micro = learner.micro_batch_rows
    _require(
        not micro or rows % micro == 0,
        f"learner.micro_batch_rows={micro} does not divide the batch of learner.queries × learner.completions = {rows} rows",
    )
    _require(
        learner.warmup_steps + learner.decay_steps <= learner.steps,
        f"learner.warmup_steps={learner.warmup_steps} + learner.decay_steps={learner.decay_steps} exceed "
        f"learner.steps={learner.steps}",
    )
    kept = learner.queries * min(config.replay.capacity_per_query, config.searchers.samples_per_query)
    _require(
        config.replay.capacity >= kept,
        f"replay.capacity={config.replay.capacity} cannot hold the {kept} responses to learner.queries={learner.queries} queries",
    )
    _require(
        config.replay.min_rows <= config.replay.capacity,
        f"replay.min_rows={config.replay.min_rows} is more than replay.capacity={config.replay.capacity}",
    )
    share = config.replay.merge_edit_distance
    _require(0 <= share < 1, f"replay.merge_edit_distance={share} must be within [0, 1)")
    distance = config.replay.merge_cosine_distance
    _require(0 <= distance < 2, f"replay.merge_cosine_distance={distance} must be within [0, 2)")
    _require(
        not (share and distance),
        f"replay.merge_edit_distance={share} and replay.merge_cosine_distance={distance} exclude each other",
    )
    _require(
        not distance or config.task.embedding_path,
        f"replay.merge_cosine_distance={distance} compares embeddings, which need task.embedding_path",
    )
    _require(
        not (share or distance) or config.replay.merge_duplicates,
        f"replay.merge_edit_distance={share} and replay.merge_cosine_distance={distance} merge near-duplicates, which "
        "replay.merge_duplicates=False forbids",
    )
    _require(
        config.replay.capacity_per_query >= learner.completions,
        f"replay.capacity_per_query={config.replay.capacity_per_query} is less than learner.completions={learner.completions}",
    )


def _check_reference(config: Any) -> None:
    reference = config.learner.reference
    decay = reference.ema_decay
    _require(0 < decay < 1, f"learner.reference.ema_decay={decay} must be within (0, 1)")
    _require(
        not reference.reset_optimizer or reference.kind == "reset",
        f"learner.reference.reset_optimizer=True needs learner.reference.kind=reset, not {reference.kind}",
    )
    _require(
        not reference.offload or reference.kind in HELD_REFERENCES,
        f"learner.reference.offload=True needs a reference that the learner holds: learner.reference.kind=reset or ema, not "
        f"{reference.kind}",
    )
    _require(
        reference.kind != "surrogate" or not config.replay.mount,
        "learner.reference.kind=surrogate compares with the policy of an earlier step of this run, which rows of "
        f"replay.mount={tuple(config.replay.mount)} do not come from",
    )


def _check_sampling(sampling: Any) -> None:
    _require(0 < sampling.top_p <= 1, f"sampling.top_p={sampling.top_p} must be within (0, 1]")
    _require(0 <= sampling.min_p < 1, f"sampling.min_p={sampling.min_p} must be within [0, 1)")
    _require(sampling.top_k >= 0, f"sampling.top_k={sampling.top_k} must not be negative (0: off)")
    _require(
        0 < sampling.explore_top_p_low <= 1, f"sampling.explore_top_p_low={sampling.explore_top_p_low} must be within (0, 1]"
    )
    _require(
        sampling.explore_temperature_factor >= 1,
        f"sampling.explore_temperature_factor={sampling.explore_temperature_factor} must be at least 1",
    )


def _check_ratios(learner: Any) -> None:
    for name in ("clip_low", "sequence_clip_low"):
        _require(0 < learner[name] <= 1, f"learner.{name}={learner[name]} must be within (0, 1]")
    low, high = learner.icepop_low, learner.icepop_high
    _require(0 <= low < 1, f"learner.icepop_low={low} must be within [0, 1): on-policy every ratio is 1")
    _require(1 < high < math.inf, f"learner.icepop_high={high} must be above 1 and finite: on-policy every ratio is 1")


def _check_objective(config: Any, objective: Objective) -> None:
    """What the objective needs, and what it does not read."""
    learner, named = config.learner, f"learner.objective={config.learner.objective}"
    _require(
        learner.completions >= objective.min_completions,
        f"learner.completions={learner.completions} must be at least {objective.min_completions}: {named} compares the "
        "completions of a query with each other",
    )
    for name in ("beta_start", "beta_end"):
        _require(
            learner[name] > 0 or not objective.positive_beta,
            f"learner.{name}={learner[name]} must be above 0: {named} has no optimum, or nothing to learn from, without β",
        )
    if objective.full_support:
        _check_full_support(config.sampling, named)
    _require(
        objective.moving_reference or learner.reference.kind == "initial",
        f"learner.reference.kind={learner.reference.kind} moves a reference that {named} does not read: leave it at initial",
    )
    _require(
        not objective.state_values or bool(config.task.step_ends),
        f"{named} needs rows with the values of the states between steps: say by task.step_ends what ends a step",
    )


def check_all_are_read(config: Any) -> None:
    """Refuses settings of objectives that the config's own does not read, and of values of states that no row is to hold. Not β,
    with which every run is measured.

    Of a new run alone: a run that has begun with one goes on.

    Raises:
      ValueError: one sentence about the first such setting.
    """
    learner, objective = config.learner, OBJECTIVES[config.learner.objective]
    defaults = {f.name: f.default for f in dataclasses.fields(ObjectiveSettings) if f.default is not dataclasses.MISSING}
    defaults |= {f"{name}_{part}": 1.0 for name in TEMPERATURES for part in ("start", "end")}
    defaults |= {"log_z_learning_rate": 1e-2, "value_learning_rate": 1e-4}
    heads = {"log_z_learning_rate": objective.log_z_head, "value_learning_rate": objective.value_head}
    read = {*objective.settings, *(name for name, learned in heads.items() if learned)}
    for name, default in defaults.items():
        _require(
            name.removesuffix("_start").removesuffix("_end") in read or learner[name] == default,
            f"learner.{name}={learner[name]} would not be used: learner.objective={learner.objective} does not read it; leave it "
            f"at {default}",
        )
    for name, default in (("value_samples", 9), ("value_states", 0)):
        _require(
            bool(config.task.step_ends) or config.searchers[name] == default,
            f"searchers.{name}={config.searchers[name]} would not be used without task.step_ends; leave it at {default}",
        )


def _check_full_support(sampling: Any, named: str) -> None:
    advice = f"{named} needs full support: truncate a share of the rows by sampling.explore_top_p_probability below 1"
    for name, on in (("top_k", sampling.top_k > 0), ("top_p", sampling.top_p < 1), ("min_p", sampling.min_p > 0)):
        _require(not on, f"sampling.{name}={sampling[name]} would truncate every row; {advice}")
    _require(sampling.explore_top_p_probability < 1, f"sampling.explore_top_p_probability=1 would truncate every row; {advice}")


def _check_run(config: Any) -> None:
    missing = config.task.missing_eos_reward
    _require(missing is None or math.isfinite(missing), f"task.missing_eos_reward={missing} must be finite")
    keep = config.publish.keep
    _require(keep == 0 or keep >= 3, f"publish.keep={keep} must be 0 (all) or at least 3")
    if config.schedule.mode == "interleaved":
        _require(
            keep == 0 or keep > config.schedule.lag,
            f"publish.keep={keep} must be 0 (all) or more than schedule.lag={config.schedule.lag}",
        )
        own = config.searchers.task_devices
        _require(
            config.evaluation.task_devices == own or not config.evaluation.enabled,
            f"evaluation.task_devices={config.evaluation.task_devices} must be searchers.task_devices={own} with "
            "schedule.mode=interleaved, where both use one process' models",
        )
    _require(
        not (config.model.path and config.warm_start.steps),
        f"model.path={config.model.path!r} and warm_start.steps={config.warm_start.steps} exclude each other: "
        "a pretrained policy needs no warm start",
    )
    _require(
        bool(config.model.path) or config.task.name != "countdown" or config.task.countdown.style == "characters",
        f"task.countdown.style={config.task.countdown.style} needs a pretrained model: set model.path to its folder",
    )
    _require(
        not (config.model.path and config.model.preset),
        f"model.path={config.model.path!r} and model.preset={config.model.preset!r} exclude each other",
    )
    _require(
        not config.lora.rank or config.lora.targets,
        f"lora.rank={config.lora.rank} needs lora.targets, names or patterns of linear maps",
    )
    searchers = config.searchers
    _require(
        searchers.samples_per_query >= 2 or not config.task.step_ends,
        f"searchers.samples_per_query={searchers.samples_per_query} must be at least 2 with task.step_ends: the value of the "
        "state before a response is the mean reward of the query's other samples",
    )
    mount = tuple(config.replay.mount)
    _require(
        all(isinstance(folder, str) and folder for folder in mount),
        f'replay.mount={mount} must hold folders of runs, such as \'("runs/first", "runs/second")\'',
    )
    _require(
        searchers.count > 0 or (bool(mount) and config.schedule.mode == "asynchronous"),
        f"searchers.count={searchers.count} needs replay.mount, whose rows are trained on, and schedule.mode=asynchronous",
    )
    batch = searchers.queries_per_batch * searchers.samples_per_query
    first = max(config.replay.min_rows, config.learner.queries * searchers.samples_per_query)
    allowed = searchers.count * max(batch, searchers.max_rows_per_snapshot)
    _require(
        not searchers.max_rows_per_snapshot or bool(mount) or allowed >= first,
        f"searchers.max_rows_per_snapshot={searchers.max_rows_per_snapshot} lets {searchers.count} searchers "
        f"generate {allowed} rows before the first update, which needs {first}",
    )
    # In turn, each update has a batch of rows of its own, whatever was lost before.
    spare = config.replay.max_draws_per_row == 0 or allowed > first or config.schedule.mode == "interleaved"
    _require(
        not searchers.max_rows_per_snapshot or bool(mount) or spare,
        f"searchers.max_rows_per_snapshot={searchers.max_rows_per_snapshot} lets {searchers.count} searchers generate just the "
        f"{first} rows of an update, of which replay.max_draws_per_row={config.replay.max_draws_per_row} can spare none: where "
        "one is left out, the trainer waits for ever; raise searchers.max_rows_per_snapshot",
    )
    mesh = config.learner.mesh
    rows, ways = config.learner.queries * config.learner.completions, mesh.data * mesh.fsdp
    _require(
        mesh.data == -1 or rows % max(ways, 1) == 0,
        f"the batch of {rows} rows does not divide by learner.mesh data={mesh.data} × fsdp={mesh.fsdp} = {ways}",
    )
