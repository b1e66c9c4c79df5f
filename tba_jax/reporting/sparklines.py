"""Small charts as SVG paths, drawn here, so that a page needs no script."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

WIDTH, HEIGHT = 300, 72


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """title; lines: (name, path of SVG, newest value) of each curve; low, high: of the axis; first, last: ends of the x axis."""

    title: str
    lines: tuple[tuple[str, str, float], ...]
    low: float
    high: float
    first: float
    last: float


def chart(title: str, curves: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Chart | None:
    """The chart of some curves on the same axes, None where none of them has two points.

    Args: curves: name -> x and y, float64[n] each, finite.
    """
    there = {name: (x, y) for name, (x, y) in curves.items() if len(x) > 1}
    if not there:
        return None
    xs, ys = (np.concatenate([each[i] for each in there.values()]) for i in (0, 1))
    first, last, low, high = float(xs.min()), float(xs.max()), float(ys.min()), float(ys.max())
    lines = tuple((name, _path(x, y, (first, last), (low, high)), float(y[-1])) for name, (x, y) in there.items())
    return Chart(title=title, lines=lines, low=low, high=high, first=first, last=last)


def _path(x: np.ndarray, y: np.ndarray, along: Sequence[float], up: Sequence[float]) -> str:
    across = (x - along[0]) / max(along[1] - along[0], 1e-300) * WIDTH
    down = HEIGHT - 3 - (y - up[0]) / max(up[1] - up[0], 1e-300) * (HEIGHT - 6) if up[1] > up[0] else np.full(len(y), HEIGHT / 2)
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(across, down, strict=True))
