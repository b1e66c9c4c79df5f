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


def checkpoints(settings: Any, *, trained: int, steps: int, moving_reference: bool = False) -> Files:
    """The checkpoints that are kept, and one that is being written. Args: settings: the section `checkpoint` of a config;
    trained: parameters."""
    size, count = (_STATE_BYTES + 4 * moving_reference) * trained, min(settings.keep + 1, steps // settings.every_steps + 1)
    what = f"{count} checkpoints of {fitting.in_words(size)} (checkpoint.keep={settings.keep})"
    return Files(what=what, count=count, size=size)


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


def demands(experiment: Experiment, run: layout.RunDir, *, trains: bool = True) -> list[Demand]:
    """What a new run takes of each file system that it writes to: weights, beside which rows, journal and logs are small.

    Object stores are left out: they do not say what is free.

    Args: trains: whether the trainer of the run has this workdir, and its checkpoints.
    """
    c, by_system = experiment.config, dict[int, tuple[Path, list[Files]]]()
    shared = [snapshots(experiment), reference(experiment)] if isinstance(run.shared, Path) else []
    moving = c.learner.reference.kind in HELD_REFERENCES
    trained = parameters.count(experiment.policy.trained_specs)
    own = [checkpoints(c.checkpoint, trained=trained, steps=c.learner.steps, moving_reference=moving)] if trains else []
    for folder, files in ((run.shared, shared), (run.root, own)):
        if files and isinstance(folder, Path):
            by_system.setdefault(file_systems.existing(folder).stat().st_dev, (folder, []))[1].extend(files)
    there = [(folder, files, file_systems.free(folder)) for folder, files in by_system.values()]
    return [Demand(folder=folder, free=free, files=tuple(files)) for folder, files, free in there if free is not None]


def check(experiment: Experiment, run: layout.RunDir, *, trains: bool) -> None:
    """Raises ValueError where a new run would fill its disk. Args: see `demands`."""
    for demand in demands(experiment, run, trains=trains):
        if not demand.fits:
            raise ValueError(
                f"this run would fill its disk, {demand.numbers}; keep fewer of them by these settings, halve snapshots by "
                "publish.dtype=bfloat16, train adapters alone (lora.rank), free some disk, or name another --workdir"
            )


def check_supervised(folder: Path, settings: Any, *, trained: int, steps: int) -> None:
    """Raises ValueError where the checkpoints of supervised training would fill the disk. Args: see `checkpoints`."""
    free, files = file_systems.free(folder), checkpoints(settings, trained=trained, steps=steps)
    if free is not None and files.total > free:
        raise ValueError(
            f"this run would fill its disk, {Demand(folder=folder, free=free, files=(files,)).numbers}; keep fewer by "
            "checkpoint.keep, free some disk, or name another --workdir"
        )
