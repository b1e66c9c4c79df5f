"""Rules that a config can break by itself: every setting against its limits, and settings against each other.

Every sentence names the values, the limit and the settings."""

import bisect
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

from tba_jax.experiment import meshes
from tba_jax.experiment.schema import SCHEMA
from tba_jax.learner.optimizer import DECAYS, SCHEDULES
from tba_jax.learner.update import HELD_REFERENCES
from tba_jax.models import hardware, layers
from tba_jax.models.config import PRESETS
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.objective import TEMPERATURES, Objective
from tba_jax.replay.selection import STRATEGIES
from tba_jax.schemas import Mistakes, flatten
from tba_jax.storage import contract
from tba_jax.tasks import TASKS
from tba_jax.tasks.interface import is_custom
from tba_jax.telemetry import metrics


def check(config: Any, *, weights: bool = True, new: bool = False) -> None:
    """Checks every setting by itself, and where all hold, settings against each other.

    Args: weights: False: for a dry run, where model.preset may say the shape in place of the weights of model.path. new: for a
    new run and for a dry run: a setting that the run would not use, or that holds a secret, is a mistake too. A run that is there
    goes on.

    Raises ValueError: a sentence about each rule that is broken.
    """
    found = Mistakes()
    found.add(_each(config))
    found.end()
    found.add(_of_model(config, weights=weights))
    for rules in (_of_responses, _of_update, _of_replay, _of_objective, _of_searchers, _of_snapshots, waits_for_ever):
        found.add(rules(config))
    found.add(metrics.refused_names(config.metrics))
    mesh = config.learner.mesh
    found.attempt(meshes.micro_batch_rows, config, ways=max(mesh.data, 1) * max(mesh.fsdp, 1))
    if new:
        found.add(_unused(config))
        found.add(_secrets(config))
    found.end()


def _each(config: Any) -> Iterator[str]:
    """Every setting, whatever the others are."""
    yield from SCHEMA.refusals(config, _registries(config.task.name)).values()
    texts, folders = "texts of at least one character", 'folders of runs, such as \'("runs/first", "runs/second")\''
    # A text that begins with "(" is a tuple whose texts have lost their quotes to the shell.
    for name, values, what in (
        ("task.stop_strings", config.task.stop_strings, texts),
        ("task.step_ends", config.task.step_ends, texts),
        ("replay.mount", config.replay.mount, folders),
    ):
        if wrong := [v for v in values if not isinstance(v, str) or not v or (what == folders and v[0] == "(")]:
            yield f"{name}={tuple(values)} must hold {what}, not {wrong[0]!r}"
    banned = tuple(config.task.banned_tokens)
    if wrong := [value for value in banned if type(value) is not int or value < 0]:
        yield f"task.banned_tokens={banned} must hold token ids, whole numbers from 0, not {wrong[0]!r}"
    for section in ("learner", "searchers", "evaluation"):
        for axis, size in config[section].mesh.items():
            other = {"data": -1, "fsdp": 0 if section == "learner" else 1}.get(axis, 1)
            also = {-1: ", or -1 for all devices that are left", 0: ", or 0 for as many as the state needs"}.get(other, "")
            if size < 1 and size != other:
                yield f"{section}.mesh.{axis}={size} must be at least 1{also}"


def _secrets(config: Any) -> Iterator[str]:
    """Texts that metrics.without_secrets hides."""
    settings = contract.plain(config.to_dict())
    hidden = flatten(metrics.without_secrets(settings))
    for name in [name for name, value in flatten(settings).items() if value != hidden[name]]:
        yield (
            f"{name} holds a secret, by name or as user of an address, which all who read the run would find in config.json: "
            "have the task read a secret from the environment, or call a setting otherwise that holds none"
        )


def _registries(task: str) -> dict[str, Collection[str]]:
    """The names that experiment/schema.py calls by their registry; `task`, where it is FILE.py:CLASS, is a name too."""
    return {
        "tasks": [*TASKS, *([task] if is_custom(task) else [])],
        "objectives": OBJECTIVES,
        "schedules": SCHEDULES,
        "decays": DECAYS,
        "strategies": STRATEGIES,
        "presets": ["", *PRESETS],
        "remat": (*layers.REMAT, hardware.AUTO),
        "sinks": tuple(metrics.TRACKERS),
    }


