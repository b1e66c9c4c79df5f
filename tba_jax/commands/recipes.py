"""--config=FILE.py[:NAME]: a recipe is loaded, and flags --config.SETTING=VALUE change its settings.

A recipe of this project is also found by its name alone, and from any folder: configs/demo.py, demo.py and demo are the same.
"""

import functools
import inspect
import linecache
import operator
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_dict, config_flags

from tba_jax.commands import command_line, settings_help
from tba_jax.commands.settings_help import PROGRAMS, Program, entries
from tba_jax.experiment import schema as run_schema
from tba_jax.run import user_code
from tba_jax.schemas import flatten, hint, nearest, offers
from tba_jax.storage import file_systems
from tba_jax.supervised import schema as supervised_schema

# How a locked config says that it has no such key, when it is set and when it is read.
_NO_KEY = re.compile(r"""Key "(\w+)" does not exist|^['"\\]+(\w+)['"\\]""")
# What a flag of a setting takes, by the type of the setting.
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", tuple: "a list of texts or numbers"}
# Setting -> Rule.path, of both programs.
_PATHS = {name: rule.path for each in (run_schema, supervised_schema) for name, rule in each.SCHEMA.rules.items()}


def add_flag(values: flags.FlagValues, *, required: bool = True, what: str = "the recipe, a file under configs/") -> None:
    """Lets a command take a recipe."""
    flags.DEFINE_string("config", None, what, flag_values=values, required=required)


def load(recipe: str, overrides: Sequence[str], *, program: Program) -> config_dict.ConfigDict:
    """The config of a recipe FILE.py[:NAME], with the settings that flags change, locked.

    Args: program: whose settings the recipe must have.

    Raises:
      ValueError: one sentence about what is wrong with the file, the name or a flag.
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
        there = ", ".join(Path(each).stem for each in settings_help.recipes())
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
        raise ValueError(f"{called}: {_misspelt(error, file, program) or user_code.told(error, file)}") from error
    if not isinstance(config, config_dict.ConfigDict):
        raise ValueError(f"{called}: get_config of {text} must return a ConfigDict, and returned {type(config).__name__}")
    if not _is_of(config, program):
        command = next((other.command for other in PROGRAMS if _is_of(config, other)), "")
        told = f"; its command is python -m {command}" if command else ""
        raise ValueError(f"{called} is not made from {program.defaults}{told}")
    config.lock()
    return config


def _is_of(config: config_dict.ConfigDict, program: Program) -> bool:
    """Whether the config has every section of the program."""
    return {entry.name.partition(".")[0] for entry in entries(program.schema)} <= set(config)


def _file(text: str) -> Path:
    """The file that is named, or else the recipe of this project of that name; it need not exist."""
    file, name = Path(os.path.expanduser(text)), text.removeprefix("configs/").removesuffix(".py")
    ours = settings_help.CONFIGS / f"{name}.py"
    is_ours = not file.is_file() and name.isidentifier() and name != "__init__" and ours.is_file()
    return ours if is_ours else file


def _like(file: Path) -> str:
    """The existing recipe whose name is most like that of `file`, "" if none is similar."""
    if (whole := file.with_name(f"{file.name}.py")).is_file():
        return str(whole)
    if file.parent.is_dir() and file.parent != Path():
        there = {path.stem: str(path) for path in sorted(file.parent.glob("*.py")) if path.stem != "__init__"}
    else:
        there = {path.stem: f"configs/{path.name}" for path in settings_help.CONFIGS.glob("*.py") if path.stem != "__init__"}
    return there.get(nearest(file.stem, there), "")


def _misspelt(error: BaseException, file: Path, program: Program) -> str:
    """The sentence on a setting that a line of the recipe misspells, "" of any other error."""
    line, key = user_code.line_of(error, file), _NO_KEY.search(str(error))
    if not (line and key and isinstance(error, AttributeError | KeyError)):
        return ""
    written = re.search(rf"\w+\.((?:\w+\.)*{key[1] or key[2]})\b", linecache.getline(str(file), line))
    if written is None:
        return ""
    name = written[1]
    near = nearest(name, [entry.name for entry in entries(program.schema)])
    return f"the config has no setting {name!r} (line {line} of {file}){hint(near)}"


def override(config: config_dict.ConfigDict, overrides: Sequence[str]) -> config_dict.ConfigDict:
    """The config with the settings that flags --config.SETTING=VALUE change, by the parser of ml_collections.

    Raises:
      ValueError: there is no such setting, or the value is of another type.
    """
    leaves = flatten(config.to_dict())
    for flag in overrides:
        _check_name(flag, leaves)
        name = flag.removeprefix("--config.")
        if "=" not in flag and not isinstance(leaves.get(name, False), bool):
            raise ValueError(f"{flag} needs a value: {flag}=VALUE")
    # Flags of its own: who imports this module defines none in absl.flags.FLAGS.
    arguments, values = ["tba_jax", *overrides], flags.FlagValues()
    try:
        holder = config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=arguments)
        values(arguments)
    except flags.IllegalFlagValueError as error:
        raise ValueError(_ill_typed(str(error), config)) from error
    except (flags.Error, AttributeError, KeyError, TypeError) as error:
        raise ValueError(str(error).partition(". ")[0]) from error
    made = holder.value
    made.update_from_flattened_dict(absolute_paths(flatten(made.to_dict())))
    return made


def absolute_paths(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that name paths, with what a role in another folder finds. Settings of custom tasks count by their name.

    Raises:
      ValueError: a path begins with the home folder of nobody; names the setting.
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


def _check_name(flag: str, leaves: Mapping[str, Any]) -> None:
    named = command_line.OVERRIDE.match(flag)
    name = named[1] if named else flag
    if name in leaves:
        return
    if inside := [leaf for leaf in leaves if leaf.startswith(f"{name}.")]:
        raise ValueError(f"{flag}: {name} is a section; name one of its settings, such as {inside[0]}")
    section = name.partition(".")[0]
    listed = f"; --help={section} lists those of {section}" if any(leaf.startswith(f"{section}.") for leaf in leaves) else ""
    raise ValueError(f"the config has no setting {name!r}{hint(*offers(name, leaves)) or listed}")


def _ill_typed(message: str, config: config_dict.ConfigDict) -> str:
    """The parser's "flag --config.x=many: invalid literal …" in the words of the setting's type."""
    flag = message.removeprefix("flag ").partition(": ")[0]
    name, _, text = flag.removeprefix("--config.").partition("=")
    *path, leaf = name.split(".")
    section = functools.reduce(operator.getitem, path, config)
    like = f", as {section[leaf]!r} is" if section[leaf] is not None else ""
    kind = section.get_type(leaf)
    return f"--config.{name}={text} must be {_KINDS.get(kind, f'of type {kind.__name__}')}{like}"
