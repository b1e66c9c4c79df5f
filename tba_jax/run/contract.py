"""The contract that every role of a run must share, and the schedule that a resumed one may change."""

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tba_jax import trajectory
from tba_jax.models.scoring import ResponseSpace
from tba_jax.run import layout, places
from tba_jax.run.places import Place
from tba_jax.settings import flatten

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
# Of config.json, and of what it describes. It is raised when either means something else from then on: versions of tba_jax with
# another number refuse the run.
FORMAT = 1
_ANOTHER_VERSION = "go on with the version that made the run, or begin another run in a new --workdir"
# Values of learner.reference.kind with a reference that the trainer holds, and checkpoints.
HELD_REFERENCES = ("reset", "ema")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contract:
    """What rows and weights of a run mean. A role whose contract differs may not join.

    model: shape of the policy (DecoderConfig without its free fields); lora: the adapters' settings, {} without; tokenizer:
    fingerprint; task: its settings that define queries and reward, paths excepted; reward_parts, reward_version: as in
    trajectory.RowShape; embedding: width and weights (a digest) of the encoder of responses, {} without;
    banned_tokens: ids that no response holds; min_response_length: tokens, below which no end-of-sequence comes;
    stop_strings: texts that end a response, sorted; step_ends: those that end a step of one, sorted, () where rows hold no values
    of states; chat_template: what stands around a prompt, "" for nothing; reward_models: digests of the models that rewards come
    from, by their settings.
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
    embedding: dict[str, Any]
    min_response_length: int
    stop_strings: tuple[str, ...]
    step_ends: tuple[str, ...]
    chat_template: str
    reward_models: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """As it looks in config.json."""
        return _plain(dataclasses.asdict(self))

    def response_space(self) -> ResponseSpace:
        """Which responses there are, and how they are scored."""
        return ResponseSpace(
            temperature=self.scoring_temperature,
            banned_tokens=tuple(self.banned_tokens),
            eos_id=self.eos_id,
            min_length=self.min_response_length,
        )

    def row_shape(self) -> trajectory.RowShape:
        """The schema of the run's rows."""
        return trajectory.RowShape(
            prompt_length=self.prompt_length,
            response_length=self.response_length,
            reward_parts=tuple(self.reward_parts),
            embedding_size=self.embedding.get("width", 0),
            state_values=bool(self.step_ends),
        )


def _plain(tree: Any) -> Any:
    """As it looks after a round trip through JSON (tuples become lists)."""
    return json.loads(json.dumps(tree))


def mounted_logs(leaves: Mapping[str, Any], *, reward_version: int) -> tuple[Place, ...]:
    """Replay folders of the runs that a flattened config mounts: rescored ones, where rows were scored in another version."""
    runs = [layout.open_run_dir(folder) for folder in leaves.get("replay.mount", ())]
    return tuple(
        run.rescored(reward_version) if places.exists(run.rescored_commit(reward_version)) else run.replay for run in runs
    )


