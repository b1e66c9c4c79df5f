"""Serves the report of a run on 127.0.0.1, and makes it again while the run goes on and somebody looks at it."""

import contextlib
import hmac
import html
import http.server
import logging
import re
import secrets
import threading
import time
from collections.abc import Iterator
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tba_jax.reporting import page
from tba_jax.reporting.gathering import UNREADABLE, Source

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
# Names by which a browser on this machine, or at the other end of an ssh tunnel, calls the server. The port may differ there.
_NAMES = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?")
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": "frame-ancestors 'none'", "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin", "Cache-Control": "no-store",
}  # fmt: skip
# A report is made again when it is older than this, and than so many times what making it took.
PAUSE_SECONDS, _TIMES = 5.0, 4.0


class LivePage:
    """The report of a run; a thread inside `following` makes it again after it was asked for."""

    def __init__(self, source: Source):
        self._source = source
        self._content, self._told = b"", "The run is being read."
        self._asked, self._stopped = threading.Event(), threading.Event()

    def now(self) -> tuple[bytes, str]:
        """The newest report, b"" before the first; and a sentence about the reading or what is wrong with it."""
        self._asked.set()
        return self._content, self._told

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        thread = threading.Thread(target=self._follow, name="follow", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            self._asked.set()
            thread.join(5.0)

    def _follow(self) -> None:
        while not self._stopped.is_set():
            self._asked.clear()
            begin = time.monotonic()
            try:
                found = self._source.gather(self._tell)
                self._content = page.page(found, served=True).encode("utf-8", errors="replace")
            except UNREADABLE as error:
                log.warning("the report cannot be made: %s", error)
                self._tell(f"the report cannot be made: {error}")
            if not self._stopped.wait(max(PAUSE_SECONDS, _TIMES * (time.monotonic() - begin))):
                self._asked.wait()

    def _tell(self, sentence: str) -> None:
        if self._stopped.is_set():
            raise OSError("the viewer ends")
        self._told = sentence


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int):
        self.live: LivePage
        self.token, self.session = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self.cookie = f"tba_view_{secrets.token_hex(4)}"  # cookies of one host are shared by all ports
        super().__init__((_HOST, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a request failed", exc_info=True)  # a browser that went away


class _Handler(http.server.BaseHTTPRequestHandler):
    """Lets in who knows the token and gives a cookie in its place. Neither requests nor the server's name are told."""

    server: _Server
    server_version, sys_version = "tba_jax", ""
    timeout = 30.0  # a connection that says nothing keeps its thread no longer

    def log_message(self, format: str, *args: Any) -> None:
        del format, args

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        query = parse_qs(asked.query)
        cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        if not _NAMES.fullmatch(self.headers.get("Host", "")):
            self._say(403, "This viewer answers to 127.0.0.1 and localhost alone.")
        elif cookie is None or not _same(cookie.value, self.server.session):
            if not _same(query.get("token", [""])[0], self.server.token):
                self._say(403, "The address lacks the token, or has a wrong one: open the address that the command has printed.")
                return
            # A redirect would lack the cookie where a link on another site was followed: the cookie is SameSite=Strict.
            given = f"{self.server.cookie}={self.server.session}; HttpOnly; SameSite=Strict; Path=/"
            self._say(200, "The report comes.", {"Set-Cookie": given, "Refresh": "0; url=/"})
        elif asked.path != "/":
            self._say(404, "There is one page here: /")
        else:
            content, told = self.server.live.now()
            every = query.get("every", [""])[0]
            if not content:
                self._say(200, told, {"Refresh": "1"})
            else:
                self._send(200, content, {"Refresh": every} if re.fullmatch(r"[1-9]\d{0,4}", every) else {})

    do_HEAD = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What is no GET, or no HTTP."""
        self._say(code, "This viewer only reads: it takes GET and no other method.")

    def _say(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        policy = {"Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'"}
        text = f"<!doctype html><title>{status}</title><p>{html.escape(sentence)}</p>\n"
        self._send(status, text.encode("utf-8", errors="replace"), policy | (headers or {}))

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (_HEADERS | {"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), secret.encode())


def listen(port: int) -> _Server:
    """A server on 127.0.0.1 for `serving`. Args: port: 0: a free one. Raises ValueError where it is taken or may not be used."""
    try:
        return _Server(port)
    except OSError as error:
        told = f"--port={port} cannot be used: {error.strerror or error}; name another one, or leave --port out for a free one"
        raise ValueError(told) from error


@contextlib.contextmanager
def serving(source: Source, server: _Server) -> Iterator[str]:
    """Serves in threads inside. Yields the address with its token."""
    server.live = LivePage(source)
    with server, server.live.following():
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="serve", daemon=True)
        thread.start()
        try:
            yield f"http://{_HOST}:{server.server_port}/?token={server.token}"
        finally:
            server.shutdown()
            thread.join(5.0)
