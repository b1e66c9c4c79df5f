"""What a person sees of a run while it runs: here without a terminal."""

import errno
import io
import re
import sys
import time

from tba_jax.roles.lives import Supervised
from tba_jax.roles.progress import Progress

from tba_jax.run import layout, places
from tba_jax.telemetry import alarms, status
from tests.support.role_files import make_reference, steps, write_lines


def progress(run: layout.RunDir, **settings) -> Progress:
    return Progress(run, steps=12, searchers=["searcher-0"], warm_start_steps=0, **settings)


def without_clock(text: str) -> list[str]:
    lines = text.splitlines()
    assert all(re.match(r" *\d+ s  ", line) for line in lines), text
    return [line.split(" s  ", 1)[1] for line in lines]


def test_lines_come_by_themselves_while_the_run_is_busy(tmp_path, capsys):
    """An interleaved run compiles for a minute without asking anybody."""
    run = layout.RunDir(tmp_path)
    make_reference(run)
    with progress(run, plain_seconds=0.1):
        run.metrics("trainer").mkdir(parents=True)
        status.Status(run.metrics("trainer")).phase("compiling the update")
        time.sleep(0.5)
    lines = without_clock(capsys.readouterr().out)
    assert lines[0].startswith("starting") and "starting  trainer: compiling the update" in lines[1:]


def test_the_figures_of_an_earlier_start_are_not_shown(tmp_path, capsys):
    run = layout.RunDir(tmp_path)
    make_reference(run)
    write_lines(run, "trainer", steps(1, 7, ago=0.5, seconds=0.5))
    progress(run).look()
    assert without_clock(capsys.readouterr().out) == ["resuming after step 7"]


def test_an_alarm_of_the_last_moment_is_told(tmp_path, capsys):
    run = layout.RunDir(tmp_path)
    make_reference(run)
    with progress(run, supervised=Supervised, plain_seconds=60.0):
        time.sleep(0.2)
        told = alarms.Alarms(run.metrics("joined-3"))
        told.tell(kind="no_end", sentence="no response ends by itself", advice="look at the prompt template", step=5)
    lines = without_clock(capsys.readouterr().out)
    assert lines == ["starting", "warning: no response ends by itself. What to do: look at the prompt template"]


def test_silent_storage_costs_the_line_alone(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(places, "exists", refuse)
    progress(layout.RunDir(tmp_path)).look()
    assert without_clock(capsys.readouterr().out) == ["storage does not answer: [Errno 5] Input/output error"]


def test_metrics_that_nobody_understands_cost_the_line_alone(tmp_path, capsys):
    run = layout.RunDir(tmp_path)
    make_reference(run)
    run.metrics("trainer").mkdir(parents=True)
    (run.metrics("trainer") / "metrics.jsonl").write_text('{"stept": 3}\n')
    progress(run).look()
    assert without_clock(capsys.readouterr().out) == ["the metrics of the run cannot be read: KeyError: 'step'"]


def test_output_that_nobody_reads_does_not_end_the_run(tmp_path, monkeypatch):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    make_reference(layout.RunDir(tmp_path))
    monkeypatch.setattr(sys, "stdout", Gone())
    progress(layout.RunDir(tmp_path)).look()


def test_output_of_another_encoding_gets_what_it_can_write(tmp_path, monkeypatch):
    run = layout.RunDir(tmp_path)
    make_reference(run)
    write_lines(run, "evaluator", [{"step": 0, "ago": 1.0, "greedy_reward": 0.5}])
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, encoding="ascii", line_buffering=True))
    shown = progress(run)
    run.metrics("trainer").mkdir(parents=True)
    status.Status(run.metrics("trainer")).phase("downloading naïve")
    shown.look()
    assert content.getvalue().endswith(b"s  starting  trainer: downloading na?ve\n")


def test_the_time_of_a_resumed_run_is_said_to_be_that_of_its_last_steps(tmp_path):
    run = layout.RunDir(tmp_path)
    assert re.fullmatch(r"\d+ s", progress(run).spent)
    write_lines(run, "trainer", steps(1, 7, ago=0.5, seconds=0.5))
    assert re.fullmatch(r"\d+ s from step 7 on", progress(run).spent)
