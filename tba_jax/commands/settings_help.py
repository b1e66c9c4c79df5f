"""What --help tells of settings: the lines of a schema, with defaults, limits and comments, and the list of recipes.

The schemas are read as text and not run, because their comments are what help is about.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tba_jax.schemas import hint, nearest

PACKAGE = Path(__file__).resolve().parent.parent
CONFIGS = PACKAGE.parent / "configs"


class Program(NamedTuple):
    """A program with settings of its own. defaults: the recipe that others begin with; command: behind `python -m`."""

    schema: Path
    defaults: str
    command: str

    def describe(self, asked: str) -> str:
        """The lines of a section, or of one setting.

        Raises:
          ValueError: the program has neither; names the nearest.
        """
        everything = entries(self.schema)
        chosen = [entry for entry in everything if f"{entry.name}.".startswith(f"{asked}.")]
        if not chosen:
            near = nearest(asked, [entry.name for entry in everything])
            raise ValueError(f"--help={asked}: there is no such section or setting{hint(near)}")
        told = [f"Each line is a setting, its default and its limits. A flag changes it: --config.{chosen[-1].name}=VALUE", ""]
        for entry in chosen:
            told += entry.lines()
        return "\n".join(told).replace("\n\n\n", "\n\n")

    def flags_like(self, name: str) -> list[str]:
        """The flags of the settings that a flag --NAME may stand for; a setting's flag begins with --config."""
        settings = [entry.name for entry in entries(self.schema) if entry.default]
        return [f"--config.{each}" for each in settings if each == name or each.rpartition(".")[2] == name][:3]

    def overview(self) -> str:
        """What --help tells after the arguments: where settings are, and the recipes."""
        sections = dict.fromkeys(entry.name.partition(".")[0] for entry in entries(self.schema) if not entry.default)
        told = [
            "",
            f"settings: {self.schema.relative_to(PACKAGE.parent)} has them all. --help=SECTION prints a section, which is one of",
            f"  {', '.join(sections)}",
            "and --help=SECTION.SETTING a single setting. A flag changes it: --config.SECTION.SETTING=VALUE",
        ]
        if self == BASE:
            width = max(map(len, recipes()))
            told += ["", "recipes:", *(f"  {name:{width}}  {line}" for name, line in recipes().items())]
        return "\n".join(told)


BASE = Program(PACKAGE / "experiment" / "schema.py", "configs/base.py", "tba_jax.main")
SUPERVISED = Program(PACKAGE / "supervised" / "schema.py", "configs/supervised.py", "tba_jax supervised")
PROGRAMS = (BASE, SUPERVISED)


class Entry(NamedTuple):
    """A setting or a section of a schema.

    name: dotted; comments: the lines before it; default: as the file says it, "" of a section; limits: as the file says them;
    behind: the comment in its line.
    """

    name: str
    comments: tuple[str, ...] = ()
    default: str = ""
    limits: str = ""
    behind: str = ""

    def lines(self) -> list[str]:
        """What help prints."""
        if not self.default:
            return ["", *self.comments, *([self.behind] if self.behind else [])]
        limits, behind = f"  [{self.limits}]" if self.limits else "", f"  {self.behind}" if self.behind else ""
        return [*self.comments, f"{self.name} = {self.default}{limits}{behind}"]


def entries(schema: Path) -> list[Entry]:
    """All settings and sections in the order of the file."""
    text = schema.read_text(encoding="utf-8")
    lines, end = text.splitlines(), 0
    found: list[Entry] = []
    for statement in ast.parse(text).body:
        before = [line.strip() for line in lines[end : statement.lineno - 1]]
        comments = tuple(line for line in before if line.startswith("#"))
        end = statement.end_lineno or statement.lineno
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]).startswith("c."):
            behind = lines[end - 1].encode()[statement.end_col_offset or 0 :].decode().strip()
            name = ast.unparse(statement.targets[0]).removeprefix("c.")
            found += _assigned(name, statement.value, comments, behind)
    return found


def _assigned(name: str, value: ast.expr, comments: tuple[str, ...], behind: str) -> Iterator[Entry]:
    """The entries of one assignment: a setting, or a section and the settings that it is made with."""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "ConfigDict"):
        yield _setting(name, value)._replace(comments=comments, behind=behind)
        return
    yield Entry(name, comments, behind=behind)
    for given in value.args:
        for leaf in given.keywords if isinstance(given, ast.Call) else ():
            yield _setting(f"{name}.{leaf.arg}", leaf.value)


def _setting(name: str, value: ast.expr) -> Entry:
    """The entry of `setting(default, limits)`, or of a plain default."""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "setting"):
        return Entry(name, default=ast.unparse(value))
    limits = ", ".join(f"{each.arg}={ast.unparse(each.value)}" for each in value.keywords)
    return Entry(name, default=ast.unparse(value.args[0]), limits=limits)


def recipes() -> dict[str, str]:
    """configs/X.py -> the first line of its docstring, for all recipes there but those that others begin with."""
    found = {}
    for path in sorted(CONFIGS.glob("*.py")):
        tree, name = ast.parse(path.read_text(encoding="utf-8")), f"configs/{path.name}"
        makes = any(isinstance(node, ast.FunctionDef) and node.name == "get_config" for node in tree.body)
        if makes and name not in {program.defaults for program in PROGRAMS}:
            found[name] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found
