"""Every path under a run's workdir, and the one rule for writing there: commit, then visible.

A file is written under a temporary name in the same folder, flushed to the device and renamed; readers ignore names
that begin with a dot. A folder counts as committed once the marker file that its owner writes last is there.
"""

import dataclasses
import json
import os
import re
import uuid
from pathlib import Path
from typing import Any

_STEP = re.compile(r"\d{8}")


@dataclasses.dataclass(frozen=True)
class RunDir:
    """Paths of one run. Making the object touches nothing on disk."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def references(self) -> Path:
        return self.root / "reference"

    @property
    def policies(self) -> Path:
        return self.root / "policy"

    @property
    def replay(self) -> Path:
        return self.root / "replay"

    def rescored(self, reward_version: int) -> Path:
        """The rows of `replay` with the rewards of another version, in the same format (rescore.py)."""
        return self.root / "rewards" / str(reward_version)

    def rescored_commit(self, reward_version: int) -> Path:
        """Written once `rescored` is complete: {"reward_parts", "heads"}."""
        return self.root / "rewards" / f"{reward_version}.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def compilation_cache(self) -> Path:
        return self.root / "compilation_cache"

    @property
    def evaluations(self) -> Path:
        return self.root / "evaluations"

    @property
    def finished(self) -> Path:
        """Written by the trainer when all steps are done; searchers and evaluators stop by it."""
        return self.root / "finished.json"

    @property
    def initial_reference(self) -> Path:
        """{"id": hex}: the reference policy that step 0 starts from. Its folder is `reference(id)`."""
        return self.references / "initial.json"

    def reference(self, reference_id: str) -> Path:
        return self.references / reference_id

    def metrics(self, role: str) -> Path:
        return self.root / "metrics" / role

    def log(self, role: str) -> Path:
        return self.root / "logs" / f"{role}.log"


def is_finished(run: RunDir, steps: int) -> bool:
    """Whether the run's trainer has done `steps` updates and said so. A run that is extended is not finished any more."""
    try:
        return read_json(run.finished)["step"] >= steps
    except FileNotFoundError:
        return False


def step_name(step: int) -> str:
    """Folder or file stem of a step: eight digits, so that names sort as numbers."""
    return f"{step:08d}"


def steps_in(folder: Path) -> list[int]:
    """Steps that have an entry in `folder`, ascending. Lists the folder: never trusts a negative lookup of one name."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    stems = (name.split(".")[0] for name in names)
    return sorted({int(stem) for stem in stems if _STEP.fullmatch(stem)})


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically and durably: temporary name, fsync, rename, fsync of the folder.

    Raises:
      OSError: the folder cannot be written or the device is full; the old content, if any, is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}"
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_bytes` of indented JSON."""
    write_bytes(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def read_json(path: Path) -> Any:
    """Reads a committed JSON file. Raises FileNotFoundError or ValueError (with the path) where there is none."""
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def sync_folder(folder: Path) -> None:
    """Makes renames in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
