"""Fenced values: the highest epoch wins on files and in buckets, and storage that ignores conditions is found."""

import concurrent.futures
import http.client
import http.server
import json
import os
import shutil
import threading
import urllib.parse
import uuid

import pytest

from tba_jax.storage import contract, fenced, layout, places
from tba_jax.storage.fenced import StaleEpoch
from tests.support import moto_server


@pytest.fixture
def value(root):
    if root.__class__ is not places.Bucket:
        root.mkdir()
    return root / "value"


def test_versions_follow_each_other_and_an_older_epoch_writes_nothing(value):
    assert fenced.read(value) == fenced.NOTHING
    first = fenced.write(value, {"a": 1}, epoch=1)
    assert fenced.read(value) == first and first.number == (1, 1)
    assert fenced.read(value, first) is first, "what is not new is not read again"
    second = fenced.write(value, {"a": 2}, epoch=1)
    assert second.number == (1, 2) and fenced.read(value, first).value == {"a": 2}
    assert fenced.replace(value, first, {"a": 3}, epoch=1) is None, "another version has come"
    later = fenced.write(value, {"a": 4}, epoch=3)
    with pytest.raises(StaleEpoch, match=r"holds epoch 1 .*epoch 3 has been taken"):
        fenced.write(value, {"a": 5}, epoch=1)
    assert fenced.replace(value, second, {"a": 5}, epoch=1) is None, "stalled between its look and its write"
    assert fenced.read(value) == later and later.number == (3, 1)
    for n in range(2, 30):
        assert fenced.write(value, {"n": n}, epoch=3).number == (3, n)
    if value.__class__ is not places.Bucket:
        assert len(list(value.iterdir())) <= 5


def test_what_an_older_epoch_wrote_before_it_was_replaced_is_not_passed_over(value):
    """A later epoch has looked, an older one writes and is told that it counts, and only then the later one writes."""
    seen = fenced.write(value, {"a": 1}, epoch=1)
    told = fenced.replace(value, seen, {"a": 2}, epoch=1)
    assert told is not None
    assert fenced.replace(value, seen, {"b": 1}, epoch=2) is None
    found = fenced.read(value)
    assert found.value == {"a": 2}
    assert fenced.replace(value, found, {"a": 2, "b": 1}, epoch=2) is not None


def test_two_damaged_versions_leave_the_one_before(tmp_path):
    for n in range(6):
        made = fenced.write(tmp_path, {"n": n}, epoch=2)
    for n in (5, 6):
        (tmp_path / f"000002-{n:010d}").write_bytes(b"torn")
    found = fenced.read(tmp_path)
    assert found.number == made.number == (2, 6) and found.value == {"n": 3}
    assert fenced.replace(tmp_path, found, {"n": 9}, epoch=2) is not None and fenced.read(tmp_path).value == {"n": 9}


def test_one_of_many_takes_an_epoch(value):
    for epoch in range(1, 6):
        before, start = fenced.read(value), threading.Barrier(4)

        def take(number: int, epoch=epoch, before=before, start=start):
            start.wait()
            made = fenced.replace(value, before, {"by": number}, epoch=epoch)
            if made is not None:  # goes on, and removes older files, while others are still about to take it
                fenced.write(value, {"by": number}, epoch=epoch)
                fenced.write(value, {"by": number}, epoch=epoch)
            return made

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            won = [made for made in pool.map(take, range(4)) if made is not None]
        assert len(won) == 1 and fenced.read(value).value == won[0].value


def test_a_damaged_file_counts_less_than_the_one_before(tmp_path):
    value = tmp_path / "value"
    fenced.write(value, "old", epoch=1)
    fenced.write(value, "new", epoch=1)
    max(value.iterdir()).write_text("")
    assert fenced.read(value).value == "old"
    for file in value.iterdir():
        file.write_text("{")
    assert fenced.read(value).value is None and fenced.read(value).epoch == 1
    assert fenced.write(value, "next", epoch=2) == fenced.read(value)


def test_storage_that_keeps_its_word_passes_and_nothing_is_left(root):
    if root.__class__ is not places.Bucket:
        root.mkdir()
    fenced.probe(root)
    assert places.names_in(root) == []


class Forgetful(http.server.BaseHTTPRequestHandler):
    """Passes requests on to the S3 server, without one kind of condition."""

    protocol_version = "HTTP/1.1"
    forgets, behind = "", ""

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kept = {name: value for name, value in self.headers.items() if name.lower() != self.forgets or self.command != "PUT"}
        connection = http.client.HTTPConnection(self.behind, timeout=30)
        connection.request(self.command, self.path, body, kept)
        answer = connection.getresponse()
        content = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection", "date", "server"):
                self.send_header(name, value)
        self.send_header(
            "Content-Length", str(len(content)) if self.command != "HEAD" else answer.getheader("content-length", "0")
        )
        self.end_headers()
        self.wfile.write(content)

    def answer(self) -> None:
        self._pass()

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = lambda self: self.answer()

    def log_message(self, *_) -> None:
        pass


@pytest.mark.parametrize("forgets", ["If-None-Match", "If-Match"])
def test_a_store_that_ignores_conditions_is_refused_before_a_run_begins(s3, tmp_path, monkeypatch, forgets):
    behind = urllib.parse.urlparse(os.environ["AWS_ENDPOINT_URL"]).netloc
    handler = type("Handler", (Forgetful,), {"forgets": forgets.lower(), "behind": behind})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    shared = places.place(f"s3://{moto_server.BUCKET}/{uuid.uuid4().hex}")
    try:
        with pytest.raises(ValueError, match=rf"{shared} cannot hold a run: its store does not keep .*\({forgets}\)"):
            contract._make(layout.RunDir(tmp_path / "run", shared), {})
        assert places.names_in(shared) == []
    finally:
        server.shutdown()
        server.server_close()


def test_a_folder_without_exclusive_creation_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", lambda source, target: shutil.copy(source, target))
    with pytest.raises(ValueError, match=rf"{tmp_path} cannot hold a run: its file system lets several"):
        fenced.probe(tmp_path)
    assert not list(tmp_path.iterdir())

    def refuses(*_) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuses)
    with pytest.raises(ValueError, match="has no hard links"):
        fenced.probe(tmp_path)


def test_an_object_that_is_no_fenced_value_is_named():
    place = places.place(f"memory://x/{uuid.uuid4().hex}")
    places.write_bytes(place, json.dumps([1]).encode())
    with pytest.raises(ValueError, match=str(place)):
        fenced.read(place)


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_version_that_a_crash_has_damaged_holds_nobody_up(tmp_path, epoch):
    """Its number is taken; the next one follows it, of its epoch or of a later one."""
    for value in ("a", "b"):
        fenced.write(tmp_path / "v", value, epoch=1)
    max((tmp_path / "v").iterdir()).write_bytes(b'"b')
    assert fenced.read(tmp_path / "v").value == "a"
    fenced.write(tmp_path / "v", "c", epoch=epoch)
    found = fenced.read(tmp_path / "v")
    assert (found.value, found.number) == ("c", (1, 3) if epoch == 1 else (2, 1))
