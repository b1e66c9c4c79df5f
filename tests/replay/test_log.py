"""The log: round trips, refusals, crashes, corruption, foreign content, a full disk."""

import concurrent.futures
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tba_jax.replay.expiry import RowsExpired, expired_segments, remove_segments
from tba_jax.replay.log import LogWriter
from tba_jax.replay.reader import LogCorruption, LogReader
from tba_jax.replay.segment import LogSchema
from tba_jax.replay.validation import REJECTIONS, validate_rows
from tba_jax.run import layout, places
from tba_jax.trajectory import RowShape
from tests.support.tiny_log import SHAPE, assert_rows, make_rows, start_appender, writer


@pytest.mark.parametrize("parts", [(), ("a",), ("a", "b")])
def test_rows_come_back_across_segments(tmp_path, parts):
    shape = RowShape(prompt_length=4, response_length=6, reward_parts=parts)
    log, reader, slow = writer(tmp_path, shape=shape), LogReader(tmp_path, shape), LogReader(tmp_path, shape)
    assert reader.heads() == slow.heads() == {"w0": 0}
    for append in range(8):
        assert log.append(make_rows(4 * append, 4, shape)) == range(4 * append, 4 * append + 4)
        assert reader.heads() == {"w0": log.next_row} == {"w0": 4 * append + 4}
    assert sorted(p.name for p in (tmp_path / "w0").iterdir()) == ["000000", "000001", "000002"]
    everything = make_rows(0, 32, shape)
    for fresh in (reader, slow, LogReader(tmp_path, shape)):
        assert fresh.heads() == {"w0": 32}
        assert_rows(fresh.read("w0", 0, 32), everything)
        assert_rows(fresh.read("w0", 9, 15), {name: column[9:15] for name, column in everything.items()})
        wanted = [30, 2, 2, 13, 0]
        assert_rows(
            fresh.read_ids([("w0", row) for row in wanted]), {name: column[wanted] for name, column in everything.items()}
        )
    assert len(reader.read_ids([])["row"]) == 0
    assert reader.problems == {}
    with pytest.raises(ValueError, match="rows 0 to 31 are committed"):
        reader.read("w0", 30, 33)


def test_a_writer_id_is_used_once_and_well_formed(tmp_path):
    writer(tmp_path)
    with pytest.raises(ValueError, match="never reused"):
        writer(tmp_path)
    for name in ("", "-a", "A", "a/b", "a" * 101, "a.b", "writers"):
        with pytest.raises(ValueError, match="must match"):
            writer(tmp_path, name)
    assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")] == ["writers", "writers/w0.json"]
    writer(tmp_path, "writers-2")


