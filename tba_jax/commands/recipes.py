"""What --help tells of settings and recipes, and --config=FILE.py[:NAME] with the flags --config.SETTING=VALUE that change it.

A recipe of this project is also found by its name alone, and from any folder: configs/demo.py, demo.py and demo are the same.
"""

import ast
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from ml_collections import config_dict, config_flags

from tba_jax.experiment import schema as run_schema
from tba_jax.run import user_code
from tba_jax.schemas import Schema, flatten, hint, nearest, offers
from tba_jax.storage import file_systems
from tba_jax.supervised import schema as supervised_schema

PACKAGE = Path(__file__).resolve().parent.parent
CONFIGS = PACKAGE.parent / "configs"
# A flag that changes a setting: --config.NAME=VALUE, or --noconfig.NAME of a setting that is true or false.
OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]*)")


class Program(NamedTuple):
    """A program with settings. file: of the schema; defaults: the recipe that others begin with; command: after `python -m`."""

    file: Path
    schema: Schema
    defaults: str
    command: str

    def sections(self) -> list[str]:
        """The names at the top of a config."""
        return list(self.schema.defaults())

    def describe(self, asked: str) -> str:
        """The lines of a section, or of a setting, in the file of the schema. Raises ValueError where there is none."""
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
            raise ValueError(f"--help={asked}: there is no such section or setting{hint(nearest(asked, names))}")
        head = "Each line is a setting, its default, its limits and its meaning. A flag changes it"
        return "\n".join([f"{head}: --config.SECTION.SETTING=VALUE", "", *told])

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
            width = max(map(len, listed()))
            told += ["", "recipes:", *(f"  {name:{width}}  {line}" for name, line in listed().items())]
        return "\n".join(told)


BASE = Program(PACKAGE / "experiment" / "schema.py", run_schema.SCHEMA, "configs/base.py", "tba_jax.main")
SUPERVISED = Program(
    PACKAGE / "supervised" / "schema.py", supervised_schema.SCHEMA, "configs/supervised.py", "tba_jax supervised"
)
PROGRAMS = (BASE, SUPERVISED)


def listed() -> dict[str, str]:
    """configs/X.py -> the first line of its docstring, for all recipes there but those that others begin with."""
    found = {}
    for path in sorted(CONFIGS.glob("*.py")):
        tree, name = ast.parse(path.read_text(encoding="utf-8")), f"configs/{path.name}"
        makes = any(isinstance(node, ast.FunctionDef) and node.name == "get_config" for node in tree.body)
        if makes and name not in {program.defaults for program in PROGRAMS}:
            found[name] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


# What a flag of a setting takes, by the type of the setting.
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", tuple: "a list of texts or numbers"}
# How a locked config says that it has no such key, when it is set and when it is read; and the key that is most like it.
_NO_KEY = re.compile(r"""^['"\\]+(?:Key ")?(\w+)['"\\].*?(?:Did you mean "(\w+)"|$)""", re.DOTALL)
# Setting -> Rule.path, of both programs.
_PATHS = {name: rule.path for program in PROGRAMS for name, rule in program.schema.rules.items()}


def add_flag(values: flags.FlagValues, *, required: bool = True, what: str = "the recipe, a file under configs/") -> None:
    """Lets a command take a recipe."""
    flags.DEFINE_string("config", None, what, flag_values=values, required=required)


def load(recipe: str, overrides: Sequence[str], *, program: Program) -> config_dict.ConfigDict:
    """The config of a recipe FILE.py[:NAME], with the settings that flags change, locked.

    Args: program: whose settings the recipe must have. Raises ValueError: what is wrong with the file, the name or a flag.
    """
    return override(_made(recipe, program), overrides)


def label_of(recipe: str) -> str:
    """The name of a run in its last line: configs/demo.py -> demo, configs/demo_baselines.py:grpo -> demo_baselines:grpo."""
    return Path(recipe).name.replace(".py", "")


