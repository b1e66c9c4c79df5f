"""An S3 server for tests: moto, as a process of its own on a free port of this machine."""

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

BUCKET = "runs"
# moto's own command serves each request in a thread and asks whether an object is there before it writes: of two conditional
# writes at once both may win, as on no S3. One thread serves one request after the other.
SERVER = """
import sys
from moto import server
from werkzeug import serving
application = server.DomainDispatcherApplication(server.create_backend_app)
serving.run_simple("127.0.0.1", int(sys.argv[1]), application, threaded=False, request_handler=server.MotoRequestHandler)
"""


@contextlib.contextmanager
def serving() -> Iterator[dict[str, str]]:
    """An empty bucket BUCKET as long as the context lasts. Yields the environment that leads to it, set in this process too.

    Skips the test where moto is not installed.
    """
    pytest.importorskip("moto.server", reason="the S3 tests need moto[server], which is in the extra dev")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", SERVER, str(port)]
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
    environment = keys | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **environment})
    try:
        _make_bucket(port)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            yield environment
    finally:
        server.kill()
        server.wait()


def _make_bucket(port: int) -> None:
    """Waits for the server by asking for the bucket."""
    deadline = time.monotonic() + 60
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("PUT", f"/{BUCKET}")
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            return
        except OSError:
            assert time.monotonic() < deadline, "the S3 server does not answer"
            time.sleep(0.1)
