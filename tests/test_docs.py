"""README.md and docs/: links lead somewhere, and every command, setting, path and name that they show is there."""

import functools
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from absl import flags

from configs import base, supervised
from tba_jax import __main__ as command_list
from tba_jax.tasks import interface

ROOT = Path(__file__).parent.parent
FIRST = [ROOT / "README.md", ROOT / ".github" / "CONTRIBUTING.md", ROOT / "benchmarks" / "RESULTS.md"]
PAGES = [*FIRST, *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")
# Whatever begins with a folder or a file of the repository.
REPOSITORY_PATH = re.compile(r"(?<![\w/.-])((?:tba_jax|configs|tests|docs|launch|benchmarks|colab|\.ci)/[\w./-]*\w/?)")
FLAG = re.compile(r"--([a-z_]+)\Z")


def prose(text: str) -> str:
    """The text without blocks of code."""
    return FENCED.sub("", text)


def anchors(text: str) -> set[str]:
    """What the headings are called in links."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def broken_links(page: Path, text: str) -> Iterator[str]:
    for link in LINK.findall(prose(text)):
        path, _, anchor = link.partition("#")
        if ":" in path:
            continue  # another site's
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{link}: there is no such file"
        elif anchor and anchor not in anchors(text if target == page else target.read_text()):
            yield f"{link}: there is no such heading"


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command that stands in a block or in backticks; of an optional argument, without its brackets."""
    blocks = [block.replace("\\\n", " ") for language, block in FENCED.findall(text) if not language]
    for line in [*"\n".join(blocks).splitlines(), *CODE.findall(prose(text))]:
        if line.startswith(("python ", "make ")):
            words = shlex.split(line.replace("…", "_").replace("[--", "--"), comments=True)
            yield [word.removesuffix("]") if word.startswith("--") and "[" not in word else word for word in words]


@functools.cache
def flags_of(file: Path) -> frozenset[str]:
    """Flags of a command, or those that a script defines by absl or argparse."""
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    if module.startswith("tba_jax") and hasattr(importlib.import_module(module), "add_flags"):
        values = flags.FlagValues()
        importlib.import_module(module).add_flags(values)
        return frozenset(values)
    return frozenset(re.findall(r"\b(?:DEFINE_\w+|add_argument)\(\s*\"(?:--)?(\w+)", file.read_text()))


@functools.cache
def settings_of(recipe: str) -> frozenset[str]:
    """Settings and sections of a recipe, FILE.py or FILE.py:VARIANT."""
    file, _, variant = recipe.partition(":")
    get_config = importlib.import_module(file.removesuffix(".py").replace("/", ".")).get_config
    return names_in((get_config(variant) if variant else get_config()).to_dict())


def names_in(config: dict[str, Any], prefix: str = "") -> frozenset[str]:
    """Dotted names of all settings and sections."""
    found = set()
    for key, value in config.items():
        found |= {prefix + key} | (names_in(value, f"{prefix}{key}.") if isinstance(value, dict) else set())
    return frozenset(found)


def broken_command(words: list[str]) -> Iterator[str]:
    """What a command shows that is not there."""
    said = " ".join(words)
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        for word in words[1:]:
            name, is_variable, _ = word.partition("=")
            if f"$({name})" not in makefile if is_variable else not re.search(rf"^{name}:", makefile, re.MULTILINE):
                yield f"{said}: the Makefile has no {name}"
    elif words[:2] == ["python", "-m"] and len(words) > 2:
        wrapped = next((at for at, word in enumerate(words) if at and word.endswith("python")), len(words))
        yield from broken_python(words[2], words[3:wrapped], said)
        yield from broken_command(["python", *words[wrapped + 1 :]] if wrapped < len(words) else [""])


def broken_python(module: str, words: list[str], said: str) -> Iterator[str]:
    file = ROOT / f"{module.replace('.', '/')}.py"
    if file.with_suffix("").is_dir():
        file = file.with_suffix("") / "__main__.py"
    if module == "tba_jax":
        if not words or words[0] == "COMMAND":
            return
        if words[0] not in command_list.commands():
            yield f"{said}: there is no command {words[0]}"
            return
        file = ROOT / "tba_jax" / "commands" / f"{command_list.SHORT.get(words[0], words)[0]}.py"
    if not file.is_file():
        yield f"{said}: there is no module {module}"
        return
    recipes = [word.removeprefix("--config=") for word in words if word.startswith("--config=")]
    try:
        settings = settings_of(recipes[0] if recipes else "configs/base.py")
    except (ImportError, ValueError) as error:
        yield f"{said}: there is no recipe {recipes[0]}: {error}"
        return
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--config."):
            if name.removeprefix("--config.") not in settings:
                yield f"{said}: there is no setting {name}"
        elif name.startswith("-") and name != "--help" and not (FLAG.match(name) and name[2:] in flags_of(file)):
            yield f"{said}: there is no flag {name}"


@functools.cache
def all_settings() -> frozenset[str]:
    """Settings and sections of both schemas."""
    return names_in(base.get_config().to_dict()) | names_in(supervised.get_config().to_dict())


def broken_settings(text: str) -> Iterator[str]:
    """Settings in backticks, with or without --config., that neither schema has."""
    for code in CODE.findall(prose(text)):
        found = re.fullmatch(r"(--config\.)?([a-z_]+(?:\.[a-z_]+)+(?<!\.jsonl))(=.*)?", code)
        if found and (found[1] or found[2].split(".")[0] in all_settings()) and found[2] not in all_settings():
            yield f"{code}: there is no such setting"


def broken_paths(text: str) -> Iterator[str]:
    for path in REPOSITORY_PATH.findall("\n".join([*CODE.findall(prose(text)), *(block for _, block in FENCED.findall(text))])):
        if not (ROOT / path).exists():
            yield f"{path}: there is no such file"


def problems(page: Path, text: str) -> list[str]:
    found = [*broken_links(page, text), *broken_settings(text), *broken_paths(text)]
    for words in commands(text):
        found.extend(broken_command(words))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_shows_what_is_there(page):
    text = page.read_text()
    if page.name == "changes.md":  # the first column names what is gone
        text = re.sub(r"^\| [^|]+\|", "|", text, flags=re.MULTILINE)
    assert not problems(page, text), "\n".join(problems(page, text))


def test_the_task_of_the_readme_grades(tmp_path):
    (code,) = (block for language, block in FENCED.findall((ROOT / "README.md").read_text()) if language == "python")
    (tmp_path / "double.py").write_text(code)
    config: dict[str, Any] = {"__file__": str(tmp_path / "double.py")}
    exec(compile(code, "double.py", "exec"), config)
    task = interface.make_custom(interface.custom_class(config["get_config"]().task.name), {})
    try:
        heldout, train = task.queries("heldout"), task.queries("train")
        assert len(heldout) == 100 and len(train) == 900
        scores = task.rewards(train[:2], ["2", "it is 5"], np.ones(2, bool))
        assert scores.reward.tolist() == [1.0, 0.0]
    finally:
        task.close()
