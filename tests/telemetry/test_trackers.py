"""Trackers: what each of them shows, and that whatever a library does, the role goes on and says once what is wrong."""

import json
import sqlite3
import sys
import time

import numpy as np
import pytest

from tba_jax.telemetry import alarms, metrics, trackers
from tests.support import tiny_run, tracked, wandb_files


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """On a busy machine a library takes longer than a role waits."""
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 60.0)


@pytest.fixture
def run(tmp_path):
    return tracked.run(tmp_path / "run")


def write(run, *sinks: str, steps=(1,), **settings) -> None:
    writer = tracked.writer(run, *sinks, **settings)
    for step in steps:
        writer.write(step, {"loss": step / 2, "note": "text"}, {"staleness": np.array([1, 1, 3])})
    writer.close()


class Library:
    """A tracker's library that raises at one point, and keeps the others."""

    kept: list[str]

    def __init__(self, session):
        Library.kept = [session.name]

    def write(self, point) -> None:
        if point.step == 3:
            raise ValueError("three s3cr3t-s3cr3t \x1b[31m\nmore")
        Library.kept.append(f"{point.step} {point.values}")

    def end(self) -> None:
        Library.kept.append("end")


def test_a_tracker_that_does_not_end_does_not_keep_the_role(run, monkeypatch):
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(Library, "end", lambda _: time.sleep(600))
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Library)
    writer = tracked.writer(run, "wandb")
    writer.write(1, {"loss": 0.5})
    begin = time.perf_counter()
    writer.close()
    assert time.perf_counter() - begin < 10 and Library.kept == ["run-01234567-trainer", "1 {'loss': 0.5}"]


def test_what_a_tracker_raises_is_one_sentence_without_secrets(run, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-s3cr3t")
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Library)
    for _ in range(2):  # the second is a role that starts again
        write(run, "wandb", steps=(1, 2, 3, 3, 4))
    (alarm,) = alarms.read(run.metrics("trainer"))
    assert alarm.kind == "wandb" and alarm.sentence == "wandb: three (WANDB_API_KEY)  [31m"
    assert Library.kept == ["run-01234567-trainer", *(f"{n} {{'loss': {n / 2}}}" for n in (1, 2, 4)), "end"]
    assert len(metrics.read_lines(run.metrics("trainer"))) == 10


def test_rows_of_a_private_run_are_in_no_tracker(tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Library)
    writer = tracked.writer(tracked.run(tmp_path / "secret", private=True), "wandb")
    assert not writer.shows_tables and not tracked.writer(tracked.run(tmp_path / "plain"), "tensorboard").shows_tables
    Library.kept = []
    writer.table("samples", 1, [{"query": "a", "response": "b"}])
    writer.close()
    assert Library.kept == []


def test_a_package_that_is_not_there_is_named(tmp_path, monkeypatch):
    (tmp_path / "no_such_tracker").mkdir()  # a folder of its name is no package
    monkeypatch.syspath_prepend(tmp_path)
    assert "no_such_tracker, which is not installed" in trackers.missing("no_such_tracker") and not trackers.missing(
        "tensorboard"
    )


def test_secrets_of_the_config_stay_here(run):
    config = tiny_run.config()
    with config.task.custom.unlocked():
        config.task.custom.update(api_key="abc", url="there")
    told = trackers.session_of(config, run, "trainer", kind="trainer").config
    assert told["task"]["custom"] == {"api_key": "(not told)", "url": "there"} and "abc" not in json.dumps(told)


def test_tensorboard_holds_the_same_numbers(run):
    from tensorboardX.proto.event_pb2 import Event

    write(run, "tensorboard", steps=(1, 3))
    found = {}
    (path,) = run.metrics("trainer").glob("events.out.tfevents.*")
    data, at = path.read_bytes(), 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        event = Event.FromString(data[at + 12 : at + 12 + length])
        found |= {(event.step, value.tag): value for value in event.summary.value}
        at += 12 + length + 4
    assert found[3, "loss"].simple_value == 1.5 and not any(tag == "note" for _, tag in found)
    assert list(found[1, "staleness"].histo.bucket) == [2, 0, 1] and found[1, "staleness"].histo.num == 3


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user who has never logged in."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "NETRC", "WANDB_ENTITY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def files(run, role="trainer"):
    sys.modules["wandb"].teardown()  # as at the end of a process: its service writes files after a run has ended
    return [wandb_files.read(path) for path in sorted(run.metrics(role).glob("wandb/offline-run-*/*.wandb"))]


def test_roles_are_runs_of_one_group_in_wandb_also_in_one_process(run, home, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    trainer = tracked.writer(run, "wandb")
    searcher = tracked.writer(run, "wandb", name="searcher-0", kind="searcher", metrics__project="theirs")
    trainer.write(5, {"loss": 1.5, "note": "text"}, {"staleness": np.array([1, 1, 3])})
    searcher.write(17, {"reward": 0.5, "policy_step": 4})
    searcher.table("samples", 4, [{"query": "1+1=", "response": "<b>2</b>", "reward": 1.0}])
    searcher.close()
    trainer.close()
    (trained,), (searched,) = files(run), files(run, "searcher-0")
    told = trained["run"]
    assert (told.project, told.run_group, told.job_type) == ("tba_jax", "run-01234567", "trainer")
    assert (told.display_name, told.run_id) == ("run-01234567-trainer", "0123456789abcdef-trainer")
    assert (searched["run"].project, searched["run"].run_group) == ("theirs", "run-01234567")
    (point,) = trained["history"]
    assert (point["step"], point["train/loss"]) == (5, 1.5) and "train/note" not in point
    assert point["train/staleness.values"] == [2, 0, 1]
    point, table = searched["history"]  # the axis of a searcher is that of its weights: its batches begin anew with each start
    assert (point["step"], point["search/batch"], point["search/reward"]) == (4, 17, 0.5)
    assert table["step"] == 4 and table["search/samples.nrows"] == 1 and trained["axes"] == {"*": "step"}
    write(run, "wandb", steps=(2, 3))  # a trainer that resumes does steps again
    first, second = files(run)
    assert first["run"].run_id == second["run"].run_id and [point["step"] for point in second["history"]] == [2, 3]


def test_points_and_tables_are_in_the_database_of_trackio(run, tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason="trackio is not installed")
    monkeypatch.setattr(sys.modules["trackio.utils"], "TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr(sys.modules["trackio.sqlite_storage"], "TRACKIO_DIR", tmp_path / "trackio")
    for steps in ((1, 2), (2, 3)):
        write(run, "trackio", steps=steps, metrics__group="a group")
    with sqlite3.connect(tmp_path / "trackio" / "tba_jax.db") as connection:
        found = connection.execute("select run_name, run_id, step, metrics from metrics order by id").fetchall()
    assert {name for name, *_ in found} == {"run-01234567-trainer"} and len({identity for _, identity, *_ in found}) == 1
    assert [step for _, _, step, _ in found] == [1, 2, 2, 3]
    values = json.loads(found[0][3])
    assert values["train/loss"] == 0.5 and values["train/staleness"]["values"] == [2, 0, 1]
