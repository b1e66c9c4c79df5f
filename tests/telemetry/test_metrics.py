"""Points of a role on disk, across kills and starts, and in trackers, whose libraries may fail. Peaks of devices."""

import json
import time
import types
from typing import Any

import numpy as np
import pytest

from tba_jax.storage import contract, layout
from tba_jax.telemetry import alarms, metrics
from tba_jax.telemetry.metrics import PEAKS, MetricWriter, Peaks, without_secrets
from tba_jax.telemetry.status import Status
from tests.run.test_processes import files_of_at_most
from tests.support import tiny_run


@pytest.mark.parametrize("cut", [0, 1, 30])
def test_points_come_back_and_a_torn_last_line_harms_no_other(tmp_path, cut):
    writer = MetricWriter(tmp_path, megabytes=1, status=(told := Status(None)))
    for step in (1, 2, 3):
        values = {"loss": np.float32(step / 2), "note": "text", "grad_norm": np.float32("nan"), "entropy": float("inf")}
        writer.write(step, values, {"staleness": np.array([1, 1, 3])})
        assert metrics.read_lines(tmp_path)[-1]["step"] == step, "it is on disk at once"
    assert told._told["figures"] == {"loss": 1.5}
    writer.close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[: -cut or None])
    writer = MetricWriter(tmp_path, megabytes=1)
    writer.write(4, {"loss": 2.0, "note": "text"})
    writer.close()
    lines = metrics.read_lines(tmp_path)
    kept = [1, 2, 4] if cut == 30 else [1, 2, 3, 4]
    assert [(line["step"], line["loss"], line["note"]) for line in lines] == [(step, step / 2, "text") for step in kept]
    assert abs(lines[-1]["time"] - time.time()) < 60 and set(lines[-1]) == {"step", "time", "loss", "note"}
    assert lines[0]["staleness_histogram"]["counts"] == [2, 0, 1] and len(lines[0]["staleness_histogram"]["edges"]) == 4


def test_the_newest_points_are_kept_within_the_megabytes_also_over_starts(tmp_path):
    for start in range(10):
        writer = MetricWriter(tmp_path, megabytes=0.01)
        for step in range(20):
            writer.write(20 * start + step, {"loss": 1.0, "note": "x" * 50})
            assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 0.01 * 2**20
        writer.close()
    steps = [line["step"] for line in metrics.each_line(tmp_path)]
    assert steps == list(range(steps[0], 200)) and 25 < len(steps) < 100


def make(workdir, *, private: bool = False) -> layout.RunDir:
    workdir.mkdir()
    made = {"format": contract.FORMAT, "id": "0123456789abcdef" * 2, "config": {}, "contract": {"private_files": private}}
    layout.write_json(workdir / "config.json", made)
    return layout.open_run_dir(workdir)


@pytest.fixture
def run(tmp_path):
    return make(tmp_path / "run")


def writer_of(run, *sinks: str) -> metrics.MetricWriter:
    return metrics.open_writer(tiny_run.config(metrics__sinks=sinks), run, "trainer", role="trainer")


def write(run, *sinks: str, steps=(1,)) -> None:
    writer = writer_of(run, *sinks)
    for step in steps:
        writer.write(step, {"loss": step / 2, "note": "text"}, {"staleness": np.array([1, 1, 3])})
    writer.close()


@pytest.fixture
def library(monkeypatch):
    """A tracker's library that raises at step 3, and keeps the other points."""
    kept: list[str] = []

    def begin(session) -> metrics.Sink:
        kept[:] = [session.name]
        return write, lambda: kept.append("end")

    def write(point) -> None:
        if point.step == 3:
            raise ValueError("three s3cr3t-s3cr3t \x1b[31m\nmore")
        kept.append(f"{point.step} {point.values}")

    monkeypatch.setitem(metrics.TRACKERS, "wandb", begin)
    return kept


