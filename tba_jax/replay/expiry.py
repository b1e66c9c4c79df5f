"""Segments that retention has removed: named first, then deleted, so that a reader can tell them from damage."""

import logging
from collections.abc import Mapping, Sequence

from tba_jax.replay.segment import segment_name
from tba_jax.storage import layout, places
from tba_jax.storage.places import Place

log = logging.getLogger(__name__)

EXPIRED = "expired.json"


class RowsExpired(ValueError):
    """Rows [start, stop) of a writer are in a segment that retention has removed."""

    def __init__(self, writer: str, start: int, stop: int):
        super().__init__(f"replay log of writer {writer}: rows {start} to {stop - 1} were removed by retention")
        self.writer, self.start, self.stop = writer, start, stop


def expired_segments(root: Place) -> dict[str, frozenset[int]]:
    """Writer -> segments that were removed, or are about to be. root: a replay folder."""
    return {writer: frozenset(numbers) for writer, numbers in _read(root)["expired"].items()}


def _read(root: Place) -> dict[str, dict[str, list[int]]]:
    try:
        return layout.read_json(root / EXPIRED)
    except FileNotFoundError:
        return {"expired": {}, "removing": {}}
    except ValueError as error:
        raise ValueError(f"{error}; the run's trainer writes it again when it is started") from error


def mend(root: Place) -> None:
    """Writes the file of names again where it is damaged: segments below a writer's last one that are not there were removed.

    One that was only announced counts as kept then, and is removed by a later call. Only the run's trainer may call it.
    """
    try:
        _read(root)
        return
    except ValueError as error:
        log.warning("%s: it does so now", error)
    there = {
        writer: [int(name) for name in places.names_in(root / writer) if name.isdecimal()] for writer in places.names_in(root)
    }
    expired = {writer: sorted({*range(max(numbers))} - {*numbers}) for writer, numbers in there.items() if numbers}
    layout.write_json(root / EXPIRED, {"expired": _merged(expired, {}), "removing": {}})


def remove_segments(root: Place, segments: Mapping[str, Sequence[int]]) -> None:
    """Removes segments, whole and for good. Only the run's trainer may call it.

    A later call with any segments completes a removal that was interrupted, or that a folder refused.

    Args:
      segments: writer -> numbers; those that are gone already cost nothing. A writer's last segment must not be among them:
        it tells where the log ends.
    """
    found = _read(root)
    new = {writer: sorted(set(numbers) - set(found["expired"].get(writer, ()))) for writer, numbers in segments.items()}
    removing = _merged(found["removing"], new)
    if not removing:
        return
    expired = _merged(found["expired"], new)
    layout.write_json(root / EXPIRED, {"expired": expired, "removing": removing})
    left = {
        writer: [number for number in numbers if not places.remove_tree(root / writer / segment_name(number))]
        for writer, numbers in removing.items()
    }
    layout.write_json(root / EXPIRED, {"expired": expired, "removing": _merged(left, {})})


def _merged(one: Mapping[str, Sequence[int]], other: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    merged = {writer: sorted({*one.get(writer, ()), *other.get(writer, ())}) for writer in one.keys() | other.keys()}
    return {writer: numbers for writer, numbers in merged.items() if numbers}
