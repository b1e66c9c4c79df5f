"""How slots are arranged: groups and their width, the lengths of prompts and caches that programs are compiled for."""

import dataclasses

# A prompt is prefilled at the first of these lengths, relative to the longest, that holds it; not shorter than _SHORTEST.
_BUCKETS = (4, 2, 1)
_SHORTEST = 32
# Slots of a group per sample of a query, up to so many samples and beyond. A group has two prompts at a time, so that slots that
# are done with one go on with the next while its longest sample runs; the more samples run side by side, the longer is that one
# compared with the rest. With these shares log-normal lengths of sigma 0.8 keep slots busy; more, smaller groups would have more
# prompts to read in each step.
_HALF_UP_TO = 24


def arrange(slots: int, samples: int, ways: int, *, what: str = "") -> tuple[int, int]:
    """Groups and width of each lane.

    Args: what: how messages call the slots.

    Raises:
      ValueError: the slots cannot be divided by the ways, or only into far smaller groups than wanted; names the numbers.
    """
    if samples < 1:
        raise ValueError(f"samples={samples} of a query must be at least 1")
    if slots < ways or slots % ways:
        raise ValueError(f"{what or f'slots={slots}'} cannot be divided by the {ways} ways of the mesh's data axis")
    lane = slots // ways
    most = max(1, samples // (2 if samples <= _HALF_UP_TO else 4))
    width = max(width for width in range(1, most + 1) if lane % width == 0)
    if lane > most and 2 * width <= most and most > 2:
        raise ValueError(
            f"{what or f'slots={slots}'} over {ways} ways of the mesh are {lane} each, which divide into groups of {width} only; "
            f"a multiple of {most} lets the {samples} samples of a query share its prompt"
        )
    return lane // width, width


@dataclasses.dataclass(frozen=True)
class LaneSizes:
    """Of the slots on one way of a mesh: groups, slots of a group, prompts of a group, prompts of one prefill call."""

    groups: int
    width: int
    buffers: int
    arrivals: int


def lane_sizes(slots: int, samples: int, ways: int, *, what: str = "") -> LaneSizes:
    """Args and errors as those of `arrange`."""
    groups, width = arrange(slots, samples, ways, what=what)
    # One slot has nobody to wait for: the next prompt takes its place.
    buffers = 1 if width == 1 else 2
    return LaneSizes(groups, width, buffers, max(1, groups * buffers // 16))


def buckets(prompt_length: int) -> tuple[int, ...]:
    """Lengths at which prompts are prefilled, ascending; the last is prompt_length."""
    shorter = {-(-prompt_length // part) for part in _BUCKETS[:-1]}
    return (*sorted(length for length in shorter if _SHORTEST <= length < prompt_length), prompt_length)


def windows(entries: int, chunk: int) -> tuple[int, ...]:
    """Parts of the own caches that are read while responses are short: quarters, of at least a chunk each. The last is all."""
    quarter = max(-(-entries // 4), chunk)
    return (*range(quarter, entries, quarter), entries)
