"""The config of a run that exists, for commands that need its task. Only code that the user names or trusts is executed.

It is the run's own config; with --config=RECIPE[:NAME] its section `task` is that of the recipe; flags change settings of both.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from absl import flags

from tba_jax.commands import command_line, recipes, settings_help


class Source(NamedTuple):
    """What the user says of a run's settings, beside the run.

    recipe: FILE.py[:NAME], whose task is taken; "": the run's. overrides: flags --config.SETTING=VALUE. trust_task: whether the
    file of a custom task that config.json names may be executed.
    """

    recipe: str = ""
    overrides: tuple[str, ...] = ()
    trust_task: bool = False


AS_IT_IS = Source()


def add_trust(values: flags.FlagValues) -> None:
    what = "the task file that the run's config.json names may be executed: you trust it"
    flags.DEFINE_bool("trust_task", False, what, flag_values=values)


def add_flags(values: flags.FlagValues) -> settings_help.Program:
    """The flags of a Source."""
    command_line.add_workdir(values)
    what = "your own recipe FILE.py[:NAME], whose task is taken in place of the one that the run names"
    recipes.add_flag(values, required=False, what=what)
    add_trust(values)
    return settings_help.BASE


def source(given: command_line.Given) -> Source:
    return Source(recipe=given.config or "", overrides=tuple(given.overrides), trust_task=given.trust_task)


def config_of(stored: Mapping[str, Any], source: Source, *, called: str) -> Any:
    """The config of a run with what the user says of it; a custom task in it may be executed.

    Args: stored: config.json, see contract.read_run. called: what messages call the run.

    Raises:
      ValueError: the recipe or a flag is wrong, config.json is damaged, or it names a task file that nobody trusts.
    """
    from tba_jax.experiment import stored_run
    from tba_jax.tasks import custom_task

    config = stored_run.config_of(stored, called=called)
    theirs = config.task.name
    if source.recipe:
        config.task = recipes.load(source.recipe, (), program=settings_help.BASE).task
    config = recipes.override(config, source.overrides)
    if _short(config.task.name) != _short(theirs):
        by = f"--config={source.recipe} has" if source.recipe else "--config.task.name asks for"
        raise ValueError(
            f"{called} is a run of task.name={theirs!r}, and {by} task.name={config.task.name!r}: a run keeps its task; another "
            "task needs another run, in a new --workdir"
        )
    named_by_user = source.recipe or config.task.name != theirs
    if custom_task.is_named(config.task.name) and not (named_by_user or source.trust_task):
        raise ValueError(
            f"{called}: its config.json names the task {theirs!r}, a file that would be executed here; --config=RECIPE gives "
            "your own recipe, whose task is taken instead, and --trust_task says that you trust this file"
        )
    return config


def _short(name: str) -> str:
    """The name of a task as the contract has it: a file may lie elsewhere on another machine."""
    from tba_jax.tasks import custom_task

    return custom_task.short(name) if custom_task.is_named(name) else name
