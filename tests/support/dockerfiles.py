"""Finds mistakes in the project's Dockerfile, and runs those of its steps that need no Docker."""

import fnmatch
import re
import shlex
import shutil
from collections.abc import Iterator
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


def problems(text: str, *, extras: set[str]) -> Iterator[str]:
    """A sentence for each mistake. Args: extras: those of pyproject.toml."""
    try:
        instructions = parse(text)
    except ValueError as error:
        yield str(error)
        return
    yield from _of_arguments(instructions, extras)
    lines = [f"{name} {rest}" for name, rest in instructions]
    position = {line: lines.index(line) for line in lines}
    install = 'RUN python -m launch.constraints.install "${CONSTRAINTS}" -r requirements.txt'
    order = ["COPY requirements.txt ./", install, "COPY pyproject.toml ./", "COPY . ."]
    if missing := [step for step in order if step not in position]:
        yield f"{missing} are not there"
    elif sorted(order, key=position.__getitem__) != order:
        yield f"the layers must come in the order {order}, so that a change of the code installs nothing again"
    users = [rest for name, rest in instructions if name == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", users[-1]):
        yield f"USER {users[-1] if users else 'root'} must be a number above 0: Kubernetes compares it with runAsNonRoot"
    names = [name for name, _ in instructions]
    if "USER" in names and "RUN" in names[names.index("USER") :]:
        yield "RUN after USER: what the image holds must not be writable for its roles"
    if "COPY" in names and "WORKDIR" not in names[: names.index("COPY")]:
        yield "COPY before WORKDIR"
    (entry,) = [rest for name, rest in instructions if name == "ENTRYPOINT"] or ["[]"]
    installed = " ".join(rest for name, rest in instructions if name == "RUN" and "apt-get install" in rest)
    for program in re.findall(r'^\["(\w+)"', entry):
        if program not in shlex.split(installed):
            yield f"ENTRYPOINT {program} is not installed"
    if not entry.startswith('["'):
        yield f"ENTRYPOINT {entry} would be a shell, which passes no signal on"


def _of_arguments(instructions: list[Instruction], extras: set[str]) -> Iterator[str]:
    for number, (name, rest) in enumerate(instructions):
        key = rest.partition("=")[0]
        later = " ".join(text for _, text in instructions[number + 1 :])
        if name == "ARG" and not re.search(rf"\$\{{{key}\}}|environ\['{key}'\]", later):
            yield f"ARG {key} is not used"
    values = arguments(instructions)
    # Where an ARG stands before FROM, the layers behind it do not see it.
    for version in ("12", "13") if "CUDA" in values else ("",):
        found = arguments(instructions, CUDA=version).get("EXTRAS", "").split() if version else []
        if f"cuda{version}" not in found:
            yield f"CUDA={version} installs the extras {found}"
        yield from (f"pyproject.toml has no extra {name}" for name in found if name not in extras)


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
