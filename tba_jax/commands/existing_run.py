"""A run that exists, for commands that open it: its config, and the snapshot that --step names.

The config is the run's own; with --config=RECIPE[:NAME] its section `task` is that of the recipe; flags change settings of both.
Only code that the user names or trusts is executed.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import flags

from tba_jax.commands import command_line, recipes
from tba_jax.storage import best_step, layout

if TYPE_CHECKING:  # what imports JAX is imported late: a mistyped flag is answered at once
    from tba_jax.experiment.composition import Experiment

log = logging.getLogger(__name__)


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
    """The config of a run with what the user says of it; a custom task in it may be executed.

    Args: stored: config.json, see contract.read_run. called: what messages call the run.

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
    """The run in a folder, and what its config means with what the user says of it. Raises: see composition.rebuild."""
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


class BestStep(NamedTuple):
    """The best of the steps that have a snapshot and a held-out score.

    of: how many there are. lost: the best of all steps with a score, if it is better and its snapshot is gone, else None.
    """

    step: int
    score: float
    of: int
    lost: best_step.Scored | None


def best_snapshot(run: layout.RunDir, steps: Sequence[int]) -> BestStep | None:
    """The best step; None where no step has both a snapshot and a score. Args: steps: with a snapshot. Raises OSError."""
    scores = best_step.Scores(run.evaluations)()
    there = {step: scores[step] for step in steps if step in scores}
    found, whole = best_step.best(there.items()), best_step.best(scores.items())
    if found is None:
        return None
    return BestStep(*found, of=len(there), lost=whole if whole is not None and whole.score > found.score else None)


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
    found = best_snapshot(run, steps)
    if found is None and asked == BEST:
        without = f"no snapshot of {called} has a held-out score in {run.evaluations}"
        raise ValueError(f"--step={BEST}: {without}; --step={LAST} takes the newest, of step {steps[-1]}")
    if found is None or (asked is None and found.of == 1 and found.step == 0):  # no policy that was trained has a score
        which = "no snapshot" if found is None else "no snapshot but that of step 0"
        why = f"{which} of {called} has a held-out score in {run.evaluations}"
        log.warning("%s: the newest, of step %d, is taken", why, steps[-1])
        return steps[-1]
    told = f"step {found.step} has the best held-out score, {found.score:.3f}, of {found.of} evaluated snapshots of {called}"
    if steps[-1] != found.step:
        told += f"; the newest is of step {steps[-1]} (--step={LAST})"
    if found.lost is not None:
        told += f"; step {found.lost.step} had {found.lost.score:.3f}, and its snapshot is gone"
    log.info("%s", told)
    return found.step
