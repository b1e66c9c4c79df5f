"""Every path of a run: the files that its roles share, the trainer's own, and those of each process.

A folder counts as committed once it holds the marker file that its owner writes last.
"""

import dataclasses
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tba_jax.storage import places
from tba_jax.storage.places import Place

_STEP = re.compile(r"\d{8}")
_SHARED = "shared.json"
_OWN_FOLDERS = ("lease", "policy", "reference", "replay", "checkpoints", "journal")


@dataclasses.dataclass(frozen=True)
class RunDir:
    """Paths of one run. Making the object touches nothing on disk.

    root: the workdir, a local or mounted folder. elsewhere: the place where searchers and trainer meet, None if it is `root`.
    id: of the run that is there, "" where there may be none yet. Nobody makes the folders of a run with an id again.
    """

    root: Path
    elsewhere: Place | None = None
    id: str = ""

    @property
    def shared(self) -> Place:
        """Where config, policies and replay are."""
        return self.root if self.elsewhere is None else self.elsewhere

    @property
    def shared_name(self) -> Path:
        """The file {"shared": …} that a workdir has if the run's roles meet elsewhere."""
        return self.root / _SHARED

    @property
    def config(self) -> Place:
        return self.shared / "config.json"

    @property
    def references(self) -> Place:
        return self.shared / "reference"

    @property
    def policies(self) -> Place:
        return self.shared / "policy"

    @property
    def lease(self) -> Place:
        """The trainer's lease, a fenced value, see lease.py."""
        return self.shared / "lease"

    @property
    def replay(self) -> Place:
        return self.shared / "replay"

    def rescored(self, reward_version: int) -> Place:
        """The rows of `replay` with the rewards of another version, in the same format (commands/rescore.py)."""
        return self.shared / "rewards" / str(reward_version)

    def rescored_commit(self, reward_version: int) -> Place:
        """The file {"reward_parts", "heads"} that is written once `rescored` is complete."""
        return self.shared / "rewards" / f"{reward_version}.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def closed(self) -> Path:
        """Which writers the trainer has closed, see replay/closed.py."""
        return self.root / "closed"

    @property
    def log_z(self) -> Path:
        """The file of learner.log_z_path as the run began with it."""
        return self.root / "log_z.json"

    @property
    def compilation_cache(self) -> Path:
        """Compiled programs, those of each type of CPU (processes.cpu_type) in a folder of their own."""
        return self.root / "compilation_cache"

    @property
    def evaluations(self) -> Path:
        return self.root / "evaluations"

    @property
    def finished(self) -> Place:
        """Written by the trainer when all steps are done; searchers and evaluators stop by it."""
        return self.shared / "finished.json"

    @property
    def demand(self) -> Place:
        """What the trainer tells searchers that would run ahead of it: roles/backpressure.py."""
        return self.shared / "demand.json"

    @property
    def initial_reference(self) -> Place:
        """{"id": hex}: the reference policy that step 0 starts from. Its folder is `reference(id)`."""
        return self.references / "initial.json"

    def reference(self, reference_id: str) -> Place:
        return self.references / reference_id

    @property
    def draft(self) -> Path:
        """A new local folder for a reference policy that is being made."""
        folder = self.references if isinstance(self.references, Path) else self.root / "reference"
        return folder / f".draft-{uuid.uuid4().hex[:8]}"

    def profiles(self, role: str) -> Path:
        """The traces of --profile."""
        return self.root / "profiles" / role

    def metrics(self, role: str) -> Path:
        return self.root / "metrics" / role

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def log(self, role: str) -> Path:
        return self.logs / f"{role}.log"


