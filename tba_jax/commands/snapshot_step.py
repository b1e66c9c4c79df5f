"""--step of commands that take one snapshot of a run: best (the default), last or a number."""

import logging
import re
from collections.abc import Sequence
from typing import NamedTuple

from absl import flags

from tba_jax.run import best_step, layout

log = logging.getLogger(__name__)

BEST, LAST = "best", "last"
# What --step asks for: BEST, LAST, or a trainer step. None: BEST, or LAST where no step after 0 has a held-out score.
Asked = int | str | None


class _Parser(flags.ArgumentParser):
    """Best, last, or a whole number."""

    def parse(self, argument: str) -> Asked:
        if argument in (BEST, LAST):
            return argument
        if not re.fullmatch(r"[0-9]{1,18}", argument):
            raise ValueError(f"it is {BEST} (by held-out score), {LAST} (the newest snapshot) or the number of a trainer step")
        return int(argument)


def add_flag(values: flags.FlagValues) -> None:
    told = f"of the snapshot: {BEST} (by held-out score), {LAST}, or a number; default: {BEST}, or {LAST} without scores"
    flags.DEFINE(_Parser(), "step", None, told, flag_values=values)


class Best(NamedTuple):
    """The best of the steps that have a snapshot and a held-out score.

    of: how many there are. lost: the best of all steps with a score, if it is better and its snapshot is gone, else None.
    """

    step: int
    score: float
    of: int
    lost: best_step.Scored | None

    @property
    def only_step_0(self) -> bool:
        """Whether no policy that was trained has been evaluated."""
        return self.of == 1 and self.step == 0


def best(run: layout.RunDir, steps: Sequence[int]) -> Best | None:
    """The best step; None where no step has both a snapshot and a score. Args: steps: with a snapshot. Raises OSError."""
    scores = best_step.Scores(run.evaluations)()
    there = {step: scores[step] for step in steps if step in scores}
    found, whole = best_step.best(there.items()), best_step.best(scores.items())
    if found is None:
        return None
    return Best(*found, of=len(there), lost=whole if whole is not None and whole.score > found.score else None)


def chosen(run: layout.RunDir, asked: Asked, *, called: str) -> int:
    """The step that --step asks for. The log says which it is, and why, where no number was given.

    Raises:
      ValueError: it has no snapshot in the run that messages call `called`; names the nearest steps that have one.
    """
    from tba_jax.run import snapshots

    steps = snapshots.committed_steps(run.policies)
    if not steps:
        raise ValueError(f"{run.policies} holds no snapshot yet")
    if isinstance(asked, int):
        if asked not in steps:
            raise ValueError(f"--step={asked} is not a snapshot of {called}{_nearest(asked, steps)}")
        return asked
    if asked == LAST:
        log.info("step %d is the newest snapshot of %s", steps[-1], called)
        return steps[-1]
    found = best(run, steps)
    if found is None and asked == BEST:
        without = f"no snapshot of {called} has a held-out score in {run.evaluations}"
        raise ValueError(f"--step={BEST}: {without}; --step={LAST} takes the newest, of step {steps[-1]}")
    if found is None or (asked is None and found.only_step_0):
        which = "no snapshot" if found is None else "no snapshot but that of step 0"
        why = f"{which} of {called} has a held-out score in {run.evaluations}"
        log.warning("%s: the newest, of step %d, is taken", why, steps[-1])
        return steps[-1]
    log.info("%s", _told(found, newest=steps[-1], called=called))
    return found.step


def _told(found: Best, *, newest: int, called: str) -> str:
    of = f"{found.of} evaluated snapshots" if found.of > 1 else "the only evaluated snapshot"
    told = f"step {found.step} has the best held-out score, {found.score:.3f}, of {of} of {called}"
    if newest != found.step:
        told += f"; the newest is of step {newest} (--step={LAST})"
    if found.lost is not None:
        told += f"; step {found.lost.step} had {found.lost.score:.3f}, and its snapshot is gone"
    return told


def _nearest(asked: int, steps: Sequence[int]) -> str:
    """The kept steps around one that is not, for a message. Args: steps: ascending."""
    around = [*[step for step in steps if step < asked][-1:], *[step for step in steps if step > asked][:1]]
    kept = f"s that are kept are {around[0]} and {around[1]}" if len(around) > 1 else f" that is kept is {around[0]}"
    return f"; the nearest step{kept}; there are {layout.listed(steps)}"
