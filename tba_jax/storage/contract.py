"""config.json: the config of a run, the contract that all its roles share, and whether its files are private."""

import contextlib
import dataclasses
import errno
import json
import os
import stat
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_jax import trajectory
from tba_jax.models.config import ResponseSpace
from tba_jax.run import processes
from tba_jax.schemas import flatten
from tba_jax.storage import fenced, layout, places
from tba_jax.storage.places import Place

# The format of a run's folder. Raise it with every change after which config.json, rows or weights mean something else.
FORMAT = 10
# The reference_id of rows without a reference policy, as 16 hex digits. No hash of weights is 0.
NO_REFERENCE = 16 * "0"
# The setting that names a teacher, whose digest is the reference_id of rows.
TEACHER = "learner.reference.path"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_ANOTHER_VERSION = "go on with the version that made the run, or begin another run in a new --workdir"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contract:
    """What rows and weights of a run mean. A role whose contract differs may not join.

    model: shape of the policy (DecoderConfig without its free fields). lora: settings of the adapters, {} without adapters.
    tokenizer: fingerprint. alphabet: the characters of the tokenizer that the task defines, "" with model.path. task: the
    settings that define queries and reward, without paths. reward_parts, reward_version: as in trajectory.RowShape. embedding:
    width and digest of the encoder that embeds responses, {} without an encoder. banned_tokens: ids that no response holds.
    min_response_length: tokens before which end-of-sequence has probability 0. force_eos: whether the last of R tokens is always
    the end of sequence. stop_strings: texts that end a response, sorted.
    step_ends: texts that end a step of a response, sorted; () if rows hold no values of states. chat_template: the text around a
    prompt, and a digest of the template's source; {} without one. date: YYYY-MM-DD, the day on which the run was made, which is
    today for the chat templates of the policy and of models that compute rewards. turns: the most turns of the policy in a
    response that an environment answers; 0: there is none. reward_models: setting -> digest of the reward model that it
    names. reference: the policy that ref_logprobs in rows come from, "initial" (that of step 0), "teacher" (reward_models has
    its digest), or "none": then they are 0. private_files: whether the files of the run are for their owner alone to read,
    see `is_private`.
    """

    model: dict[str, Any]
    lora: dict[str, Any]
    tokenizer: str
    alphabet: str
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
    force_eos: bool
    stop_strings: tuple[str, ...]
    step_ends: tuple[str, ...]
    chat_template: dict[str, str]
    date: str
    turns: int
    reward_models: dict[str, str]
    reference: str
    private_files: bool

    def to_json(self) -> dict[str, Any]:
        """The contract as it stands in config.json."""
        return plain(dataclasses.asdict(self))

    def response_space(self) -> ResponseSpace:
        """The responses that the policy can give, and how they are scored."""
        return ResponseSpace(
            temperature=self.scoring_temperature,
            banned_tokens=tuple(self.banned_tokens),
            eos_id=self.eos_id,
            min_length=self.min_response_length,
            force_eos=self.force_eos,
        )

    @property
    def given_length(self) -> int:
        """The most response tokens that a request may give: a state, or a turn, may begin before the last of R tokens."""
        return self.response_length - 1 if self.step_ends or self.turns else 0

    @property
    def has_reference(self) -> bool:
        """Whether rows hold log-probs of a reference policy."""
        return self.reference != "none"

    def reference_of_rows(self, initial: str) -> str:
        """16 hex digits, the reference_id of rows. Args: initial: that of the policy of step 0, see layout.reference_id."""
        return {"initial": initial, "teacher": self.reward_models.get(TEACHER, "")}.get(self.reference, NO_REFERENCE)

    def row_shape(self) -> trajectory.RowShape:
        """The schema of the run's rows."""
        return trajectory.RowShape(
            prompt_length=self.prompt_length,
            response_length=self.response_length,
            reward_parts=tuple(self.reward_parts),
            embedding_size=self.embedding.get("width", 0),
            state_values=bool(self.step_ends),
            environment=bool(self.turns),
        )


def reference_in_words(reference_of_rows: str) -> str:
    """What messages call the reference policy of rows. Args: reference_of_rows: 16 hex digits."""
    return "no reference" if reference_of_rows == NO_REFERENCE else f"reference {reference_of_rows}"


def of(stored: Mapping[str, Any], *, called: str) -> Contract:
    """The contract that a config.json holds. Raises ValueError where its fields are not those of this version.

    Args: stored: see `read`; called: what messages call the run.
    """
    try:
        return Contract(**stored["contract"])
    except TypeError as error:
        raise ValueError(f"{called}: the contract in its config.json is damaged: {error}") from error


def plain(tree: Any) -> Any:
    """The tree as it returns from JSON: tuples are lists."""
    return json.loads(json.dumps(tree))


def mounted_logs(mounts: Sequence[str], *, reward_version: int) -> tuple[Place, ...]:
    """The replay folders of the runs of replay.mount: the rescored rows of a run, if it has them, else its own."""
    runs = [layout.open_run_dir(folder) for folder in mounts]
    return tuple(
        run.rescored(reward_version) if places.exists(run.rescored_commit(reward_version)) else run.replay for run in runs
    )


