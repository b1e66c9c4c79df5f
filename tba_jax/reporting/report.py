"""One HTML file about a run, self-contained: what the run is, whether it learns, who waits, its rows.

The page fetches nothing and executes nothing but its own two scripts, whose hashes its content security policy names. What
models, files and other runs wrote is escaped by jinja; the figures are JSON in an element that no browser executes.
"""

import base64
import functools
import hashlib
import json
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from plotly import offline

from tba_jax.reporting import about, charts, gathering, series, tokens
from tba_jax.reporting.gathering import Gathered
from tba_jax.text.visible import visible

TEMPLATES = Path(__file__).parent / "templates"


def page(found: Gathered, *, recipe: Mapping[str, Any] | None = None, recipe_name: str = "") -> str:
    """The HTML of a report. Args: recipe: the config of the recipe that the settings are compared with, if the user named one."""
    begin, end = gathering.oldest_sign(found), gathering.newest_sign(found)
    known = charts.of(found, begin=begin, end=max(end, begin + 1.0))
    stored, finished = found.stored, _is_finished(found)
    content = {
        "title": Path(found.called).name or found.called,
        "workdir": found.called,
        "quoted_workdir": shlex.quote(found.called),
        "shared": str(found.run.shared),
        "made": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "began": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(begin)) if begin else "not known",
        "length": about.duration(end - begin) if begin else "0 s",
        "state": about.state(step=found.step, steps=found.steps, finished=finished, ended=found.ended, newest=end),
        "settings": about.settings(stored["config"], recipe),
        "recipe_name": recipe_name,
        "contract": about.contract(stored["contract"]),
        "changes": [about.in_words(each) for each in changes] if isinstance(changes := stored.get("changes"), list) else [],
        "init_from": str(stored.get("init_from") or ""),
        "run_id": str(stored.get("id") or ""),
        "processes": about.processes(found.marks.starts, found.writers),
        "versions": about.versions(found.marks.starts),
        "now": [] if finished else _now(found),
        "troubles": [(name, role.status["trouble"][:500]) for name, role in found.roles.items() if role.status.get("trouble")],
        "alarms": found.alarms,
        "problems": found.problems,
        "marks": known.marks,
        "time_title": known.time_title,
        "mark_counts": found.marks.counts,
        "left_out_roles": found.left_out_roles,
        "ledger": _ledger(found),
        "has_tokenizer": found.tokenizer is not None,
        "newest_policy": max(found.snapshots, default=0),
        "regenerate": functools.partial(_regenerate, found.called),
        **known.content,
    }
    return _rendered(content, {"figures": known.figures, "again": known.again, "time_title": known.time_title})


def _is_finished(found: Gathered) -> bool:
    step = found.finished.get("step")
    return series.is_number(step) and step >= found.steps


def _now(found: Gathered) -> list[dict[str, str]]:
    """What roles said last of what they do and wait for, where they said anything."""
    told = []
    for name, role in found.roles.items():
        said = {key: role.status.get(key, "")[:500] for key in ("phase", "waits")}
        done, total = role.status.get("phase_of", [0, 0])
        if said["phase"] and total:
            said["phase"] += f" ({done:,} of {total:,})"
        if any(said.values()):
            told.append({"role": name, **said})
    return told


def _ledger(found: Gathered) -> dict[str, Any]:
    """What became of the rows: the trainer's own account at its end where there is one, else what log and journal tell."""
    accounts = found.finished.get("ledger")
    sums: dict[str, int] = {}
    if isinstance(accounts, dict):
        with found.part("the ledger in finished.json"):
            for account in accounts.values():
                for name, value in account.items():
                    if isinstance(value, dict):
                        for rule, count in value.items():
                            sums[f"{name}: {rule}"] = sums.get(f"{name}: {rule}", 0) + int(count)
                    else:
                        sums[name] = sums.get(name, 0) + int(value)
    last = found.roles["trainer"].read.last if "trainer" in found.roles else {}
    live = {
        name: last[name]
        for name in ("rows_seen", "buffer_rows", "buffer_queries", "rows_rejected", "draws_per_row")
        if name in last
    }
    return {
        "sums": {name: value for name, value in sums.items() if value},
        "balanced": found.finished.get("balanced"),
        "live": live,
        "epochs": found.lines.epochs if found.lines is not None else [],
        "journalled": len(found.lines) if found.lines is not None else 0,
    }


def _regenerate(workdir: str, name: str) -> str:
    """The command that generates a row again."""
    return f"python -m tba_jax audit --workdir={shlex.quote(workdir)} --regenerate={shlex.quote(name)}"


def environment() -> jinja2.Environment:
    """Jinja with escaping always on, and control characters made visible."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    made.filters["clock"] = lambda seconds: (
        time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds)) if seconds == seconds else "–"
    )
    return made


def _rendered(content: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    scripts = [offline.get_plotlyjs(), (TEMPLATES / "report.js").read_text(encoding="utf-8")]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    trusted = {"scripts": [*map(Markup, scripts)], "data": Markup(text), "style": Markup(tokens.style())}
    return environment().get_template("report.html").render({**content, **trusted, "policy": policy})