# (setting, whether a value of it uses others, these others)
_USED_WITH: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    ("learner.schedule", lambda schedule: schedule == "wsd", ("learner.decay", "learner.decay_steps")),
    ("learner.schedule", lambda schedule: schedule in ("linear", "wsd"), ("learner.schedule_steps",)),
    (
        "learner.reference.kind",
        lambda kind: kind == "reset",
        ("learner.reference.reset_steps", "learner.reference.reset_optimizer"),
    ),
    ("learner.reference.kind", lambda kind: kind == "ema", ("learner.reference.ema_decay",)),
    ("learner.reference.kind", lambda kind: kind == "teacher", ("learner.reference.path",)),
    ("learner.reference.kind", lambda kind: kind in HELD_REFERENCES, ("learner.reference.offload",)),
    ("schedule.mode", lambda mode: mode == "asynchronous", ("searchers.lag",)),
    ("schedule.mode", lambda mode: mode == "interleaved", ("schedule.lag", "schedule.updates_per_search")),
    ("task.step_ends", bool, ("searchers.value_samples", "searchers.value_states")),
    (
        "searchers.prompt_selection",
        lambda way: way == "posterior",
        ("searchers.target_success_rate", "searchers.prompt_candidates"),
    ),
    (
        "searchers.engine",
        lambda engine: engine != "own",
        tuple(
            f"searchers.engine_{name}" for name in ("url", "python", "arguments", "folder", "start_seconds", "request_seconds")
        ),
    ),
    ("searchers.engine_url", lambda url: not url, ("searchers.engine_python", "searchers.engine_arguments")),
    ("replay.merge_duplicates", bool, ("replay.merge_keep",)),
    ("replay.recent_probability", bool, ("replay.recent_window", "replay.recent_fill")),
    ("replay.recent_probability", lambda share: share < 1, ("replay.strategy",)),
    ("replay.strategy", lambda strategy: strategy == "softmax", ("replay.inverse_temperature",)),
)


def _unused(config: Any) -> Iterator[str]:
    """Settings that differ from their defaults although the run does not use them: objectives declare those of theirs that they
    read (Objective.settings). β scales a metric of every run."""
    learner, values, defaults = config.learner, flatten(config.to_dict()), flatten(SCHEMA.defaults().to_dict())
    of_any = {name for objective in OBJECTIVES.values() for name in objective.settings}
    unused = {}
    for name in sorted(of_any - {"beta", *OBJECTIVES[learner.objective].settings}):
        for each in (f"{name}_start", f"{name}_end") if name in TEMPERATURES else (name,):
            unused[f"learner.{each}"] = f"learner.objective={learner.objective}, which does not read it"
    for other, uses, names in _USED_WITH:
        # recent_fill=wait also says which queries are drawn
        unused |= {name: f"{other}={values[other]}" for name in names if not uses(values[other]) and values[name] != "wait"}
    for name, why in unused.items():
        if values[name] != defaults[name]:
            yield f"{name}={values[name]} would not be used with {why}; leave it at {defaults[name]}"
    if learner.schedule == "wsd" and not learner.decay_steps:
        yield "learner.decay_steps=0 must be at least 1 with learner.schedule=wsd, whose rate would never decay"


def _of_responses(config: Any) -> Iterator[str]:
    task, samples = config.task, config.searchers.samples_per_query
    if task.min_response_length > task.response_length:
        yield f"task.min_response_length={task.min_response_length} is more than task.response_length={task.response_length}"
    if task.force_eos and task.response_length < 2:
        why = "with task.force_eos, which makes the last token the end"
        yield f"task.response_length={task.response_length} must be at least 2 {why}"
    for stop, step in itertools.product(task.stop_strings, task.step_ends):
        if stop in step:
            ends = f"task.step_ends={tuple(task.step_ends)} holds {step!r}, which ends no step"
            yield f"{ends}: by then {stop!r} of task.stop_strings has ended the response"
    if task.step_ends and samples < 2:
        yield (
            f"searchers.samples_per_query={samples} must be at least 2 with task.step_ends: the value of the state before a "
            "response is the mean reward of the query's other samples"
        )


