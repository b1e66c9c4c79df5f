"""Writes one HTML file about a run, live or ended: whether it learns, who waits, alarms, samples and what trained on them.

python -m tba_jax report --workdir=DIR [--output=FILE]
python -m tba_jax view --workdir=DIR [--port=PORT]

The file needs no network and no other file. No task is imported, and the run is only read.

`view`, or `report --serve`, serves the report on this machine, and makes it again as the run goes on. The address that is printed
holds a token; whoever has it sees the run until Ctrl-C. From another machine: ssh -L PORT:127.0.0.1:PORT HOST.
"""

import contextlib
import hmac
import http.server
import logging
import re
import secrets
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from absl import flags

from tba_jax import outputs
from tba_jax.commands import command_line
from tba_jax.outputs import visible_line
from tba_jax.storage import contract

if TYPE_CHECKING:  # what is slow to import is imported late: a mistyped flag is answered at once
    from tba_jax.reporting.gathering import Source

log = logging.getLogger(__name__)


def write(workdir: Path, output: Path) -> tuple[int, list[str]]:
    """Writes the report. Returns its bytes, and sentences about what of the run could not be read.

    Raises ValueError where there is no run of this version in `workdir`, or the output cannot be written.
    """
    from tba_jax.reporting import page
    from tba_jax.reporting.gathering import Source

    outputs.check_file(output)
    found = Source(workdir).gather()
    content = page.page(found).encode("utf-8", errors="replace")
    # Rows that are for their owner alone stay so outside of the run.
    outputs.write(output, content, mode=0o600 if contract.is_private(found.run) else 0o666)
    return len(content), found.problems


_HOST = "127.0.0.1"
# Names by which a browser on this machine, or at the other end of an ssh tunnel, calls the server. The port may differ there.
_NAMES = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?")
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin", "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
}  # fmt: skip
# A report is made again once it is older than so many seconds, and than so many times what making it took.
PAUSE_SECONDS, _TIMES = 5.0, 4.0


class Server(http.server.ThreadingHTTPServer):
    """`handle_request` serves one request, in a thread, or returns after `timeout`. address: its path is a token that lets in."""

    daemon_threads, timeout = True, 0.1

    def __init__(self, source: "Source", port: int):
        """Reads the run. Args: port: 0: a free one. Raises ValueError where the port is taken."""
        try:
            super().__init__((_HOST, port), _Handler)
        except OSError as error:
            raise ValueError(f"--port={port} cannot be used: {error.strerror or error}; name another, or none") from error
        self.path = f"/{secrets.token_urlsafe(24)}/"
        self.address = f"http://{_HOST}:{self.server_port}{self.path}"
        self._source, self._lock, self._page, self._again = source, threading.Lock(), b"", 0.0
        self.page()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.warning("a page failed: %s", sys.exception())

    def page(self) -> bytes:
        """The report of the run as it was at most some seconds ago."""
        from tba_jax.reporting import page

        with self._lock:
            if (begin := time.monotonic()) >= self._again:
                self._page = page.page(self._source.gather(), served=True).encode("utf-8", errors="replace")
                self._again = time.monotonic() + max(PAUSE_SECONDS, _TIMES * (time.monotonic() - begin))
            return self._page


class _Handler(http.server.BaseHTTPRequestHandler):
    """Lets in who knows the path. Neither requests nor the server's name are told."""

    server: Server
    server_version, sys_version, timeout = "tba_jax", "", 30.0  # seconds: a connection that says nothing is closed

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if not _NAMES.fullmatch(self.headers.get("Host", "")):
            self.send_error(403, "This viewer answers to 127.0.0.1 and localhost alone.")
        elif not hmac.compare_digest(asked.path.encode(errors="replace"), self.server.path.encode()):
            self.send_error(403, "The address has no token, or a wrong one: open the address that the command has printed.")
        else:
            every, content = parse_qs(asked.query).get("every", [""])[0], self.server.page()
            self.send_response(200)
            more = {"Refresh": every} if re.fullmatch(r"[1-9]\d{0,4}", every) else {}
            for name, value in (_HEADERS | {"Content-Length": str(len(content))} | more).items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # a browser that went away
                self.wfile.write(content)


def _serve(server: Server) -> int:
    ended: list[int] = []  # the handler takes no lock, which it could find taken
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: ended.append(number))
    with server:
        print(f"{server.address}\nCtrl-C ends it.", flush=True)
        while not ended:
            server.handle_request()
    print("stopped", flush=True)
    return 0


def add_flags(values: flags.FlagValues) -> None:
    command_line.add_workdir(values)
    command_line.add_path(values, "output", "the HTML file to write or replace; default: report.html in the current folder")
    flags.DEFINE_bool("serve", False, "serves the report on 127.0.0.1 instead, as view does", flag_values=values)
    what = "of 127.0.0.1, where the report is served; 0: a free one"
    flags.DEFINE_integer("port", 0, what, lower_bound=0, upper_bound=65535, flag_values=values)


def run(given: command_line.Given) -> int | command_line.Job:
    if given.serve:
        from tba_jax.reporting.gathering import Source

        if given.output:
            raise ValueError(f"--output={given.output} would not be used: a report that is served is written nowhere")
        server = Server(Source(given.workdir), given.port)
        return lambda: _serve(server)
    if given.port:
        raise ValueError(f"--port={given.port} would not be used without --serve")
    output = given.output or Path.cwd() / "report.html"
    if not given.output and Path.cwd().is_relative_to(given.workdir.resolve()):
        raise ValueError(f"the current folder belongs to the run {given.workdir}: name a file by --output")
    size, problems = write(given.workdir, output)
    print(visible_line(f"{output} ({size / 1e6:.1f} MB)"))
    if problems:
        parts = f"{len(problems)} parts" if len(problems) > 1 else "A part"
        print(f"{parts} of the run could not be read whole: see “What could not be read” in the report")
    return 0
