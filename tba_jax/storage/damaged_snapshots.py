"""Snapshots that a role has found damaged: it says so once, and does not read them again until they are published again."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from tba_jax.models.parameters import Params, Specs
from tba_jax.storage import layout, places, snapshots
from tba_jax.storage.places import Place

log = logging.getLogger(__name__)

# Storage that damages everything must not fill the memory with sentences.
_MOST_SENTENCES = 64

T = TypeVar("T")


def lagging(steps: Sequence[int], *, lag: int) -> list[int]:
    """The steps, of published ones in ascending order, that are at least `lag` older than the newest; step 0 where none is."""
    return [step for step in steps if step <= max(0, steps[-1] - lag)]


class DamagedSnapshots:
    """What one role knows of the damaged snapshots of a run."""

    def __init__(self, policies: Place, *, follows: str):
        """Args: follows: what the role does without a damaged snapshot, in part of a sentence."""
        self._policies, self._follows = policies, follows
        # The newest published step, −1 before the first; only kept by `load_newest` under a lag.
        self.newest = -1
        # Step -> the version of its commit.json as it was read. One that is forgotten would be read again and again.
        self._found: dict[int, bytes] = {}
        # Step -> the sentence about it, of the newest steps.
        self._sentences: dict[int, str] = {}

    def above(self, step: int) -> str:
        """A sentence about the newest snapshot that was found damaged, "" where there is none above this step."""
        sentences = dict(self._sentences)  # another thread may read snapshots meanwhile
        newest = max(sentences, default=step)
        return sentences[newest] if newest > step else ""

    def without(self, steps: Iterable[int]) -> list[int]:
        """The steps whose snapshots are not known to be damaged, or have been published again since. Keeps their order."""
        asked = list(steps)
        known = {step: (self._commit(step), self._found[step]) for step in asked if step in self._found}
        for step, version in places.changed(known).items():
            if not isinstance(version, OSError):  # of a storage that does not answer, which says nothing
                del self._found[step]
                self._sentences.pop(step, None)
        return [step for step in asked if step not in self._found]

    def attempt(self, step: int, read: Callable[[], T]) -> T | None:
        """What `read` returns, which reads the snapshot of a step; None where that is damaged, which is said once.

        Raises: as `read`, but for Damaged.
        """
        version = places.changed({step: (self._commit(step), b"")}).get(step)
        if isinstance(version, OSError):
            raise version
        try:
            return read()
        except snapshots.Damaged as error:
            self._note(step, version or b"", error)
            return None

    def load_newest(
        self, specs: Specs, shardings: Params, *, newer_than: int, lag: int = 0, dtype: str = "float32"
    ) -> tuple[int, Params] | None:
        """The newest whole snapshot above the step `newer_than`, None where there is none. Args: lag: see `lagging`.

        Where one is damaged, the one before is taken; where one vanishes while it is read, this looks again.
        """
        damaged: set[int] = set()
        while True:
            above = layout.steps_in(self._policies, newer_than=newer_than)
            while lag and above and not snapshots.is_committed(self._policies, above[-1]):
                above.pop()  # it is being written
            self.newest = above[-1] if lag and above else self.newest
            asked = self.without(step for step in reversed(lagging(above, lag=lag)) if step not in damaged)
            step = next((step for step in asked if snapshots.is_committed(self._policies, step)), None)
            if step is None:
                return None
            load = functools.partial(snapshots.load_step, self._policies, step, specs, shardings, dtype=dtype)
            with contextlib.suppress(FileNotFoundError):
                if (loaded := self.attempt(step, load)) is not None:
                    return step, loaded
                damaged.add(step)

    def _commit(self, step: int) -> Place:
        return self._policies / layout.step_name(step) / snapshots.COMMIT

    def _note(self, step: int, version: bytes, error: snapshots.Damaged) -> None:
        folder = self._policies / layout.step_name(step)
        sentence = (
            f"the snapshot of step {step} is damaged: {error}. {self._follows}; a trainer that resumes at this step publishes it "
            f"again, and to be rid of it, remove {folder}"
        )
        log.warning("%s", sentence)
        self._found[step], self._sentences[step] = version, sentence
        for oldest in sorted(self._sentences)[:-_MOST_SENTENCES]:
            del self._sentences[oldest]
