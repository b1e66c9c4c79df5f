"""What a role's process records of itself, from its beginning to its end."""

import dataclasses
import time
from pathlib import Path

import pytest

from tba_jax.experiment import jobs, recording
from tba_jax.run import contract, layout
from tba_jax.telemetry import metrics, status

# GONE ['events', 'timeline']
from tba_jax.telemetry.profiles import Window
from tests.support import frozen_runs, tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")


def steps(folder: Path, event: str) -> list[int]:
    return [each["step"] for each in events.read(folder) if each["event"] == event]


def spans(folder: Path) -> set[tuple[str, str]]:
    """(lane, name) of what is on a timeline."""
    return {(line["lane"], name) for line in timeline.each_line(folder) for name, *_ in line["spans"]}


def test_a_run_in_one_process_records_all_that_it_does(tmp_path):
    c = tiny_run.config(schedule__mode="interleaved", learner__steps=4, evaluation__every_steps=2, checkpoint__every_steps=3)
    s = dataclasses.replace(tiny_run.settings(tmp_path / "run", c), profile=Window(2, 2))
    assert jobs.everything(s)() == 0
    folder = s.run.metrics("trainer")
    first, *_, last = events.read(folder)
    assert first["event"] == "start" and first["devices"] == "1 × cpu" and first["versions"]["jax"]
    assert (last["event"], last["step"], last["reason"]) == ("end", 4, "finished")
    assert steps(folder, "publish") == list(range(5)) and steps(folder, "checkpoint") == [3, 4]
    assert steps(folder, "swap") == [0, 1, 2, 3] and not steps(folder, "resume")
    found = spans(folder)
    assert {("main", "compile"), ("main", "evaluate"), ("compiler", "compile"), ("publisher", "publish")} <= found
    assert {"main", "publisher", "compiler", "checkpoints"} <= {lane for lane, _ in found}
    assert status.read(folder).phase == "finished"
    lines = metrics.read_lines(folder)
    assert all(0 < line["time_recording"] < 1 for line in lines[1:])
    (trace,) = (s.run.profiles("trainer")).rglob("*.xplane.pb")
    content = trace.read_bytes()
    assert all(name in content for name in (b"decode", b"update", b"wait_rewards"))
    assert list(trace.parent.glob("*.trace.json.gz"))


def test_a_resume_tells_its_phases_and_what_it_did_again(tmp_path, frozen, monkeypatch):
    s = frozen(tmp_path / "run", batches=6)
    frozen_runs.train(s, until=7, abandon=True)  # a checkpoint of step 5, and two steps in the journal
    told: list[tuple[str, int, int]] = []
    tell = status.Status._tell

    def listen(self: status.Status, **changes: object) -> None:
        tell(self, **changes)
        now = self._told["phase"], *self._told["phase_of"]
        if now != (told or [None])[-1]:
            told.append(now)

    monkeypatch.setattr(status.Status, "_tell", listen)
    with frozen_runs.trainer(s) as again:
        assert again.step_number == 7
    again.record.flush()
    phases = [phase for phase in told if phase[0] and not phase[0].startswith("compiling")]
    again_twice = [("doing steps of the journal again", done, 2) for done in (0, 1)]
    assert list(dict.fromkeys(phases)) == [("loading", 0, 0), ("restoring the checkpoint of step 5", 0, 0), *again_twice]
    assert ("compiling the update", 0, 0) in told
    (resumed,) = [event for event in events.read(s.run.metrics("trainer")) if event["event"] == "resume"]
    assert (resumed["step"], resumed["from_step"], resumed["replayed"]) == (7, 5, 2)


def test_an_error_is_the_reason_of_the_end(tmp_path):
    s = tiny_run.settings(tmp_path / "run", tiny_run.config())
    s.run.root.mkdir()
    record = recording.begin(s, "trainer")
    record.step = 3
    with pytest.raises(OSError), recording.told_failures(record):
        raise OSError(28, "No space \x1b[31mleft\nsecond line")
    end = events.read(s.run.metrics("trainer"))[-1]
    assert (end["event"], end["step"]) == ("end", 3) and end["reason"].startswith("OSError: [Errno 28] No space ")
    assert "\x1b" not in end["reason"] and "second" not in end["reason"]
    assert status.read(s.run.metrics("trainer")).phase == end["reason"]


def test_the_log_says_why_a_role_ends_also_where_storage_does_not(tmp_path, caplog):
    s = tiny_run.settings(tmp_path / "run", tiny_run.config())
    contract.join(s.run, s.config, s.experiment.contract)

    def told(run: layout.RunDir) -> str:
        """What the record and the log say of the end of a searcher."""
        caplog.clear()
        recording.end(recording.of_role(s, "searcher-0"), run, role="searcher")
        assert events.read(s.run.metrics("searcher-0"))[-1]["reason"] == status.read(s.run.metrics("searcher-0")).phase
        return f"{status.read(s.run.metrics('searcher-0')).phase}: {caplog.messages[-1]}"

    with caplog.at_level("INFO", logger="tba_jax"):
        assert told(s.run) == "stopped: stopped; the same command starts this searcher again"
        layout.write_json(s.run.finished, {"step": s.config.learner.steps})
        assert told(s.run).startswith(f"finished: the run in {s.run.root} has finished its {s.config.learner.steps} steps")
        assert told(dataclasses.replace(s.run, id="another")).startswith("stopped")  # RunIsAway


def test_a_checkpoint_that_is_not_there_in_the_end_is_no_event(tmp_path, frozen):
    """As one is whose writing failed in orbax' thread."""
    s = frozen(tmp_path / "run", checkpoint__every_steps=100, publish__every_steps=100)
    with frozen_runs.trainer(s, publish_every_steps=100) as trainer:
        trainer.poll()
        for saved in (1, 2):
            assert trainer.step() is not None
            trainer.save_checkpoint()
            if saved == 1:
                trainer.checkpoints.wait()
        while not (folder := s.run.checkpoints / "00000002").exists():
            time.sleep(0.01)
        folder.rename(tmp_path / "elsewhere")
        trainer.checkpoints.wait()
    assert steps(s.run.metrics("trainer"), "checkpoint") == [1]


def test_a_run_without_timelines_has_none(tmp_path):
    assert frozen_runs.run(tmp_path / "run", learner__steps=2, evaluation__enabled=False, metrics__timeline_megabytes=0.0) == 0
    assert not list((tmp_path / "run" / "metrics").rglob("timeline*"))
