"""Metrics that survive kills, accounts of time, and the end of a large file."""

import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from tba_jax.roles import tails
from tba_jax.run import json_lines
from tba_jax.telemetry import metrics
from tba_jax.telemetry.metrics import MetricWriter
from tba_jax.telemetry.record import Record
from tba_jax.telemetry.time_account import TimeAccount


@pytest.fixture
def folder(tmp_path):
    """A role's metrics with points of steps 1 to 3."""
    writer = MetricWriter(tmp_path / "trainer", event_megabytes=1)
    for step in (1, 2, 3):
        writer.write(step, {"loss": np.float32(step / 2), "count": step, "note": "text"}, {"staleness": np.array([1, 1, 3])})
    writer.close()
    return tmp_path / "trainer"


def test_points_come_back(folder):
    lines = metrics.read_lines(folder)
    assert [(line["step"], line["loss"], line["count"], line["note"]) for line in lines] == [
        (1, 0.5, 1.0, "text"),
        (2, 1.0, 2.0, "text"),
        (3, 1.5, 3.0, "text"),
    ]
    assert abs(lines[-1]["time"] - time.time()) < 60
    assert lines[0]["staleness_histogram"]["counts"] == [2, 0, 1]
    assert len(lines[0]["staleness_histogram"]["edges"]) == 4
    assert tails.last_line(folder) == lines[-1]


def test_numbers_that_are_not_finite_are_left_out(tmp_path):
    writer = MetricWriter(tmp_path, event_megabytes=1)
    writer.write(7, {"loss": np.float32("nan"), "grad_norm": float("inf"), "reward": 0.5, "note": "text"})
    writer.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert set(found) == {"step", "time", "reward", "note"}


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    writer = MetricWriter(tmp_path, event_megabytes=1)
    writer.write(7, {"loss": 1.0})
    assert tails.last_line(tmp_path)["step"] == 7
    writer.close()


def test_events_for_tensorboard_hold_the_same_numbers(folder):
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for path in folder.glob("events.out.tfevents.*"):
        data, at = path.read_bytes(), 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + length])
            found |= {(event.step, value.tag): value.simple_value for value in event.summary.value if not value.HasField("histo")}
            at += 12 + length + 4
    assert found[3, "loss"] == 1.5 and found[1, "count"] == 1.0
    assert not any(tag == "note" for _, tag in found)


@pytest.mark.parametrize("cut", [1, 2, 30, 10_000])
def test_a_torn_last_line_is_left_out_and_harms_no_other(folder, cut):
    path = folder / "metrics.jsonl"
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    path.write_bytes(whole[: -min(cut, last - 1)])
    # Without its newline alone, a line is whole to a reader of the file, and still being written to one of its end.
    assert [line["step"] for line in metrics.read_lines(folder)] == ([1, 2, 3] if cut == 1 else [1, 2])
    assert tails.last_line(folder)["step"] == 2
    writer = MetricWriter(folder, event_megabytes=1)
    assert tails.last_line(folder)["step"] == (3 if cut == 1 else 2)
    writer.write(4, {"loss": 9.0})
    writer.close()
    assert [line["step"] for line in metrics.read_lines(folder)] == ([1, 2, 3, 4] if cut == 1 else [1, 2, 4])
    assert tails.last_line(folder)["step"] == 4


