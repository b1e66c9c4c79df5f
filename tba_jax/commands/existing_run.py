"""A run that exists, for commands that open it: its config, and the snapshot that --step names.

With --config=RECIPE[:NAME] the section `task` is that of the recipe. Only code that the user names or trusts is executed.
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import flags

from tba_jax.commands import command_line, recipes
from tba_jax.storage import best_step, layout

if TYPE_CHECKING:  # what imports JAX is imported late: a mistyped flag is answered at once
    from tba_jax.experiment.composition import Experiment

log = logging.getLogger(__name__)


class Source(NamedTuple):
    """What the user says of a run's settings.

    recipe: FILE.py[:NAME], whose task is taken; "": the run's. overrides: flags --config.SETTING=VALUE. trust_task: whether the
    task file that config.json names may be executed.
    """

    recipe: str = ""
    overrides: tuple[str, ...] = ()
    trust_task: bool = False


AS_IT_IS = Source()


def add_trust(values: flags.FlagValues) -> None:
    what = "the task file that the run's config.json names may be executed: you trust it"
    flags.DEFINE_bool("trust_task", False, what, flag_values=values)


def add_flags(values: flags.FlagValues) -> recipes.Program:
    """The flags of a Source."""
    command_line.add_workdir(values)
    what = "your own recipe FILE.py[:NAME], whose task is taken in place of the one that the run names"
    recipes.add_flag(values, required=False, what=what)
    add_trust(values)
    return recipes.BASE


def source(given: command_line.Given) -> Source:
    return Source(recipe=given.config or "", overrides=tuple(given.overrides), trust_task=given.trust_task)


def config_of(stored: Mapping[str, Any], source: Source, *, called: str) -> Any:
    """The config of a run with what the user says of it. Args: stored: config.json; called: what messages call the run.

    Raises:
      ValueError: the recipe or a flag is wrong, config.json is damaged, or it names a task file that nobody trusts.
    """
    from tba_jax.experiment import stored_run
    from tba_jax.tasks import custom_task

    def short(name: str) -> str:  # as the contract has it: a file may lie elsewhere on another machine
        return custom_task.short(name) if custom_task.is_named(name) else name

    config = stored_run.config_of(stored, called=called)
    theirs = config.task.name
    if source.recipe:
        config.task = recipes.load(source.recipe, (), program=recipes.BASE).task
    config = recipes.override(config, source.overrides)
    if short(config.task.name) != short(theirs):
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


def rebuilt(workdir: Path, source: Source) -> "tuple[layout.RunDir, Experiment]":
    """The run in a folder, and its experiment. Raises: see composition.rebuild."""
    from tba_jax.experiment import composition
    from tba_jax.storage import contract

    run, called = layout.open_run_dir(workdir), str(workdir)
    stored = contract.read_run(run, called=called)
    return run, composition.rebuild(stored, config_of(stored, source, called=called), called=called)


BEST, LAST = "best", "last"
# What --step asks for: BEST, LAST, or a trainer step. None: BEST, or LAST where no step after 0 has a held-out score.
AskedStep = int | str | None


class _StepParser(flags.ArgumentParser):
    def parse(self, argument: str) -> AskedStep:
        if argument in (BEST, LAST):
            return argument
        if not re.fullmatch(r"[0-9]{1,18}", argument):
            raise ValueError(f"it is {BEST} (by held-out score), {LAST} (the newest snapshot) or the number of a trainer step")
        return int(argument)


def add_step(values: flags.FlagValues) -> None:
    told = f"of the snapshot: {BEST} (by held-out score), {LAST}, or a number; default: {BEST}, or {LAST} without scores"
    flags.DEFINE(_StepParser(), "step", None, told, flag_values=values)


def chosen_step(run: layout.RunDir, asked: AskedStep, *, called: str) -> int:
    """The step that --step asks for. The log says which it is, and why, where no number was given.

    Raises:
      ValueError: it has no snapshot in the run that messages call `called`; names the steps that have one.
    """
    from tba_jax.storage import snapshots

    steps = snapshots.committed_steps(run.policies)
    if not steps:
        raise ValueError(f"{run.policies} holds no snapshot yet")
    if isinstance(asked, int):
        if asked not in steps:
            near = min(steps, key=lambda step: abs(step - asked))
            there = f"the nearest snapshot is of step {near}; there are {layout.listed(steps)}"
            raise ValueError(f"--step={asked} is not a snapshot of {called}: {there}")
        return asked
    if asked == LAST:
        log.info("step %d is the newest snapshot of %s", steps[-1], called)
        return steps[-1]
    scores = best_step.Scores(run.evaluations)()
    evaluated = {step: scores[step] for step in steps if step in scores}
    found, whole = best_step.best(evaluated.items()), best_step.best(scores.items())
    if found is None and asked == BEST:
        without = f"no snapshot of {called} has a held-out score in {run.evaluations}"
        raise ValueError(f"--step={BEST}: {without}; --step={LAST} takes the newest, of step {steps[-1]}")
    if found is None or whole is None or (asked is None and [*evaluated] == [0]):  # no policy that was trained has a score
        which = "no snapshot but that of step 0" if evaluated else "no snapshot"
        why = f"{which} of {called} has a held-out score in {run.evaluations}"
        log.warning("%s: the newest, of step %d, is taken", why, steps[-1])
        return steps[-1]
    told = (
        f"step {found.step} has the best held-out score, {found.score:.3f}, of {len(evaluated)} evaluated snapshots of {called}"
    )
    if steps[-1] != found.step:
        told += f"; the newest is of step {steps[-1]} (--step={LAST})"
    if whole.score > found.score:
        told += f"; step {whole.step} had {whole.score:.3f}, and its snapshot is gone"
    log.info("%s", told)
    return found.step
