"""What the viewer says of a whole run: how it goes now, who waits, charts, and two runs or two evaluations side by side."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax.reporting import learning, marks, sparklines, stories
from tba_jax.reporting.about import QUIET_SECONDS
from tba_jax.reporting.gathering import UNREADABLE
from tba_jax.reporting.live_run import LiveRun, RoleNow
from tba_jax.reporting.series import is_number
from tba_jax.run import contract as contract_lib

# Name in the trainer's lines -> title of its chart.
CHARTS = {
    "reward": "Reward of the trained rows",
    "kl_to_ref": "KL to the reference, nats",
    "entropy": "Entropy, nats a token",
    "log_z": "log Z",
    "effective_sample_share": "Effective sample share",
    "staleness_mean": "Staleness, steps",
    "equal_reward_groups": "Groups of equal rewards",
    "queries_mixed": "Queries neither failed nor solved",
    "steps_per_second": "Steps a second",
}
_SHARES_SHOWN = 4


def content(run: LiveRun) -> dict[str, Any]:
    """What the template of the overview needs."""
    roles = run.roles()
    evaluations, unread = _evaluations(run)
    state = _state(run, roles)
    return {
        "roles": [(role, "ended" if state == "finished" else _doing(role), shares(role.line)) for role in roles],
        "alarms": sorted(((role.name, alarm) for role in roles for alarm in role.alarms), key=lambda each: each[1].time),
        "state": state,
        "waits": learning.heading_of_waits({role.name: _times(role.line) for role in roles}),
        "verdict": learning.verdict(_held_out(evaluations)[0], _trained(run)[0]),
        "told": [_held_out(evaluations)[1], _trained(run)[1], *unread],
        "charts": charts([run]),
        "worst": [(line, run.draws.steps_of(line.writer, line.row)) for line in stories.worst(run, 3)],
        "figures": figures(run.trainer.last),
        "steps": _steps(run),
    }


def charts(runs: Sequence[LiveRun]) -> list[sparklines.Chart]:
    """The charts of the trainers of these runs, each on the same axes."""
    made = [sparklines.chart(title, {run.called: run.trainer.curve(name) for run in runs}) for name, title in CHARTS.items()]
    return [chart for chart in made if chart is not None]


def compared(runs: Sequence[LiveRun]) -> tuple[list[sparklines.Chart], list[tuple[str, list[Any]]]]:
    """Charts of runs, and (name, newest figure of each run, None where it has none) of all figures."""
    newest = [dict(figures(run.trainer.last)) for run in runs]
    names = dict.fromkeys(name for figures_of_run in newest for name in figures_of_run)
    return charts(runs), [(name, [each.get(name) for each in newest]) for name in names]


def figures(line: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The numbers of a line of metrics, but for the time."""
    return [(name, value) for name, value in line.items() if is_number(value) and name != "time"]


def shares(line: Mapping[str, Any]) -> list[tuple[str, float, bool]]:
    """(name, share, whether it is waiting) of what a role's time went into, as of its newest line, the largest first."""
    found = sorted(_times(line).items(), key=lambda each: -each[1])
    return [(name.replace("_", " "), share, name.startswith("wait_")) for name, share in found[:_SHARES_SHOWN] if share >= 0.005]


def _times(line: Mapping[str, Any]) -> dict[str, float]:
    """Name -> share of a role's time, as of its newest line."""
    return {
        name.removeprefix("time_"): float(value) for name, value in line.items() if name.startswith("time_") and is_number(value)
    }


def paired_samples(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, str, list[list[Mapping[str, Any]]]]]:
    """(kind, query, samples of each report) of the queries that either report has samples of, in the order of the reports."""
    found: dict[tuple[str, str], list[list[Mapping[str, Any]]]] = {}
    for side, report in enumerate((one, other)):
        samples = report.get("samples")
        for kind, listed in samples.items() if isinstance(samples, dict) else ():
            for sample in listed if isinstance(listed, list) else ():
                if isinstance(sample, dict):
                    found.setdefault((str(kind), str(sample.get("query", ""))), [[], []])[side].append(sample)
    return [(kind, query, sides) for (kind, query), sides in found.items()][:200]


def _doing(role: RoleNow) -> str:
    """What a role does now, in half a sentence."""
    told = role.told
    if told.phase in ("finished", "stopped"):
        return told.phase
    last = min(role.seconds, time.time() - told.time if told.time else math.inf)
    if last > QUIET_SECONDS:
        said = told.phase or (f"waits for {told.waits}" if told.waits else "")
        return f"silent; it said last: {said}" if said else "silent"
    if told.phase:
        return f"{told.phase}{f' {told.done} of {told.total}' if told.total else ''}"
    return f"waits for {told.waits}" if told.waits else "at work"


def _state(run: LiveRun, roles: Sequence[RoleNow]) -> str:
    try:
        if contract_lib.is_finished(run.run):
            return "finished"
    except UNREADABLE:
        pass
    try:
        if marks.has_ended({role.name: run.run.metrics(role.name) for role in roles}):
            return "stopped"
    except OSError:
        pass
    quiet = [role.seconds for role in roles] + [time.time() - role.told.time for role in roles if role.told.time]
    return "live" if min(quiet, default=math.inf) < QUIET_SECONDS else "not finished, and silent"


def _steps(run: LiveRun) -> int:
    try:
        return int(run.stored["config"]["learner"]["steps"])
    except UNREADABLE:
        return 0


def _trained(run: LiveRun) -> tuple[str, str]:
    _, reward = run.trainer.curve("reward")
    return learning.trained_values(reward)


def _held_out(evaluations: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    return learning.held_out(evaluations)


def _evaluations(run: LiveRun) -> tuple[list[dict[str, Any]], list[str]]:
    """The figures of some reports, the first, the best and the last among them; and sentences about what cannot be read."""
    steps, found, unread = run.evaluation_steps(), [], list[str]()
    chosen = {steps[i] for i in np.linspace(0, len(steps) - 1, min(len(steps), 40)).astype(int)} if steps else set()
    try:
        best = run.scores.best()
        chosen |= {best.step} if best is not None else set()
    except OSError as error:
        unread.append(f"The held-out scores cannot be read: {error}")
    for step in sorted(chosen):
        try:
            found.append({"step": step, **dict(figures(run.evaluation(step)))})
        except UNREADABLE as error:
            unread.append(f"The evaluation of step {step} cannot be read: {error}")
    return found, unread
