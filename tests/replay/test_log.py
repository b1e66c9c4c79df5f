"""Writers of the log: round trips, refusals, claims, lost replies, a full disk; and an append as a stranger reads it."""

import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from tba_jax.commands.append import write_whole
from tba_jax.replay import log as log_lib
from tba_jax.replay.log import LogWriter, minute_of
from tba_jax.replay.reader import LogCorruption, LogReader
from tba_jax.storage import places
from tests.run.test_processes import files_of_at_most
from tests.support import without_locks
from tests.support.tiny_log import SHAPE, assert_rows, make_rows, objects, writer


def test_a_writer_id_is_used_once_and_well_formed(tmp_path):
    writer(tmp_path)
    with pytest.raises(ValueError, match="never reused"):
        writer(tmp_path)
    for name in ("", "-a", "A", "a/b", "a" * 101, "a.b", "writers"):
        with pytest.raises(ValueError, match="must match"):
            writer(tmp_path, name)
    assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")] == ["writers", "writers/w0.json"]
    writer(tmp_path, "writers-2")


def test_wrong_rows_are_refused_and_the_log_goes_on_with_any_number_of_rows(tmp_path):
    log = writer(tmp_path)
    good = make_rows(0, 4)
    for bad, words in [
        (make_rows(0, 0), "empty"),
        (make_rows(4, 4), "continues at 0"),
        (good | {"reward": good["reward"].astype(np.float64)}, "reward is float64"),
        (good | {"key": good["key"][:, :1]}, "column key"),
        ({name: column for name, column in good.items() if name != "top_k"}, "top_k"),
    ]:
        with pytest.raises(ValueError, match=words):
            log.append(bad)
    for count in (4, 1, 7):
        log.append(make_rows(log.next_row, count))
    assert_rows(LogReader(tmp_path, SHAPE).read("w0", 0, 12), make_rows(0, 12))


def test_what_a_crash_leaves_lying_around_is_ignored(tmp_path):
    log = writer(tmp_path)
    for append in range(4):
        log.append(make_rows(4 * append, 4))
    minute = objects(tmp_path)[0].parent
    (minute / "w0.16-20_0123456789abcdef.__lock").write_bytes(b"")
    (tmp_path / "junk").write_text("x")
    (tmp_path / "20260101T0000").mkdir()
    reader = LogReader(tmp_path, SHAPE)
    assert reader.heads() == {"w0": 16} and reader.problems == {}
    assert_rows(reader.read("w0", 0, 16), make_rows(0, 16))


def test_given_rows_appear_together_when_they_are_registered(tmp_path):
    log = LogWriter(tmp_path, "given-1", SHAPE, info={"n": 7}, claim=False)
    (tmp_path / "writers").mkdir()
    for append in range(4):
        log.append(make_rows(4 * append, 4))
    reader = LogReader(tmp_path, SHAPE)
    assert reader.heads() == {} and reader.problems == {} and not reader.look()
    log.claim()
    assert reader.look() == {"given-1"} and reader.heads() == {"given-1": 16} and reader.info("given-1") == {"n": 7}
    assert_rows(reader.read("given-1", 0, 16), make_rows(0, 16))
    with pytest.raises(ValueError, match="never reused"):
        log.claim()


def test_given_rows_are_all_read_by_who_saw_an_attempt_that_was_interrupted(tmp_path, monkeypatch):
    first = LogWriter(tmp_path, "given-1", SHAPE, claim=False, info={})
    first.append(make_rows(0, 4))
    reader = LogReader(tmp_path, SHAPE)
    reader.look()
    monkeypatch.setattr(log_lib, "minute_of", lambda seconds: minute_of(seconds + 60))
    write_whole(tmp_path, "given-1", SHAPE, [make_rows(0, 4), make_rows(4, 4)], info={})
    reader.look()
    for _ in range(2):
        reader.look(sweep=True)
    assert reader.kept("given-1") == [range(8)] and not reader.problems
    assert_rows(reader.read("given-1", 0, 8), make_rows(0, 8))


def test_a_full_disk_refuses_appends_and_keeps_committed_ones(tmp_path):
    log = writer(tmp_path)
    log.append(make_rows(0, 4))
    for _ in range(2):
        with files_of_at_most(64), pytest.raises(OSError, match=r"append of rows 4 to 7 .* too large"):
            log.append(make_rows(4, 4))
    for _ in range(3):
        log.append(make_rows(log.next_row, 4))
    reader = LogReader(tmp_path, SHAPE)
    assert reader.heads() == {"w0": 16}
    assert_rows(reader.read("w0", 0, 16), make_rows(0, 16))


