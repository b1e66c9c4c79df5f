"""One HTML file about a run, self-contained: whether it learns, who waits, its alarms, its rows, its settings.

The page fetches nothing and executes only its own two scripts, whose hashes its content security policy names. Text of others is
escaped by jinja; charts and samples are JSON, which the script shows as text.
"""

import base64
import hashlib
import json
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from plotly import offline

from tba_jax.experiment.schema import SCHEMA
from tba_jax.outputs import visible
from tba_jax.reporting import charts
from tba_jax.reporting.gathering import Gathered, is_number, part
from tba_jax.roles.results import STDERR, with_stderr
from tba_jax.schemas import flatten
from tba_jax.storage import contract as contract_lib
from tba_jax.telemetry.metrics import without_secrets
from tba_jax.telemetry.status import Told

TEMPLATES = Path(__file__).parent / "templates"
_QUIET_SECONDS = 60.0  # a run that wrote nothing for so long is not called live
_LONGEST = 300  # characters of a value
_CLEAR = 2.0  # standard errors that a change must exceed to count as one
_WAITS = {"rows": "rows from searchers", "policy": "a newer policy from the trainer", "rewards": "rewards of the task"}


def page(found: Gathered, *, served: bool = False) -> str:
    """The HTML of a report. Args: served: whether the viewer serves the page, and makes it again when the run has gone on."""
    begin, end = found.times
    counts, stored, roles = found.table.counts(), found.stored, found.roles
    drawn: dict[str, Any] = {"charts": [], "resumes": {}, "time_title": ""}
    with part(found.problems, "what the charts show"):
        drawn = charts.of(found)
    groups, shown = charts.chosen(found.table.rows, counts), dict[int, dict[str, Any]]()
    with part(found.problems, "the samples"):
        shown = charts.samples(found, [i for indices in groups.values() for i in indices])
    named = {group: [shown[i]["name"] for i in indices if i in shown] for group, indices in groups.items()}
    of_held_out, told_held_out = held_out(found.evaluations)
    of_trained, told_trained = trained(found.trainer.curve("reward"))
    heading, sentences = waits({name: of_role for name, role in roles.items() if (of_role := role.shares())})
    content = {
        "found": found,
        "title": Path(found.called).name or found.called,
        "workdir": found.called,
        "quoted_workdir": shlex.quote(found.called),
        "shared": str(found.run.shared),
        "made": _moment(time.time()),
        "began": _moment(begin) if begin else "not known",
        "state": _state(found, end),
        "verdict": verdict(of_held_out, of_trained),
        "learns": [told_held_out, told_trained],
        "waits_heading": heading,
        "waits": sentences,
        "now": {name: said for name, role in roles.items() if (said := _now(role.status)) and not _is_finished(found)},
        "troubles": {name: role.status.trouble for name, role in roles.items() if role.status.trouble},
        "worst": [each for each in shown.values() if each["name"] in named.get("worst", [])[:3]],
        "row_count": len(counts),
        "drawn_share": float((counts > 0).mean()) if len(counts) else 0.0,
        "writers": _writers(found, counts),
        "turns": by_turns(found.table.rows),
        "served": served,
        "settings": _settings(stored["config"]),
        "contract": [(name, in_words(value)) for name, value in flatten(without_secrets(stored["contract"])).items()],
        "changes": [in_words(each) for each in changes] if isinstance(changes := stored.get("changes"), list) else [],
        "init_from": str(stored.get("init_from") or ""),
        "run_id": str(stored.get("id") or ""),
    }
    return _rendered(content, {**drawn, "groups": named, "samples": [*shown.values()], "newest": found.step})