def _of_model(config: Any, *, weights: bool) -> Iterator[str]:
    model, lora, warm_start, style = config.model, config.lora, config.warm_start, config.task.countdown.style
    path = f"model.path={model.path!r}"
    if model.path and warm_start.steps:
        yield f"{path} and warm_start.steps={warm_start.steps} exclude each other: a pretrained policy needs no warm start"
    if model.path and model.preset and weights:
        dry = "but for a dry run, which takes the tokenizer of the one and the shape of the other"
        yield f"{path} and model.preset={model.preset!r} exclude each other, {dry}"
    if config.task.name == "countdown" and style != "characters" and not model.path:
        yield f"task.countdown.style={style} needs a pretrained model: set model.path to its folder"
    if lora.rank and not lora.targets:
        yield f"lora.rank={lora.rank} needs lora.targets, names or patterns of linear maps"
    # Merged adapters and rounded weights are made on the devices, from the whole of the policy.
    for section in ("searchers", "evaluation"):
        made = {"lora.rank": lora.rank, "searchers.weights": section == "searchers" and config.searchers.weights != "full"}
        if config[section].swap_memory == "in_place" and (first := " and ".join(name for name, on in made.items() if on)):
            yield f"{section}.swap_memory=in_place takes up snapshots as they are, not as {first} makes them first; use beside"


def _of_update(config: Any) -> Iterator[str]:
    """The rows of an update, its learning rate and its coefficients."""
    learner, samples = config.learner, config.searchers.samples_per_query
    if samples < learner.completions:
        yield f"searchers.samples_per_query={samples} is less than learner.completions={learner.completions}"
    most = f"learner.schedule_steps={learner.schedule_steps}" if learner.schedule_steps else f"learner.steps={learner.steps}"
    if 0 < learner.schedule_steps < learner.steps:
        yield f"{most} is less than learner.steps={learner.steps}: the last updates would have a learning rate of 0"
    if learner.warmup_steps + learner.decay_steps > (learner.schedule_steps or learner.steps):
        yield f"learner.warmup_steps={learner.warmup_steps} + learner.decay_steps={learner.decay_steps} exceed {most}"
    for name in ("beta", *TEMPERATURES):
        start, end, over = (learner[f"{name}_{part}"] for part in ("start", "end", "steps"))
        if start != end and not over:
            yield f"learner.{name}_start={start} would not be used: learner.{name}_steps=0 means {end}, its end, at every step"


def _of_replay(config: Any) -> Iterator[str]:
    learner, replay = config.learner, config.replay
    kept = learner.queries * min(replay.capacity_per_query, config.searchers.samples_per_query)
    if replay.capacity < kept:
        yield f"replay.capacity={replay.capacity} cannot hold the {kept} responses to learner.queries={learner.queries} queries"
    if replay.capacity_per_query < learner.completions:
        yield f"replay.capacity_per_query={replay.capacity_per_query} is less than learner.completions={learner.completions}"
    share, distance = replay.merge_edit_distance, replay.merge_cosine_distance
    both = f"replay.merge_edit_distance={share} and replay.merge_cosine_distance={distance}"
    if share and distance:
        yield f"{both} exclude each other"
    if distance and not config.task.embedding_path:
        yield f"replay.merge_cosine_distance={distance} compares embeddings, which need task.embedding_path"
    if (share or distance) and not replay.merge_duplicates:
        yield f"{both} merge near-duplicates, which replay.merge_duplicates=False forbids"
    if replay.recent_fill == "wait" and replay.merge_duplicates:
        why = "draws no query before it has learner.completions rows, which merging may keep from it"
        yield f"replay.recent_fill=wait {why}: it needs replay.merge_duplicates=False"


