"""Traces of a window of steps, or of batches, and what becomes of the run where there can be none."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from tba_jax.telemetry import profiles, status
from tba_jax.telemetry.profiles import Profiler, Window
from tba_jax.telemetry.record import Record
from tba_jax.telemetry.time_account import TimeAccount


def traces(folder) -> list[bytes]:
    return [file.read_bytes() for file in sorted(folder.rglob("*.xplane.pb"))]


@pytest.mark.parametrize("text", ["5", "5:", ":5", "0:5", "5:0", "-1:5", "5:2:1", "a:b", "1.5:2", "5:2 ", "5:" + "9" * 20])
def test_text_that_is_no_window_is_refused_with_an_example(text):
    with pytest.raises(ValueError) as refused:
        profiles.parse(text)
    assert str(refused.value).startswith(f"--profile={text} is not START:STEPS") and "--profile=100:5" in str(refused.value)


def test_a_window_past_the_end_of_the_run_is_refused():
    window = profiles.parse("98:3")
    assert window == Window(98, 3) and window is not None and window.last == 100 and profiles.parse("") is None
    profiles.check(window, steps=100)
    profiles.check(None, steps=100)
    with pytest.raises(ValueError, match=r"--profile=98:3 asks for steps 98 to 100, and learner\.steps=99 ends the run before"):
        profiles.check(window, steps=99)
    with pytest.raises(ValueError, match=r"asks for step 9, and learner\.steps=8"):
        profiles.check(Window(9, 1), steps=8)


def test_a_trainer_is_traced_in_its_window_with_the_names_of_its_work(tmp_path):
    record = Record(traces=tmp_path / "profiles" / "trainer", profile=Window(2, 2))
    account, profiler, calls = TimeAccount(record), record.profiler, []
    update = jax.jit(lambda x: jnp.sin(x @ x))
    profiler.starts_at(0, tell=calls.append)
    for step in range(1, 6):
        with profiler.step(step), account.measure(f"work of step {step}"):
            update(jnp.ones((8, 8))).block_until_ready()
        profiler.ended(step)
        assert len(traces(tmp_path)) == (step >= 3)
    (trace,) = traces(tmp_path)
    assert [f"work of step {step}".encode() in trace for step in range(1, 6)] == [False, True, True, False, False]
    assert calls == ["begin profile", "end profile"]


def test_waiting_for_rows_does_not_use_the_window_up(tmp_path):
    profiler = Profiler(tmp_path / "trainer", Window(1, 1))
    for _ in range(3):  # no rows yet
        with profiler.step(1):
            pass
        profiler.ended(0)
    assert not traces(tmp_path)
    with profiler.step(1):
        jnp.ones(3).block_until_ready()
    profiler.ended(1)
    assert len(traces(tmp_path)) == 1


def test_batches_are_traced_from_the_weights_on_that_the_window_begins_with(tmp_path):
    profiler = Profiler(tmp_path / "searcher-0", Window(5, 2))
    found = []
    for policy_step in (0, 3, 6, 6, 8):
        with profiler.batch(policy_step):
            jnp.ones(3).block_until_ready()
        found.append(len(traces(tmp_path)))
    assert found == [0, 0, 0, 1, 1]


def test_a_trace_that_is_open_at_the_end_is_written(tmp_path):
    record = Record(tmp_path / "metrics", traces=tmp_path / "profiles" / "evaluator", profile=Window(1, 5))
    with record.profiler.batch(0):
        jnp.ones(3).block_until_ready()
    assert not traces(tmp_path)
    record.close("stopped")
    assert len(traces(tmp_path)) == 1


def test_a_window_before_the_step_of_a_resume_is_told_and_nothing_is_traced(tmp_path, caplog):
    profiler = Profiler(tmp_path / "trainer", Window(3, 2))
    profiler.starts_at(3)
    assert not caplog.records
    profiler = Profiler(tmp_path / "trainer", Window(3, 2))
    profiler.starts_at(4)
    (told,) = [record.message for record in caplog.records]
    assert told == "--profile=3:2: nothing is traced, because the run goes on from step 4; name later steps"
    with profiler.step(5):
        pass
    profiler.ended(5)
    assert not list(tmp_path.iterdir())


def test_the_others_trace_nothing_where_the_first_process_cannot(tmp_path):
    """Nobody would end their traces, which take memory until they end."""
    (tmp_path / "trainer").write_text("a file")
    profiler, calls = Profiler(tmp_path / "trainer", Window(1, 1)), []
    profiler.starts_at(0, tell=calls.append)
    with profiler.step(1):
        pass
    profiler.ended(1)
    assert not calls


def test_an_error_is_not_hidden_by_processes_that_are_gone(tmp_path):
    """Those that trace with this one, and of which one has ended."""

    def tell(call: str) -> None:
        if call == "end profile":
            raise ConnectionError("process 1 is gone")

    record = Record(tmp_path / "metrics", traces=tmp_path / "profiles", profile=Window(1, 5))
    record.profiler.starts_at(0, tell=tell)
    with record.profiler.step(1):
        record.close("an error")
    assert len(traces(tmp_path)) == 1 and status.read(tmp_path / "metrics").phase == "an error"


@pytest.mark.parametrize("where", ["in the way", "full"])
def test_storage_that_refuses_costs_the_trace_alone(where, tmp_path):
    """In a process of its own, whose profiler is of no use afterwards."""
    if where == "in the way":
        (tmp_path / "trainer").write_text("a file")
    program = (
        "import logging, resource, sys\nfrom pathlib import Path\nfrom tba_jax.telemetry.profiles import Profiler, Window\n"
        "logging.basicConfig(format='%(message)s')\n"
        "profiler = Profiler(Path(sys.argv[1]), Window(1, 1))\n"
        "for step in (1, 2):\n"
        "    with profiler.step(step):\n"
        "        print('step', step)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))\n"  # bytes of a file
        "    profiler.ended(step)\n"
        "profiler.close()"
    )
    limit = "100" if where == "full" else "1000000"
    arguments = [sys.executable, "-c", program, str(tmp_path / "trainer"), limit]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["step", "1", "step", "2"]
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("--profile=")]
    assert told.startswith(f"--profile=1:1: no trace in {tmp_path / 'trainer'}: ")
