"""Trackers: what each of them shows, and that whatever a library does, the role goes on and says once what is wrong."""

import json
import time

import numpy as np
import pytest

from tba_jax.storage import contract, layout
from tba_jax.telemetry import alarms, metrics, trackers
from tests.support import tiny_run


def make(workdir, *, private: bool = False) -> layout.RunDir:
    """A run as far as trackers look at it."""
    workdir.mkdir()
    made = {"format": contract.FORMAT, "id": "0123456789abcdef" * 2, "config": {}, "contract": {"private_files": private}}
    layout.write_json(workdir / "config.json", made)
    return layout.open_run_dir(workdir)


def writer_of(run, *sinks: str, **changes) -> metrics.MetricWriter:
    return metrics.open_writer(tiny_run.config(metrics__sinks=sinks, **changes), run, "trainer", role="trainer")


@pytest.fixture
def run(tmp_path):
    return make(tmp_path / "run")


def write(run, *sinks: str, steps=(1,), **settings) -> None:
    writer = writer_of(run, *sinks, **settings)
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
    writer = writer_of(run, "wandb")
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
    writer = writer_of(make(tmp_path / "secret", private=True), "wandb")
    assert not writer.shows_tables and not writer_of(make(tmp_path / "plain"), "tensorboard").shows_tables
    Library.kept = []
    writer.table("samples", 1, [{"query": "a", "response": "b"}])
    writer.close()
    assert Library.kept == []


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
    assert [count for count in found[1, "staleness"].histo.bucket if count] == [2, 1] and found[1, "staleness"].histo.num == 3


class Numbers:
    """The names that wandb and trackio share."""

    def Histogram(self, np_histogram):
        return np_histogram[0].tolist()

    def Table(self, columns, data):
        return [columns, *data]


def test_points_stand_under_the_group_of_their_role_and_the_step_of_the_trainer(run):
    """whole_runs/test_watching.py reads what wandb and trackio have of a run."""
    trainer, searcher = (
        trackers.session_of(tiny_run.config(), run, name, kind=kind)
        for name, kind in (("trainer", "trainer"), ("searcher-0", "searcher"))
    )
    point = trackers.Point(step=5, time=0.0, values={"loss": 1.5}, histograms={"staleness": np.array([1, 1, 3])})
    assert trainer.shown(Numbers(), point) == {"step": 5, "train/loss": 1.5, "train/staleness": [2, 0, 1]}
    point = trackers.Point(step=17, time=0.0, values={"policy_step": 4.0}, tables={"samples": [{"query": "1+1=", "reward": 1.0}]})
    table = [["query", "reward"], ["1+1=", 1.0]]
    assert searcher.shown(Numbers(), point) == {"step": 4, "search/batch": 17, "search/policy_step": 4.0, "search/samples": table}
    assert (trainer.group, trainer.id, searcher.name) == ("run-01234567", "0123456789abcdef-trainer", "run-01234567-searcher-0")
