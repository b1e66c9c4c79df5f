"""What a role's process tells of itself, from its beginning to its end."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tba_jax.experiment import jobs, joining
from tba_jax.run import contract, layout
from tba_jax.telemetry import metrics, status
from tba_jax.telemetry.record import Record, Window
from tests.support import frozen_runs, tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")


def test_a_run_in_one_process_tells_where_it_runs_and_is_traced(tmp_path):
    c = tiny_run.config(schedule__mode="interleaved", learner__steps=4, evaluation__every_steps=2, checkpoint__every_steps=3)
    s = dataclasses.replace(tiny_run.settings(tmp_path / "run", c), profile=Window(2, 2))
    assert jobs.everything(s)() == 0
    told = status.read(s.run.metrics("trainer"))
    assert (told.phase, told.step) == ("finished", 4) and told.process["devices"] == "1 × cpu" and told.process["versions"]["jax"]
    assert told.figures.items() <= metrics.read_lines(s.run.metrics("trainer"))[-1].items() and "reward" in told.figures
    assert "greedy_reward" in status.read(s.run.metrics("evaluator")).figures
    assert "tokens_per_second" in status.read(s.run.metrics("searcher-0")).figures
    (trace,) = s.run.profiles("trainer").rglob("*.xplane.pb")
    assert all(name in trace.read_bytes() for name in (b"decode", b"update", b"wait_rewards"))
    assert list(s.run.metrics("trainer").glob("events.out.tfevents*"))


def test_a_resume_tells_its_phases_and_its_step(tmp_path, frozen, monkeypatch):
    s = frozen(tmp_path / "run", batches=6)
    frozen_runs.train(s, until=7, abandon=True)  # a checkpoint of step 5, and two steps in the journal
    told: list[tuple[str, int, int]] = []
    phase = status.Status.phase

    def listen(self: status.Status, sentence: str, *, done: int = 0, total: int = 0) -> None:
        phase(self, sentence, done=done, total=total)
        told.append((sentence, done, total))

    monkeypatch.setattr(status.Status, "phase", listen)
    with frozen_runs.trainer(s) as again:
        assert again.step_number == again.record.status.step == 7
    phases = [phase for phase in told if phase[0] and not phase[0].startswith("compiling")]
    again_twice = [("doing steps of the journal again", done, 2) for done in (0, 1)]
    assert list(dict.fromkeys(phases)) == [("loading", 0, 0), ("restoring the checkpoint of step 5", 0, 0), *again_twice]
    assert ("compiling the update", 0, 0) in told


def test_a_compilation_is_the_phase_while_it_lasts(tmp_path, monkeypatch):
    def deep(x: jax.Array) -> jax.Array:
        for i in range(200):  # unrolled: the compiler has something to do
            x = jnp.sin(x @ x + i)
        return x

    monkeypatch.setattr(status, "FLUSH_SECONDS", 0.01)
    made, written = Record(tmp_path / "trainer"), list[str]()
    write = status.Path.write_text
    monkeypatch.setattr(status.Path, "write_text", lambda path, text: written.append(text) or write(path, text))
    jax.jit(deep)(jnp.ones((4, 4)))
    made.close("finished")
    assert any('"compiling deep"' in text for text in written) and '"finished"' in written[-1]
    assert not [text for text in written if "lambda" in text]


def test_an_error_is_what_a_role_says_last(tmp_path):
    made = Record(tmp_path / "trainer")
    made.status.step = 3
    with pytest.raises(OSError), made.told_failures():
        raise OSError(28, "No space \x1b[31mleft\nsecond line")
    told = status.read(tmp_path / "trainer")
    assert told.phase.startswith("OSError: [Errno 28] No space ") and told.step == 3
    assert "\x1b" not in told.phase and "second" not in told.phase


def test_the_log_says_why_a_role_ends_also_where_storage_does_not(tmp_path, caplog):
    s = tiny_run.settings(tmp_path / "run", tiny_run.config())
    contract.join(s.run, s.config, s.experiment.contract)

    def told(run: layout.RunDir) -> str:
        """What the status and the log say of the end of a searcher."""
        caplog.clear()
        joining.record_of(s, "searcher-0").end(run, role="searcher")
        return f"{status.read(s.run.metrics('searcher-0')).phase}: {caplog.messages[-1]}"

    with caplog.at_level("INFO", logger="tba_jax"):
        assert told(s.run) == "stopped: stopped; the same command starts this searcher again"
        layout.write_json(s.run.finished, {"step": s.config.learner.steps})
        assert told(s.run).startswith(f"finished: the run in {s.run.root} has finished its {s.config.learner.steps} steps")
        assert told(dataclasses.replace(s.run, id="another")).startswith("stopped")  # RunIsAway
