"""--config=FILE.py[:NAME]: a recipe is loaded, and flags --config.SETTING=VALUE change its settings.

A recipe of this project is also found by its name alone, and from any folder: configs/demo.py, demo.py and demo are the same.
"""

import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_dict, config_flags

from tba_jax.commands import command_line, settings_help
from tba_jax.commands.settings_help import Program
from tba_jax.run import user_code
from tba_jax.schemas import flatten, hint, nearest, offers
from tba_jax.storage import file_systems

# What a flag of a setting takes, by the type of the setting.
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", tuple: "a list of texts or numbers"}
# Setting -> Rule.path, of both programs.
_PATHS = {name: rule.path for program in settings_help.PROGRAMS for name, rule in program.schema.rules.items()}


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
        raise ValueError(f"{called}: {user_code.told(error, file)}") from error
    if not isinstance(config, config_dict.ConfigDict):
        raise ValueError(f"{called}: get_config of {text} must return a ConfigDict, and returned {type(config).__name__}")
    if not set(program.sections()) <= set(config):
        command = next((other.command for other in settings_help.PROGRAMS if set(other.sections()) <= set(config)), "")
        told = f"; its command is python -m {command}" if command else ""
        raise ValueError(f"{called} is not made from {program.defaults}{told}")
    config.lock()
    return config


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
    there = {path.stem: f"configs/{path.name}" for path in settings_help.CONFIGS.glob("*.py") if path.stem != "__init__"}
    return there.get(nearest(file.stem, there), "")


def override(config: config_dict.ConfigDict, overrides: Sequence[str]) -> config_dict.ConfigDict:
    """The config with the settings that flags --config.SETTING=VALUE change, by the parser of ml_collections.

    Raises:
      ValueError: there is no such setting, or the value is of another type.
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
    named = command_line.OVERRIDE.match(flag)
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