# A text is in the JSON lines alone; a number takes more room among the events.
@pytest.mark.parametrize(
    "point, refusing", [({"note": "x" * 50}, "metrics.jsonl"), (dict.fromkeys("abcdefgh", 1), "events.out.*")]
)
def test_storage_that_refuses_is_told_and_never_waited_for(tmp_path, point, refusing):
    program = (
        "import resource, sys\nfrom pathlib import Path\nfrom tba_jax.run import metrics\nmetrics.FLUSH_SECONDS = 0.0\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
        "writer = metrics.MetricWriter(Path(sys.argv[1]), event_megabytes=1)\n"
        f"for step in range(200):\n    writer.write(step, {point})"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "OSError: [Errno 27] File too large" in done.stderr
    (path,) = tmp_path.glob(refusing)
    assert path.stat().st_size == 4000


def test_a_writer_that_starts_again_reads_the_end_of_its_file_alone(tmp_path):
    with open(tmp_path / "metrics.jsonl", "w") as file:
        file.writelines(json.dumps({"step": step, "padding": "x" * 1000}) + "\n" for step in range(20_000))
    MetricWriter(tmp_path, event_megabytes=1).close()  # imports are no part of it
    tracemalloc.start()
    try:
        MetricWriter(tmp_path, event_megabytes=1).close()
        assert tracemalloc.get_traced_memory()[1] < 2e6 < (tmp_path / "metrics.jsonl").stat().st_size
    finally:
        tracemalloc.stop()


def test_no_metrics_yet(tmp_path):
    assert metrics.read_lines(tmp_path) == [] and tails.last_line(tmp_path) == {}
    MetricWriter(tmp_path, event_megabytes=1).close()
    assert metrics.read_lines(tmp_path) == [] and tails.last_line(tmp_path) == {}


def test_the_last_line_of_a_large_file_is_read_from_its_end(tmp_path, monkeypatch):
    count = 40_000
    with open(tmp_path / "metrics.jsonl", "w") as file:
        file.writelines(json.dumps({"step": step, "loss": 0.25, "padding": "x" * 60}) + "\n" for step in range(count))
        file.write('{"step": 999999, "lo')
    read = []
    parse = json_lines.parse_line
    monkeypatch.setattr(json_lines, "parse_line", lambda line: read.append(line) or parse(line))
    assert tails.last_line(tmp_path) == {"step": count - 1, "loss": 0.25, "padding": "x" * 60}
    assert len(read) == 1
    size = (tmp_path / "metrics.jsonl").stat().st_size
    assert size > 20 * tails.TAIL_BYTES
    # Files around the size that is read at once: the first line of what is read may be cut, the last never is.
    for length in range(tails.TAIL_BYTES - 3, tails.TAIL_BYTES + 4):
        first, last = '{"step": 1}\n', '{"step": 2}\n'
        filler = '{"step": 0, "x": "' + "y" * (length - len(first) - len(last) - 21) + '"}\n'
        (tmp_path / "metrics.jsonl").write_text(first + filler + last)
        assert (tmp_path / "metrics.jsonl").stat().st_size == length
        assert tails.last_line(tmp_path)["step"] == 2


def test_shares_of_time_are_those_of_the_clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    account = TimeAccount()

    def work(name: str | None, seconds: float) -> None:
        if name is None:
            now[0] += seconds
            return
        with account.measure(name):
            now[0] += seconds

    for name, seconds in (("wait", 1.0), ("update", 2.0), (None, 0.5), ("wait", 0.5)):
        work(name, seconds)
    assert account.shares() == pytest.approx(
        {"time_wait": 1.5 / 4, "time_update": 0.5, "time_other": 0.125, "time_recording": 0.0}
    )
    with pytest.raises(KeyError), account.measure("draw"):
        now[0] += 4.0
        raise KeyError
    assert account.shares()["time_draw"] == pytest.approx(0.5)
    account.restart()
    work("wait", 3.0)
    assert account.shares() == pytest.approx({"time_wait": 1.0, "time_other": 0.0, "time_recording": 0.0})


def test_shares_of_real_time_sum_to_one():
    account = TimeAccount()
    for name in ("a", "b", "a"):
        with account.measure(name):
            time.sleep(0.002)
    shares = account.shares()
    assert shares.pop("time_recording") == 0.0
    assert sum(shares.values()) == pytest.approx(1.0) and min(shares.values()) >= 0
    assert sum(shares.values()) <= 1 + 1e-9


def test_the_share_of_recording_holds_metrics_timeline_and_status(tmp_path):
    record = Record(tmp_path / "trainer", timeline_megabytes=1.0)
    account = TimeAccount(record)
    writer = MetricWriter(tmp_path / "trainer", event_megabytes=1, cost=record.cost)
    spent = [record.cost.seconds]

    def costs(work: Callable[[], object]) -> None:
        work()
        spent.append(record.cost.seconds)
        assert spent[-1] > spent[-2]

    costs(lambda: writer.write(1, {"loss": 0.5}))
    costs(lambda: record.timeline.note("update", 1.0, 2.0))
    costs(record.timeline.flush)
    costs(lambda: record.status.phase("compiling the update"))
    costs(lambda: record.events.tell("publish", step=1))
    assert 0 < account.shares()["time_recording"] <= spent[-1] / account.total()
    account.restart()
    assert account.shares()["time_recording"] == 0.0
    record.close("finished")
    writer.close()
