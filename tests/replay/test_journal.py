"""The journal: durable lines, torn lines, and the one lineage across epochs."""

import json
import os
import tracemalloc

import numpy as np
import pytest

from tba_jax.replay import journal as journal_lib
from tba_jax.replay.journal import Journal, batch_hash, last_step, read_lineage


def line(step: int, **changes):
    return {"step": step, "writers": [], "rows": []} | changes


def write(folder, epoch: int, steps, **changes) -> Journal:
    journal = Journal(folder, epoch)
    for step in steps:
        journal.append(line(step, **changes))
    journal.close()
    return journal


def test_a_torn_last_line_is_ignored_at_every_length(tmp_path):
    path = write(tmp_path, 1, [1, 2]).path
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    for length in range(first, len(content), 3):
        path.write_bytes(content[:length])
        assert [entry["step"] for entry in read_lineage(tmp_path)] == [1]
    write(tmp_path, 2, [2, 3])
    assert [(entry["step"], entry["epoch"]) for entry in read_lineage(tmp_path)] == [(1, 1), (2, 2), (3, 2)]


def test_every_answer_is_that_of_a_reader_of_all_lines(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    for trial in range(15):
        folder, expected, first = tmp_path / str(trial), {}, 1
        for epoch in range(1, 6):
            steps = range(first, first + int(draw.integers(0, 6)))
            write(folder, epoch, steps, note="x" * int(draw.integers(0, 90)))
            if steps:
                expected = {step: by for step, by in expected.items() if step < first} | dict.fromkeys(steps, epoch)
            first = int(draw.integers(1, len(expected) + 2))
        monkeypatch.setattr(journal_lib, "_BLOCK", int(draw.choice([2, 7, 64, 1 << 18])))
        assert last_step(folder) == len(expected)
        for after in range(len(expected) + 2):
            lineage = read_lineage(folder, after=after)
            found = [(line["step"], line["epoch"]) for line in lineage]
            assert found == [(step, by) for step, by in sorted(expected.items()) if step > after]
            assert (lineage.last, len(lineage)) == (len(expected), len(found))
            assert lineage.epoch == expected.get(after, 0) and lineage.epochs == sorted({by for _, by in found})


def test_damage_before_the_step_that_is_asked_for_does_no_harm(tmp_path):
    path = write(tmp_path, 1, range(1, 8)).path
    whole = path.read_bytes().split(b"\n")
    for damaged in range(1, 8):
        broken = (b"\0" * 9, b'{"step": 2', b"[]", b'{"epoch": 1}')[damaged % 4]
        path.write_bytes(b"\n".join([*whole[: damaged - 1], broken, *whole[damaged:]]))
        for after in range(7):
            # The last line counts as torn: no update followed it.
            if damaged in (7, *range(1, after + 1)):
                lineage = read_lineage(tmp_path, after=after)
                assert [line["step"] for line in lineage] == [step for step in range(after + 1, 8) if step != 7 or damaged != 7]
                assert lineage.epoch == (1 if after else 0)
            else:
                with pytest.raises(ValueError, match=rf"epoch-000001\.jsonl line {damaged} is not a journal line"):
                    read_lineage(tmp_path, after=after)
    # A step that no file has any more, because a device lost the line, is missing from there alone.
    path.write_bytes(b"\n".join(whole[:5]) + b"\n")
    write(tmp_path, 2, range(7, 10))
    assert [line["step"] for line in read_lineage(tmp_path, after=6)] == [7, 8, 9]
    assert read_lineage(tmp_path, after=6).epoch == 0 and last_step(tmp_path) == 9
    with pytest.raises(ValueError, match="lacks step 6"):
        read_lineage(tmp_path, after=4)
    path = write(tmp_path / "foreign", 2, [1]).path
    path.rename(path.with_name("epoch-000003.jsonl"))
    with pytest.raises(ValueError, match="of epoch 2"):
        read_lineage(tmp_path / "foreign")


def test_a_long_history_costs_neither_memory_nor_reading(tmp_path, monkeypatch):
    content = "".join(json.dumps(line(step, epoch=1, note="x" * 1450)) + "\n" for step in range(1, 4_001))
    (tmp_path / "epoch-000001.jsonl").write_text(content)
    parsed, real_loads = [], json.loads
    monkeypatch.setattr(journal_lib.json, "loads", lambda content: parsed.append(1) or real_loads(content))
    assert [line["step"] for line in read_lineage(tmp_path, after=3_980)] == list(range(3_981, 4_001)) and len(parsed) <= 41
    tracemalloc.start()
    assert sum(line["step"] for line in read_lineage(tmp_path)) == 4_000 * 4_001 // 2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(content) > 6e6 and peak < 3e6


def test_lines_are_synced_before_append_returns_and_a_failed_one_leaves_no_trace(tmp_path, monkeypatch):
    journal, synced = Journal(tmp_path, 1), []
    real_sync, real_write = os.fsync, os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (synced.append(journal.path.read_bytes()), real_sync(descriptor)))
        journal.append(line(1))
        assert len(synced) == 2 and json.loads(synced[0])["step"] == 1, "the file, then once the folder"

    def write_some_then_fail(descriptor, content):
        if len(content) <= 5:
            raise OSError(28, "No space left on device")
        return real_write(descriptor, content[:5])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_some_then_fail)
        with pytest.raises(OSError, match="No space"):
            journal.append(line(2))
    journal.append(line(2))
    assert [entry["step"] for entry in read_lineage(tmp_path)] == [1, 2] and journal.path.read_text().count("\n") == 2


def test_the_batch_hash_sees_every_byte_dtype_and_name():
    rows = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": np.zeros(2, np.float32)}
    hashes = {
        batch_hash(rows),
        batch_hash(rows | {"a": rows["a"].T}),
        batch_hash(rows | {"a": rows["a"].reshape(3, 2)}),
        batch_hash(rows | {"a": rows["a"].view(np.uint32)}),
        batch_hash(rows | {"b": np.array([0.0, -0.0], np.float32)}),
        batch_hash({"a": rows["a"], "c": rows["b"]}),
    }
    assert len(hashes) == 6
    assert batch_hash(dict(reversed(rows.items()))) == batch_hash(rows)
    assert batch_hash(rows | {"a": np.asfortranarray(rows["a"])}) == batch_hash(rows)
