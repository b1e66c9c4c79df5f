"""The pointer to the snapshots that the trainer keeps, `policy/kept`: how readers find them, and how the trainer moves it.

It is a fenced value: the names of the folders. A folder is whole before the pointer names it; the pointer lets go of it first,
and the folder is removed publish.keep_seconds later. Only a trainer that starts lists the folders. The pointer has the base of
each delta that it has.
"""

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tba_jax.models.parameters import Params, Specs
from tba_jax.storage import deltas, fenced, places, snapshots
from tba_jax.storage.fenced import NOTHING, Version
from tba_jax.storage.host_copies import HostCopies
from tba_jax.storage.places import Bucket, Place
from tba_jax.storage.snapshots import Damaged

log = logging.getLogger(__name__)

POINTER = "kept"
# Seconds until a reader looks again that lost a snapshot while it read it; each further time twice as long, up to the longest.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0


def kept(policies: Place) -> dict[int, Place]:
    """Step -> folder of the snapshots that are there, ascending; one small read. Raises ValueError: the pointer is damaged."""
    return _folders(policies, fenced.read(policies / POINTER))


def _folders(policies: Place, found: Version) -> dict[int, Place]:
    if found.epoch and not isinstance(found.value, list):
        raise ValueError(
            f"{policies / POINTER} is damaged: it names the snapshots that are kept; restore it from a copy, or remove it: the "
            "trainer then removes the older snapshots, and publishes anew"
        )
    return {asked[0]: policies / name for name in found.value or () if (asked := snapshots.step_and_epoch(name))}


def lagging(steps: Sequence[int], *, lag: int) -> list[int]:
    """The steps, of published ones in ascending order, that are at least `lag` older than the newest; step 0 where none is."""
    return [step for step in steps if step <= max(0, steps[-1] - lag)]


class Published:
    """The snapshots of a run for one reader, which reads none twice that it found damaged, and of a delta whose base it has read
    the delta alone."""

    def __init__(self, policies: Place, *, shares: bool = False, clock: Callable[[], float] = time.monotonic):
        """Args: shares: whether this reader and others of its host download a snapshot from a bucket once, see host_copies.py."""
        self._policies, self._clock = policies, clock
        self._copies = HostCopies(policies, kept=lambda: self._last.value) if shares and isinstance(policies, Bucket) else None
        self._last: Version = NOTHING
        self._held = deltas.Held()
        # The newest published step, −1 before the first; only kept by `load_newest` under a lag.
        self.newest = -1
        # Folder -> the sentence about its damage.
        self._damaged: dict[Place, str] = {}
        self._pause, self._pauses_until, self._told = FIRST_PAUSE, -float("inf"), False

    def kept(self) -> dict[int, Place]:
        """Step -> folder, ascending, as the module's `kept`, and cheaper where nothing is new."""
        self._last = fenced.read(self._policies / POINTER, self._last)
        return _folders(self._policies, self._last)

    def whole(self) -> list[int]:
        """The steps, ascending, whose snapshots this reader has not found damaged."""
        return [step for step, folder in self.kept().items() if folder not in self._damaged]

    def damage_above(self, step: int) -> str:
        """A sentence about the newest snapshot that was found damaged, "" where there is none above this step."""
        found = [each for each, folder in self.kept().items() if each > step and folder in self._damaged]
        return self._damaged[self.kept()[found[-1]]] if found else ""

    def load(self, step: int, specs: Specs, shardings: Params, *, dtype: str = "float32") -> Params:
        """The snapshot of a step, see snapshots.load. Raises FileNotFoundError: there is none, or it was removed meanwhile.
        Damaged: it is; the first time, a warning says so."""
        if (folder := self.kept().get(step)) is None:
            raise FileNotFoundError(f"there is no snapshot of step {step} in {self._policies}")
        if folder in self._damaged:
            raise Damaged(self._damaged[folder])
        try:
            load = functools.partial(snapshots.load, folder, specs, shardings, dtype=dtype, held=self._held)
            return load() if self._copies is None else self._copies.read(lambda nearby: load(nearby=nearby))
        except Damaged as error:
            if self.kept().get(step) != folder:
                raise FileNotFoundError(f"snapshot {folder} was removed while it was read") from error
            self._damaged[folder] = (
                f"the snapshot of step {step} is damaged: {error}. This process goes on without it; a trainer that resumes at "
                "this step publishes it again"
            )
            log.warning("%s", self._damaged[folder])
            raise

    def load_newest(
        self, specs: Specs, shardings: Params, *, newer_than: int, lag: int = 0, dtype: str = "float32"
    ) -> tuple[int, Params] | None:
        """The newest whole snapshot above the step `newer_than`, None where there is none. Args: lag: see `lagging`.

        Where one is damaged, the one before is taken. Where one is removed while it is read, this process looks for a newer one
        after a pause, until which the result is None.
        """
        if self._clock() < self._pauses_until:
            return None
        above = [step for step in self.kept() if step > newer_than]
        self.newest = above[-1] if lag and above else self.newest
        for step in reversed(lagging(above, lag=lag)):
            try:
                loaded = self.load(step, specs, shardings, dtype=dtype)
            except Damaged:
                continue
            except FileNotFoundError as error:
                self._lost(error)
                return None
            self._pause = FIRST_PAUSE
            return step, loaded
        return None

    def _lost(self, error: FileNotFoundError) -> None:
        if not self._told:
            log.warning(
                "%s: this process goes on with a newer one. publish.keep_seconds should be longer than the time to read one",
                error,
            )
        self._told = True
        self._pauses_until = self._clock() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


