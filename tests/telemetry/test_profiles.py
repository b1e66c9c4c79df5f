"""Traces of a window of steps, or of batches, and what becomes of the run where there can be none."""

import jax
import jax.numpy as jnp
import pytest

from tba_jax.telemetry import record
from tba_jax.telemetry.record import Profiler, Record, TimeAccount, Window


def traces(folder) -> list[bytes]:
    return [file.read_bytes() for file in sorted(folder.rglob("*.xplane.pb"))]


@pytest.mark.parametrize("text", ["5", "5:", "0:5", "5:0", "-1:5", "5:2:1", "a:b", "1.5:2", "5:2 ", "5:" + "9" * 20])
def test_text_that_is_no_window_is_refused_with_an_example(text):
    with pytest.raises(ValueError) as refused:
        record.parse_window(text)
    assert f"--profile={text} is not START:STEPS" in str(refused.value) and "--profile=100:5" in str(refused.value)


def test_a_window_past_the_end_of_the_run_is_refused():
    window = record.parse_window("98:3")
    assert window == Window(98, 3) and record.parse_window("") is None
    record.check_window(window, steps=100)
    record.check_window(None, steps=100)
    with pytest.raises(ValueError, match=r"--profile=98:3 asks for steps up to 100, and learner\.steps=99 ends the run before"):
        record.check_window(window, steps=99)


def test_a_trainer_is_traced_in_its_window_with_the_names_of_its_work(tmp_path):
    record = Record(traces=tmp_path / "profiles" / "trainer", profile=Window(2, 2))
    account, profiler = TimeAccount(record), record.profiler
    update = jax.jit(lambda x: jnp.sin(x @ x))
    profiler.step(1)
    for step in range(1, 6):
        with account.measure(f"work of step {step}"):
            update(jnp.ones((8, 8))).block_until_ready()
        profiler.step(step)  # there were no rows for it at first
        profiler.step(step + 1)
        assert len(traces(tmp_path)) == (step >= 3)
    (trace,) = traces(tmp_path)
    assert [f"work of step {step}".encode() in trace for step in range(1, 6)] == [False, True, True, False, False]


def test_batches_are_traced_from_the_weights_on_that_the_window_begins_with(tmp_path):
    profiler = Profiler(tmp_path / "searcher-0", Window(5, 2))
    found = []
    for policy_step in (0, 3, 6, 6, 8, 9):
        profiler.batch(policy_step)
        jnp.ones(3).block_until_ready()
        found.append(len(traces(tmp_path)))
    assert found == [0, 0, 0, 0, 1, 1]


def test_a_trace_that_is_open_at_the_end_is_written(tmp_path):
    record = Record(tmp_path / "metrics", traces=tmp_path / "profiles" / "evaluator", profile=Window(1, 5))
    record.profiler.batch(0, most=1)
    jnp.ones(3).block_until_ready()
    assert not traces(tmp_path)
    record.close("stopped")
    assert len(traces(tmp_path)) == 1


def test_a_window_before_the_step_of_a_resume_is_told_and_nothing_is_traced(tmp_path, caplog):
    profiler = Profiler(tmp_path / "trainer", Window(3, 2))
    for step in (5, 6):
        profiler.step(step)
    (told,) = [record.message for record in caplog.records]
    assert told == "--profile: nothing is traced, because the run goes on from step 4; name later steps"
    assert not list(tmp_path.iterdir())


def test_storage_that_refuses_costs_the_trace_alone(tmp_path, caplog):
    (tmp_path / "trainer").write_text("a file")
    profiler = Profiler(tmp_path / "trainer", Window(1, 1))
    for step in (1, 2):
        profiler.step(step)
    (told,) = [record.message for record in caplog.records]
    assert told.startswith(f"--profile: no trace in {tmp_path / 'trainer'}: ")
