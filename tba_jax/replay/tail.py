"""Follows the replay log for the trainer: reads new rows beside the training loop, hands them over between steps."""

import collections
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tba_jax.replay import journal
from tba_jax.replay.expiry import RowsExpired
from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.reader import LogCorruption, LogReader
from tba_jax.trajectory import Rows, concatenate

_ROWS_PER_READ = 4096

Missing = LogCorruption | RowsExpired


def _read_runs(reader: LogReader, writer: str, begin: int, end: int) -> tuple[list[Rows], list[Missing]]:
    """Rows [begin, end) without the appends that cannot be read whole or have been removed, and what was wrong with those."""
    runs: list[Rows] = []
    missing: list[Missing] = []
    while begin < end:
        stop = min(begin + _ROWS_PER_READ, end)
        try:
            runs.append(reader.read(writer, begin, stop))
        except (LogCorruption, RowsExpired) as error:
            # A gap may end beyond `end`: the call that reads the rows after `end` counts the rest of it.
            stop = min(error.stop, end)
            missing.append(RowsExpired(writer, error.start, stop) if isinstance(error, RowsExpired) else error)
            if error.start > begin:
                runs.append(reader.read(writer, begin, error.start))
        begin = stop
    return runs, missing


def _merge(runs: Iterable[Rows]) -> list[Rows]:
    """Joins runs whose row numbers follow one another: however a writer was polled, the index is given the same."""
    groups: list[list[Rows]] = []
    for run in runs:
        follows = groups and groups[-1][-1]["row"][-1] + 1 == run["row"][0]
        groups[-1].append(run) if follows else groups.append([run])
    return [concatenate(group) if len(group) > 1 else group[0] for group in groups]


def _take(
    index: ReplayIndex, reader: LogReader, writer: str, runs: Iterable[Rows], missing: Iterable[Missing], *, step: int
) -> None:
    """Gives the index the next rows of a writer, and the number of those that cannot be read."""
    for rows in _merge(runs):
        index.add(writer, rows, step=step, own=reader.is_own(writer))
    for lost in missing:
        index.skip(writer, lost.start, lost.stop, expired=isinstance(lost, RowsExpired))


class Tail:
    """Reads with a thread of its own. `integrate` is called by the training loop, everything else is inside."""

    def __init__(self, reader: LogReader, heads: Mapping[str, int], *, poll_seconds: float):
        """
        Args:
          reader: no other thread may use it from `start` on, but for what LogReader says is thread-safe.
          heads: rows of each writer that the index holds or has seen already.
          poll_seconds: between two polls, see places.poll_seconds.
        """
        self._reader = reader
        self._read_to = dict(heads)
        # (writer, head after it, runs of rows, what is missing between them)
        self._arrivals: collections.deque[tuple[str, int, list[Rows], list[Missing]]] = collections.deque()
        self._poll_seconds = poll_seconds
        self._stop = threading.Event()
        self._news = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._follow, name="replay-tail", daemon=True)
        self._missing: list[Missing] = []

    def start(self) -> None:
        """Polls in the background from now on."""
        self._thread.start()

    def poll(self, *, spare_quiet: bool = False) -> None:
        """Reads all rows committed since the last poll; directly in a one-process run. spare_quiet: as of LogReader.heads."""
        heads = sorted(self._reader.heads(spare_quiet=spare_quiet).items())
        news = {writer: (begin, head) for writer, head in heads if (begin := self._read_to.get(writer, 0)) < head}
        self._reader.prefetch(news)
        for writer, (begin, head) in news.items():
            runs, missing = _read_runs(self._reader, writer, begin, head)
            self._missing += missing
            self._read_to[writer] = head
            self._arrivals.append((writer, head, runs, missing))
        if self._arrivals:
            self._news.set()

    def _follow(self) -> None:
        try:
            while not self._stop.is_set():
                self.poll(spare_quiet=True)
                self._stop.wait(self._poll_seconds)
        except BaseException as error:  # handed to the training loop, which raises it
            self._failure = error
            self._news.set()

    def integrate(self, index: ReplayIndex, *, step: int) -> dict[str, int]:
        """Adds what has arrived to the index, as visible from `step` on, writer by writer.

        Returns:
          the new heads (writer -> rows) of writers with news: the journal's record of what this call did.
        """
        if self._failure is not None:
            raise self._failure
        self._news.clear()
        arrived = [self._arrivals.popleft() for _ in range(len(self._arrivals))]
        heads: dict[str, int] = {}
        runs: dict[str, list[Rows]] = {}
        missing: dict[str, list[Missing]] = {}
        for writer, head, new, lost in arrived:
            heads[writer] = head
            runs.setdefault(writer, []).extend(new)
            missing.setdefault(writer, []).extend(lost)
        for writer in sorted(runs):
            _take(index, self._reader, writer, runs[writer], missing[writer], step=step)
        return heads

    def wait(self, seconds: float) -> None:
        """Returns when rows have arrived, at the latest after `seconds`."""
        self._news.wait(seconds)

    @property
    def corrupted_rows(self) -> int:
        """Rows below a committed head that could not be read whole; they are never trained on."""
        return sum(error.stop - error.start for error in self._missing if isinstance(error, LogCorruption))

    def problems(self) -> list[str]:
        """Sentences about folders and rows that are left out."""
        return [*self._reader.problems.values(), *map(str, self._missing)]

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()


def replay_visible(index: ReplayIndex, reader: LogReader, heads: Mapping[str, int], *, step: int) -> None:
    """Does again what `Tail.integrate` did when it returned `heads`."""
    for writer in sorted(heads):
        runs, missing = _read_runs(reader, writer, index.heads.get(writer, 0), heads[writer])
        _take(index, reader, writer, runs, missing, step=step)


def not_resident(reader: LogReader, line: Mapping[str, Any], slots: np.ndarray) -> ValueError:
    """Why a journalled batch cannot be drawn again: the row that is missing, and what is wrong with it.

    Args: slots: int[B], of the batch's rows; −1 where one is not resident.
    """
    writer, row = journal.line_ids(line)[int((slots < 0).argmax())]
    try:
        reader.read_ids([(writer, row)])
    except ValueError as error:
        return ValueError(
            f"step {line['step']} drew row {writer}:{row}, which cannot be read any more: {error}. Restore it, or begin a new "
            "run from a snapshot (--init_from=RUN@STEP)"
        )
    return ValueError(f"step {line['step']} drew row {writer}:{row}, which was not resident: log and journal disagree")
