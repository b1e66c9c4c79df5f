"""Checks across settings, and the contract that every role of a run must share."""

import dataclasses
import datetime
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tba_jax import run_dir, storage, trajectory
from tba_jax.storage import Place

# Settings that a resumed trainer may change only when it is told to (--allow_change): they are the run's schedule.
SCHEDULE_SECTIONS = ("seed", "learner", "replay", "publish", "schedule")
# ... but not these: they say how the same numbers are computed, or how often storage is asked.
_FREE = (
    "learner.micro_batch_rows",
    "learner.logit_megabytes",
    "learner.remat",
    "learner.memory_fraction",
    "learner.logprob_gap_every_steps",
    "learner.logprob_gap_limit",
    "learner.mesh",
    "learner.reference.offload",
    "replay.poll_seconds",
    "replay.segment_appends",
    "publish.keep",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contract:
    """What rows and weights of a run mean. A role whose contract differs may not join.

    model: shape of the policy (DecoderConfig without its free fields); lora: the adapters' settings, {} without; tokenizer:
    fingerprint; task: its settings that define queries and reward, paths excepted; reward_parts, reward_version: as in
    trajectory.RowShape; embedding: width and weights (a digest) of the encoder of responses, {} without.
    """

    model: dict[str, Any]
    lora: dict[str, Any]
    tokenizer: str
    eos_id: int
    pad_id: int
    banned_tokens: tuple[int, ...]
    prompt_length: int
    response_length: int
    scoring_temperature: float
    task_name: str
    task: dict[str, Any]
    missing_eos_reward: float | None
    reward_parts: tuple[str, ...]
    reward_version: int
    warm_start: dict[str, Any]
    embedding: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As it looks in config.json."""
        return _plain(dataclasses.asdict(self))

    def row_shape(self) -> trajectory.RowShape:
        """The schema of the run's rows."""
        return trajectory.RowShape(
            prompt_length=self.prompt_length,
            response_length=self.response_length,
            reward_parts=tuple(self.reward_parts),
            embedding_size=self.embedding.get("width", 0),
        )


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        leaves |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return leaves


def _plain(tree: Any) -> Any:
    """As it looks after a round trip through JSON (tuples become lists)."""
    return json.loads(json.dumps(tree))


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
    _check_learner(config)
    _check_reference(config)
    _check_sampling(config.sampling)
    _check_run(config)


_AT_LEAST_ONE = (
    "task.prompt_length",
    "task.response_length",
    "task.arithmetic.digits",
    "task.arithmetic.train_queries",
    "task.arithmetic.heldout_queries",
    "task.story_sentiment.opening_words",
    "task.story_sentiment.heldout_queries",
    "model.layers",
    "model.width",
    "model.heads",
    "model.kv_heads",
    "model.head_size",
    "model.ffn",
    "searchers.queries_per_batch",
    "searchers.samples_per_query",
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
    "task.arithmetic.seed",
    "lora.rank",
    "warm_start.steps",
    "warm_start.warmup_steps",
    "searchers.count",
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
    "learner.beta_start",
    "learner.beta_end",
    "learner.ref_temperature_start",
    "learner.ref_temperature_end",
    "learner.reward_temperature_start",
    "learner.reward_temperature_end",
    "learner.log_ratio_clip",
    "learner.learning_rate",
    "learner.log_z_learning_rate",
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
    "sampling.explore_temperature_probability",
    "sampling.explore_top_p_probability",
    "searchers.memory_fraction",
    "learner.memory_fraction",
    "evaluation.memory_fraction",
)
_CHOICES: dict[str, tuple[str, ...]] = {
    "task.long_prompts": ("refuse", "skip"),
    "model.compute_dtype": ("float32", "bfloat16"),
    "model.attention": ("auto", "xla", "cudnn"),
    "searchers.weights": ("full", "int8"),
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


def _check_learner(config: Any) -> None:
    learner = config.learner
    rows = learner.queries * learner.completions
    _require(
        learner.completions >= 2 or learner.objective == "learned_log_z",
        f"learner.completions={learner.completions} must be at least 2: learner.objective={learner.objective} compares the "
        "completions of a query with each other",
    )
    _require(
        config.searchers.samples_per_query >= learner.completions,
        f"searchers.samples_per_query={config.searchers.samples_per_query} is less than "
        f"learner.completions={learner.completions}",
    )
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
        not reference.offload or reference.kind in ("reset", "ema"),
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
    advice = "trajectory balance needs full support: truncate a share of the rows by sampling.explore_top_p_probability below 1"
    for name, on in (("top_k", sampling.top_k > 0), ("top_p", sampling.top_p < 1), ("min_p", sampling.min_p > 0)):
        _require(not on, f"sampling.{name}={sampling[name]} would truncate every row; {advice}")
    _require(sampling.explore_top_p_probability < 1, f"sampling.explore_top_p_probability=1 would truncate every row; {advice}")


def _check_run(config: Any) -> None:
    keep = config.publish.keep
    _require(keep == 0 or keep >= 3, f"publish.keep={keep} must be 0 (all) or at least 3")
    if config.schedule.mode == "interleaved":
        _require(
            keep == 0 or keep > config.schedule.lag,
            f"publish.keep={keep} must be 0 (all) or more than schedule.lag={config.schedule.lag}",
        )
    _require(
        not (config.model.path and config.warm_start.steps),
        f"model.path={config.model.path!r} and warm_start.steps={config.warm_start.steps} exclude each other: "
        "a pretrained policy needs no warm start",
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
    mesh = config.learner.mesh
    rows, ways = config.learner.queries * config.learner.completions, mesh.data * mesh.fsdp
    _require(
        mesh.data == -1 or rows % max(ways, 1) == 0,
        f"the batch of {rows} rows does not divide by learner.mesh data={mesh.data} × fsdp={mesh.fsdp} = {ways}",
    )


def check_ways(rows: int, ways: int, *, what: str) -> None:
    """Raises ValueError where `rows` do not divide by the `ways` of a mesh that the devices of the role made up."""
    _require(rows % ways == 0, f"{what} = {rows} rows are not divisible by the {ways} ways of the mesh")


def mounted_logs(leaves: Mapping[str, Any], *, reward_version: int) -> tuple[Place, ...]:
    """Replay folders of the runs that a flattened config mounts: rescored ones, where rows were scored in another version."""
    runs = [run_dir.open_run_dir(folder) for folder in leaves.get("replay.mount", ())]
    return tuple(
        run.rescored(reward_version) if storage.exists(run.rescored_commit(reward_version)) else run.replay for run in runs
    )


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Fields of two trees that differ, each with both values."""
    theirs, ours = flatten(there), flatten(here)
    return [f"{k}: {theirs.get(k)!r} there, {ours.get(k)!r} here" for k in sorted(theirs | ours) if theirs.get(k) != ours.get(k)]


def join(run: run_dir.RunDir, config: Any, contract: Contract, *, init_from: str = "") -> None:
    """Makes the run's config.json if there is none; compares contracts, and writes nothing, if there is.

    Args:
      init_from: RUN@STEP, the policy that the run starts from; "": the config's, or what the run was made with.

    Raises:
      ValueError: the contract differs (every differing field with both values), or the workdir cannot be written.
    """
    mine = {"config": _plain(config.to_dict()), "contract": contract.to_json(), "changes": [], "init_from": init_from}
    # A role that is started again while storage is full or read-only must not take that for the user's mistake.
    if not (storage.exists(run.config) and (run.elsewhere is None or storage.exists(run.shared_name))):
        _make(run, mine)
    stored = read(run)
    if different := differences(stored["contract"], mine["contract"]):
        raise ValueError(f"workdir {str(run.shared)!r} belongs to a run of another contract; " + "; ".join(different))
    there = stored.get("init_from", "")
    if init_from and init_from != there:
        began = f"the policy {there}" if there else "what its config says"
        raise ValueError(f"--init_from={init_from}: the run in {str(run.shared)!r} exists and began from {began}")


def _make(run: run_dir.RunDir, mine: Mapping[str, Any]) -> None:
    try:
        run.root.mkdir(parents=True, exist_ok=True)
        run_dir.create_json(run.config, mine)  # where another role was first, its file stays
        run_dir.note_shared(run)
    except OSError as error:
        raise ValueError(f"workdir {str(run.shared)!r} cannot be written: {error.strerror or error}") from error


def read_run(run: run_dir.RunDir, *, called: str = "") -> dict[str, Any]:
    """`read`, of a run that is there and of this version.

    Args: called: what the user calls the run; default: its workdir.

    Raises:
      ValueError: there is none, or config.json is not that of a run.
    """
    if not storage.exists(run.config):
        raise ValueError(f"{called or run.root} holds no run: there is no {run.config}")
    stored = read(run)
    whole = isinstance(stored, dict) and all(isinstance(stored.get(name), dict) for name in ("config", "contract"))
    fields = {field.name for field in dataclasses.fields(Contract)}
    if not whole or stored["contract"].keys() | {"embedding"} != fields:
        raise ValueError(
            f"{called or run.root}: {run.config} is not that of a run of this version (supervised training has none)"
        )
    return stored


def read(run: run_dir.RunDir) -> dict[str, Any]:
    """config.json: {"config", "contract", "changes"}. Raises FileNotFoundError or ValueError where there is none."""
    return run_dir.read_json(run.config)


def changed_schedule(run: run_dir.RunDir, config: Any) -> dict[str, tuple[Any, Any]]:
    """Schedule settings that differ from the run's: name -> (there, here)."""
    theirs, ours = flatten(read(run)["config"]), flatten(_plain(config.to_dict()))
    names = [name for name in ours if name.split(".")[0] in SCHEDULE_SECTIONS and not name.startswith(_FREE)]
    return {name: (theirs.get(name), ours[name]) for name in names if theirs.get(name) != ours[name]}


# What the replay index of a checkpoint was built with.
_FIXED = (
    "replay.capacity",
    "replay.capacity_per_query",
    "replay.merge_duplicates",
    "replay.merge_edit_distance",
    "replay.merge_cosine_distance",
    "replay.drop",
)


def change_schedule(run: run_dir.RunDir, config: Any, *, allowed: Sequence[str], step: int) -> dict[str, tuple[Any, Any]]:
    """Lets a resumed trainer change allowed schedule settings, recorded in config.json with the step.

    At step 0 it needs no leave: nothing was trained yet, and a searcher that came first stored a schedule that is not its own.

    Raises:
      ValueError: a setting differs that is not in `allowed`.
    """
    changes = changed_schedule(run, config)
    if step or (run.checkpoints.is_dir() and any(run.checkpoints.iterdir())):
        _check_index(changes)
    if step:
        _check_allowed(changes, allowed)
    if changes:
        stored = read(run)
        entry = {"step": step, "time": datetime.datetime.now(datetime.UTC).isoformat(), "settings": _plain(changes)}
        stored |= {"config": _plain(config.to_dict()), "changes": [*stored["changes"], entry]}
        run_dir.write_json(run.config, stored)
    return changes


def _check_index(changes: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuses what the index of a checkpoint does not go with."""
    there, here = changes.get("replay.mount", ((), ()))
    if gone := sorted(set(there or ()) - set(here)):
        raise ValueError(f"replay.mount of a run can only grow: its journal names rows of {gone[0]!r}, which is not among {here}")
    if fixed := [name for name in _FIXED if name in changes]:
        there, here = changes[fixed[0]]
        raise ValueError(f"{fixed[0]} of a run cannot change: {there!r} there, {here!r} here")


def _check_allowed(changes: Mapping[str, tuple[Any, Any]], allowed: Sequence[str]) -> None:
    refused = {name: values for name, values in changes.items() if name not in allowed}
    if refused:
        listed = "; ".join(f"{name}: {there!r} there, {here!r} here" for name, (there, here) in refused.items())
        raise ValueError(f"the run has another schedule; {listed}; to change it, add --allow_change={','.join(sorted(refused))}")
