"""The charts of a report as plain dictionaries, which the page hands to plotly.

A chart with two axes has, for each trace, the x of both under "x_by": {"step": [...], "time": [...]}; the page shows one of them.
Text of a chart that others wrote is escaped: plotly takes some HTML in labels.
"""

import html
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax.reporting.marks import KINDS, Mark
from tba_jax.reporting.series import AgeMap, Column, Series
from tba_jax.reporting.timeline import DOWN, STARTING, Shares, Span
from tba_jax.text.visible import visible_line

# Okabe and Ito's colours, which colour-blind people can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6b6b6b", "#8a6d00")
# What a role does -> a colour. Waiting is red, so that it is seen first; setting up and stopping is grey.
_OF_WORK = {
    "update": "#0072b2",
    "decode": "#0072b2",
    "evaluate": "#0072b2",
    "reference": "#56b4e9",
    "draw": "#009e73",
    "integrate": "#66c2a5",
    "journal": "#a6d854",
    "publish": "#e69f00",
    "load_policy": "#e69f00",
    "checkpoint": "#8a6d00",
    "compile": "#9467bd",
    "logprob_gap": "#cc79a7",
    "embedding": "#cc79a7",
    "values": "#cc79a7",
    STARTING: "#c9c9c9",
    "other": "#e3e3e3",
    DOWN: "#ffffff",
}
_LONGEST_LABEL = 80
# Parts that take a smaller share of a role's time are joined.
_SHOWN = 0.01
SHOWN_SECONDS = 20
_NUMBER = re.compile(r"[-_]\d+$")
_WAITING = ("#d62728", "#ff7f7f", "#b22222", "#ffb3b3")
_OTHERS = ("#7f9f7f", "#9fbf9f", "#5f8f8f", "#8fafaf")

Figure = dict[str, Any]


def safe(text: str) -> str:
    """Text that others wrote, for a label."""
    return html.escape(visible_line(text)[:_LONGEST_LABEL], quote=False)