_LONG = 6  # values of a list that a sentence may hold


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Fields of two trees that differ, each with both values."""
    theirs, ours = flatten(there), flatten(here)
    # A contract has the settings of its task alone.
    section = "custom" if ".py:" in (task := str(ours.get("task_name", ""))) else task
    return [
        f"{f'task.{section}.{k[5:]}' if section and k.startswith('task.') else k}: {_compared(theirs.get(k), ours.get(k))}"
        for k in sorted(theirs | ours)
        if theirs.get(k) != ours.get(k)
    ]


def _compared(there: Any, here: Any) -> str:
    """Both values; of two long lists, what only one of them holds."""
    if not (isinstance(there, list | tuple) and isinstance(here, list | tuple) and max(len(there), len(here)) > _LONG):
        return f"{there!r} there, {here!r} here"
    only = ([value for value in mine if value not in other] for mine, other in ((there, set(here)), (here, set(there))))
    alone = [", ".join(map(repr, each[:_LONG])) + (f" … ({len(each)})" if len(each) > _LONG else "") for each in only]
    return f"{len(there)} values there, {len(here)} here; {alone[0] or 'none'} only there, {alone[1] or 'none'} only here"


def join(run: layout.RunDir, config: Any, contract: Contract, *, init_from: str = "") -> None:
    """Makes the run's config.json if there is none; compares contracts, and writes nothing, if there is.

    Args:
      init_from: RUN@STEP, the policy that the run starts from; "": the config's, or what the run was made with.

    Raises:
      ValueError: the contract differs (every differing field with both values), or the workdir cannot be written.
    """
    mine = {
        "format": FORMAT,
        "config": _plain(config.to_dict()),
        "contract": contract.to_json(),
        "changes": [],
        "init_from": init_from,
    }
    # A role that is started again while storage is full or read-only must not take that for the user's mistake.
    if not (places.exists(run.config) and (run.elsewhere is None or places.exists(run.shared_name))):
        _make(run, mine)
    check_joins(run, config, contract, init_from=init_from)


def check_joins(run: layout.RunDir, config: Any, contract: Contract, *, init_from: str = "") -> None:
    """Raises ValueError where the existing run has another contract or other settings, or began from another policy."""
    stored = read_run(run, called=f"workdir {str(run.shared)!r}")
    if different := differences(stored["contract"], contract.to_json()):
        raise ValueError(
            f"workdir {str(run.shared)!r} belongs to a run of another contract; {'; '.join(different)}. A run keeps its "
            "contract: take its settings, or begin another run in a new --workdir"
        )
    lacking = flatten(config.to_dict()).keys() - flatten(stored["config"]).keys()
    if lacking := {name for name in lacking if not name.startswith("task.custom.")}:
        raise ValueError(f"{run.config} has no setting {min(lacking)}: {_ANOTHER_VERSION}")
    there = stored["init_from"]
    if init_from and init_from != there:
        began = f"the policy {there}" if there else "what its config says"
        raise ValueError(f"--init_from={init_from}: the run in {str(run.shared)!r} exists and began from {began}")


def _make(run: layout.RunDir, mine: Mapping[str, Any]) -> None:
    try:
        run.root.mkdir(parents=True, exist_ok=True)
        layout.create_json(run.config, mine)  # where another role was first, its file stays
        layout.note_shared(run)
    except OSError as error:
        raise ValueError(f"workdir {str(run.shared)!r} cannot be written: {error.strerror or error}") from error


def read_run(run: layout.RunDir, *, called: str = "") -> dict[str, Any]:
    """`read`, of an RL run that exists.

    Args: called: what the user calls the run; default: its workdir.

    Raises:
      ValueError: there is no run, it is supervised training, or see `read`.
    """
    if not places.exists(run.config):
        raise ValueError(f"{called or run.root} holds no run: there is no {run.config}")
    stored = read(run)
    if "supervised" in stored["contract"]:
        raise ValueError(f"{called or run.root} holds supervised training, and no RL run")
    return stored


def read(run: layout.RunDir) -> dict[str, Any]:
    """config.json: {"format", "config", "contract", "changes", "init_from"}; of supervised training the first three.

    Raises:
      FileNotFoundError: there is none. ValueError: it is damaged, or another version of tba_jax wrote it.
    """
    stored = layout.read_json(run.config)
    there = stored.get("format") if isinstance(stored, dict) else None
    if there != FORMAT:
        raise ValueError(
            f"{run.config} has format {there!r}, and this version of tba_jax reads format {FORMAT}: {_ANOTHER_VERSION}"
        )
    return stored


def changed_schedule(run: layout.RunDir, config: Any) -> dict[str, tuple[Any, Any]]:
    """Schedule settings that differ from the run's: name -> (there, here)."""
    theirs, ours = flatten(read(run)["config"]), flatten(_plain(config.to_dict()))
    names = [name for name in ours if name.split(".")[0] in SCHEDULE_SECTIONS and not name.startswith(_FREE)]
    return {name: (theirs[name], ours[name]) for name in names if theirs[name] != ours[name]}


