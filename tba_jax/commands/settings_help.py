"""What --help tells of settings, which are lines of a schema with default, limits and comments, and of recipes."""

import ast
from pathlib import Path
from typing import NamedTuple

from tba_jax.experiment import schema as run_schema
from tba_jax.schemas import Schema, hint, nearest
from tba_jax.supervised import schema as supervised_schema

PACKAGE = Path(__file__).resolve().parent.parent
CONFIGS = PACKAGE.parent / "configs"


class Program(NamedTuple):
    """A program with settings of its own. file: of the schema; defaults: the recipe that others begin with; command: behind
    `python -m`."""

    file: Path
    schema: Schema
    defaults: str
    command: str

    def sections(self) -> list[str]:
        """The names at the top of a config."""
        return list(self.schema.defaults())

    def describe(self, asked: str) -> str:
        """The lines of a section, or of one setting, as the file of the schema has them.

        Raises:
          ValueError: the program has neither; names the nearest.
        """
        told: list[str] = []
        comments: list[str] = []
        names = list(self.schema.rules)
        for line in self.file.read_text(encoding="utf-8").splitlines():
            name = line.removeprefix("c.").partition(" = ")[0]
            names += [name] * line.startswith("c.")
            if line.startswith("c.") and f"{name}.".startswith(f"{asked}."):
                told += [*comments, line.removeprefix("c.")]
            comments = [*comments, line] if line.startswith("# ") else []
        if not told and asked in self.schema.rules:  # one line gives the section and its settings
            return self.describe(asked.rpartition(".")[0])
        if not told:
            near = nearest(asked, names)
            raise ValueError(f"--help={asked}: there is no such section or setting{hint(near)}")
        head = (
            "Each line is a setting, its default, its limits and its meaning. A flag changes it: --config.SECTION.SETTING=VALUE"
        )
        return "\n".join([head, "", *told])

    def flags_like(self, name: str) -> list[str]:
        """The flags of the settings that a flag --NAME may stand for; a setting's flag begins with --config."""
        return [f"--config.{each}" for each in self.schema.rules if name in (each, each.rpartition(".")[2])][:3]

    def overview(self) -> str:
        """What --help tells after the arguments: where settings are, and the recipes."""
        told = [
            "",
            f"settings: {self.file.relative_to(PACKAGE.parent)} has them all. --help=SECTION prints a section, which is one of",
            f"  {', '.join(self.sections())}",
            "and --help=SECTION.SETTING a single setting. A flag changes it: --config.SECTION.SETTING=VALUE",
        ]
        if self == BASE:
            width = max(map(len, recipes()))
            told += ["", "recipes:", *(f"  {name:{width}}  {line}" for name, line in recipes().items())]
        return "\n".join(told)


BASE = Program(PACKAGE / "experiment" / "schema.py", run_schema.SCHEMA, "configs/base.py", "tba_jax.main")
SUPERVISED = Program(
    PACKAGE / "supervised" / "schema.py", supervised_schema.SCHEMA, "configs/supervised.py", "tba_jax supervised"
)
PROGRAMS = (BASE, SUPERVISED)


def recipes() -> dict[str, str]:
    """configs/X.py -> the first line of its docstring, for all recipes there but those that others begin with."""
    found = {}
    for path in sorted(CONFIGS.glob("*.py")):
        tree, name = ast.parse(path.read_text(encoding="utf-8")), f"configs/{path.name}"
        makes = any(isinstance(node, ast.FunctionDef) and node.name == "get_config" for node in tree.body)
        if makes and name not in {program.defaults for program in PROGRAMS}:
            found[name] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found