def held_out(evaluations: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """(verdict, sentence) about the held-out rewards. The verdict is one of yes, no, unclear, or "" without two evaluations.

    Args: evaluations: figures of the reports in the order of steps.
    """
    found = [each for each in evaluations if "greedy_reward" in each]
    if not found:
        return "", "There is no held-out score."
    first, last = found[0], found[-1]
    before, after = (with_stderr(each, "greedy_reward") for each in (first, last))
    if len(found) == 1:
        return "", f"The held-out reward is {before} at step {first['step']}; there is no second one yet."
    best = max(found, key=lambda each: (each["greedy_reward"], each["step"]))  # as results.best has it
    # The standard deviation of a reward in [low, high] is at most half of the range: for scores without a standard error.
    most = max(1.0, float(np.ptp([each["greedy_reward"] for each in found]))) / 2
    errors = (each.get("greedy_reward" + STDERR, most / np.sqrt(max(1.0, each.get("queries", 1.0)))) for each in (first, last))
    verdict, verb = _change(last["greedy_reward"] - first["greedy_reward"], float(np.hypot(*errors)))
    ends = f"{before} at step {first['step']} to {after} at step {last['step']:,}"
    others = f"; the best is {best['greedy_reward']:.3f} at step {best['step']:,}"
    return verdict, f"The held-out reward {verb} {ends}{', the best so far' if best is last else others}."


def trained(reward: np.ndarray) -> tuple[str, str]:
    """(verdict, sentence) about the rewards of the rows trained on: the first tenth of the run against the last.

    Args: reward: float64[n], in the order of steps.
    """
    reward = reward[np.isfinite(reward)]
    if len(reward) < 10:
        return "", "The trainer has told of too few steps to say how its reward moves."
    part = max(3, len(reward) // 10)
    first, last = reward[:part], reward[-part:]
    error = float(np.sqrt(first.var(ddof=1) / part + last.var(ddof=1) / part))
    verdict, verb = _change(float(last.mean() - first.mean()), error)
    ends = f"{first.mean():.3f} in the first steps to {last.mean():.3f} in the last"
    return verdict, f"The reward of the trained rows {verb} {ends}."


def _change(change: float, error: float) -> tuple[str, str]:
    if abs(change) <= _CLEAR * error or change == 0:
        return "unclear", "has not moved clearly: from"
    return ("yes", "rose from") if change > 0 else ("no", "fell from")


def verdict(of_held_out: str, of_trained: str) -> str:
    """The heading above both sentences. Held-out rewards decide where they are clear."""
    if of_held_out == "unclear" and of_trained in ("yes", "no"):
        return {"yes": "The trained reward rises", "no": "The trained reward falls"}[of_trained]
    told = {"yes": "It learns", "no": "It gets worse", "unclear": "No clear change yet"}
    return told.get(of_held_out or of_trained, "Too early to say")


def waits(shares: Mapping[str, Mapping[str, float]]) -> tuple[str, list[str]]:
    """Heading, and a sentence for each role. Args: shares: role -> what it did -> share of its time, in [0, 1]."""
    sentences, longest = [], (0.0, "")
    for role, of_role in shares.items():
        waited = {name: share for name, share in of_role.items() if name.startswith("wait_")}
        work = sorted((name for name in of_role if name not in waited), key=lambda name: -of_role[name])[:3]
        did = ", ".join(f"{name.replace('_', ' ')} {of_role[name]:.0%}" for name in work if of_role[name] >= 0.05)
        long = [f"{share:.0%} of its time for {_called(name)}" for name, share in waited.items() if share >= 0.01]
        told = f"{role} waited {' and '.join(long)}" if long else f"{role} waited for nobody"
        sentences.append(f"{told}; its time went into {did}." if did else f"{told}.")
        if not role.startswith("evaluator") and waited:
            name = max(waited, key=waited.__getitem__)
            longest = max(longest, (waited[name], f"{role} waits most: {waited[name]:.0%} for {_called(name)}"))
    if not shares:
        return "Nothing is known of waits yet", []
    return longest[1] if longest[0] >= 0.05 else "Neither trainer nor searchers wait", sentences


def _called(name: str) -> str:
    return _WAITS.get(name.removeprefix("wait_"), name.removeprefix("wait_").replace("_", " "))


def in_words(value: Any) -> str:
    """A value as JSON, cut where it is long."""
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters)"


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _is_finished(found: Gathered) -> bool:
    step = found.finished.get("step")
    return is_number(step) and step >= found.steps


def _state(found: Gathered, newest: float) -> str:
    """Whether the run is finished, live or silent. Args: newest: unix seconds of the last sign of life."""
    of = f"step {found.step:,} of {found.steps:,}" if found.steps else f"step {found.step:,}"
    quiet = time.time() - newest
    if _is_finished(found):
        return f"Finished: {of}."
    if not newest:
        return f"No role has written anything yet: {of}."
    if quiet < _QUIET_SECONDS:
        return f"At work: {of}; the last sign of life is {max(0.0, quiet):.0f} s old."
    return f"Not finished, and silent since {_moment(newest)}: {of}."


def _now(told: Told) -> str:
    """What a role said last of what it does and waits for."""
    phase = f"is {told.phase}" + (f" ({told.done:,} of {told.total:,})" if told.total else "") if told.phase else ""
    return ", ".join(filter(None, (phase, f"waits for {told.waits}" if told.waits else "")))


def _writers(found: Gathered, counts: Any) -> list[dict[str, str]]:
    """A line for each writer, those with most rows first, 100 at most."""
    lines = []
    for name in found.table.writers:
        mine = found.table.of_writer(name)
        if (count := int(mine.sum())) == 0:
            continue
        of, info = found.table.rows[mine], found.writers.get(name, {})
        line = {"writer": name, "rows": f"{count:,}", "trained on": f"{int((counts[mine] > 0).sum()):,}"}
        line |= {"mean reward": f"{of['reward'].mean():.3f}", "ended by themselves": f"{of['finished'].mean():.1%}"}
        own = of["newest_step"].max() >= 0
        line["policy steps"] = f"{of['oldest_step'].min()} to {of['newest_step'].max()}" if own else "of a mounted run"
        line |= {key: in_words(info.get(key, "")).strip('"') for key in ("host", "devices")}
        lines.append((count, line))
    return [line for _, line in sorted(lines, key=lambda each: -each[0])[:100]]


def by_turns(rows: np.ndarray) -> list[dict[str, str]]:
    """A line for each number of turns, after which rows have ended: it tells in which turn they fail. Args: rows: FIGURES[n]."""
    lines = []
    for count in np.unique(rows["turns"][rows["turns"] >= 0]).tolist():
        of = rows[rows["turns"] == count]
        reward = of["reward"][~np.isnan(of["reward"])]
        line = {"turns": f"{count}", "rows": f"{len(of):,}", "mean reward": f"{reward.mean():.3f}" if len(reward) else ""}
        line |= {
            "failed": f"{len(of) - len(reward):,}",
            "cut": f"{1 - of['finished'].mean():.1%}",
            "turns not read": f"{of['errors'].mean():.2f}",
        }
        lines.append({**line, "seconds of the environment": f"{of['seconds'].mean():.2f}"})
    return lines


def _settings(config: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value and default of each setting that differs from its default, without secrets."""
    here, defaults = flatten(without_secrets(config)), flatten(contract_lib.plain(SCHEMA.defaults().to_dict()))
    return [
        (name, in_words(value), in_words(defaults[name]) if name in defaults else "(there is none)")
        for name, value in here.items()
        if name not in defaults or defaults[name] != value
    ]


def _rendered(content: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    scripts = [offline.get_plotlyjs(), (TEMPLATES / "report.js").read_text(encoding="utf-8")]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
    policy += "base-uri 'none'; form-action 'none'"
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=lambda value: visible(value) if type(value) is str else value,
    )  # fmt: skip
    trusted = {"scripts": [*map(Markup, scripts)], "data": Markup(text), "policy": policy}
    return environment.get_template("report.html").render({**content, **trusted})
