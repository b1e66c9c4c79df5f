"""The command that serves a run: who may see the report, and that it follows the run."""

import contextlib
import http.client
import os
import signal
import socket
import threading

import pytest

from tba_jax.commands import command_line
from tba_jax.commands import report as view
from tba_jax.commands.report import Server
from tba_jax.reporting.gathering import Source
from tests.commands.test_command_line import refusal
from tests.support import frozen_runs, hostile_runs


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return hostile_runs.make(tmp_path_factory.mktemp("served") / "run")


@contextlib.contextmanager
def served(run):
    with Server(Source(run.root), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    asked = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    asked.request(method, path, headers=headers)
    answer = asked.getresponse()
    answer.text = answer.read().decode()
    return answer


def test_nobody_without_the_token_gets_in_nothing_is_changed_and_no_request_is_told(run, capfd):
    before = frozen_runs.contents(run.root)
    with served(run) as server:
        assert server.address.endswith(server.path) and len(server.path) == 34 and server.server_address[0] == "127.0.0.1"
        for path in ("/", "//", server.path[:-2] + "/", server.path[:-1], f"{server.path}x", "/%C3%A9/", "/etc/passwd"):
            refused = ask(server, path)
            assert refused.status == 403 and "w0:" not in refused.text
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost:1:2", ""):
            assert ask(server, server.path, Host=host).status == 403
        for host in ("localhost:9", "127.0.0.1", "[::1]:80"):
            assert ask(server, server.path, Host=host).status == 200
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
            assert ask(server, server.path, method).status == 501
        answer = ask(server, f"{server.path}?every=30")
        assert server.path not in answer.text
        assert answer.getheader("Refresh") == "30" and ask(server, f"{server.path}?every=<b>").getheader("Refresh") is None
        for name, value in (("Content-Security-Policy", "frame-ancestors 'none'"), ("Cache-Control", "no-store")):
            assert value in answer.getheader(name)
    said = capfd.readouterr()
    assert "GET" not in said.out + said.err and server.path not in said.out + said.err
    assert frozen_runs.contents(run.root) == before


def test_the_page_follows_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(view, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(view, "_TIMES", 0.0)
    run = hostile_runs.make(tmp_path / "run")
    with served(run) as server:
        assert "16 rows can be read" in ask(server, server.path).text
        hostile_runs.more_rows(run, "w1")
        assert "20 rows can be read" in ask(server, server.path).text


def test_a_taken_port_is_refused_and_ctrl_c_ends_it(run, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flag = f"--port={taken.getsockname()[1]}"
        assert f"{flag} cannot be used" in refusal(capsys, view, "--serve", f"--workdir={run.root}", flag)
    monkeypatch.setattr(Server, "handle_request", lambda self: os.kill(os.getpid(), signal.SIGINT))
    assert command_line.execute(view, ["--serve", f"--workdir={run.root}"]) == 0
    assert capsys.readouterr().out.endswith("\nCtrl-C ends it.\nstopped\n")