# Fields of the contract that are a setting -> the setting.
_SETTINGS = {
    "task_name": "task.name",
    "scoring_temperature": "sampling.scoring_temperature",
    "reference": "learner.reference.kind",
    **{
        name: f"task.{name}"
        for name in (
            *("prompt_length", "response_length", "min_response_length", "force_eos"),
            *("missing_eos_reward", "stop_strings", "step_ends"),
        )
    },
}
# Fields of the contract that say nothing about rows.
FREE_OF_ROWS = ("lora", "private_files", "date")
_MOST_TOLD = 8  # fields that differ, of which a sentence tells
_LONG = 6  # values of a list that a sentence may hold


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The fields that differ between two trees, each with both values; the name of the task, from which others follow, first."""
    theirs, ours = flatten(there), flatten(here)
    # In a contract, `task` holds the settings of one task. Its section of the config is named, so that they can be set.
    section = "custom" if ".py:" in (task := str(ours.get("task_name", ""))) else task

    def called(name: str) -> str:
        return f"task.{section}.{name[5:]}" if section and name.startswith("task.") else _SETTINGS.get(name, name)

    different = [
        name for name in sorted(theirs | ours, key=lambda name: (name != "task_name", name)) if theirs.get(name) != ours.get(name)
    ]
    if "task_name" in different:  # another task has other settings
        different = [name for name in different if not name.startswith("task.")]
    return [f"{called(name)}: {_compared(theirs.get(name), ours.get(name))}" for name in different]


def in_words(different: Sequence[str]) -> str:
    """Fields that differ, as part of a sentence. Args: different: see `differences`."""
    more = len(different) - _MOST_TOLD
    return "; ".join(different[:_MOST_TOLD]) + (f"; and {more} more" if more > 0 else "")


def _compared(there: Any, here: Any) -> str:
    """Both values; of two long lists, what only one of them holds."""
    if not (isinstance(there, list | tuple) and isinstance(here, list | tuple) and max(len(there), len(here)) > _LONG):
        return f"{there!r} there, {here!r} here"
    only = ([value for value in mine if value not in other] for mine, other in ((there, set(here)), (here, set(there))))
    alone = [", ".join(map(repr, each[:_LONG])) + (f" … ({len(each)})" if len(each) > _LONG else "") for each in only]
    return f"{len(there)} values there, {len(here)} here; {alone[0] or 'none'} only there, {alone[1] or 'none'} only here"


def join(run: layout.RunDir, config: Any, contract: Contract, *, init_from: str = "") -> None:
    """Makes config.json, if the run has none; else compares the contracts, and writes nothing.

    Args: init_from: RUN@STEP, the policy that the run starts from; "": that of the config, or of config.json.

    Raises ValueError: the contract differs (names every differing field with both values), another version of tba_jax made the
    run, it began from another policy, or the workdir cannot be written.
    """
    mine = {
        "format": FORMAT,
        "id": uuid.uuid4().hex,
        "config": plain(config.to_dict()),
        "contract": contract.to_json(),
        "changes": [],
        "init_from": init_from,
    }
    # A role that starts again does not write: a full or read-only storage would look like a mistake of the user.
    if run.id:  # of a run that was there before; a folder of --shared alone is joined by a workdir that is new
        check_is_there(run)
    elif not (places.exists(run.config) and (run.elsewhere is None or places.exists(run.shared_name))):
        _make(run, mine)
    check_joins(run, config, contract, init_from=init_from)


def check_joins(run: layout.RunDir, config: Any, contract: Contract, *, init_from: str = "") -> None:
    """Raises ValueError where the existing run has another contract or other settings, or began from another policy."""
    stored = read_run(run, called=f"workdir {str(run.shared)!r}")
    if different := differences(stored["contract"], contract.to_json()):
        raise ValueError(
            f"workdir {str(run.shared)!r} belongs to a run of another contract; {in_words(different)}. A run keeps its "
            "contract: take its settings, or begin another run in a new --workdir"
        )
    lacking = flatten(config.to_dict()).keys() - flatten(stored["config"]).keys()
    if lacking := {name for name in lacking if not name.startswith("task.custom.")}:
        raise ValueError(f"{run.config} has no setting {min(lacking)}: {_ANOTHER_VERSION}")
    there = stored["init_from"]
    if init_from and init_from != there:
        began = f"the policy {there}" if there else "what its config says"
        raise ValueError(f"--init_from={init_from}: the run in {str(run.shared)!r} exists and began from {began}")


def steps_of(run: layout.RunDir) -> int:
    """learner.steps of the run, which a resumed trainer may have changed."""
    steps: int = read(run)["config"]["learner"]["steps"]
    return steps


def is_finished(run: layout.RunDir) -> bool:
    """Whether the trainer has recorded that it did all steps of the run.
    Raises processes.RunIsAway: another run is in the place of this one."""
    if not layout.is_finished(run, 0):
        return False
    if run.id:
        check_is_there(run)
    return layout.is_finished(run, steps_of(run))


def _make(run: layout.RunDir, mine: Mapping[str, Any]) -> None:
    layout.check_can_be_made(run)
    try:
        run.root.mkdir(parents=True, exist_ok=True)
        if isinstance(run.shared, Path):
            run.shared.mkdir(parents=True, exist_ok=True)
        if not places.exists(run.config):  # a workdir that joins needs no right to write there
            fenced.probe(run.shared)
            layout.create_json(run.config, mine)  # where another role was first, its file stays
        layout.note_shared(run)
    except OSError as error:
        raise ValueError(f"workdir {str(run.shared)!r} cannot be written: {error.strerror or error}") from error


def known(run: layout.RunDir, expected: str) -> layout.RunDir:
    """The run with the id `expected`, or with that of config.json; without an id where the workdir has not joined a run yet.
    Raises processes.RunIsAway: `expected` is not there."""
    has_joined = run.elsewhere is None or places.exists(run.shared_name)
    found = dataclasses.replace(run, id=expected or (_id(run) if has_joined else ""))
    if expected:
        check_is_there(found)
    return found


def wait_for(run: layout.RunDir, expected: str, *, seconds: float = 60.0) -> layout.RunDir:
    """`known`, once storage shows this process the run that another one has made or joined. Raises RunIsAway after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return known(run, expected)
        except processes.RunIsAway:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def check_is_there(run: layout.RunDir) -> None:
    """Raises processes.RunIsAway where the place of a run does not hold the run with its id, OSError where storage fails."""
    found = _id(run)
    if not found:
        raise processes.RunIsAway(f"workdir {run.shared} is not there: it has no config.json; was it moved, or is a mount lost?")
    if found != run.id:
        raise processes.RunIsAway(f"workdir {run.shared} holds another run: its id is {found}, expected {run.id}")
    if run.elsewhere is not None and not places.exists(run.shared_name):
        raise processes.RunIsAway(f"workdir {run.root} is not there: it has no {run.shared_name.name}")


