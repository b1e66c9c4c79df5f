"""Segments that retention has removed: named first, then deleted, so that a reader can tell them from damage."""

import logging
from collections.abc import Mapping, Sequence

from tba_jax.replay.segment import segment_name
from tba_jax.run import layout, places
from tba_jax.run.places import Place

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
    except ValueError as error:
        raise ValueError(
            f"{error}; it names the segments that replay.retention=checkpoints has removed: restore it from a copy, or let the "
            "trainer go on, which writes it again with one of its next checkpoints"
        ) from error
    except FileNotFoundError:
        return {"expired": {}, "removing": {}}


def remove_segments(root: Place, segments: Mapping[str, Sequence[int]]) -> None:
    """Removes segments, whole and for good. Only the run's trainer may call it.

    A later call with any segments completes a removal that was interrupted, or that a folder refused. Where the file of names is
    damaged, it is written anew: `segments` are all that no checkpoint needs, those among them that are gone as well.

    Args:
      segments: writer -> numbers; those that are gone already cost nothing. A writer's last segment must not be among them:
        it tells where the log ends.
    """
    try:
        found = _read(root)
    except ValueError as error:
        log.warning("%s; it is written again", error)
        found = {"expired": {}, "removing": {}}
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
