"""The two wires on an object store: the log, the snapshots, and a run whose roles meet on an S3 server."""

import dataclasses
import http.server
import os
import signal
import socket
import threading
import time
import urllib.parse
import uuid
from typing import ClassVar

import jax
import numpy as np
import pytest

from tba_jax import main
from tba_jax.commands import audit, command_line, show
from tba_jax.experiment import jobs, training
from tba_jax.replay import tail as tail_lib
from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.log import remove
from tba_jax.replay.reader import LogCorruption, LogReader, RowsGone
from tba_jax.replay.tail import Tail
from tba_jax.roles.trainer.publishing import Publisher
from tba_jax.storage import layout, places, published, snapshots
from tests.commands.test_command_line import refusal
from tests.storage.test_fenced import Forgetful
from tests.support import moto_server, tiny_run
from tests.support.tiny_log import SHAPE, assert_rows, integrate_again, make_rows, writer
from tests.support.tiny_snapshots import SPECS, assert_same_bits, random_params, shardings


def test_rows_come_back_and_damage_is_named(root):
    log, reader = writer(root), LogReader(root, SHAPE)
    with pytest.raises(ValueError, match="never reused"):
        writer(root)
    objects, rows, rng = [], make_rows(0, 32), np.random.default_rng(0)
    rows["ref_logprobs"] = rng.normal(size=(32, 6)).astype(np.float32)
    tail = Tail(LogReader(root, SHAPE), {}, poll_seconds=0.2)
    index = ReplayIndex(shape=SHAPE, capacity=500, capacity_per_query=99, vocab_size=100, merge_duplicates=False)
    for append in range(8):
        log.append({name: column[4 * append : 4 * append + 4] for name, column in rows.items()})
        objects += [root / name for name in places.files_in(root) if f"w0.{4 * append}-" in name]
        tail.poll()
        tail.integrate(index, step=append)
        assert index.heads == {"w0": log.next_row} == reader.heads()
    assert index.ledger()["w0"]["seen"] == 32 and tail.problems() == []
    for each in (reader, LogReader(root, SHAPE)):
        assert each.heads() == {"w0": 32}
        assert_rows(each.read("w0", 0, 32), rows)
        wanted = [31, 2, 2, 13, 0]
        assert_rows(each.read_ids([("w0", row) for row in wanted]), {name: column[wanted] for name, column in rows.items()})
        assert each.problems == {} and each.info("w0")["pid"]
    content, found = places.read_bytes(objects[0]), []
    for position in range(0, len(content), len(content) // 3):
        places.write_bytes(objects[0], content[:position] + bytes([content[position] ^ 16]) + content[position + 1 :])
        try:
            assert_rows(LogReader(root, SHAPE, patience_seconds=0).read("w0", 0, 12), {k: c[:12] for k, c in rows.items()})
        except LogCorruption as corruption:
            found.append((corruption.start, corruption.stop))
    assert found and set(found) == {(0, 4)}
    places.write_bytes(objects[0], content)
    remove(root, reader.appends("w0")[1:6])
    for each in (reader, LogReader(root, SHAPE, patience_seconds=0)):
        assert each.heads() == {"w0": 32} and each.kept("w0") == [range(4), range(24, 32)]
        with pytest.raises(RowsGone, match="rows 4 to 23 are not in the log"):
            each.read("w0", 4, 8)
    assert len(places.files_in(root)) == 4, "three appends and a registration"


class NotFound:
    """A read that tensorstore fails."""

    def result(self):
        raise ValueError("NOT_FOUND: it may be shown later")


@pytest.mark.parametrize("kind", ["local", "memory"])
@pytest.mark.parametrize("how", ["it is not listed", "it is gone once it was listed", "reads of it fail"])
def test_rows_that_storage_does_not_show_for_longer_than_the_patience_come_late(tmp_path, monkeypatch, kind, how):
    root = tmp_path if kind == "local" else places.place(f"memory://late/{uuid.uuid4().hex}")
    monkeypatch.setattr(tail_lib, "_LONGEST_PAUSE", 0.05)
    log, make = writer(root), lambda: ReplayIndex(shape=SHAPE, capacity=500, capacity_per_query=99, vocab_size=100)
    tail, index, told, start = (
        Tail(LogReader(root, SHAPE, patience_seconds=0.3), {}, poll_seconds=0.1),
        make(),
        [],
        LogReader._start,
    )
    for append in range(4):
        log.append(make_rows(4 * append, 4))
    (away,) = (root / name for name in places.files_in(root) if "w0.4-" in name)
    content = places.read_bytes(away)
    if how == "it is gone once it was listed":
        tail.poll()
    if how == "reads of it fail":
        monkeypatch.setattr(LogReader, "_start", lambda self, each: NotFound() if each.first == 4 else start(self, each))
    else:
        places.remove(away)

    def follow(done, end: float) -> None:
        while not done():
            assert time.monotonic() < end, (index.heads, index.pending, tail.problems())
            time.sleep(0.02)
            tail.poll()
            told.extend(tail.integrate(index, step=1))

    begin = time.monotonic()
    follow(lambda: index.heads.get("w0") == 16, begin + 30)
    assert time.monotonic() - begin > 0.3 and index.pending == {"w0": [(4, 8)]} and index.ledger()["w0"]["pending"] == 4
    monkeypatch.setattr(LogReader, "_start", start)
    if how != "reads of it fail":
        places.write_bytes(away, content)
    follow(lambda: not index.pending, time.monotonic() + 30)
    found = index.ledger()["w0"]
    assert found["seen"] == 16 and found["damaged"] == 0 and not tail.problems()
    again = make()
    assert not integrate_again(again, LogReader(root, SHAPE), *told, step=1) and again.state() == index.state()


def test_snapshots_are_published_loaded_and_pruned_and_requests_are_counted(root):
    rate = places.RequestRate([root])
    settings = dict(dtype="float32", every_steps=1, keep=2, keep_every=10, final_step=99, scores=lambda: {0: 0.25, 1: 0.75})
    publisher = Publisher(root, epoch=1, **settings)
    for step in range(5):
        publisher.publish(jax.device_put(random_params(step), shardings()), step)
        publisher.wait()
    publisher.close()
    assert [*published.kept(root)] == [0, 1, 3, 4], "the best stays"
    assert [*map(snapshots.step_and_epoch, places.names_in(root)[:-1])] == [(0, 1), (1, 1), (3, 1), (4, 1)]
    if root.root.startswith("s3"):
        before = places.sent()
        places.write_bytes(root / "counted", b"x")
        places.read_bytes(root / "counted")
        places.names_in(root)
        assert places.sent() - before == 3 and rate.scalars()["storage_requests_per_minute"] > 0
        poll, before = published.Published(root), places.sent()
        poll.kept()
        poll.kept()
        assert places.sent() - before == 2, "a poll is one request, however many files the snapshots have"
    step, params = published.Published(root).load_newest(SPECS, shardings((2, 2, 2)), newer_than=0)
    assert step == 4
    assert_same_bits(params, random_params(4))


def refused(capsys, workdir, *flags: str) -> str:
    """The sentence that main refuses the tiny run with these flags by."""
    capsys.readouterr()
    return refusal(capsys, main, *tiny_run.command(workdir, *flags)[3:])


def test_a_run_on_s3_is_resumed_mounted_and_audited(s3, tmp_path, one_device, capsys):
    shared, a = f"s3://{moto_server.BUCKET}/run", tmp_path / "a"
    plain = ("--config.evaluation.enabled=False", "--config.schedule.mode=interleaved")
    assert command_line.execute(main, tiny_run.command(a, f"--shared={shared}", *plain, "--config.learner.steps=2")[3:]) == 0
    run = layout.open_run_dir(a)
    assert not {"config.json", "replay", "policy", "reference", "finished.json"} & set(places.names_in(a))
    assert {"checkpoints", "journal", "metrics", "shared.json"} <= set(places.names_in(a))
    assert places.names_in(run.shared) == ["config.json", "finished.json", "lease", "policy", "reference", "replay"]
    assert str(run.shared) == shared and [*published.kept(run.policies)][-1] == 2
    assert f"meet in {shared}" in refused(capsys, a, f"--shared={shared}-other", *plain)

    # The same workdir, without being told where, goes on. Another one has neither its journal nor its checkpoints.
    more = ("--config.learner.steps=3", "--allow_change=learner.steps")
    assert command_line.execute(main, tiny_run.command(a, *plain, *more)[3:]) == 0
    assert "resumed at step 2" in capsys.readouterr().err and layout.read_json(run.finished)["step"] == 3
    c = tiny_run.config(schedule__mode="interleaved", learner__steps=4, evaluation__enabled=False)
    other = dataclasses.replace(
        tiny_run.settings(tmp_path / "b", c), run=layout.RunDir(tmp_path / "b", run.shared), allow_change=("learner.steps",)
    )
    with pytest.raises(ValueError, match=rf"went on in {a} on host .*{tmp_path / 'b' / 'journal'} lacks the file of epoch 2"):
        jobs.everything(other)()
    assert layout.read_json(run.finished)["step"] == 3 and not list((tmp_path / "b").glob("journal/*"))

    assert command_line.execute(audit, [f"--workdir={a}"]) == 0
    assert "the ledger balances" in capsys.readouterr().out and audit.rebuild_batch(audit.open_run(a), 2)[1]
    assert "of 2 writers, newest first" in show.show(a, "newest", 2)

    # Another run, in a plain folder, trains on its rows; the URL names it as well as its workdir does.
    settings = {"evaluation__enabled": False, "searchers__count": 0, "learner__steps": 1, "replay__mount": (shared,)}
    other = tiny_run.settings(tmp_path / "c", tiny_run.config(**settings))
    assert training.trainer(other)() == 0
    assert layout.read_json(other.run.initial_reference) == layout.read_json(run.initial_reference)
    assert audit.rebuild_batch(audit.open_run(tmp_path / "c"), 1)[1]


class Confined(Forgetful):
    """Lets a searcher read everything, and put new objects below replay."""

    written: ClassVar[list[str]] = []
    refused: ClassVar[list[str]] = []

    def answer(self) -> None:
        reads, is_new = self.command in ("GET", "HEAD"), self.command == "PUT" and self.headers.get("If-None-Match") == "*"
        if reads or (is_new and self.path.startswith(f"/{moto_server.BUCKET}/run/replay/")):
            self.written.extend([self.path] * is_new)
            self._pass()
        else:
            self.refused.append(f"{self.command} {self.path}")
            self.send_error(403)


def test_a_searcher_needs_no_more_rights_than_new_objects_below_replay(s3, tmp_path, one_device, monkeypatch):
    """docs/security.md gives it these alone."""
    shared, plain = f"s3://{moto_server.BUCKET}/run", ("--config.evaluation.enabled=False", "--config.learner.steps=2")
    begun = tiny_run.command(tmp_path / "a", f"--shared={shared}", *plain, "--config.schedule.mode=interleaved")
    assert command_line.execute(main, begun[3:]) == 0
    run = layout.open_run_dir(tmp_path / "a")
    places.remove(run.finished)
    Confined.behind = urllib.parse.urlparse(os.environ["AWS_ENDPOINT_URL"]).netloc
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Confined)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    searcher = tiny_run.start(
        tiny_run.command(tmp_path / "b", f"--shared={shared}", *plain, "--role=searcher", "--config.schedule.mode=interleaved")
    )
    try:
        deadline = time.monotonic() + 120
        while len(Confined.written) < 2 and searcher.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        searcher.send_signal(signal.SIGTERM)
        said, _ = searcher.communicate(timeout=60)
        assert searcher.returncode == 0 and len(Confined.written) >= 2 and not Confined.refused, (Confined.refused, said)
    finally:
        searcher.kill()
        server.shutdown()
        server.server_close()


def test_a_store_that_is_not_there_is_named(s3, tmp_path, monkeypatch, capsys):
    for name, shared, words in (
        ("a", "s3://no-such-bucket/x", "s3://no-such-bucket does not exist"),
        ("b", "memory:x", "memory:x ends with its process"),
    ):
        assert words in refused(capsys, tmp_path / name, f"--shared={shared}", "--role=searcher")
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(places, "REPORT_SECONDS", 0.05)
        told: list[float] = []

        def report(seconds: float) -> None:
            told.append(seconds)
            if len(told) == 3:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            places.check_answers(places.place("s3://bucket/x"), report=report)
        assert told == pytest.approx([0.05, 0.1, 0.15])
