"""config.json: the config of a run, and the contract that all its roles share."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from tba_jax import trajectory
from tba_jax.models.scoring import ResponseSpace
from tba_jax.run import layout, places
from tba_jax.run.places import Place
from tba_jax.schemas import flatten

# Of config.json, and of what it describes. It is raised when either means something else from then on: versions of tba_jax with
# another number refuse the run.
FORMAT = 1
_ANOTHER_VERSION = "go on with the version that made the run, or begin another run in a new --workdir"


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
        return plain(dataclasses.asdict(self))

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


def plain(tree: Any) -> Any:
    """As it looks after a round trip through JSON (tuples become lists)."""
    return json.loads(json.dumps(tree))


def mounted_logs(leaves: Mapping[str, Any], *, reward_version: int) -> tuple[Place, ...]:
    """Replay folders of the runs that a flattened config mounts: rescored ones, where rows were scored in another version."""
    runs = [layout.open_run_dir(folder) for folder in leaves.get("replay.mount", ())]
    return tuple(
        run.rescored(reward_version) if places.exists(run.rescored_commit(reward_version)) else run.replay for run in runs
    )


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Fields of two trees that differ, each with both values."""
    theirs, ours = flatten(there), flatten(here)
    # A contract has the settings of its task alone.
    section = "custom" if ".py:" in (task := str(ours.get("task_name", ""))) else task
    return [
        f"{f'task.{section}.{k[5:]}' if section and k.startswith('task.') else k}: {theirs.get(k)!r} there, {ours.get(k)!r} here"
        for k in sorted(theirs | ours)
        if theirs.get(k) != ours.get(k)
    ]


def join(run: layout.RunDir, config: Any, contract: Contract, *, init_from: str = "") -> None:
    """Makes the run's config.json if there is none; compares contracts, and writes nothing, if there is.

    Args:
      init_from: RUN@STEP, the policy that the run starts from; "": the config's, or what the run was made with.

    Raises:
      ValueError: the contract differs (every differing field with both values), or the workdir cannot be written.
    """
    mine = {
        "format": FORMAT,
        "config": plain(config.to_dict()),
        "contract": contract.to_json(),
        "changes": [],
        "init_from": init_from,
    }
    # A role that is started again while storage is full or read-only must not take that for the user's mistake.
    if not (places.exists(run.config) and (run.elsewhere is None or places.exists(run.shared_name))):
        _make(run, mine)
    stored = read_run(run, called=f"workdir {str(run.shared)!r}")
    if different := differences(stored["contract"], mine["contract"]):
        raise ValueError(
            f"workdir {str(run.shared)!r} belongs to a run of another contract; {'; '.join(different)}. A run keeps its "
            "contract: take its settings, or begin another run in a new --workdir"
        )
    lacking = flatten(mine["config"]).keys() - flatten(stored["config"]).keys()
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
