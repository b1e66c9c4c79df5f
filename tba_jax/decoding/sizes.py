"""How slots are divided into groups, and the lengths of prompts and caches that programs are compiled for.

A lane reads the first entries of the own caches, as many as the running samples need (Ring).
"""

import dataclasses
import math
from collections.abc import Sequence

# Prompts are prefilled at one of these parts of the longest length, the shortest that holds them, but not below _SHORTEST.
_BUCKETS = (8, 4, 2, 1)
_SHORTEST = 32
# Up to this many samples of a query, a group has half as many slots as samples; beyond, a quarter. Slots that are done with one
# of the group's two prompts go on with the other while the longest sample of the first runs. With these shares log-normal lengths
# of sigma 0.8 keep slots busy; more and smaller groups would have more prompts to read in each step.
_HALF_UP_TO = 24
# On TPUs, caches have a multiple of this many entries, which fill tiles: else XLA copies all caches into another layout at every
# call of the decode loop.
_TILE = 16
# For the same reason a part of the entries that a loop reads, where heads share no keys, fills the columns of tiles.
_TILE_COLUMNS = 128


@dataclasses.dataclass(frozen=True)
class LaneSizes:
    """groups: J; width: W, slots of a group; buffers: U, prompts of a group; arrivals: I, prompts of one prefill call."""

    groups: int
    width: int
    buffers: int
    arrivals: int


def lane_sizes(slots: int, samples: int, ways: int, *, lockstep: bool = False, what: str = "") -> LaneSizes:
    """The sizes of each lane.

    Args: ways: lanes; lockstep: see Engine; what: how messages call the slots.

    Raises:
      ValueError: the slots cannot be divided by the ways, or only into far smaller groups than wanted; names the numbers.
    """
    what = what or f"slots={slots}"
    if samples < 1:
        raise ValueError(f"samples={samples} of a query must be at least 1")
    if slots < ways or slots % ways:
        raise ValueError(f"{what} cannot be divided by the {ways} ways of the mesh's data axis")
    lane, width = slots // ways, samples
    if not lockstep or lane % samples:  # else all samples of a query begin at once, and read its prompt together
        most = max(1, samples // (2 if samples <= _HALF_UP_TO else 4))
        width = max(width for width in range(1, most + 1) if lane % width == 0)
        if lane > most and 2 * width <= most and most > 2:
            raise ValueError(
                f"{what} over {ways} ways of the mesh are {lane} each, which divide into groups of {width} only; "
                f"a multiple of {most} lets the {samples} samples of a query share its prompt"
            )
    groups = lane // width
    # A group of one slot needs no second prompt: no slot waits for another.
    buffers = 1 if width == 1 else 2
    return LaneSizes(groups, width, buffers, max(1, groups * buffers // 16))


def buckets(prompt_length: int) -> tuple[int, ...]:
    """Lengths at which prompts are prefilled, ascending; the last is prompt_length."""
    shorter = {-(-prompt_length // part) for part in _BUCKETS[:-1]}
    return (*sorted(length for length in shorter if _SHORTEST <= length < prompt_length), prompt_length)


def in_tiles(entries: int, *, tiled: bool) -> int:
    """The entries of a cache that holds at least so many. Args: tiled: see SlotsConfig."""
    return -(-entries // _TILE) * _TILE if tiled else entries


def heads_together(kv_heads: int, head_size: int, ways: int, *, tiled: bool) -> int:
    """The fewest heads whose sizes add up to whole columns of tiles; 1 where no such number divides the heads of a device.

    Args: ways: devices that heads are divided over, if their number divides the heads; tiled: see SlotsConfig.
    """
    together = _TILE_COLUMNS // math.gcd(_TILE_COLUMNS, head_size)
    of_device = kv_heads // ways if kv_heads % ways == 0 else kv_heads
    return together if tiled and of_device % together == 0 else 1


def windows(entries: int, chunk: int, *, tiled: bool = False) -> tuple[int, ...]:
    """Windows of the own caches, ascending: quarters, each at least a chunk; the last is the whole."""
    quarter = max(-(-entries // 4), chunk)
    quarter = -(-quarter // _TILE_COLUMNS) * _TILE_COLUMNS if tiled else quarter
    return (*range(quarter, entries, quarter), entries)


class Ring:
    """The host's side of the rings of all slots: the entries of the own caches that the next call reads.

    After the last of these entries, steps write to the first again. A ring that is to become longer is rotated first where a
    running sample goes over its end. A ring becomes shorter without being moved, once the running samples lie in the shorter one.

    Attributes: window: entries that the next call reads; position: of the next step's entry, at most `window`, which is entry 0
      again or, if the ring becomes longer, the entry after.
    """

    def __init__(self, windows: Sequence[int], chunk: int, *, lockstep: bool):
        """Args: windows: that may be chosen, ascending, the last the whole caches; chunk: most steps of a call."""
        self._windows, self._chunk, self._lockstep = tuple(windows), chunk, lockstep
        self.window, self.position = self._windows[-1], 0
        # The longest windows needed in the last round and in this one: a few short samples are no reason to give up a window.
        self._needed = (self._windows[-1], 0)
        self.begin()

    def begin(self) -> None:
        """All slots are idle. In lockstep, the next samples begin together, with the shortest window."""
        self.position = 0
        if self._lockstep:
            self.window, self._needed = self._windows[0], (0, 0)
        elif self._needed[1]:
            self._needed = self._needed[1], 0

    def choose(self, longest: int) -> int:
        """Chooses the window of the next call. Returns by how many entries the rings of the window before must be rotated first.

        Args: longest: entries of the longest running sample.
        """
        needed = self._fitting(longest + self._chunk)
        self._needed = self._needed[0], max(self._needed[1], needed)
        if needed > self.window:
            by = (self.position - longest) % self.window if longest > self.position else 0
            self.window, self.position = needed, max(self.position, longest)
            return by
        kept = max(self._needed)
        if longest <= self.position <= kept:
            self.window = min(self.window, kept)
        return 0

    def advance(self, steps: int) -> None:
        """Moves the position on after a call that made `steps` decode steps."""
        self.position += steps
        if self.position > self.window:
            self.position -= self.window
            self._needed = self._needed[1], 0

    def _fitting(self, entries: int) -> int:
        return next((window for window in self._windows if window >= entries), self._windows[-1])