def _made(recipe: str, program: Program) -> config_dict.ConfigDict:
    """What the recipe's get_config returns."""
    text, colon, name = recipe.partition(":")
    file, called = _file(text), f"--config={recipe}"
    if not file.is_file():
        there = ", ".join(Path(each).stem for each in listed())
        raise ValueError(f"there is no recipe {text}; it is a file of your own or one of {there}{hint(_like(file))}")
    get_config = getattr(user_code.load(file, "tba_jax_recipe", called=called), "get_config", None)
    if not inspect.isfunction(get_config):
        raise ValueError(f"{called}: {text} has no function get_config")
    arguments = [name] if colon else []
    try:
        inspect.signature(get_config).bind(*arguments)
    except TypeError as error:
        takes = "takes no name after a colon" if colon else "needs a name after a colon"
        raise ValueError(f"{called}: this recipe {takes}") from error
    try:
        config = get_config(*arguments)
    except ValueError as error:
        raise ValueError(f"{called}: {error}") from error
    except (Exception, SystemExit) as error:
        told, key = user_code.told(error, file), _NO_KEY.search(str(error))
        if key and isinstance(error, AttributeError):  # told in short: a locked config lists all that it has
            told = f"the config has no setting {key[1]!r} (line{told.rpartition(' (line')[2]}{hint(key[2] or '')}"
        raise ValueError(f"{called}: {told}") from error
    if not isinstance(config, config_dict.ConfigDict):
        raise ValueError(f"{called}: get_config of {text} must return a ConfigDict, and returned {type(config).__name__}")
    if not set(program.sections()) <= set(config):
        command = next((other.command for other in PROGRAMS if set(other.sections()) <= set(config)), "")
        told = f"; its command is python -m {command}" if command else ""
        raise ValueError(f"{called} is not made from {program.defaults}{told}")
    config.lock()
    return config


def _file(text: str) -> Path:
    """The file that is named, or else the recipe of this project of that name; it need not exist."""
    file, name = Path(os.path.expanduser(text)), text.removeprefix("configs/").removesuffix(".py")
    ours = CONFIGS / f"{name}.py"
    is_ours = not file.is_file() and name.isidentifier() and name != "__init__" and ours.is_file()
    return ours if is_ours else file


def _like(file: Path) -> str:
    """The existing recipe whose name is most like that of `file`, "" if none is similar."""
    if (whole := file.with_name(f"{file.name}.py")).is_file():
        return str(whole)
    there = {path.stem: f"configs/{path.name}" for path in CONFIGS.glob("*.py") if path.stem != "__init__"}
    return there.get(nearest(file.stem, there), "")


def override(config: config_dict.ConfigDict, overrides: Sequence[str]) -> config_dict.ConfigDict:
    """The config with the settings that flags --config.SETTING=VALUE change, by the parser of ml_collections.

    Raises ValueError where there is no such setting, or the value is of another type.
    """
    leaves = flatten(config.to_dict())
    for flag in overrides:
        _check(flag, leaves)
    # Flags of its own: who imports this module defines none in absl.flags.FLAGS.
    arguments, values = ["tba_jax", *overrides], flags.FlagValues()
    try:
        holder = config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=arguments)
        values(arguments)
    except flags.IllegalFlagValueError as error:  # "flag --config.x=many: invalid literal for int() …"
        flag = str(error).removeprefix("flag ").partition(": ")[0]
        default = leaves[flag.removeprefix("--config.").partition("=")[0]]
        like = "a number" if default is None else f"{_KINDS.get(type(default), type(default).__name__)}, as {default!r} is"
        raise ValueError(f"{flag} must be {like}") from error
    except (flags.Error, AttributeError, KeyError, TypeError) as error:
        raise ValueError(str(error).partition(". ")[0]) from error
    made = holder.value
    made.update_from_flattened_dict(absolute_paths(flatten(made.to_dict())))
    return made


def _check(flag: str, leaves: Mapping[str, Any]) -> None:
    """Raises ValueError where a flag changes no setting, or gives it no value. Args: leaves: setting -> value."""
    named = OVERRIDE.match(flag)
    name = named[1] if named else flag
    if name in leaves:
        if "=" not in flag and not isinstance(leaves[name], bool):
            raise ValueError(f"{flag} needs a value: {flag}=VALUE")
        return
    if inside := [leaf for leaf in leaves if leaf.startswith(f"{name}.")]:
        raise ValueError(f"{flag}: {name} is a section; name one of its settings, such as {inside[0]}")
    raise ValueError(f"the config has no setting {name!r}{hint(*offers(name, leaves)) or '; --help tells which there are'}")


def absolute_paths(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that name paths, with what a role in another folder finds. Settings of custom tasks count by their name.

    Raises ValueError where a path begins with the home folder of nobody.
    """
    found = {}
    for name, value in leaves.items():
        kind = _PATHS.get(name, "or hub" if name.startswith("task.custom.") and name.endswith("path") else "")
        try:
            found[name] = _absolute(value, kind)
        except ValueError as error:
            raise ValueError(f"{name}={value!r}: {error}") from error
    return {name: value for name, value in found.items() if value != leaves[name]}


def _absolute(value: Any, kind: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_absolute(each, kind) for each in value)
    if not kind or not isinstance(value, str) or value.startswith("("):  # the last is refused, see checks
        return value
    file, _, attribute = value.rpartition(":")
    if kind == "of class":
        return f"{file_systems.path(file)}:{attribute}" if file.endswith(".py") else value
    return file_systems.absolute(value, or_hub=kind == "or hub")