def _of_objective(config: Any) -> Iterator[str]:
    """What the objective and its reference need."""
    learner, kind = config.learner, config.learner.reference.kind
    objective, named = OBJECTIVES[learner.objective], f"learner.objective={learner.objective}"
    if learner.completions < objective.min_completions:
        least = f"learner.completions={learner.completions} must be at least {objective.min_completions}"
        yield f"{least}: {named} compares the completions of a query with each other"
    for name in ("beta_start", "beta_end"):
        if objective.positive_beta and not learner[name]:
            yield f"learner.{name}=0.0 must be above 0: {named} has no optimum, or nothing to learn from, without β"
    if learner.clip_norm and objective.reward_unit is None:
        lacks = f"{named} has no reward_unit (tba_jax/objectives/__init__.py)"
        yield f"learner.clip_norm={learner.clip_norm} is in units of the reward, and {lacks}: set it to 0"
    if kind in (*HELD_REFERENCES, "teacher") and not objective.reads_reference:
        does = "names" if kind == "teacher" else "moves"
        yield f"learner.reference.kind={kind} {does} a reference that {named} does not read: leave it at initial"
    if kind == "teacher" and not config.learner.reference.path:
        yield "learner.reference.kind=teacher needs learner.reference.path, the folder or hub id of a model"
    if kind == "none" and objective.k3 and (learner.beta_start or learner.beta_end):
        betas = f"learner.beta_start={learner.beta_start} and learner.beta_end={learner.beta_end}"
        yield f"{betas} must be 0 with learner.reference.kind=none: {named} estimates the KL from the reference"
    for name in ("ref_temperature_start", "ref_temperature_end"):
        if kind == "none" and learner[name] != 1:
            yield f"learner.{name}={learner[name]} would not be used with learner.reference.kind=none; leave it at 1"
    if kind == "ema" and config.lora.rank:
        why = "adapters, and the product of averages of A and B is not the average of A B"
        yield f"lora.rank={config.lora.rank} trains {why}: learner.reference.kind=ema needs lora.rank=0 (reset does not)"
    if objective.given_log_z and not learner.log_z_path:
        yield f"{named} needs learner.log_z_path, a file of log Z of the queries, which python -m tba_jax log_z makes"
    if objective.given_log_z and kind in HELD_REFERENCES:
        yield f"learner.reference.kind={kind} moves a reference that log Z of {named} is estimated for: leave it at initial"
    if objective.state_values and not config.task.step_ends:
        yield f"{named} needs rows with the values of the states between steps: say by task.step_ends what ends a step"
    yield from _of_rows(objective, config, named)


def _of_rows(objective: Objective, config: Any, named: str) -> Iterator[str]:
    """How the rows of an objective must be drawn that weighs them by π_behaviour, or needs its support."""
    sampling, replay, share = config.sampling, config.replay, config.sampling.explore_top_p_probability
    if objective.as_drawn:
        weighs = f"{named} weighs rows by π_ref/π_behaviour, as π_behaviour drew them"
        if replay.recent_fill != "wait":  # a row that is repeated would have its own reward in its estimate of V*
            yield f"replay.recent_fill={replay.recent_fill} must be wait: {weighs}, each once"
        if config.task.force_eos:
            yield f"task.force_eos=True must be False: {weighs}, and a forced end was not drawn"
        for name, value in {"strategy": "softmax", "merge_keep": "best"}.items():
            if replay[name] == value:
                yield f"replay.{name}={value} chooses rows by their rewards: {weighs}"
        advice = f"{named} weighs rows by π_ref/π_behaviour, which truncation makes infinite"
        if share:
            yield f"sampling.explore_top_p_probability={share} must be 0: {advice}"
    elif objective.full_support:
        advice = f"{named} needs full support: truncate a share of the rows by sampling.explore_top_p_probability below 1"
        if share == 1:
            yield f"sampling.explore_top_p_probability=1 would truncate every row; {advice}"
    else:
        return
    for name, on in (("top_k", sampling.top_k > 0), ("top_p", sampling.top_p < 1), ("min_p", sampling.min_p > 0)):
        if on:
            yield f"sampling.{name}={sampling[name]} would truncate every row; {advice}"


def _of_searchers(config: Any) -> Iterator[str]:
    searchers, evaluation, mode = config.searchers, config.evaluation, config.schedule.mode
    if not searchers.count and not (config.replay.mount and mode == "asynchronous"):
        needs = "replay.mount, whose rows are trained on, and schedule.mode=asynchronous"
        yield f"searchers.count={searchers.count} needs {needs}"
    if searchers.prompt_selection == "posterior":
        posterior, missing_eos, asked = (
            "searchers.prompt_selection=posterior",
            config.task.missing_eos_reward,
            searchers.queries_per_batch,
        )
        if asked < config.learner.queries:
            why = f"with {posterior} the next batch may have the same queries"
            yield f"searchers.queries_per_batch={asked} is less than learner.queries={config.learner.queries}: {why}"
        if missing_eos is not None and not 0 <= missing_eos <= 1:
            yield f"task.missing_eos_reward={missing_eos} must be within [0, 1] with {posterior}, which counts successes"
    yield from _of_engine(config)
    if mode == "interleaved":
        if config.trainer.processes > 1:
            yield f"trainer.processes={config.trainer.processes} must be 1 with schedule.mode=interleaved, which is one process"
        if evaluation.enabled and evaluation.task_devices != searchers.task_devices:
            devices = f"evaluation.task_devices={evaluation.task_devices} must be searchers.task_devices={searchers.task_devices}"
            yield f"{devices} with schedule.mode=interleaved, where both use one process' models"


