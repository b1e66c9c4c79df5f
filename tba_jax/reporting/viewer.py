"""The viewer's pages as a web application: who may ask, what is answered, and which rules the browser gets.

Nothing is written. Pages have no script, and all text is escaped: models, tasks and other people wrote it.
"""

import hmac
import logging
import re
import secrets
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flask
import jinja2
import numpy as np
from werkzeug.exceptions import HTTPException

from tba_jax.reporting import row_filter, stories, tokens, viewer_overview
from tba_jax.reporting.live_run import LiveRun
from tba_jax.text.visible import visible

log = logging.getLogger(__name__)

_TEMPLATES = Path(__file__).parent / "templates"
# Names by which a browser on this machine, or at the other end of an ssh tunnel, calls the server. The port may differ there.
_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?")
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; img-src data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_ROW = re.compile(r"[0-9]{1,18}")


def make_app(runs: Sequence[LiveRun], token: str) -> flask.Flask:
    """The application. Args: runs: one, or two to compare. token: of the address that lets a browser in."""
    app = flask.Flask("tba_jax_viewer", static_folder=None, template_folder=str(_TEMPLATES))
    app.jinja_options = {
        "autoescape": True,
        "undefined": jinja2.StrictUndefined,
        "trim_blocks": True,
        "lstrip_blocks": True,
        "finalize": lambda value: visible(value) if type(value) is str else value,
    }
    app.jinja_env.filters |= {"age": age, "short": short, "figure": figure}
    _guard(app, token)
    _answer_mistakes(app)
    pages = _Pages(runs)
    app.add_url_rule("/", view_func=pages.home)
    app.add_url_rule("/style.css", view_func=pages.style)
    app.add_url_rule("/compare", view_func=pages.compare)
    views: dict[str, Callable[..., Any]] = {
        "": pages.overview,
        "rows": pages.rows,
        "row/<writer>/<number>": pages.row,
        "step": pages.go_to_step,
        "step/<number>": pages.step,
        "queries": pages.queries,
        "query/<query>": pages.query,
        "evaluations": pages.evaluations,
    }
    for rule, view in views.items():
        app.add_url_rule(f"/run/<int:which>/{rule}", view_func=view)
    return app


def _guard(app: flask.Flask, token: str) -> None:
    """Lets in who knows the token, gives a cookie to a browser whose address has it, and sends the rules with every answer."""
    session = secrets.token_urlsafe(24)
    # Cookies of one host are shared by all ports: another viewer has another name.
    cookie = f"tba_view_{secrets.token_hex(4)}"

    @app.before_request
    def check() -> Any:
        if not _HOST.fullmatch(flask.request.headers.get("Host", "")):
            return _message(403, "This viewer answers to 127.0.0.1 and localhost alone.")
        if flask.request.method not in ("GET", "HEAD"):
            return _message(405, "This viewer only reads: it takes GET and no other method.")
        if _same(flask.request.cookies.get(cookie, ""), session):
            return None
        if "token" in flask.request.args and _same(flask.request.args["token"], token):
            # A redirect would lack the cookie where a link on another site was followed: the cookie is SameSite=Strict.
            answer = flask.make_response(flask.render_template("view_enter.html"))
            answer.set_cookie(cookie, session, httponly=True, samesite="Strict", path="/")
            return answer
        return _message(403, "The address lacks the token, or has a wrong one: open the address that the command has printed.")

    @app.after_request
    def add_rules(answer: flask.Response) -> flask.Response:
        answer.headers.update(_HEADERS)
        answer.headers.pop("Server", None)
        return answer


def _same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), secret.encode())


def _message(status: int, sentence: str) -> Any:
    return flask.render_template("view_message.html", sentence=sentence, status=status), status


def _answer_mistakes(app: flask.Flask) -> None:
    """One sentence in place of a traceback: 400 what the address got wrong, 404 what is not there, 503 what storage refuses."""

    @app.errorhandler(HTTPException)
    def told(error: HTTPException) -> Any:
        return _message(error.code or 500, error.description or error.name)

    @app.errorhandler(ValueError)
    def mistake(error: ValueError) -> Any:
        return _message(400, f"{error}.")

    @app.errorhandler(OSError)
    def refused(error: OSError) -> Any:
        return _message(503, f"The run cannot be read now: {error}")

    @app.errorhandler(Exception)
    def failed(error: Exception) -> Any:
        log.error("a page failed", exc_info=error)
        return _message(500, f"This page failed ({type(error).__name__}); the log of the command has the traceback.")


