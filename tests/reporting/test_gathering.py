"""What is read of a run: lines of roles, rows, and the steps that drew them, whatever is damaged, expired or does not fit."""

import json

import numpy as np
import pytest

from tba_jax.replay import journal
from tba_jax.replay.reader import LogReader
from tba_jax.reporting import gathering
from tba_jax.reporting.gathering import MOST_POINTS, RowTable, Source, read_lines
from tests.support import frozen_runs, hostile_runs
from tests.support.tiny_log import SHAPE, damage, make_rows, objects, writer

WRITERS = ("w0", "w1", "w2")


@pytest.mark.parametrize("count", [7, MOST_POINTS, 5 * MOST_POINTS + 3])
def test_some_lines_are_kept_evenly_with_the_first_and_the_newest(tmp_path, count):
    lines = [json.dumps({"step": step, "time": 1.0}) + "\n" for step in range(count)]
    for name, some in (("metrics.jsonl.1", lines[: count // 3]), ("metrics.jsonl", lines[count // 3 :])):
        (tmp_path / name).write_text("".join(some))
    steps = [line["step"] for line in read_lines(tmp_path)]
    assert steps[0] == 0 and steps[-1] == count - 1 and len(steps) <= MOST_POINTS
    gaps = np.diff(steps)
    assert len(steps) == count or (len(steps) > MOST_POINTS / 2 and len({*gaps[:-1].tolist()}) == 1 and gaps[-1] <= gaps[0])


def test_damage_is_named_the_rest_is_read_and_a_run_is_only_read(tmp_path):
    run = hostile_runs.make(tmp_path / "run")
    before = frozen_runs.contents(run.root)
    assert Source(run.root).gather().problems == [] and frozen_runs.contents(run.root) == before
    for file, named in (
        ("finished.json", "finished.json"),
        ("config.json", "the tokenizer"),
        (objects(run.replay)[0].relative_to(run.root), "w0"),
    ):
        path = run.root / file
        path.write_bytes(path.read_bytes().replace(b'"path": ""', b'"path": "/gone"') if file == "config.json" else b"[1, {}")
        found = Source(run.root).gather()
        assert any(named in told for told in found.problems), found.problems
        assert found.roles["trainer"].last["step"] == 20 and (named == "w0" or len(found.table.rows) == hostile_runs.ROWS)


def table(root, patience: float = 0.0) -> tuple[RowTable, list[str]]:
    problems: list[str] = []
    return RowTable(LogReader(root, SHAPE, patience_seconds=patience), root.with_name(f"{root.name}-journal"), problems), problems


def append(root, name: str, count: int, **settings) -> None:
    log = writer(root, name, **settings)
    for begin in range(0, count, 4):
        log.append(make_rows(begin, 4))


def identities(found: RowTable) -> list[str]:
    return sorted("{}:{}".format(*found.name(key)) for key in found.rows["key"].tolist())


def named(name: str, *rows: range) -> list[str]:
    return [f"{name}:{row}" for each in rows for row in each]


def test_the_figures_are_those_of_the_log(tmp_path):
    log, rows = writer(tmp_path), make_rows(0, 8)
    rows["policy_step"] = np.array([[5, 7, 6, -1, -1, -1], [-1] * 6] * 4, np.int32)
    for begin in (0, 4):
        log.append({name: column[begin : begin + 4] for name, column in rows.items()})
    found, problems = table(tmp_path)
    assert problems == [] and found.committed == 8 and identities(found) == named("w0", range(8))
    assert found.rows["newest_step"].tolist() == [7, -1] * 4 and found.rows["oldest_step"].tolist() == [5, -1] * 4
    for name in ("query_id", "reward", "finished"):
        np.testing.assert_array_equal(found.rows[name], rows[name])


def test_damaged_removed_and_lagging_rows_are_left_out_and_damage_is_named(tmp_path):
    damage(tmp_path / "log", 1)
    append(tmp_path / "log", "w1", 28)
    for path in objects(tmp_path / "log", "w1")[:3]:
        path.unlink()
    found, problems = table(tmp_path / "log")
    assert identities(found) == sorted(named("w0", range(4), range(8, 16)) + named("w1", range(12, 28)))
    assert any("4 rows are damaged" in told and "w0: rows 4 to 7" in told for told in problems)
    append(tmp_path / "lags", "w2", 12)
    objects(tmp_path / "lags", "w2")[1].rename(tmp_path / "away")
    found, told = table(tmp_path / "lags", patience=60.0)
    assert identities(found) == sorted(named("w2", range(4), range(8, 12))) and not told


def test_of_more_rows_than_are_kept_those_are_read_that_each_writer_wrote_last(tmp_path, monkeypatch):
    monkeypatch.setattr(gathering, "MOST_ROWS", 12)
    append(tmp_path, "w0", 32)
    append(tmp_path, "w1", 16)
    found, problems = table(tmp_path)
    assert identities(found) == named("w0", range(24, 32)) + named("w1", range(12, 16))
    assert any("48 are committed" in told for told in problems)


def test_draws_are_those_of_the_lines_that_a_trainer_would_replay(tmp_path):
    for name in WRITERS:
        append(tmp_path / "log", name, 20)
    (folder := tmp_path / "log-journal").mkdir()
    for epoch, steps in ((1, range(1, 40)), (2, range(12, 17)), (3, range(17, 30)), (4, range(0))):
        lines = []
        for step in steps:
            rng = np.random.default_rng([step, epoch])
            ids = [(WRITERS[rng.integers(3)], int(rng.integers(20))) for _ in range(int(rng.integers(5)))]
            line = journal.journal_line(step=step, visible=[], ids=ids, reward_version=1, key=step, rows={})
            lines.append(json.dumps(line | {"epoch": epoch}) + "\n")
        (folder / f"epoch-{epoch:06d}.jsonl").write_text("".join(lines))
    found, problems = table(tmp_path / "log")
    ids = {line["step"]: journal.line_ids(line) for line in journal.read_lineage(folder)}
    keys = found.rows["key"].tolist()
    drawn = {key: [step for step, rows in ids.items() for each in rows if each == found.name(key)] for key in keys}
    assert found.last_step == max(ids) and found.draws_of(keys) == drawn
    assert found.counts().tolist() == [len(drawn[key]) for key in keys]
    assert problems == [] and found.resumes == [11, 16]