def test_wrong_rows_are_refused_and_the_log_goes_on(tmp_path):
    log = writer(tmp_path)
    good = make_rows(0, 4)
    for bad, words in [
        (make_rows(0, 3), "rows_per_append"),
        (make_rows(4, 4), "continues at 0"),
        (good | {"reward": good["reward"].astype(np.float64)}, "reward is float64"),
        (good | {"key": good["key"][:, :1]}, "column key"),
        ({name: column for name, column in good.items() if name != "top_k"}, "top_k"),
    ]:
        with pytest.raises(ValueError, match=words):
            log.append(bad)
    log.append(good)
    assert_rows(LogReader(tmp_path, SHAPE).read("w0", 0, 4), good)


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_a_killed_writer_loses_no_acknowledged_append(tmp_path, kills):
    acknowledged = {}
    for number in range(0, kills, 2):
        names = [f"w{number}", f"w{number + 1}"]
        processes = [start_appender(tmp_path, name) for name in names]
        for process in processes:
            process.stdout.readline()
        time.sleep(0.02 + 0.013 * (number % 10))
        for name, process in zip(names, processes, strict=True):
            os.kill(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            acknowledged[name] = max([4] + [int(line) for line in output.split("\n")[:-1]])
    # What a crash may leave lying around.
    for name in ("w0", "w1"):
        (tmp_path / name / "000000" / "d" / "garbage").write_bytes(b"\x00" * 100)
        (tmp_path / name / "000000" / "manifest.ocdbt.__lock").write_bytes(b"")
        (tmp_path / name / "junk").write_text("x")
        (tmp_path / name / "000777.tmp").mkdir()
    reader = LogReader(tmp_path, SHAPE)
    heads = reader.heads()
    assert set(heads) == set(acknowledged)
    for name, head in heads.items():
        # The append in flight may have been committed without the acknowledgement.
        assert head in (acknowledged[name], acknowledged[name] + 4)
        assert_rows(reader.read(name, 0, head), make_rows(0, head))
    assert reader.problems == {}


def test_a_live_reader_never_sees_a_torn_row(tmp_path):
    def append(name):
        log = writer(tmp_path, name, segment_appends=7)
        for _ in range(40):
            log.append(make_rows(log.next_row, 4))

    threads = [threading.Thread(target=append, args=(name,)) for name in ("a", "b")]
    reader, seen = LogReader(tmp_path, SHAPE), {}
    for thread in threads:
        thread.start()
    polls = 0
    while seen != {"a": 160, "b": 160} and polls < 10_000:
        for name, head in reader.heads().items():
            previous = seen.get(name, 0)
            assert head >= previous and head % 4 == 0
            if head > previous:
                assert_rows(reader.read(name, previous, head), make_rows(previous, head - previous))
            seen[name] = head
        polls += 1
        time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert seen == {"a": 160, "b": 160}
    assert reader.problems == {}


def test_a_flipped_byte_is_named_with_its_writer_and_rows(tmp_path):
    shape = RowShape(prompt_length=4, response_length=64, reward_parts=())
    log, rng = writer(tmp_path, shape=shape, segment_appends=8), np.random.default_rng(0)
    expected, files = make_rows(0, 16, shape), []
    for name in ("ref_logprobs", "policy_logprobs"):
        expected[name] = rng.normal(size=(16, 64)).astype(np.float32)
    for append in range(4):
        before = set((tmp_path / "w0").rglob("d/*"))
        log.append({name: column[4 * append : 4 * append + 4] for name, column in expected.items()})
        files.append(max(set((tmp_path / "w0").rglob("d/*")) - before, key=lambda path: path.stat().st_size))

    def damage_everywhere(path: Path) -> tuple[list[LogCorruption], int]:
        """Flips a bit here and there, one at a time; returns the damaged reads and the number of damaged heads."""
        found, heads, content = [], 0, path.read_bytes()
        for position in range(0, len(content), len(content) // 60):
            path.write_bytes(content[:position] + bytes([content[position] ^ 16]) + content[position + 1 :])
            reader = LogReader(tmp_path, shape, patience_seconds=0)
            if reader.heads() != {"w0": 16}:
                assert "head of writer w0 cannot be read" in reader.problems["w0"]
                heads += 1
                continue
            try:
                assert_rows(reader.read("w0", 0, 16), expected)
            except LogCorruption as corruption:
                found.append(corruption)
        path.write_bytes(content)
        return found, heads

    # The file of append 1 holds its large values, and index nodes that later appends have replaced.
    found, heads = damage_everywhere(files[1])
    assert len(found) > 20 and heads == 0
    for corruption in found:
        assert (corruption.writer, corruption.start, corruption.stop) == ("w0", 4, 8)
        assert "w0: rows 4 to 7" in str(corruption)
    # That of the last append holds the index nodes of all.
    found, heads = damage_everywhere(files[3])
    assert len(found) > 20 and heads > 5

    # A data file that was cut off at any length, or is gone: its append is named, the others are read.
    content = files[1].read_bytes()
    for length in range(0, len(content) * 9 // 10, len(content) // 20):
        files[1].write_bytes(content[:length])
        reader = LogReader(tmp_path, shape, patience_seconds=0)
        assert reader.heads() == {"w0": 16}
        with pytest.raises(LogCorruption, match="rows 4 to 7"):
            reader.read("w0", 0, 16)
        assert_rows(reader.read("w0", 8, 16), {name: column[8:] for name, column in expected.items()})
    # So is a segment whose list of contents was cut off: its rows are not seen, and the writer is named.
    manifest = tmp_path / "w0" / "000000" / "manifest.ocdbt"
    whole = manifest.read_bytes()
    for length in range(1, len(whole), len(whole) // 7):
        manifest.write_bytes(whole[:length])
        reader = LogReader(tmp_path, shape, patience_seconds=0)
        assert reader.heads() == {"w0": 0} and "head of writer w0 cannot be read" in reader.problems["w0"]
    manifest.write_bytes(whole)

    files[1].unlink()
    reader = LogReader(tmp_path, shape, patience_seconds=0)
    assert_rows(reader.read("w0", 8, 16), {name: column[8:] for name, column in expected.items()})
    with pytest.raises(LogCorruption, match="rows 4 to 7"):
        reader.read("w0", 4, 8)


@pytest.mark.parametrize("entry", ["folder", "file"])
def test_lagging_storage_is_waited_for(tmp_path, entry):
    shape = RowShape(prompt_length=4, response_length=64, reward_parts=())
    log, rows = writer(tmp_path, shape=shape), make_rows(0, 4, shape)
    rows["ref_logprobs"] = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    data, away = tmp_path / "w0" / "000000" / "d", tmp_path / ".away"
    log.append(rows)
    before = set(data.iterdir())
    # A second append takes over the index nodes, so that the first one's file holds nothing but values.
    log.append(make_rows(4, 4, shape))
    reader = LogReader(tmp_path, shape, patience_seconds=20)
    assert reader.heads() == {"w0": 8}
    lagging = data if entry == "folder" else max(before, key=lambda path: path.stat().st_size)
    lagging.rename(away)
    timer = threading.Timer(0.3, lambda: away.rename(lagging))
    timer.start()
    assert_rows(reader.read("w0", 0, 4), rows)
    assert lagging.exists()
    timer.join()


def test_a_damaged_head_is_a_problem_and_the_writer_stays_where_it_was(tmp_path):
    log, reader = writer(tmp_path), LogReader(tmp_path, SHAPE)
    log.append(make_rows(0, 4))
    assert reader.heads() == {"w0": 4}
    log.append(make_rows(4, 4))
    manifest = tmp_path / "w0" / "000000" / "manifest.ocdbt"
    content = manifest.read_bytes()
    manifest.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    assert reader.heads() == {"w0": 4}
    assert "w0" in reader.problems["w0"] and "row 4" in reader.problems["w0"]
    manifest.write_bytes(content)
    assert reader.heads() == {"w0": 8}
    assert reader.problems == {}


def test_foreign_content_and_other_schemas_are_problems(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "foreign").mkdir()
    (tmp_path / ".w9.tmp").mkdir()
    good = writer(tmp_path, "good")
    good.append(make_rows(0, 4))
    register = tmp_path / "writers"
    (register / "notes.txt").write_text("hello")
    (register / ".w9.json.tmp").write_text("")
    (register / "list.json").write_text("[]")
    (register / "bare.json").write_text(json.dumps({"schema": {"layout": "packed-columns-1", "rows_per_append": 4}}))
    described = json.loads((register / "good.json").read_text())
    (register / "old.json").write_text(json.dumps({"schema": described["schema"] | {"layout": "named-columns-0"}}))
    (register / "older.json").write_text(json.dumps({"schema": {k: v for k, v in described["schema"].items() if k != "layout"}}))
    writer(tmp_path, "longer", RowShape(prompt_length=4, response_length=9, reward_parts=("a", "b")))
    writer(tmp_path, "parts", RowShape(prompt_length=4, response_length=6, reward_parts=("a", "c")))
    reader = LogReader(tmp_path, SHAPE)
    foreign = {"notes.txt", "foreign", "list", "bare", "old", "older", "longer", "parts"}
    for _ in range(2):  # what is told does not depend on when one looks
        assert reader.heads() == {"good": 4}
        assert set(reader.problems) == foreign
        assert "no writer is registered under this name" in reader.problems["foreign"]
        assert "layout 'named-columns-0', this version reads 'packed-columns-1'" in reader.problems["old"]
        assert "'layout'" in reader.problems["older"] and "segment_appends" in reader.problems["bare"]
        assert "policy_step" in reader.problems["longer"] and "prompt_length" not in reader.problems["longer"]
        assert "['a', 'c']" in reader.problems["parts"]
    with pytest.raises(ValueError, match="policy_step"):
        reader.read("longer", 0, 4)


def test_a_folder_that_is_claimed_later_is_followed_then(tmp_path):
    """Rows may be written first and claimed at the end: nobody sees them before."""
    log = LogWriter(tmp_path, "late", SHAPE, rows_per_append=4, segment_appends=3, info={"n": 7}, claim=False)
    for append in range(4):
        log.append(make_rows(4 * append, 4))
    reader = LogReader(tmp_path, SHAPE)
    assert reader.heads() == {} and "late is ignored" in reader.problems["late"]
    with pytest.raises(ValueError, match="never reused"):
        writer(tmp_path, "late")
    log.claim()
    assert reader.heads() == {"late": 16} and reader.problems == {} and reader.info("late") == {"n": 7}
    assert_rows(reader.read("late", 0, 16), make_rows(0, 16))
    with pytest.raises(ValueError, match="never reused"):
        log.claim()


def test_a_claim_between_the_listings_of_a_poll_is_no_alarm(tmp_path, monkeypatch):
    writer(tmp_path, "first")
    names_in, claimed = places.names_in, []

    def list_then_claim(folder, **settings):
        names = names_in(folder, **settings)
        if not claimed:
            claimed.append("second")
            writer(tmp_path, "second").append(make_rows(0, 4))
        return names

    reader = LogReader(tmp_path, SHAPE)
    monkeypatch.setattr(places, "names_in", list_then_claim)
    assert reader.heads() == {"first": 0, "second": 4} and reader.problems == {}


def test_of_many_that_claim_an_id_at_once_one_gets_it(tmp_path):
    start = threading.Barrier(8)

    def claim(_):
        start.wait()
        try:
            return writer(tmp_path)
        except ValueError as error:
            assert "never reused" in str(error)
            return None

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        claimed = [log for log in pool.map(claim, range(8)) if log is not None]
    assert len(claimed) == 1


def test_columns_are_packed_in_the_order_of_the_schema_whatever_its_sizes():
    """Unaligned offsets, empty columns and booleans: what is packed comes back, and bytes lie where the schema says."""
    columns = {"flag": ("bool", ()), "key": ("uint32", (3,)), "none": ("float32", (0,)), "row": ("int64", ())}
    schema = LogSchema(rows_per_append=3, segment_appends=2, columns=columns, reward_parts=())
    rows = {
        "flag": np.array([True, False, True]),
        "key": np.arange(9, dtype=np.uint32).reshape(3, 3),
        "none": np.zeros((3, 0), np.float32),
        "row": np.array([-1, 0, 1 << 40]),
    }
    packed = schema.pack(rows)
    assert packed.dtype == np.uint8 and packed.shape == (3 + 36 + 24,) == (schema.append_bytes,)
    assert packed[:8].tolist() == [1, 0, 1, 0, 0, 0, 0, 1] and packed[-3:].tolist() == [1, 0, 0]
    assert_rows(schema.unpack(packed), rows)
    assert LogSchema.from_json(json.loads(json.dumps(schema.to_json(), sort_keys=True))) == schema


def test_removed_segments_are_told_from_damage(tmp_path):
    log, reader = writer(tmp_path), LogReader(tmp_path, SHAPE)
    for append in range(13):
        log.append(make_rows(4 * append, 4))
    assert reader.heads() == {"w0": 52}
    remove_segments(tmp_path, {"w0": [0, 2]})
    assert sorted(p.name for p in (tmp_path / "w0").iterdir()) == ["000001", "000003", "000004"]
    for each in (reader, LogReader(tmp_path, SHAPE)):
        with pytest.raises(RowsExpired, match="writer w0: rows 4 to 11 were removed by retention") as told:
            each.read_ids([("w0", 13), ("w0", 5)])
        assert (told.value.writer, told.value.start, told.value.stop) == ("w0", 4, 12)
        assert each.heads() == {"w0": 52} and each.kept("w0") == [range(12, 24), range(36, 52)]
        assert_rows(each.read("w0", 12, 24), make_rows(12, 12))
        assert_rows(each.read("w0", 36, 52), make_rows(36, 16))
    log.append(make_rows(52, 4))
    assert reader.heads() == {"w0": 56}
    # Killed between the announcement and the removal: what is there still is not read, and the next call completes it.
    layout.write_json(tmp_path / "expired.json", {"expired": {"w0": [0, 1, 2]}, "removing": {"w0": [1]}})
    with pytest.raises(RowsExpired, match="rows 12 to 35"):
        LogReader(tmp_path, SHAPE).read("w0", 12, 24)
    remove_segments(tmp_path, {})
    assert sorted(p.name for p in (tmp_path / "w0").iterdir()) == ["000003", "000004"]
    assert expired_segments(tmp_path) == {"w0": {0, 1, 2}}
    before = (tmp_path / "expired.json").stat().st_mtime_ns
    remove_segments(tmp_path, {"w0": [0, 1, 2]})
    assert (tmp_path / "expired.json").stat().st_mtime_ns == before, "what is gone already costs no write"


def test_a_folder_that_cannot_be_removed_is_removed_by_the_next_call(tmp_path, monkeypatch):
    log = writer(tmp_path)
    for append in range(10):
        log.append(make_rows(4 * append, 4))
    rmtree = shutil.rmtree
    with monkeypatch.context() as patch:  # a reader elsewhere has a file of it open, say
        patch.setattr(shutil, "rmtree", lambda folder, **k: None if folder.name == "000001" else rmtree(folder, **k))
        remove_segments(tmp_path, {"w0": [0, 1]})
    assert layout.read_json(tmp_path / "expired.json") == {"expired": {"w0": [0, 1]}, "removing": {"w0": [1]}}
    remove_segments(tmp_path, {})
    assert layout.read_json(tmp_path / "expired.json") == {"expired": {"w0": [0, 1]}, "removing": {}}
    assert sorted(p.name for p in (tmp_path / "w0").iterdir()) == ["000002", "000003"]


def test_a_writer_that_is_not_followed_has_no_segment_rows(tmp_path):
    writer(tmp_path)
    reader = LogReader(tmp_path, SHAPE)
    assert reader.segment_rows("w0") is None
    reader.heads()
    assert reader.segment_rows("w0") == 12 and reader.segment_rows("nobody") is None


def test_every_claim_has_a_content_of_its_own(tmp_path):
    """By which a writer knows its claim where the reply to it is lost."""
    for root in ("a", "b"):
        LogWriter(tmp_path / root, "w0", SHAPE, rows_per_append=4, segment_appends=3, info={})
    one, other = ((tmp_path / root / "writers" / "w0.json").read_bytes() for root in ("a", "b"))
    assert one != other


def test_a_reader_that_slept_while_its_segment_expired_goes_on_behind_it(tmp_path):
    log, reader = writer(tmp_path), LogReader(tmp_path, SHAPE, patience_seconds=5)
    log.append(make_rows(0, 4))
    assert reader.heads() == {"w0": 4}
    for append in range(1, 11):
        log.append(make_rows(4 * append, 4))
    remove_segments(tmp_path, {"w0": [0, 1, 2]})
    assert reader.heads() == {"w0": 44}
    assert_rows(reader.read("w0", 36, 44), make_rows(36, 8))


FULL_DISK = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log = writer(Path(sys.argv[1]), "full")
log.append(make_rows(0, 4))
resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
for _ in range(2):
    try:
        log.append(make_rows(4, 4))
    except OSError as error:
        print("refused", log.next_row, error, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for _ in range(3):
    log.append(make_rows(log.next_row, 4))
print("done", log.next_row)
"""


def test_a_full_disk_refuses_the_append_and_keeps_what_was_committed(tmp_path):
    program = f"import sys\nfrom pathlib import Path\nexec(open({__file__!r}).read().split('def assert_rows')[0])\n" + FULL_DISK
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    result = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, env=environment, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("refused 4 append of rows 4 to 7") == 2, result.stdout
    assert "too large" in result.stdout
    assert result.stdout.strip().endswith("done 16")
    reader = LogReader(tmp_path, SHAPE)
    assert reader.heads() == {"full": 16}
    assert_rows(reader.read("full", 0, 16), make_rows(0, 16))


def test_an_append_that_landed_unnoticed_is_acknowledged_once(tmp_path, monkeypatch):
    log = writer(tmp_path)
    log.append(make_rows(0, 4))
    commit = log._segment.append

    def commit_then_fail(*arguments):
        commit(*arguments)
        raise ValueError("UNAVAILABLE: the reply was lost")

    monkeypatch.setattr(log._segment, "append", commit_then_fail)
    with pytest.raises(OSError, match="may be appended again"):
        log.append(make_rows(4, 4))
    assert log.next_row == 4
    with pytest.raises(OSError, match="committed after all"):
        log.append(make_rows(4, 4) | {"reward": np.full(4, 99, np.float32)})
    log.append(make_rows(4, 4))
    log.append(make_rows(8, 4))
    assert_rows(LogReader(tmp_path, SHAPE).read("w0", 0, 12), make_rows(0, 12))


def test_invalid_values_are_told_apart():
    rows = make_rows(0, 10)
    rows["prompt_length"][1] = 5
    rows["response_length"][2] = -1
    rows["tokens"][3, 2] = 50
    rows["tokens"][4, 8] = -1
    rows["reward"][5] = np.nan
    rows["reward_parts"][6, 1] = np.inf
    rows["behavior_logprobs"][7, 3] = -np.inf
    rows["ref_logprobs"][8, 5] = np.nan
    reasons = [REJECTIONS[reason] for reason in validate_rows(rows, vocab_size=50)]
    assert reasons == [
        *("valid", "prompt_length", "response_length", "tokens", "tokens"),
        *("reward", "reward", "logprobs", "logprobs", "valid"),
    ]
