"""How much disk the snapshots and checkpoints of a run take, held against what is free before the run begins."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from tba_jax.experiment import fitting
from tba_jax.experiment.composition import Experiment
from tba_jax.learner.settings import HELD_REFERENCES
from tba_jax.models import parameters
from tba_jax.storage import file_systems, layout

# Adam's two moments beside the weights, all of float32.
_STATE_BYTES = 3 * 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Files:
    """Files of one kind. what: in words, with the settings that say how many and how large; count, size: bytes of each."""

    what: str
    count: int
    size: int

    @property
    def total(self) -> int:
        return self.count * self.size


def snapshots(experiment: Experiment) -> Files:
    """The snapshots that are there at the end of the run, and one that is being written."""
    c = experiment.config
    every = 1 if c.schedule.mode == "interleaved" else c.publish.every_steps
    steps, keep, evaluated_every = c.learner.steps, c.publish.keep, c.evaluation.every_steps
    # Step 0, multiples, and the last step.
    evaluated = steps // evaluated_every + 1 + (steps % evaluated_every > 0)
    both = steps // math.lcm(every, evaluated_every)
    published = steps // every + steps // evaluated_every - both + 1 + (steps % every > 0 and steps % evaluated_every > 0)
    count = min(published, evaluated + keep + 1) if keep else published
    size = jnp.dtype(c.publish.dtype).itemsize * parameters.count(experiment.policy.trained_specs)
    kept = f"publish.keep={keep}{'' if keep else ', all'}, evaluation.every_steps={evaluated_every}"
    what = f"{count:,} snapshots of {fitting.in_words(size)} ({kept}, publish.dtype={c.publish.dtype})"
    return Files(what=what, count=count, size=size)


def checkpoints(experiment: Experiment) -> Files:
    """The checkpoints that are kept, and one that is being written."""
    c, trained = experiment.config, parameters.count(experiment.policy.trained_specs)
    moving = 4 * trained if c.learner.reference.kind in HELD_REFERENCES else 0
    return _checkpoints(c.checkpoint, _STATE_BYTES * trained + moving, steps=c.learner.steps)


def _checkpoints(settings: Any, size: int, *, steps: int) -> Files:
    """Args: settings: the section `checkpoint` of a config; size: bytes of each."""
    count = min(settings.keep + 1, steps // settings.every_steps + 1)
    return Files(
        what=f"{count} checkpoints of {fitting.in_words(size)} (checkpoint.keep={settings.keep})", count=count, size=size
    )


def reference(experiment: Experiment) -> Files:
    """The policy that step 0 starts from, which the run keeps in float32."""
    size = 4 * parameters.count(experiment.policy.model_specs)
    return Files(what=f"the reference policy of {fitting.in_words(size)}", count=1, size=size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demand:
    """What a run writes to one file system. folder: of the run; free: bytes; files: what it takes."""

    folder: Path
    free: int
    files: tuple[Files, ...]

    @property
    def size(self) -> int:
        return sum(each.total for each in self.files)

    @property
    def fits(self) -> bool:
        return self.size <= self.free

    @property
    def numbers(self) -> str:
        """The bytes that the run needs and those that are free, and the files that need them, as a clause of a sentence."""
        there = f"{fitting.in_words(self.free)} left on the file system of {self.folder}"
        return f"about {fitting.in_words(self.size)} of the {there}: {', '.join(each.what for each in self.files)}"

    def describe(self) -> str:
        """The verdict of a dry run."""
        return f"{'fits' if self.fits else 'does not fit'}: {self.numbers}"


def demands(experiment: Experiment, run: layout.RunDir, *, trains: bool = True) -> list[Demand]:
    """What a new run takes of each file system that it writes to. Object stores are left out: they do not say what is free.

    The rows, the journal and the logs are left out as well: they are small beside weights.

    Args: trains: whether the trainer of the run has this workdir, and its checkpoints.
    """
    found: list[tuple[Path, Files]] = []
    if isinstance(run.shared, Path):
        found += [(run.shared, snapshots(experiment)), (run.shared, reference(experiment))]
    if trains:
        found.append((run.root, checkpoints(experiment)))
    by_system: dict[int, list[tuple[Path, Files]]] = {}
    for folder, files in found:
        by_system.setdefault(file_systems.existing(folder).stat().st_dev, []).append((folder, files))
    made = []
    for there in by_system.values():
        folder = there[0][0]
        free = file_systems.free(folder)
        made += [] if free is None else [Demand(folder=folder, free=free, files=tuple(files for _, files in there))]
    return made


def check(experiment: Experiment, run: layout.RunDir, *, trains: bool) -> None:
    """Raises ValueError where a new run would fill its disk. Args: see `demands`."""
    for demand in demands(experiment, run, trains=trains):
        if not demand.fits:
            raise ValueError(
                f"this run would fill its disk, {demand.numbers}; keep fewer of them by these settings, halve snapshots by "
                "publish.dtype=bfloat16, train adapters alone (lora.rank), free some disk, or name another --workdir"
            )


def check_supervised(folder: Path, settings: Any, *, trained: int, steps: int) -> None:
    """Raises ValueError where the checkpoints of supervised training would fill the disk.

    Args: folder: of the run; settings: the section `checkpoint` of its config; trained: parameters.
    """
    if (free := file_systems.free(folder)) is None:
        return
    demand = Demand(folder=folder, free=free, files=(_checkpoints(settings, _STATE_BYTES * trained, steps=steps),))
    if not demand.fits:
        raise ValueError(
            f"this run would fill its disk, {demand.numbers}; keep fewer by checkpoint.keep, free some disk, or name another "
            "--workdir"
        )