def _of_engine(config: Any) -> Iterator[str]:
    """What an inference server is asked to be, or cannot do."""
    s, named = config.searchers, f"searchers.engine={config.searchers.engine}"
    if not s.scores_reference and config.learner.reference.kind == "none":
        yield "searchers.scores_reference=False needs a reference, by which the trainer scores: learner.reference.kind is none"
    if not s.scores_reference and config.learner.reference.kind == "teacher":
        why = "the trainer holds copies of its own policy alone"
        yield f"learner.reference.kind=teacher needs searchers.scores_reference=True: {why}"
    if s.engine == "own":
        return
    if s.weights != "full":
        yield f"searchers.weights={s.weights} is for the own decoder: {named} has its own settings (searchers.engine_arguments)"
    if s.swap_memory != "beside":
        yield f"searchers.swap_memory={s.swap_memory} is for the own decoder, not for {named}"
    if config.task.force_eos:
        yield f"task.force_eos=True is for the own decoder: a server ({named}) gives no log-prob of an end that it did not draw"
    if s.engine_url and s.count > 1:
        yield f"searchers.count={s.count} must be 1 with searchers.engine_url: each searcher gives its server weights of its own"
    if s.engine_url and not s.engine_url.startswith(("http://", "https://")):
        yield f"searchers.engine_url={s.engine_url!r} must begin with http:// or https://"


def _of_snapshots(config: Any) -> Iterator[str]:
    """Snapshots that searchers may still want are kept, and there are those that a lag asks for."""
    lag, every, keep = config.searchers.lag, config.publish.every_steps, config.publish.keep
    if config.schedule.mode == "interleaved":
        if 0 < keep <= config.schedule.lag:
            yield f"publish.keep={keep} must be 0 (all) or more than schedule.lag={config.schedule.lag}"
    elif lag:
        if lag % every:
            yield f"searchers.lag={lag} must be a multiple of publish.every_steps={every}: other steps have no snapshot"
        if 0 < keep < (least := lag // every + 3):
            yield f"searchers.lag={lag} needs publish.keep={keep} to be 0 (all) or at least {least}: two more may come meanwhile"


def waits_for_ever(config: Any) -> Iterator[str]:
    """Limits on the age of rows under which a step would have no rows, whatever comes.

    All else goes on: a trainer without a batch has room for rows, and publishes what it has after publish.at_most_seconds.
    """
    limit, steps, lag = config.replay.max_staleness, config.learner.steps, config.searchers.lag
    if not limit or steps <= limit + 1:
        return
    stale, ever = f"replay.max_staleness={limit}", "would wait for ever"
    if config.schedule.mode == "interleaved":
        if (lag := config.schedule.lag) > limit:
            yield f"schedule.lag={lag} makes every row {lag} steps old, more than {stale}: step {limit + 2} {ever}"
    elif not config.searchers.count:
        only = "searchers.count=0 leaves only rows of replay.mount, which count as of step 0"
        yield f"{only}: under {stale}, step {limit + 2} of learner.steps={steps} {ever}"
    elif lag:
        every = config.publish.every_steps, config.evaluation.every_steps
        published = [step for step in range(steps + 1) if step == steps or not all(step % each for each in every)]
        for newest, following in itertools.pairwise(published):
            used = published[bisect.bisect_right(published, max(0, newest - lag)) - 1]
            if following - used > limit + 1:
                taken = f"searchers take up the next snapshot after {following - used} (searchers.lag={lag})"
                yield f"{stale} lets rows be drawn in {limit + 1} steps, and {taken}: step {used + limit + 2} {ever}"
                return
