"""Rows on their way into the index: what is wrong with their values, and resident rows that are read back from the log."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax.replay import gaps as gaps_lib
from tba_jax.replay.expiry import RowsExpired
from tba_jax.replay.gaps import Gap, KnownGaps
from tba_jax.replay.reader import LogCorruption, LogReader
from tba_jax.trajectory import Rows

_ROWS_PER_READ = 4096
# What ReplayIndex.state says of each resident row.
_OF_ROWS = ("slot", "query", "writer", "row", "arrival", "visible_step", "row_draws")


class Lost:
    """Resident rows that the log does not give back. known: gaps of the journal; new: those that were found now."""

    def __init__(self, known: KnownGaps):
        self.known = known
        self._known_rows: list[Gap] = []
        self._new_rows: list[Gap] = []
        self._unreadable: dict[str, list[Gap]] = {}

    def holds(self, writer: str, row: int) -> bool:
        """Whether a row is lost; it is counted then."""
        if self.known.within(writer, row, row + 1):
            self._known_rows.append(Gap(writer, row, row + 1, "damaged"))
            return True
        for gap in self._unreadable.get(writer, []):
            if gap.start <= row < gap.stop:
                self._new_rows.append(Gap(writer, row, row + 1, "damaged", gap.reason))
                return True
        return False

    def note(self, error: LogCorruption | RowsExpired) -> None:
        gap = Gap(error.writer, error.start, error.stop, "damaged", getattr(error, "reason", str(error)))
        self._unreadable.setdefault(error.writer, []).append(gap)

    @property
    def all(self) -> list[Gap]:
        return [*self._known_rows, *self._new_rows]

    @property
    def new(self) -> list[Gap]:
        """Ascending, by writer."""
        writers = sorted({gap.writer for gap in self._new_rows})
        return [gap for each in writers for gap in gaps_lib.merged(gap for gap in self._new_rows if gap.writer == each)]


def read(state: Mapping[str, Any], reader: LogReader, lost: Lost) -> Iterator[tuple[dict[str, np.ndarray], Rows]]:
    """Parts of the resident rows of an index in their order: what `state` says of them (name -> int64[n]), and their content.

    Args: state: ReplayIndex.state. lost: takes the rows that are left out.

    Raises: RowsPending, ValueError: see LogReader.read_ids.
    """
    for begin in range(0, len(state["slot"]), _ROWS_PER_READ):
        there = {name: np.array(state[name][begin : begin + _ROWS_PER_READ], np.int64) for name in _OF_ROWS}
        rows: Rows | None = None
        while rows is None:
            ids = [(state["writers"][w], row) for w, row in zip(there["writer"].tolist(), there["row"].tolist(), strict=True)]
            kept = [not lost.holds(writer, row) for writer, row in ids]
            there = {name: column[kept] for name, column in there.items()}
            rows = _attempt(reader, [each for each, stays in zip(ids, kept, strict=True) if stays], lost)
        yield there, rows


def _attempt(reader: LogReader, ids: Sequence[tuple[str, int]], lost: Lost) -> Rows | None:
    try:
        return reader.read_ids(ids)
    except (LogCorruption, RowsExpired) as error:
        lost.note(error)
        return None


# Why a row is not trained on; `validate_rows` returns indices into this tuple, 0 = valid.
REJECTIONS = (
    "valid",
    "prompt_length",
    "response_length",
    "tokens",
    "reward",
    "logprobs",
    "embedding",
    "state_values",
    "reference",
)


def validate_rows(rows: Rows, *, vocab_size: int, reference_id: int | None = None) -> np.ndarray:
    """Checks the values of rows that a searcher wrote.

    Args:
      rows: of a valid schema, see `check_rows`.
      vocab_size: V; every token, padding included, must be in [0, V).
      reference_id: of the policy that ref_logprobs must be of, None: of any.

    Returns:
      int8[B], the first of REJECTIONS that holds; 0 where the row is valid.
    """
    finite = {name: np.isfinite(rows[name]) for name in ("ref_logprobs", "policy_logprobs", "behavior_logprobs")}
    R = rows["policy_step"].shape[1]
    P = rows["tokens"].shape[1] - R
    nothing = np.zeros(len(rows["row"]), bool)
    failed = np.stack(
        [
            (rows["prompt_length"] < 0) | (rows["prompt_length"] > P),
            (rows["response_length"] < 0) | (rows["response_length"] > R),
            ((rows["tokens"] < 0) | (rows["tokens"] >= vocab_size)).any(1),
            ~np.isfinite(rows["reward"]) | ~np.isfinite(rows["reward_parts"]).all(1),
            ~np.logical_and.reduce([column.all(1) for column in finite.values()]),
            ~np.isfinite(rows["embedding"]).all(1) if "embedding" in rows else nothing,
            # NaN elsewhere says that a state was not valued.
            np.isinf(rows["state_values"]).any(1) | np.isnan(rows["state_values"][:, 0]) if "state_values" in rows else nothing,
            nothing if reference_id is None else rows["reference_id"] != np.uint64(reference_id),
        ],
        axis=1,
    )
    return np.where(failed.any(1), failed.argmax(1) + 1, 0).astype(np.int8)
