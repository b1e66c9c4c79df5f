"""What --help tells of settings: the lines of a schema, configs/base.py or configs/supervised.py, with their comments.

The file is read as text and not run, so that help comes at once.
"""

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tba_jax.commands import command_line

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"
BASE, SUPERVISED = CONFIGS / "base.py", CONFIGS / "supervised.py"


class Entry(NamedTuple):
    """A setting or a section of a schema.

    name: dotted; comments: the lines before it; default: as the file says it, "" of a section; behind: the comment in its line.
    """

    name: str
    comments: tuple[str, ...] = ()
    default: str = ""
    behind: str = ""

    def lines(self) -> list[str]:
        """What help prints."""
        line = f"{self.name} = {self.default}" + (f"  {self.behind}" if self.behind else "")
        return [*self.comments, line] if self.default else ["", *self.comments, *([self.behind] if self.behind else [])]


def entries(path: Path) -> list[Entry]:
    """All settings and sections in the order of the file."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    (function,) = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == "get_config")
    found: list[Entry] = []
    end = function.lineno
    for statement in function.body:
        before = [line.strip() for line in lines[end : statement.lineno - 1]]
        comments = tuple(line for line in before if line.startswith("#"))
        end = statement.end_lineno or statement.lineno
        if isinstance(statement, ast.Assign) and (name := _dotted(statement.targets[0])):
            last, column = lines[end - 1], statement.end_col_offset or 0
            behind = last.encode()[column:].decode().strip()
            found += _assigned(name, statement.value, comments, behind)
    return found


def _dotted(target: ast.expr) -> str:
    """`c.learner.steps` -> "learner.steps"; "" of anything that does not begin with c."""
    name = ast.unparse(target)
    return name.removeprefix("c.") if name.startswith("c.") else ""


def _assigned(name: str, value: ast.expr, comments: tuple[str, ...], behind: str) -> Iterator[Entry]:
    """The entries of one assignment: a setting, or a section and the settings that it is made with."""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func).endswith("ConfigDict")):
        yield Entry(name, comments, ast.unparse(value), behind)
        return
    yield Entry(name, comments, behind=behind)
    for given in value.args:
        for leaf in given.keywords if isinstance(given, ast.Call) else ():
            yield Entry(f"{name}.{leaf.arg}", default=ast.unparse(leaf.value))


def names(path: Path) -> list[str]:
    """Dotted names of all settings."""
    return [entry.name for entry in entries(path) if entry.default]


def describe(path: Path, asked: str) -> str:
    """The lines of a section, or of one setting.

    Raises:
      ValueError: the schema has neither; names the nearest.
    """
    everything = entries(path)
    chosen = [entry for entry in everything if f"{entry.name}.".startswith(f"{asked}.")]
    if not chosen:
        near = command_line.nearest(asked, [entry.name for entry in everything])
        raise ValueError(f"--help={asked}: there is no such section or setting{command_line.hint(near)}")
    told = [f"Settings of configs/{path.name} with their defaults. A flag changes one: --config.{chosen[-1].name}=VALUE", ""]
    for entry in chosen:
        told += entry.lines()
    return "\n".join(told).replace("\n\n\n", "\n\n")


def recipes() -> dict[str, str]:
    """configs/X.py -> the first line of its docstring, for all files there that make a config but the schemas."""
    found = {}
    for path in sorted(CONFIGS.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        makes = any(isinstance(node, ast.FunctionDef) and node.name == "get_config" for node in tree.body)
        if makes and path not in (BASE, SUPERVISED):
            found[f"configs/{path.name}"] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def _overview(path: Path) -> str:
    """What --help tells after the arguments: recipes and sections."""
    sections = dict.fromkeys(entry.name.partition(".")[0] for entry in entries(path) if not entry.default)
    told = [
        "",
        f"settings: configs/{path.name} has them all, each with its default and what it means. --help=SECTION prints one of",
    ]
    told += [
        f"  {', '.join(sections)}",
        "and --help=SECTION.SETTING a single one. A flag changes a setting: --config.SECTION.SETTING=VALUE",
    ]
    if path == BASE:
        width = max(map(len, recipes()))
        told += ["", "recipes:", *(f"  {name:{width}}  {line}" for name, line in recipes().items())]
    return "\n".join(told)


class Help(argparse.Action):
    """--help, and --help=SECTION of the schema at `const`."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None) -> None:
        assert isinstance(self.const, Path)
        if isinstance(values, str):
            try:
                print(describe(self.const, values))
            except ValueError as error:
                parser.error(str(error))
        else:
            print(parser.format_help() + _overview(self.const))
        parser.exit()


def add_overrides(parser: argparse.ArgumentParser, path: Path) -> None:
    """Lets a command take flags --config.SETTING=VALUE, and --help=SECTION tell of them."""
    parser.set_defaults(overrides=[])
    parser.add_argument(
        "-h", "--help", nargs="?", action=Help, const=path, metavar="SECTION", help="this, or the settings of a section"
    )
