"""What stands between a run and its storage in a benchmark: an S3 proxy that counts and fails, and requests that take longer."""

import collections
import http.client
import http.server
import threading
import time
import urllib.parse
from typing import Any

from tba_jax.storage import places

_HOP = ("transfer-encoding", "connection", "content-length", "keep-alive")


class Proxy(http.server.ThreadingHTTPServer):
    """An S3 endpoint that passes requests on to another one. Attributes: counts: kind -> requests that were answered, refusals by
    throttling apart; throttles: whether every second request is refused with 503; is_out: whether none is answered."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, target: str):
        """Args: target: http://host:port."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urllib.parse.urlsplit(target).netloc
        self.counts: collections.Counter[str] = collections.Counter()
        self.counting, self.throttles, self.is_out = threading.Lock(), False, False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no news."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm, wbufsize = "HTTP/1.1", True, 1 << 16
    server: Proxy

    def _pass_on(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        lists = self.command == "GET" and "list-type" in urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        if self.server.is_out:
            self.close_connection = True
            return
        with self.server.counting:
            kind = "LIST" if lists else self.command
            self.server.counts["all"] += 1
            refuses = self.server.throttles and self.server.counts["all"] % 2 == 0
            self.server.counts["503" if refuses else kind] += 1
        if refuses:
            self._answer(503, {}, b"<Error><Code>SlowDown</Code></Error>")
            return
        connection = http.client.HTTPConnection(self.server.target, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
        connection.request(self.command, self.path, content or None, headers | {"Content-Length": str(len(content))})
        answer = connection.getresponse()
        found = answer.read()
        self._answer(answer.status, dict(answer.getheaders()), found)
        connection.close()

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.wfile.flush()

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass_on


class _Later:
    """The future of a request that is answered at `due` (time.monotonic()) at the earliest."""

    def __init__(self, future: Any, due: float):
        self._future, self._due = future, due

    def result(self) -> Any:
        time.sleep(max(self._due - time.monotonic(), 0))
        return self._future.result()


class _SlowStore:
    def __init__(self, store: Any, seconds: float):
        self._store, self._seconds = store, seconds

    def read(self, *args: Any, **settings: Any) -> _Later:
        return _Later(self._store.read(*args, **settings), time.monotonic() + self._seconds)

    def write(self, *args: Any, **settings: Any) -> _Later:
        return _Later(self._store.write(*args, **settings), time.monotonic() + self._seconds)


def slow_down(seconds: float) -> None:
    """From now on a request of this process to a folder takes so much longer, and a folder is asked as seldom as an object store.

    What is slower: appends and their reads (the key-value store), listings, and small files that are read, written or removed.
    """
    for name in ("names_in", "read_bytes", "write_bytes", "create", "exists", "remove"):
        setattr(places, name, _slower(getattr(places, name), seconds))
    opens, asked = places.open_store, places.poll_seconds
    setattr(places, "open_store", lambda folder: _SlowStore(opens(folder), seconds))  # noqa: B010
    a_bucket = places.place("memory://slow")
    places.poll_seconds = lambda used, seconds, **settings: asked([a_bucket], seconds, **settings)


def _slower(function: Any, seconds: float) -> Any:
    def call(*args: Any, **settings: Any) -> Any:
        time.sleep(seconds)
        return function(*args, **settings)

    return call