def retained(
    steps: Sequence[int], *, keep: int, keep_every: int, final_step: int, scores: Callable[[], Mapping[int, float]] = dict
) -> list[int]:
    """The steps, of ascending ones, whose snapshots stay: the newest `keep` (0: all), step 0, multiples of keep_every,
    final_step, and the best. Args: scores: gives step -> held-out score; the best is of `steps` (see results.best)."""
    going = [step for step in steps[:-keep] if step % keep_every and step != final_step] if keep else []
    scored = scores() if going else {}
    if not scored.keys().isdisjoint(going):
        best = max((step for step in steps if step in scored), key=lambda step: (scored[step], step))
        going = [step for step in going if step != best]
    return [step for step in steps if step not in going]


def _readable(there: dict[int, str]) -> dict[int, str]:
    """Step -> name of the folder, without deltas whose base is not among them: another snapshot may have taken its step."""
    return {step: name for step, name in there.items() if snapshots.base_of(name) in ("", *there.values())}


class Pointer:
    """The pointer in the hand of the trainer that holds the lease. Attributes: kept: step -> name of the folder, ascending."""

    def __init__(
        self, policies: Place, *, epoch: int, keep_seconds: float = 0.0, clock: Callable[[], float] = time.monotonic, **rule: Any
    ):
        """Takes the pointer away from earlier epochs, and removes the folders of theirs that it does not name.

        Args: epoch: of the lease. rule: see `retained`. Raises StaleEpoch, OSError; ValueError: the pointer is damaged.
        """
        self._policies, self._place, self._epoch = policies, policies / POINTER, epoch
        self._keep_seconds, self._clock, self._rule = keep_seconds, clock, rule
        # When a folder that the pointer has let go of is removed.
        self._removals: dict[Place, float] = {}
        places.make_folder(policies)
        made = None
        while made is None:
            found = fenced.read(self._place)
            fenced.refuse_stale(self._place, found, epoch)
            there = {step: folder.name for step, folder in _folders(policies, found).items()}
            made = fenced.replace(self._place, found, list(there.values()), epoch=epoch)
        # From here on no earlier epoch moves the pointer, or removes what it names.
        names = {name: of for name in places.names_in(policies) if (of := snapshots.step_and_epoch(name))}
        self.kept = _readable({step: name for step, name in there.items() if name in names})
        if self.kept != there:
            self._write(self.kept)
        # Deltas are removed before their bases, which are older.
        for name in sorted(names, reverse=True):
            if names[name][1] < epoch and name not in self.kept.values():
                places.remove_tree(policies / name)

    def add(self, step: int, name: str) -> None:
        """Shows a whole snapshot, and lets go of those that need not stay, nor are the base of one that does. Raises StaleEpoch,
        OSError."""
        there = _readable(dict(sorted({**self.kept, step: name}.items())))
        stay = {there[each] for each in retained([*there], **self._rule)}
        stay |= {snapshots.base_of(each) for each in stay}
        self._move({each: name for each, name in there.items() if name in stay})

    def drop_after(self, end: int) -> list[int]:
        """Lets go of the snapshots of the steps above `end`, and returns these."""
        dropped = [step for step in self.kept if step > end]
        if dropped:
            self._move({step: name for step, name in self.kept.items() if step <= end})
        return dropped

    def close(self) -> None:
        """Removes what the pointer has let go of, unless a later trainer has taken it."""
        if self._removals and fenced.read(self._place).epoch == self._epoch:
            self._remove(list(self._removals))

    def _move(self, there: dict[int, str]) -> None:
        self._write(there)
        now = self._clock()
        gone = [self._policies / name for name in reversed(self.kept.values()) if name not in there.values()]
        self.kept = there
        self._removals |= dict.fromkeys(gone, now + self._keep_seconds)
        self._remove([folder for folder, due in self._removals.items() if due <= now])

    def _write(self, there: Mapping[int, str]) -> None:
        fenced.write(self._place, list(there.values()), epoch=self._epoch)

    def _remove(self, folders: Sequence[Place]) -> None:
        for folder in folders:
            places.remove_tree(folder)
            del self._removals[folder]
