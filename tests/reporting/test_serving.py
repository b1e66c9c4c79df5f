"""The viewer's server: on 127.0.0.1 alone, quiet, on a free port, gone when it is told to stop."""

import http.client
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest

from tba_jax.reporting import live_run, serving
from tba_jax.reporting.live_run import LiveRun
from tests.support import hostile_runs


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(live_run, "POLL_SECONDS", 0.05)
    hostile_runs.make(tmp_path / "run")
    return LiveRun(tmp_path / "run")


def get(address: str, path: str, cookie: str = "") -> tuple[int, str, str]:
    asked = http.client.HTTPConnection("127.0.0.1", urlsplit(address).port, timeout=10)
    asked.request("GET", path, headers={"Cookie": cookie} if cookie else {})
    answer = asked.getresponse()
    content = answer.status, answer.read().decode(), (answer.getheader("Set-Cookie") or "").partition(";")[0]
    asked.close()
    return content


def test_the_printed_address_opens_the_run_and_the_end_closes_it(run, capfd):
    before = threading.active_count()
    with serving.serving([run], serving.listen(0)) as address:
        parts = urlsplit(address)
        assert parts.hostname == "127.0.0.1" and len(parts.query) > 30
        status, _, cookie = get(address, f"/?{parts.query}")
        assert status == 200 and cookie
        deadline = time.monotonic() + 20
        while run.table.progress != (hostile_runs.ROWS, hostile_runs.ROWS) and time.monotonic() < deadline:
            time.sleep(0.02)  # a thread reads the rows meanwhile
        status, content, _ = get(address, "/run/0/rows", cookie)
        assert status == 200 and "16 rows match" in content
        assert get(address, "/run/0/rows")[0] == 403
    with pytest.raises(OSError):
        get(address, "/")
    assert threading.active_count() <= before
    said = capfd.readouterr()
    assert "GET" not in said.out + said.err and parts.query not in said.out + said.err


def test_every_start_has_another_token(run):
    tokens = set()
    for _ in range(3):
        with serving.serving([run], serving.listen(0)) as address:
            tokens.add(urlsplit(address).query)
    assert len(tokens) == 3


def test_only_this_machine_reaches_it():
    with serving.listen(0) as made:
        assert made.getsockname()[0] == "127.0.0.1"


def test_a_port_that_is_taken_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port={port} cannot be used: Address already in use; name another"):
            serving.listen(port)


def test_rows_that_are_appended_meanwhile_come(run, tmp_path):
    from tba_jax.replay.log import LogWriter

    log = LogWriter(run.run.replay, "w1", run.contract.row_shape(), rows_per_append=4, segment_appends=4, info={})
    with serving.serving([run], serving.listen(0)):
        rows, _, _ = LiveRun(tmp_path / "run").rows([("w0", row) for row in range(4)])
        log.append(rows)
        deadline = time.monotonic() + 20
        while "w1" not in run.table.writers and time.monotonic() < deadline:
            time.sleep(0.02)
    assert "w1" in run.table.writers and run.table.progress == (20, 20)
