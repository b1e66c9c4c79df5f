"""What a role's process tells of itself, from its beginning to its end."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import pytest

from tba_jax.experiment import training
from tba_jax.storage import contract, layout
from tba_jax.telemetry import metrics, status
from tba_jax.telemetry.record import Profiler, Record, TimeAccount, Window
from tests.support import tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")


def test_a_run_in_one_process_tells_where_it_runs(finished):
    told = status.read(finished.run.metrics("trainer"))
    assert (told.phase, told.step) == ("finished", 6) and told.process["devices"] == "1 × cpu" and told.process["versions"]["jax"]
    assert told.figures.items() <= metrics.read_lines(finished.run.metrics("trainer"))[-1].items() and "reward" in told.figures
    assert "tokens_per_second" in status.read(finished.run.metrics("searcher-0")).figures
    assert list(finished.run.metrics("trainer").glob("events.out.tfevents*"))


def test_a_compilation_is_the_phase_while_it_lasts(tmp_path, monkeypatch):
    made, phases = Record(tmp_path / "trainer"), list[str]()
    phase = status.Status.phase
    monkeypatch.setattr(status.Status, "phase", lambda self, said, **parts: (phase(self, said, **parts), phases.append(self.now)))

    def deep(x: jax.Array) -> jax.Array:
        return jnp.sin(x @ x + time.time())  # another program in each process

    jax.jit(deep)(jnp.ones((4, 4)))
    assert "compiling a program" in phases and made.status.now == ""
    made.close("finished")


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
        training.record_of(s, "searcher-0").end(run, role="searcher")
        return f"{status.read(s.run.metrics('searcher-0')).phase}: {caplog.messages[-1]}"

    with caplog.at_level("INFO", logger="tba_jax"):
        assert told(s.run) == "stopped: stopped; the same command starts this searcher again"
        layout.write_json(s.run.finished, {"step": s.config.learner.steps})
        assert told(s.run).startswith(f"finished: the run in {s.run.root} has finished its {s.config.learner.steps} steps")
        assert told(dataclasses.replace(s.run, id="another")).startswith("stopped")  # RunIsAway


@pytest.fixture
def traced(monkeypatch):
    """What the profiler was asked for."""
    calls: list[str] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **_: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    return calls


def test_a_trainer_is_traced_in_its_window_with_the_names_of_its_work(tmp_path):
    made = Record(traces=tmp_path / "profiles" / "trainer", profile=Window(2, 2))
    account = TimeAccount(made)
    made.profiler.step(1)
    for step in range(1, 6):
        with account.measure(f"work of step {step}"):
            jax.jit(jnp.sin)(jnp.ones((8, 8))).block_until_ready()
        made.profiler.step(step)  # there were no rows for it at first
        made.profiler.step(step + 1)
    (trace,) = (file.read_bytes() for file in tmp_path.rglob("*.xplane.pb"))
    assert [f"work of step {step}".encode() in trace for step in range(1, 6)] == [False, True, True, False, False]


def test_batches_are_traced_from_the_weights_on_that_the_window_begins_with(tmp_path, traced):
    profiler, counts = Profiler(tmp_path, Window(5, 2)), []
    for policy_step in (0, 3, 6, 6, 8, 9):
        profiler.batch(policy_step)
        counts.append(len(traced))
    assert counts == [0, 0, 1, 1, 2, 2] and traced == ["start", "stop"]


def test_shares_of_time_are_those_of_the_clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    account = TimeAccount()

    def work(name: str, seconds: float) -> None:
        with account.measure(name):
            now[0] += seconds

    work("wait", 1.0)
    work("update", 2.0)
    now[0] += 0.5
    work("wait", 0.5)
    assert account.shares() == pytest.approx({"time_wait": 1.5 / 4, "time_update": 0.5, "time_other": 0.125})
    with pytest.raises(KeyError), account.measure("draw"):
        now[0] += 4.0
        raise KeyError
    assert account.shares()["time_draw"] == pytest.approx(0.5)
    account.restart()
    work("wait", 3.0)
    assert account.shares() == pytest.approx({"time_wait": 1.0, "time_other": 0.0})
