"""Serves the viewer on 127.0.0.1 until it is told to stop, one thread a request."""

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flask
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from tba_jax.reporting.live_run import LiveRun
from tba_jax.reporting.viewer import make_app

_HOST = "127.0.0.1"
# A thread that stops ends its slice of work first.
_STOP_SECONDS = 5.0


class _Quiet(WSGIRequestHandler):
    """Neither requests, whose addresses may hold the token, nor the name of the server are told."""

    server_version, sys_version = "tba_jax", ""
    timeout = 30.0  # a connection that says nothing keeps its thread no longer

    def log(self, type: str, message: str, *args: Any) -> None:
        del type, message, args


def listen(port: int) -> socket.socket:
    """A socket on 127.0.0.1. Args: port: 0: a free one.

    Raises:
      ValueError: the port is taken, or may not be used.
    """
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((_HOST, port))
        made.listen(128)
    except OSError as error:
        made.close()
        told = f"--port={port} cannot be used: {error.strerror or error}; name another one, or leave --port out for a free one"
        raise ValueError(told) from error
    return made


@contextlib.contextmanager
def serving(runs: Sequence[LiveRun], listening: socket.socket) -> Iterator[str]:
    """Serves in threads inside, and keeps the runs up to date. Yields the address with its token."""
    token, stopped = secrets.token_urlsafe(24), threading.Event()
    with listening:
        server = _server(make_app(runs, token), listening)
        work: list[tuple[str, Callable[[], None]]] = [(f"follow-{i}", _following(run, stopped)) for i, run in enumerate(runs)]
        threads = [
            threading.Thread(target=each, name=name, daemon=True) for name, each in [*work, ("serve", server.serve_forever)]
        ]
        for thread in threads:
            thread.start()
        try:
            yield f"http://{_HOST}:{server.port}/?token={token}"
        finally:
            stopped.set()
            server.shutdown()
            for thread in threads:
                thread.join(_STOP_SECONDS)
            server.server_close()


def _following(run: LiveRun, stopped: threading.Event) -> Callable[[], None]:
    return lambda: run.follow(stopped)


def _server(app: flask.Flask, listening: socket.socket) -> BaseWSGIServer:
    return make_server(_HOST, 0, app, threaded=True, request_handler=_Quiet, fd=listening.fileno())
