"""Backpressure: searchers make at most searchers.max_updates_ahead updates' worth of rows that the trainer has not trained on.

The trainer tells in DIR/demand.json how many rows it has taken up of each searcher, and how many more each may make. The file is
told and not trusted: where there is none, or none that can be read, searchers go on without a limit. Only rows that have come
count, so that a searcher which died holds nothing.
"""

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.log import GIVEN
from tba_jax.replay.selection import Selection, undrawn
from tba_jax.storage import layout, places
from tba_jax.storage.places import Place

# The trainer writes what it has to tell anew after so long, changed or not: another process may have written meanwhile.
RETELL_SECONDS = 20.0


def demand(
    index: ReplayIndex,
    selection: Selection,
    *,
    updates_ahead: int,
    min_rows: int,
    is_own: Callable[[str], bool],
    step: int,
    waits: bool,
) -> dict[str, Any]:
    """What the trainer tells after `step` updates: {"share", "heads"}.

    share: rows that each searcher may have asked beyond its head. heads: writer -> its rows that the trainer has taken up.

    Args: updates_ahead: searchers.max_updates_ahead, at least 1. min_rows: replay.min_rows. is_own: whether a writer's log is of
    this run. waits: whether no batch can be drawn: there is then room for the rows of an update at least.
    """
    searched = np.array([is_own(writer) and not writer.startswith(GIVEN) for writer in index.writers], bool)
    per_update = selection.queries * selection.completions
    most = updates_ahead * per_update
    room = max(most - undrawn(index, selection, step=step, of_writers=searched), 0)
    if waits:
        room = max(room, per_update, min_rows - index.arrivals)
    # A searcher that died is among the newest rows only until others have written as many as may be ahead.
    newest = index.slot_writer[index.arrival >= max(index.arrivals - most, 0)]
    live = int(np.count_nonzero(searched[np.unique(newest)]))
    heads = {writer: index.heads[writer] for writer, own in zip(index.writers, searched.tolist(), strict=True) if own}
    return {"share": math.ceil(room / max(live, 1)), "heads": heads}


class DemandWriter:
    """Writes the trainer's demand in a thread: the newest one, where it is another one, at most every `seconds`.

    Attributes: told: the newest one.
    """

    def __init__(self, file: Place, *, seconds: float):
        """Args: file: RunDir.demand; seconds: searchers.poll_seconds, as often as searchers look."""
        self._file, self._seconds = file, places.poll_seconds([file], seconds)
        self.told: dict[str, Any] = {}
        self._failure: BaseException | None = None
        self._news, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._write, name="demand", daemon=True)
        self._thread.start()

    def tell(self, told: dict[str, Any]) -> None:
        """Args: told: see `demand`. Raises OSError: the last one could not be written."""
        if self._failure is not None:
            raise self._failure
        if told != self.told:
            self.told = told
            self._news.set()

    def _write(self) -> None:
        try:
            while not self._stop.is_set():
                self._news.wait(RETELL_SECONDS)
                self._news.clear()
                if self.told:
                    layout.write_json(self._file, self.told)
                self._stop.wait(self._seconds)
        except BaseException as error:  # raised where the next demand is told
            self._failure = error

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._news.set()
        self._thread.join()


class Room:
    """How many rows a searcher may still make, as the trainer told it last."""

    def __init__(self, file: Place, writer: str):
        """Args: file: RunDir.demand. writer: the id of the searcher's log."""
        self._file, self._writer = file, writer
        self._share: int | None = None  # None: nothing is told
        # The last that was told: a writer that is closed (replay.close_seconds) is named no more.
        self._head: int | None = None

    def look(self) -> None:
        """Reads what the trainer tells. Raises OSError where the storage refuses."""
        try:
            self.take(layout.read_json(self._file))
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            self._share = None

    def take(self, told: Any) -> None:
        """Args: told: see `demand`. Raises ValueError, KeyError, TypeError: it is something else."""
        share, head = int(told["share"]), told["heads"].get(self._writer, self._head)
        self._share, self._head = share, None if head is None else int(head)

    def allows(self, asked: int) -> bool:
        """Whether a searcher may begin a batch that has asked so many rows. One batch may begin before the trainer has seen rows
        of the searcher: it divides the room among those whose rows it has seen."""
        if self._share is None:
            return True
        return asked == 0 if self._head is None else asked - self._head < self._share