class _Pages:
    """The pages; each method answers one kind of address."""

    def __init__(self, runs: Sequence[LiveRun]):
        self._runs = runs

    def _run(self, which: int) -> LiveRun:
        if which >= len(self._runs):
            flask.abort(404, f"There is no run {which}: this viewer shows {len(self._runs)}.")
        return self._runs[which]

    def _render(self, template: str, which: int, **content: Any) -> str:
        run = self._runs[which]
        done, committed = run.table.progress
        shared = {
            "which": which,
            "runs": [each.called for each in self._runs],
            "run": run,
            "done": done,
            "committed": committed,
            "known": len(run.table.columns),
            "complaints": run.complaints(),
            "quoted": shlex.quote(run.called),
            "filter_of": lambda **asked: row_filter.Filter(**asked).address(),
        }
        return flask.render_template(template, **shared, **content)

    def home(self) -> Any:
        return flask.redirect(flask.url_for("overview", which=0))

    def style(self) -> Any:
        content = (_TEMPLATES / "view.css").read_text(encoding="utf-8") + tokens.style()
        return flask.Response(content, mimetype="text/css")

    def overview(self, which: int) -> str:
        run = self._run(which)
        refresh = row_filter.whole(flask.request.args, "refresh", least=2)
        return self._render("view_overview.html", which, refresh=refresh, **viewer_overview.content(run))

    def rows(self, which: int) -> str:
        run, asked = self._run(which), row_filter.parse(flask.request.args)
        begin, columns = time.perf_counter(), run.columns
        of = min(asked.of or len(columns), len(columns))
        columns = columns.first(of)
        matching = run.orders.matching(columns, run.table.writers, asked)
        address = asked.address(of=of)
        found: dict[str, Any] = {"total": len(matching), "searched": 0, "next": None, "before": None}
        if asked.text:
            ids, searched = stories.search(run, columns, matching, asked)
            found["searched"] = searched
            found["next"] = {**address, "at": searched} if searched < len(matching) else None
        else:
            pages = max(1, -(-len(matching) // stories.PAGE))
            if asked.page > pages:
                raise ValueError(f"page={asked.page} is not there: {len(matching)} rows make {pages} pages")
            ids = stories.names_of(run, columns, matching[(asked.page - 1) * stories.PAGE : asked.page * stories.PAGE])
            found |= {"pages": pages, "next": {**address, "page": asked.page + 1} if asked.page < pages else None}
            found["before"] = {**address, "page": asked.page - 1} if asked.page > 1 else None
        lines = stories.lines(run, ids)
        return self._render(
            "view_rows.html",
            which,
            asked=asked,
            lines=lines,
            orders=row_filter.ORDERS,
            ends=row_filter.FINISHED,
            writers=sorted(run.table.writers),
            milliseconds=1000 * (time.perf_counter() - begin),
            **found,
        )

    def row(self, which: int, writer: str, number: str) -> Any:
        run = self._run(which)
        if not _ROW.fullmatch(number):
            raise ValueError(f"row {number[:40]!r} of writer {writer[:100]} is no row number")
        try:
            story = stories.story(run, writer, int(number))
        except ValueError as error:
            return _message(404, f"{error}.")
        colour = "step" if flask.request.args.get("colour") == "step" else "ratio"
        command = f"python -m tba_jax audit --workdir={shlex.quote(run.called)} --regenerate={shlex.quote(f'{writer}:{number}')}"
        return self._render("view_row.html", which, story=story, colour=colour, command=command, newest=run.newest_step())

    def go_to_step(self, which: int) -> Any:
        self._run(which)
        number = row_filter.whole(flask.request.args, "number", least=1)
        return flask.redirect(flask.url_for("step", which=which, number=number or 1))

    def step(self, which: int, number: str) -> Any:
        run = self._run(which)
        step = row_filter.whole({"step": number}, "step", least=1) or 0
        ids = run.draws.rows_of(step)
        if not ids and not run.draws.first_step <= step <= run.draws.last_step:
            there = f"{run.draws.first_step} to {run.draws.last_step}" if run.draws.last_step else "none yet"
            return _message(404, f"The journal has no step {step}; it has {there}.")
        page = row_filter.whole(flask.request.args, "page", least=1) or 1
        pages = max(1, -(-len(ids) // stories.PAGE))
        if page > pages:
            raise ValueError(f"page={page} is not there: {len(ids)} rows make {pages} pages")
        lines = stories.lines(run, ids[(page - 1) * stories.PAGE : page * stories.PAGE])
        figures = viewer_overview.figures(run.trainer.of_step(step))
        told = {"step": step, "lines": lines, "total": len(ids), "page": page, "pages": pages}
        return self._render("view_step.html", which, figures=figures, draws=run.draws, **told)

    def queries(self, which: int) -> str:
        run = self._run(which)
        order = flask.request.args.get("order") or "hardest"
        if order not in stories.QUERY_ORDERS:
            raise ValueError(f"order={order[:60]!r} must be one of {', '.join(stories.QUERY_ORDERS)}")
        page = row_filter.whole(flask.request.args, "page", least=1) or 1
        found, total = stories.queries(run, order, page)
        pages = max(1, -(-total // stories.PAGE))
        if page > pages:
            raise ValueError(f"page={page} is not there: {total} queries make {pages} pages")
        told = {"order": order, "orders": stories.QUERY_ORDERS, "page": page, "pages": pages, "total": total}
        return self._render("view_queries.html", which, queries=found, **told)

    def query(self, which: int, query: str) -> Any:
        run = self._run(which)
        query = row_filter.parse({"query": query}).query
        summary, groups = stories.of_query(run, query)
        if not summary:
            return _message(404, f"No row of query {query} has been read.")
        asked = {side: row_filter.whole(flask.request.args, side, least=-1) for side in ("a", "b")}
        chosen = [
            asked["a"] if asked["a"] is not None else summary[0][0],
            asked["b"] if asked["b"] is not None else summary[-1][0],
        ]
        sides = [(step, stories.of_policy(run, groups[step]) if step in groups else []) for step in dict.fromkeys(chosen)]
        prompt = next((line.prompt for _, lines in sides for line in lines if line.prompt), "")
        told = {"listed": stories.listed(summary, chosen), "policies": len(summary), "chosen": chosen}
        return self._render("view_query.html", which, query=query, sides=sides, prompt=prompt, **told)

    def evaluations(self, which: int) -> Any:
        run = self._run(which)
        steps = run.evaluation_steps()
        if not steps:
            return self._render("view_evaluations.html", which, steps=[], sides=[], pairs=[], chosen=[])
        asked = [row_filter.whole(flask.request.args, side, least=0) for side in ("a", "b")]
        chosen = [step if step is not None else default for step, default in zip(asked, (steps[0], steps[-1]), strict=True)]
        if missing := [step for step in chosen if step not in steps]:
            return _message(
                404, f"There is no evaluation of step {missing[0]}; there are {len(steps)}, {steps[0]} to {steps[-1]}."
            )
        reports = [run.evaluation(step) for step in chosen]
        sides = [
            viewer_overview.figures({name: each for name, each in report.items() if name != "samples"}) for report in reports
        ]
        pairs = viewer_overview.paired_samples(*reports)
        return self._render("view_evaluations.html", which, steps=steps, sides=sides, pairs=pairs, chosen=chosen)

    def compare(self) -> Any:
        if len(self._runs) < 2:
            return _message(404, "There is one run: --other=DIR names another one to compare with.")
        query = row_filter.parse({"query": flask.request.args.get("query", "")}).query
        sides = []
        for run in self._runs if query else ():
            indices = np.flatnonzero(run.table.columns.query_id == np.uint64(int(query, 16)))
            sides.append((len(indices), stories.of_policy(run, indices) if len(indices) else []))
        charts, table = viewer_overview.compared(self._runs)
        return self._render("view_compare.html", 0, charts=charts, table=table, query=query, sides=sides)


def age(seconds: float) -> str:
    """A time span for people."""
    if not np.isfinite(seconds):
        return "never"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def short(text: str, length: int = 160) -> str:
    """The begin of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[:length]}…"


def figure(value: Any) -> str:
    """A number with as many digits as people read."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, float) and not value.is_integer():
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    return f"{int(value):,}"