def open_run_dir(workdir: Path | str, shared: str = "") -> RunDir:
    """The run in a workdir, wherever its roles meet.

    Args: workdir: a folder, or the URL where the roles of a run meet; such a run has nothing local. shared: where its roles meet;
    "": the place that the workdir names, else the workdir. Raises ValueError: the run meets elsewhere; names both.
    """
    if isinstance(workdir, str) and isinstance(found := places.place(workdir), places.Bucket):
        return RunDir(Path(os.devnull), found)  # below a file there is nothing, and nothing can be made
    root = Path(workdir)
    if any(f"{scheme}:" in root.parts for scheme in places.SCHEMES):
        raise ValueError(f"workdir {workdir} must be a local folder: the trainer's, which remembers the place of its --shared")
    asked = places.absolute(shared) if shared else ""
    try:
        there = str(read_json(root / _SHARED)["shared"])
    except (FileNotFoundError, NotADirectoryError):
        there = str(root.absolute()) if (root / "config.json").exists() else ""
    except OSError as error:
        raise ValueError(f"workdir {workdir} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError) as error:
        raise ValueError(f"{root / _SHARED} does not say where the run's roles meet") from error
    if asked and there and asked != there:
        raise ValueError(f"--shared={shared}: the roles of the run in {root} meet in {there}")
    meeting = asked or there
    return RunDir(root) if meeting in ("", str(root.absolute())) else RunDir(root, places.place(meeting))


def check_can_be_made(run: RunDir) -> None:
    """Raises ValueError where the workdir is no folder and cannot become one, cannot be written, or holds folders of the names
    that a run gives its own, in which the trainer removes what it does not know; writes nothing."""
    there = next(folder for folder in (run.root, *run.root.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"workdir {str(run.root)!r} cannot be written: {there} is {'read-only' if there.is_dir() else 'a file'}")
    if places.exists(run.config):
        return
    folders: dict[Place, None] = dict.fromkeys((run.root, run.shared))
    foreign = [folder / name for folder in folders for name in _OWN_FOLDERS if any(places.names_in(folder / name))]
    if foreign and not places.exists(run.config):  # looked for again: whoever makes the run writes it before these folders
        raise ValueError(
            f"workdir {str(foreign[0].parent)!r} holds no run, for there is no {run.config}, and yet has {foreign[0].name}/, a "
            "name that a run gives its own folder: take another --workdir; where a run has lost that file, restore it from a copy"
        )


def note_shared(run: RunDir) -> None:
    """Writes into the workdir where the run's roles meet."""
    if run.elsewhere is not None:
        create_json(run.shared_name, {"shared": str(run.elsewhere)})


def is_finished(run: RunDir, steps: int) -> bool:
    """Whether the run's trainer has recorded that it did `steps` updates. A run that is extended is not finished any more.

    A torn file records nothing: a trainer that is started again writes it anew.
    """
    try:
        return json.loads(read_file(run.finished))["step"] >= steps
    except (FileNotFoundError, UnicodeDecodeError, json.JSONDecodeError):
        return False
    except (KeyError, TypeError) as error:
        raise ValueError(f"{run.finished} does not say at which step the run was finished") from error


def reference_id(run: RunDir) -> str:
    """16 hex digits that name the reference policy which step 0 starts from.
    Raises FileNotFoundError: the run has none yet. ValueError: initial.json is damaged."""
    named = read_json(run.initial_reference)
    if not isinstance(named, dict) or not isinstance(named.get("id"), str):
        raise ValueError(f"{run.initial_reference} names no reference policy: {named!r} has no id")
    return named["id"]


def step_name(step: int) -> str:
    """Folder or file stem of a step: eight digits, so that names sort as numbers."""
    return f"{step:08d}"


def steps_in(folder: Place, *, newer_than: int = -1) -> list[int]:
    """Steps above `newer_than` that have an entry in `folder`, ascending."""
    return as_steps(places.names_in(folder, after=step_name(newer_than) if newer_than >= 0 else ""))


def as_steps(names: Iterable[str]) -> list[int]:
    """The steps among names of folders and files, ascending."""
    stems = (name.split(".")[0] for name in names)
    return sorted({int(stem) for stem in stems if _STEP.fullmatch(stem)})


def listed(steps: Sequence[int]) -> str:
    """The steps for a message; of more than eight, the first four and the last."""
    shown = [*map(str, steps)] if len(steps) <= 8 else [*map(str, steps[:4]), "…", str(steps[-1])]
    return ", ".join(shown)


def write_json(file: Place, value: Any) -> None:
    places.write_bytes(file, _json(value))


def create_json(file: Place, value: Any) -> bool:
    return places.create(file, _json(value))


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def read_file(file: Place) -> bytes:
    """`places.read_bytes` of a small file. Raises ValueError as well, where it is no file."""
    if isinstance(file, Path) and file.is_fifo():
        raise ValueError(f"{file} is no file")  # to read it would wait for ever
    return places.read_bytes(file)


def read_json(file: Place) -> Any:
    """Reads a committed JSON file. Raises FileNotFoundError if it does not exist, ValueError with its path if it is not JSON."""
    content = read_file(file)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error


def parse_line(line: str) -> dict[str, Any]:
    """One line; {} for a line that a kill cut short, or that is no object."""
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):  # also a number of very many digits, and very many brackets
        return {}
    return parsed if isinstance(parsed, dict) else {}


def each(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file, oldest first; none where there is no file. Raises OSError where the storage refuses."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            yield from filter(None, map(parse_line, file))
    except FileNotFoundError:
        return


def append(path: Path, lines: Sequence[str]) -> None:
    """Appends lines by one write. After a line that a kill cut short they begin on a line of their own.
    Raises OSError: the storage refused."""
    content = "".join(f"{line}\n" for line in lines)
    if is_torn(path):
        content = "\n" + content
    with open(path, "ab", buffering=0) as file:
        file.write(content.encode())


def is_torn(path: Path) -> bool:
    """Whether the last line of a file has no end."""
    try:
        with open(path, "rb") as file:
            if not file.seek(0, os.SEEK_END):
                return False
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"
    except FileNotFoundError:
        return False