APPENDS = """
import fcntl, sys
from pathlib import Path
try:
    fcntl.flock(open(__file__), fcntl.LOCK_EX)
except OSError:
    pass
else:
    sys.exit("this process can lock files")
from tba_jax.replay.log import remove
from tba_jax.replay.reader import LogReader
from tests.support.tiny_log import SHAPE, assert_rows, make_rows, writer
root = Path(sys.argv[1])
log = writer(root)
for append in range(3):
    log.append(make_rows(4 * append, 4))
reader = LogReader(root, SHAPE)
assert reader.heads() == {"w0": 12}
assert_rows(reader.read("w0", 0, 12), make_rows(0, 12))
remove(root, reader.appends("w0")[:1])
"""


def test_a_file_system_without_locks_holds_rows(tmp_path):
    (tmp_path / "appends.py").write_text(APPENDS)
    (tmp_path / "log").mkdir()
    environment = {**os.environ, "LD_PRELOAD": str(without_locks.built(tmp_path)), "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(
        [sys.executable, tmp_path / "appends.py", tmp_path / "log"], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert_rows(LogReader(tmp_path / "log", SHAPE).read("w0", 4, 12), make_rows(4, 8))
    assert len(objects(tmp_path / "log")) == 2


def test_an_append_that_landed_unnoticed_is_acknowledged_once(tmp_path, monkeypatch):
    log = writer(tmp_path)
    log.append(make_rows(0, 4))
    put = places.put

    def put_then_fail(*arguments):
        put(*arguments)
        raise ValueError("UNAVAILABLE: the reply was lost")

    with monkeypatch.context() as patch:
        patch.setattr(places, "put", put_then_fail)
        with pytest.raises(OSError, match="may be appended again"):
            log.append(make_rows(4, 4))
    assert log.next_row == 4
    with pytest.raises(OSError, match="committed after all"):
        log.append(make_rows(4, 4) | {"reward": np.full(4, 99, np.float32)})
    monkeypatch.setattr(log_lib, "minute_of", lambda seconds: "20300101T0000")  # a retry keeps the name of the first try
    log.append(make_rows(4, 4))
    log.append(make_rows(8, 4))
    assert len(objects(tmp_path)) == 3
    assert_rows(LogReader(tmp_path, SHAPE).read("w0", 0, 12), make_rows(0, 12))


def test_two_processes_of_one_name_never_mix(tmp_path):
    one, two = (LogWriter(tmp_path, "w0", SHAPE, info={}, claim=False) for _ in range(2))
    one.append(make_rows(0, 4))
    with pytest.raises(OSError, match="another process writes as w0"):
        two.append(make_rows(0, 4) | {"reward": np.full(4, 99, np.float32)})
    assert_rows(LogReader(tmp_path, SHAPE).read("w0", 0, 4), make_rows(0, 4))


def test_a_later_column_is_left_out_and_another_layout_is_named(tmp_path):
    log = writer(tmp_path)
    log.append(make_rows(0, 4))
    file = objects(tmp_path)[0]

    def rewrite(change) -> None:
        content = file.read_bytes()
        size = int.from_bytes(content[:4], "little")
        header, body = change(json.loads(content[4 : 4 + size]), content[4 + size : -4])
        described = json.dumps(header).encode()
        new = len(described).to_bytes(4, "little") + described + body
        file.write_bytes(new + zlib.crc32(new).to_bytes(4, "little"))

    more = ["later", "<f4", [2]]
    rewrite(lambda h, b: (h | {"columns": [*h["columns"], more], "bytes": [*h["bytes"], 4 * 8]}, b + bytes(4 * 8)))
    assert_rows(LogReader(tmp_path, SHAPE).read("w0", 0, 4), make_rows(0, 4))
    rewrite(lambda h, b: (h | {"layout": "append-9"}, b))
    with pytest.raises(LogCorruption, match="layout 'append-9', and this version reads 'append-2'"):
        LogReader(tmp_path, SHAPE).read("w0", 0, 4)


def test_the_lines_of_the_docs_read_an_append_with_tensorstore_alone(tmp_path):
    writer(tmp_path).append(make_rows(0, 4))
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    (code,) = re.findall(r"```python\n(import json.*?)```", page, re.DOTALL)
    assert len(code.strip().splitlines()) <= 12 and "tba_jax" not in code
    found: dict = {}
    exec(code.replace("/runs/a/replay", str(tmp_path)), found)
    assert_rows(found["rows"], make_rows(0, 4))