def past_schedules(run: layout.RunDir, *, after: int) -> list[tuple[int, dict[str, Any]]]:
    """Schedule settings of steps after `after` that have changed since: (last step, name -> value then), in order.

    Steps after the last of these have the settings of config.json. learner.non_finite is left out: whether a run went on after a
    step is in its journal.
    """
    changes = read(run)["changes"]
    past = []
    for step in sorted({entry["step"] for entry in changes if entry["step"] > after}):
        values: dict[str, Any] = {}
        for entry in reversed([entry for entry in changes if entry["step"] >= step]):
            values |= {name: there for name, (there, _) in entry["settings"].items()}
        values.pop("learner.non_finite", None)
        if values:
            past.append((step, {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}))
    return past


# What the replay index of a checkpoint was built with.
_FIXED = (
    "replay.capacity",
    "replay.capacity_per_query",
    "replay.merge_duplicates",
    "replay.merge_edit_distance",
    "replay.merge_cosine_distance",
    "replay.drop",
)


def change_schedule(run: layout.RunDir, config: Any, *, allowed: Sequence[str], step: int) -> dict[str, tuple[Any, Any]]:
    """Lets a resumed trainer change allowed schedule settings, recorded in config.json with the step.

    At step 0 it needs no leave: nothing was trained yet, and a searcher that came first stored a schedule that is not its own.

    Raises:
      ValueError: a setting differs that is not in `allowed`, or cannot change, or `allowed` names none.
    """
    changes = check_schedule(run, config, allowed=allowed, step=step)
    if changes:
        stored = read(run)
        entry = {"step": step, "time": datetime.datetime.now(datetime.UTC).isoformat(), "settings": _plain(changes)}
        stored |= {"config": _plain(config.to_dict()), "changes": [*stored["changes"], entry]}
        layout.write_json(run.config, stored)
    return changes


def check_schedule(run: layout.RunDir, config: Any, *, allowed: Sequence[str], step: int) -> dict[str, tuple[Any, Any]]:
    """The changes that `change_schedule` would make. Raises ValueError where it would."""
    if unknown := sorted(set(allowed) - flatten(config.to_dict()).keys()):
        raise ValueError(f"--allow_change={','.join(allowed)}: there is no setting {unknown[0]}")
    changes = changed_schedule(run, config)
    if step or (run.checkpoints.is_dir() and any(run.checkpoints.iterdir())):
        _check_checkpointed(changes)
    if step:
        _check_allowed(changes, allowed)
    return changes


# Settings by which a checkpoint has more state: value -> what it has. Of objectives it is what tba_jax.objectives declares, which
# a test holds against this: that layer is above.
STATEFUL: dict[str, dict[str, str]] = {
    "learner.objective": {"learned_log_z": "log_z", "ppo": "value_head"},
    "learner.reference.kind": dict.fromkeys(HELD_REFERENCES, "reference"),
}


def _check_checkpointed(changes: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuses what the state or the index of a checkpoint does not go with."""
    for name, state in STATEFUL.items():
        there, here = changes.get(name, ("", ""))
        if state.get(there) != state.get(here):
            raise ValueError(
                f"{name} of a run cannot change from {there!r} to {here!r}: its checkpoints hold another state; "
                "begin a new run from this one's policy with --init_from"
            )
    there, here = changes.get("replay.mount", ((), ()))
    if gone := sorted(set(there) - set(here)):
        raise ValueError(f"replay.mount of a run can only grow: its journal names rows of {gone[0]!r}, which is not among {here}")
    if fixed := [name for name in _FIXED if name in changes]:
        there, here = changes[fixed[0]]
        raise ValueError(f"{fixed[0]} of a run cannot change: {there!r} there, {here!r} here")


def _check_allowed(changes: Mapping[str, tuple[Any, Any]], allowed: Sequence[str]) -> None:
    refused = {name: values for name, values in changes.items() if name not in allowed}
    if refused:
        listed = "; ".join(f"{name}: {there!r} there, {here!r} here" for name, (there, here) in refused.items())
        raise ValueError(f"the run has another schedule; {listed}; to change it, add --allow_change={','.join(sorted(refused))}")
