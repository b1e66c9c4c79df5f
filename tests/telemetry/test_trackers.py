"""The process of a tracker: whatever its library does, the role goes on, and says once what is wrong."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tba_jax.run.sinks import feed

from tba_jax.telemetry import metrics
from tests.support import tiny_run, tracked

BLOCKS = "import time\nSettings = lambda **_: None\ndef init(**_):\n    time.sleep(600)\n"
IMPATIENT = "import sys\nsys.modules['__main__']._END_SECONDS = 0.5\n"  # the process ends sooner than it would
DIES = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
RAISES = "class errors:\n    UsageError = CommError = AuthenticationError = KeyError\nSettings = lambda **_: None\n" + (
    "def init(**told):\n    import os\n    raise RuntimeError(f'no {os.environ[\"WANDB_API_KEY\"]} \\x1b[31m\\nmore')\n"
)
KEEPS = """import os, pathlib
class errors:
    UsageError = CommError = AuthenticationError = KeyError
Settings = lambda **_: None
def teardown(): pass
class init:
    def __init__(self, dir, **_):
        print("chatter", flush=True)
        os.system("echo chatter of a child >&2")
        self.file = open(pathlib.Path(dir) / "kept", "a")
    def define_metric(self, *_, **__): pass
    def log(self, point):
        if point["step"] == 3:
            raise ValueError("three")
        self.file.write(f"{point['step']}\\n")
    def finish(self):
        self.file.write("end\\n")
        self.file.close()
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes a package wandb of some lines, which the processes of trackers import."""

    def make(lines: str) -> None:
        (tmp_path / "packages").mkdir()
        (tmp_path / "packages" / "wandb.py").write_text(lines)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "packages"), str(tiny_run.ROOT)]))

    monkeypatch.setattr(metrics, "missing", lambda name: "")
    return make


@pytest.fixture
def run(tmp_path):
    return tracked.run(tmp_path / "run")


def gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and os.path.exists(f"/proc/{pid}"):
        time.sleep(0.05)
    return not os.path.exists(f"/proc/{pid}")


def trackers(pid: int) -> list[int]:
    """The processes of trackers that a process has started."""
    found = [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
    return [child for child in found if "tba_jax.run.sinks" in Path(f"/proc/{child}/cmdline").read_text()]


def test_a_tracker_that_blocks_holds_up_nobody(package, run, monkeypatch, caplog):
    package(BLOCKS)
    monkeypatch.setattr(metrics, "CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(feed, "MOST_POINTS", 100)
    writer, slowest = tracked.writer(run, "wandb"), 0.0
    text = "x" * 1000
    for step in range(400):  # more than a pipe holds
        begin = time.perf_counter()
        writer.write(step, {text: step})
        slowest = max(slowest, time.perf_counter() - begin)
    begin = time.perf_counter()
    writer.close()
    assert time.perf_counter() - begin < 2 and slowest < 0.5
    assert [line["step"] for line in metrics.each_line(run.metrics("trainer"))] == list(range(400))
    first, last = [record.getMessage() for record in caplog.records]
    assert first.startswith("wandb does not keep up") and last.startswith("wandb lacks ") and last.endswith("jsonl has")
    for pid in trackers(os.getpid()):
        os.kill(pid, signal.SIGKILL)


def test_what_a_tracker_raises_is_one_sentence_without_secrets(package, run, monkeypatch, caplog, capfd):
    package(RAISES)
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-s3cr3t")
    for _ in range(2):  # the second is a role that starts again
        writer = tracked.writer(run, "wandb")
        for step in range(100):
            writer.write(step, {"loss": 1.0})
        writer.close()
    (record,) = caplog.records
    assert record.getMessage().startswith("wandb: no (WANDB_API_KEY)  [31m; what to do: nothing has to be done")
    assert len(metrics.read_lines(run.metrics("trainer"))) == 200 and capfd.readouterr() == ("", "")


def test_a_point_that_a_tracker_refuses_is_left_out_there(package, run, caplog, capfd):
    package(KEEPS)
    writer = tracked.writer(run, "wandb")
    for step in range(1, 6):
        writer.write(step, {"loss": 1.0})
    writer.close()
    assert (run.metrics("trainer") / "kept").read_text().split() == ["1", "2", "4", "5", "end"]
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == ["wandb: three"]
    assert capfd.readouterr() == ("", "")  # nothing of what its library and their children print


def test_a_tracker_that_is_killed_is_told(package, run, caplog):
    package(DIES)
    writer, deadline = tracked.writer(run, "wandb"), time.monotonic() + 30
    while not caplog.records and time.monotonic() < deadline:
        writer.write(1, {"loss": 1.0})
        time.sleep(0.05)
    writer.close()
    (record,) = caplog.records
    assert record.getMessage().startswith("wandb: the process that hands points to it has ended (code -9); what to do: ")


ROLE = (
    "import sys, time\nfrom pathlib import Path\nfrom tba_jax.run import layout\nfrom tests.support import tracked\n"
    "writer = tracked.writer(layout.open_run_dir(Path(sys.argv[1])), 'wandb')\n"
    "for step in (1, 2):\n    writer.write(step, {'loss': 1.0})\n"
    "print('written', flush=True)\ntime.sleep(600)"
)


def test_a_tracker_that_blocks_ends_after_a_role_that_is_killed(package, run):
    package(IMPATIENT + BLOCKS)
    arguments = [sys.executable, "-c", ROLE, str(run.root)]
    with subprocess.Popen(arguments, cwd=tiny_run.ROOT, stdout=subprocess.PIPE, text=True) as role:
        assert role.stdout is not None and role.stdout.readline() == "written\n"
        deadline = time.monotonic() + 30
        while not (started := trackers(role.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(2)  # in which it comes to block
        role.kill()
    try:
        assert gone(started[0], 10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(started[0], signal.SIGKILL)


def test_a_role_that_is_killed_leaves_what_it_wrote_and_no_process(package, run, tmp_path):
    package(KEEPS)
    arguments = [sys.executable, "-c", ROLE, str(run.root)]
    with subprocess.Popen(arguments, cwd=tiny_run.ROOT, stdout=subprocess.PIPE, text=True) as role:
        assert role.stdout is not None and role.stdout.readline() == "written\n"
        kept, deadline = run.metrics("trainer") / "kept", time.monotonic() + 30
        while not kept.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        (pid,) = trackers(role.pid)
        role.kill()
    assert gone(pid, 10) and kept.read_text().split() == ["1", "2", "end"]


def test_rows_of_a_private_run_are_in_no_tracker(package, tmp_path):
    package(KEEPS)
    writer = tracked.writer(tracked.run(tmp_path / "secret", private=True), "wandb")
    assert not writer.shows_tables
    writer.table("samples", 1, [{"query": "a", "response": "b"}])
    writer.close()
    assert not (tmp_path / "secret" / "metrics" / "trainer" / "kept").exists()


def test_a_package_that_is_not_there_is_named(tmp_path):
    assert feed.missing("json") == "" and "metrics.sinks names no_such_tracker, which is not installed" in feed.missing(
        "no_such_tracker"
    )


def test_a_folder_of_its_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "no_such_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert "no_such_tracker, which is not installed" in feed.missing("no_such_tracker")


def test_without_tensorboard_there_are_no_event_files(run):
    for sinks, count in (((), 0), (("tensorboard",), 1)):
        writer = tracked.writer(run, *sinks)
        writer.write(1, {"loss": 1.0})
        writer.close()
        assert len([*run.metrics("trainer").glob("events.out.*")]) == count
    assert [line["loss"] for line in metrics.read_lines(run.metrics("trainer"))] == [1.0, 1.0]


def test_secrets_of_the_config_stay_here(run):
    from tba_jax.run.sinks.roles import session_of

    config = tiny_run.config()
    with config.task.custom.unlocked():
        config.task.custom.update(api_key="abc", reward_token="abc", url="there")
    told = session_of(config, run, "trainer", kind="trainer").config
    assert told["task"]["custom"] == {"api_key": "(not told)", "reward_token": "(not told)", "url": "there"}
    assert "abc" not in json.dumps(told) and told["learner"]["steps"] == 12
