"""Storage before a run begins: whether what settings and flags name answers, and whether snapshots and checkpoints have room."""

import dataclasses
import logging
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from tba_jax.experiment import fitting
from tba_jax.experiment.composition import Experiment
from tba_jax.experiment.mistakes import Mistakes
from tba_jax.learner.settings import HELD_REFERENCES
from tba_jax.models import parameters
from tba_jax.schemas import flatten
from tba_jax.storage import file_systems, layout, places
from tba_jax.storage.places import Place

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


log = logging.getLogger(__name__)

# A dry run and a plan wait no longer for a place. A role waits until the place answers: storage may come back.
DRY_RUN_SECONDS = 30.0
# For each other place, once one was waited for in vain.
_OTHERS_SECONDS = 2.0


def of_config(config: Any) -> list[tuple[str, Place]]:
    """(setting, place) of the runs of replay.mount, and of whatever settings name by a path; one may be a name on the hub."""
    mounts = [("replay.mount", folder) for folder in config.replay.mount]
    paths = [(name, value) for name, value in flatten(config.to_dict()).items() if name.endswith(("_path", ".path"))]
    texts = [(name, text) for name, text in (*mounts, *paths) if text and isinstance(text, str)]
    return [(name, place) for name, text in texts if (place := _place(text)) is not None]


def of_init_from(init_from: str) -> list[tuple[str, Place]]:
    """The run of RUN@STEP; none of "". Args: init_from: see other_runs.parse_init_from."""
    return [("--init_from", places.place(init_from.rpartition("@")[0]))] if init_from else []


def _place(text: str) -> Place | None:
    """None where the text names no place; other checks say so."""
    try:
        return places.place(text)
    except ValueError:
        return None


def check_answers(named: Iterable[tuple[str, Place]], *, limit: float = math.inf) -> None:
    """Returns once each place has answered, and says every ten seconds for which one it waits.

    Args: named: (setting or flag, place); limit: seconds, for the first place that does not answer; the others then have less.

    Raises:
      ValueError: a place has not answered within the limit, or is in no bucket. OSError: a store refuses.
    """
    found = Mistakes()
    for setting, place in dict.fromkeys(named):
        found.attempt(_check, setting, place, limit=min(limit, _OTHERS_SECONDS) if found else limit)
    found.end()


def _check(setting: str, place: Place, *, limit: float) -> None:
    def report(seconds: float) -> None:
        log.warning("%s=%s has not answered for %g s; still trying", setting, place, round(seconds, 1))

    try:
        places.check_answers(place, report=report, limit=limit)
    except TimeoutError as error:
        raise ValueError(f"{setting}={place} has not answered within {limit:g} s, and is not waited for any longer") from error