def _id(run: layout.RunDir) -> str:
    """The id in config.json, "" without one."""
    try:
        stored = layout.read_json(run.config)
    except (FileNotFoundError, ValueError):  # who reads the whole file says what is wrong with it
        return ""
    return str(stored.get("id", "")) if isinstance(stored, dict) else ""


@contextlib.contextmanager
def failures_of_storage(run: layout.RunDir) -> Iterator[None]:
    """Makes every error inside one of storage, if the run with this id is not to be found after it."""
    try:
        yield
    except Exception as error:
        if run.id and not processes.is_storage_failure(error):
            try:
                check_is_there(run)
            except OSError as away:
                raise away from error
        raise


def read_run(run: layout.RunDir, *, called: str = "") -> dict[str, Any]:
    """config.json of an RL run, see `read`.

    Args: called: what the user calls the run; default: its workdir.

    Raises ValueError: there is no run, or it is supervised training, is damaged, or is of another version.
    """
    if not places.exists(run.config):
        raise ValueError(f"{called or run.root} holds no run: there is no {run.config}")
    stored = read(run)
    if "supervised" in stored["contract"]:
        raise ValueError(f"{called or run.root} holds supervised training, and no RL run")
    return stored


def read(run: layout.RunDir) -> dict[str, Any]:
    """config.json: {"format", "id", "config", "contract", "changes", "init_from"}; of supervised training, the first four.
    Raises FileNotFoundError: there is no config.json. ValueError: it is damaged, or another version of tba_jax wrote it."""
    try:
        stored = layout.read_json(run.config)
    except ValueError as error:
        raise ValueError(f"{error}; nothing else holds the settings of the run: restore the file from a copy") from error
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ELOOP):
            raise ValueError(f"{run.config} cannot be read: {error.strerror}") from error
        raise
    there = stored.get("format") if isinstance(stored, dict) else None
    if there != FORMAT:
        raise ValueError(
            f"{run.config} has format {there!r}, and this version of tba_jax reads format {FORMAT}: {_ANOTHER_VERSION}"
        )
    return stored


def is_private(run: layout.RunDir) -> bool:
    """Whether the owner alone may read the files of the run; False where there is no run yet, or its config.json cannot be read.

    An object store has no such permissions: who may read a run there is a rule of the bucket.
    """
    try:
        stored = layout.read_json(run.config)
        return stored["contract"]["private_files"] is True
    except (OSError, ValueError, KeyError, TypeError):  # who reads the whole file says what is wrong with it
        return False


def keep_private(run: layout.RunDir) -> None:
    """Has this process, and those that it starts, make files and folders that their owner alone may read.

    The folders of the run that are there already, such as a workdir that a launcher has made, are closed to others as well.
    """
    os.umask(_OTHERS)
    for folder in {run.root, run.shared}:
        if isinstance(folder, Path) and folder.is_dir():
            mode = stat.S_IMODE(folder.stat().st_mode)
            if mode & _OTHERS:
                with contextlib.suppress(PermissionError):  # another user's folder
                    folder.chmod(mode & ~_OTHERS)


def follow_privacy(workdir: Path) -> None:
    """`keep_private`, if the run in a workdir is private. A command calls this before it writes anything of the run."""
    run = layout.open_run_dir(workdir)
    if is_private(run):
        keep_private(run)
