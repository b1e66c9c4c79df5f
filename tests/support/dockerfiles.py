"""Reads the project's Dockerfile, and runs those of its steps that need no Docker."""

import fnmatch
import re
import shutil
from pathlib import Path

Instruction = tuple[str, str]
_KNOWN = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}


def parse(text: str) -> list[Instruction]:
    """Instructions with their arguments; comments are left out, continued lines are joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", "", "\n".join(lines))
    found = [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]
    for words in found:
        if len(words) != 2 or words[0] not in _KNOWN:
            raise ValueError(f"{' '.join(words)!r} is no instruction that is known here: {sorted(_KNOWN)}")
    return [(name, rest) for name, rest in found]


def arguments(instructions: list[Instruction], **given: str) -> dict[str, str]:
    """The values of ARG, each of which may name earlier ones."""
    values: dict[str, str] = {}
    for name, rest in instructions:
        if name == "ARG":
            key, _, default = rest.partition("=")
            values[key] = given.get(key, expand(default.strip('"'), values))
    if unknown := given.keys() - values.keys():
        raise ValueError(f"there is no ARG {sorted(unknown)}")
    return values


def expand(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda found: values.get(found[1], ""), text)


def copy(source: str, root: Path, ignored: str, to: Path) -> None:
    """COPY of one path of `root`, without what the text of a .dockerignore leaves out."""
    paths = [root / source] if source != "." else sorted(root.iterdir())
    for path in paths:
        relative = path.relative_to(root)
        if not _is_kept(relative.parts[0], ignored):
            if source != ".":
                raise ValueError(f"COPY {source}: .dockerignore leaves it out")
        elif path.is_dir():
            shutil.copytree(path, to / relative, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        else:
            shutil.copy(path, to / relative)


def _is_kept(name: str, ignored: str) -> bool:
    """Whether a path at the top of the context is in the image: the last line that matches decides."""
    kept = True
    for line in ignored.splitlines():
        pattern = line.strip()
        if pattern and not pattern.startswith("#") and fnmatch.fnmatch(name, pattern.removeprefix("!")):
            kept = pattern.startswith("!")
    return kept