def rounded(values: Any) -> list[Any]:
    """Numbers with six digits, None in place of what is not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in np.asarray(values, np.float64).ravel()]


class Clock:
    """The axis of time: since the run began, in a unit that suits its length."""

    def __init__(self, begin: float, end: float):
        """Args: unix seconds."""
        self.begin = begin
        self.unit, self.seconds = next(
            (unit, seconds)
            for unit, seconds, limit in (("s", 1, 300), ("min", 60, 18_000), ("h", 3600, 1e6), ("days", 86_400, math.inf))
            if end - begin < limit
        )

    def __call__(self, times: Any) -> list[Any]:
        """Unix seconds -> positions on the axis."""
        return rounded((np.asarray(times, np.float64) - self.begin) / self.seconds)

    @property
    def title(self) -> str:
        return f"time since the run began ({self.unit})"


def chart(traces: Sequence[Mapping[str, Any]], *, y: str, height: int = 260, **layout: Any) -> Figure:
    """A chart over steps or time."""
    values = [value for trace in traces for value in trace.get("y", ()) if isinstance(value, float)]
    tiny = max(map(abs, values), default=0.0) < 1e-3
    axis: Figure = {"title": {"text": y}, "exponentformat": "power" if tiny else "SI"}
    if values and min(values) >= 0:
        axis |= {"rangemode": "tozero"} if max(values) > 0 else {"range": [0, 1]}
    return {"traces": [*traces], "height": height, "axes": True, "layout": {"yaxis": axis, **layout}}


def line(name: str, column: Column, steps: Any, times: Any, clock: Clock, *, colour: str, band: bool = True) -> list[Figure]:
    """A line of means, and behind it the range of each bucket where that is more than a point."""
    there = np.isfinite(column.mean)
    x_by = {"step": rounded(np.asarray(steps)[there]), "time": clock(np.asarray(times)[there])}
    low, high, mean = (rounded(each[there]) for each in (column.least, column.greatest, column.mean))
    traces: list[Figure] = []
    if band and low != high:
        x_of_band = {axis: [*x, *reversed(x)] for axis, x in x_by.items()}
        traces.append(
            {
                "x_by": x_of_band,
                "y": [*high, *reversed(low)],
                "fill": "toself",
                "fillcolor": f"{colour}26",
                "line": {"width": 0},
                "mode": "lines",
                "hoverinfo": "skip",
                "showlegend": False,
            }
        )
    single = len(mean) < 40
    traces.append(
        {
            "x_by": x_by,
            "y": mean,
            "name": safe(name),
            "mode": "lines+markers" if single else "lines",
            "marker": {"size": 4},
            "line": {"color": colour, "width": 1.8},
        }
    )
    return traces


def of_trainer(series: Series, clock: Clock, names: Sequence[tuple[str, str]], *, y: str, **layout: Any) -> Figure | None:
    """A chart of some figures of the trainer, None where its lines have none of them.

    Args: names: (in the lines, on the page).
    """
    steps, times = series.column("step").mean, series.column("time").mean
    traces: list[Figure] = []
    for number, (name, called) in enumerate(each for each in names if each[0] in series):
        traces += line(called, series.column(name), steps, times, clock, colour=COLOURS[number % len(COLOURS)])
    return chart(traces, y=y, **layout) if traces else None


def of_searchers(roles: Mapping[str, Series], clock: Clock, name: str, *, y: str) -> Figure | None:
    """A figure of all searchers. Their lines are on the axis of steps where the policy was that they sampled with."""
    traces: list[Figure] = []
    for number, (role, series) in enumerate((role, series) for role, series in roles.items() if name in series):
        steps = series.column("policy_step" if "policy_step" in series else "step").mean
        times, colour = series.column("time").mean, COLOURS[number % len(COLOURS)]
        traces += line(role, series.column(name), steps, times, clock, colour=colour, band=len(roles) == 1)
    return chart(traces, y=y) if traces else None


def heat_map_of_ages(ages: AgeMap, series: Series, clock: Clock) -> Figure | None:
    """Share of the trained rows by staleness, over the steps."""
    steps, lows, shares = ages.shares()
    if not len(steps):
        return None
    times = _times_of(steps, series)
    trace = {
        "type": "heatmap",
        "x_by": {"step": rounded(steps), "time": clock(times)},
        "y": rounded(lows),
        "z": [rounded(row) for row in np.where(shares > 0, shares, np.nan)],
        "colorscale": "Viridis",
        "reversescale": True,
        "zmin": 0,
        "zmax": 1,
        "colorbar": {"title": {"text": "share of<br>the batch"}, "thickness": 12, "tickformat": ".0%"},
        "hovertemplate": "x %{x}<br>%{y} steps old<br>%{z:.1%} of the batch<extra></extra>",
    }
    return chart([trace], y="staleness (steps)", height=300)


def _times_of(steps: np.ndarray, series: Series) -> np.ndarray:
    """Unix seconds at which the trainer did these steps."""
    known, times = series.column("step").mean, series.column("time").mean
    order = np.argsort(known)
    return np.interp(steps, known[order], times[order]) if len(known) else np.full(len(steps), np.nan)


def events(marks: Sequence[Mark], clock: Clock) -> Figure | None:
    """A row for each kind of mark."""
    traces = []
    for number, (kind, called) in enumerate(KINDS.items()):
        mine = [mark for mark in marks if mark.kind == kind]
        if not mine:
            continue
        told = [
            f"{safe(mark.role)}: {called}, step {mark.step}" + (f"<br>{safe(mark.told)}" if mark.told else "") for mark in mine
        ]
        traces.append(
            {
                "x_by": {"step": [mark.step for mark in mine], "time": clock([mark.time for mark in mine])},
                "y": [called] * len(mine),
                "text": told,
                "hovertemplate": "%{text}<extra></extra>",
                "mode": "markers",
                "showlegend": False,
                "marker": {"symbol": "line-ns-open", "size": 14, "color": COLOURS[number % len(COLOURS)], "line": {"width": 2}},
            }
        )
    if not traces:
        return None
    figure = chart(traces, y="", height=60 + 34 * len(traces) + 40)
    figure["layout"]["margin"] = {"l": 160}
    figure["layout"]["yaxis"] |= {"type": "category"}
    return figure


def vertical_lines(marks: Sequence[Mark], clock: Clock) -> dict[str, list[Any]]:
    """Where a trainer began to work again, for all charts over steps or time."""
    again = [mark for mark in marks if mark.role == "trainer" and mark.kind == "resume"][-50:]
    return {"step": [mark.step for mark in again], "time": clock([mark.time for mark in again])}


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """Name of work or of a wait -> a colour."""
    found = dict[str, str]()
    for name in names:
        if name in _OF_WORK:
            found[name] = _OF_WORK[name]
        elif name.startswith("wait_"):
            found[name] = _WAITING[sum(each.startswith("wait_") for each in found) % len(_WAITING)]
        else:
            found[name] = _OTHERS[len(found) % len(_OTHERS)]
    return found


def shares_of_time(role: str, shares: Shares, clock: Clock, begin: float, end: float) -> Figure | None:
    """What a role did, as shares of its time, over the whole run. What took little of it is joined to "other"."""
    edges, by_name = shares.buckets()
    if not by_name:
        return None
    totals = shares.totals()
    alive = sum(seconds for name, seconds in totals.items() if name != DOWN)
    names = [name for name in totals if name not in (DOWN, "other") and totals[name] >= _SHOWN * alive]
    ordered = sorted(names, key=lambda name: (not name.startswith("wait_"), name == STARTING, names.index(name)))
    rest = np.sum([by_name[name] for name in totals if name != DOWN and name not in names], axis=0)
    if np.max(rest, initial=0.0) > 0:
        by_name, ordered = {**by_name, "other": rest}, [*ordered, "other"]
    colours = colours_of(ordered)
    centres, width = (edges[:-1] + edges[1:]) / 2, (edges[1] - edges[0]) / clock.seconds
    traces = [
        {
            "type": "bar",
            "x": clock(centres),
            "y": rounded(by_name[name]),
            "width": width,
            "name": safe(name.replace("_", " ")),
            "marker": {"color": colours[name], "line": {"width": 0}},
            "hovertemplate": "%{y:.1%}<extra>" + safe(name.replace("_", " ")) + "</extra>",
        }
        for name in ordered
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0,
        "yaxis": {"range": [0, 1], "tickformat": ".0%", "tickvals": [0, 0.5, 1]},
        "xaxis": {"range": clock([begin, end])},
        "title": {"text": safe(role), "x": 0, "xanchor": "left", "font": {"size": 13}},
        "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom", "font": {"size": 11}},
        "margin": {"t": 34, "b": 26},
    }
    return {"traces": traces, "height": 132, "axes": False, "layout": layout}


def recorded_spans(spans: Sequence[Span]) -> Figure | None:
    """Exact spans of the end that was recorded, a row for each thread of a role."""
    if not spans:
        return None
    end = max(span.begin + span.seconds for span in spans)
    # From the bottom up, so that the trainer stands at the top.
    order = sorted({(span.role != "trainer", span.role, _lane(span)) for span in spans}, reverse=True)
    lanes = [lane for _, _, lane in order]
    names = sorted({span.name for span in spans})
    colours = colours_of(names)
    traces = []
    for name in names:
        mine = [span for span in spans if span.name == name]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "y": [safe(_lane(span)) for span in mine],
                "x": rounded([span.seconds for span in mine]),
                "base": rounded([span.begin - end for span in mine]),
                "name": safe(name.replace("_", " ")),
                "marker": {"color": colours[name], "line": {"width": 0}},
                "hovertemplate": "%{x:.3f} s, from %{base:.2f} s on<extra>" + safe(name.replace("_", " ")) + "</extra>",
            }
        )
    layout = {
        "barmode": "overlay",
        "dragmode": "pan",
        "xaxis": {"title": {"text": "seconds before the end of the recording"}, "range": [-SHOWN_SECONDS, 0]},
        "yaxis": {"type": "category", "categoryorder": "array", "categoryarray": [safe(lane) for lane in lanes]},
        "margin": {"l": 150},
    }
    return {"traces": traces, "height": 110 + 34 * len(lanes), "axes": False, "scroll": True, "layout": layout}


def _lane(span: Span) -> str:
    """The row of a span. Threads of a pool, such as reward-1 and reward-2, share one."""
    return span.role if span.lane == "main" else f"{span.role} · {_NUMBER.sub('', span.lane)}"


def bars(x: Sequence[Any], y: Any, *, x_title: str, y_title: str, colour: str = COLOURS[0], width: Any = None) -> Figure:
    """A histogram that is counted already."""
    trace = {"type": "bar", "x": [*x], "y": rounded(y), "marker": {"color": colour}}
    if width is not None:
        trace["width"] = width
    return {
        "traces": [trace],
        "height": 260,
        "axes": False,
        "layout": {"xaxis": {"title": {"text": x_title}}, "yaxis": {"title": {"text": y_title}}, "bargap": 0.06},
    }


def heat_map(x: Any, y: Any, z: np.ndarray, *, x_title: str, y_title: str, told: str, ticks: bool = False) -> Figure:
    """Shares in [0, 1] by x and y. Args: z: float64[y, x]; told: what a share is of; ticks: one for each y."""
    trace: Figure = {
        "type": "heatmap",
        "x": rounded(x),
        "y": rounded(y),
        "z": [rounded(row) for row in z],
        "zmin": 0,
        "colorscale": "Viridis",
        "reversescale": True,
        "colorbar": {"title": {"text": "share"}, "thickness": 12, "tickformat": ".2~p"},
        "hovertemplate": "%{x}, %{y}: %{z:.1%} of " + told + "<extra></extra>",
    }
    axis: Figure = {"title": {"text": y_title}}
    if ticks:
        axis |= {"tickvals": trace["y"], "ticktext": [f"{value:g}" for value in trace["y"]]}
    layout = {"xaxis": {"title": {"text": x_title}}, "yaxis": axis}
    return {"traces": [trace], "height": 280, "axes": False, "layout": layout}