def test_what_a_tracker_raises_is_one_sentence_without_secrets(run, library, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-s3cr3t")
    for _ in range(2):  # the second is a role that starts again
        write(run, "wandb", steps=(1, 2, 3, 3, 4))
    (alarm,) = alarms.read(run.metrics("trainer"))
    assert alarm.kind == "wandb" and alarm.sentence == "wandb: three (WANDB_API_KEY)  [31m"
    assert library == ["run-01234567-trainer", *(f"{n} {{'loss': {n / 2}}}" for n in (1, 2, 4)), "end"]
    assert len(metrics.read_lines(run.metrics("trainer"))) == 10
    monkeypatch.setattr(metrics, "CLOSE_SECONDS", 0.1)
    monkeypatch.setitem(metrics.TRACKERS, "wandb", lambda _: (print, lambda: time.sleep(60)))
    begin = time.perf_counter()
    write(run, "wandb")
    assert time.perf_counter() - begin < 10, "the role does not wait for a tracker that does not end"


def test_rows_of_a_private_run_and_secrets_of_the_config_stay_here(tmp_path, run, library):
    writer = writer_of(make(tmp_path / "secret", private=True), "wandb")
    assert not writer.shows_tables and writer_of(run, "wandb").shows_tables and not writer_of(run, "tensorboard").shows_tables
    writer.table("samples", 1, [{"query": "a", "response": "b"}])
    writer.close()
    assert library == []
    config = tiny_run.config()
    with config.task.custom.unlocked():
        config.task.custom.update(api_key="abc", url="there")
    told = metrics.session_of(config, run, "trainer", kind="trainer").config
    assert told["task"]["custom"] == {"api_key": "(not told)", "url": "there"} and "abc" not in json.dumps(told)


def events_of(run) -> dict[tuple[int, str], Any]:
    """(step, name) -> the value in the one event file of the trainer, whose records are all whole."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[tuple[int, str], Any] = {}
    (path,) = run.metrics("trainer").glob("events.out.tfevents.*")
    data, at = path.read_bytes(), 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        event = Event.FromString(data[at + 12 : at + 12 + length])
        found |= {(event.step, value.tag): value for value in event.summary.value}
        at += 12 + length + 4
    assert at == len(data)
    return found


def test_tensorboard_holds_the_same_numbers(run):
    write(run, "tensorboard", steps=(1, 3))
    found = events_of(run)
    assert found[3, "loss"].simple_value == 1.5 and not any(tag == "note" for _, tag in found)
    assert [count for count in found[1, "staleness"].histo.bucket if count] == [2, 1] and found[1, "staleness"].histo.num == 3


def test_no_role_waits_for_tensorboard_where_the_disk_is_full(run):
    told = alarms.Alarms(run.metrics("trainer"))
    tracker = metrics.Tracker("tensorboard", lambda: metrics.session_of(tiny_run.config(), run, "trainer", kind="trainer"), told)
    (folder := run.metrics("trainer")).mkdir(parents=True)
    points = [metrics.Point(step=step, time=0.0, values={"loss": step / 2}) for step in range(100)]
    tracker.write(points[0])
    with files_of_at_most(500 + sum(file.stat().st_size for file in folder.iterdir())):
        for point in points[1:-1]:
            tracker.write(point)
        deadline = time.monotonic() + 30
        while not (told.told and tracker._points.empty()) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert told.told == {"tensorboard"}
    tracker.write(points[-1])
    tracker.end()
    assert [value.simple_value for value in events_of(run).values()] == [step / 2 for step in range(100)]


def test_peaks_add_up_and_what_is_not_known_is_said(caplog):
    caplog.set_level("INFO")
    known, new = (types.SimpleNamespace(device_kind=kind) for kind in ("NVIDIA H200", "gpu of tomorrow"))
    assert metrics.peaks_of([known] * 4) == Peaks(4 * PEAKS["NVIDIA H200"].flops, 4 * PEAKS["NVIDIA H200"].bandwidth)
    assert metrics.peaks_of([known] * 2, flops=1e12) == Peaks(2e12, 2 * PEAKS["NVIDIA H200"].bandwidth) and not caplog.text
    assert metrics.peaks_of([new] * 2, bandwidth=5.0) == Peaks(0.0, 10.0)
    assert "gpu of tomorrow" in caplog.text and "no mfu" in caplog.text and "metrics.peak_flops" in caplog.text


def test_secrets_are_hidden_wherever_they_stand():
    servers, keys = ("https://me:jkl@host/path", "http://plain/a@b"), ["abc", "def"]
    config = {"api_keys": keys, "tokens": {"hub": "ghi"}, "servers": servers, "banned_tokens": (1, 2), "reward_token": ""}
    assert without_secrets(config) == {
        "api_keys": ["(not told)", "(not told)"],
        "tokens": {"hub": "(not told)"},
        "servers": ["https://(not told)@host/path", "http://plain/a@b"],
        "banned_tokens": [1, 2],
        "reward_token": "",
    }
