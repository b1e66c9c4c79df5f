"""What a person sees of a run while it runs, on a terminal and without one."""

import errno
import io
import re
import sys
import time

import pytest

from tba_jax.storage import layout
from tba_jax.telemetry import alarms, status, terminal
from tba_jax.telemetry.status import Status, Told
from tba_jax.telemetry.terminal import Progress

NOW = 1e9
FIGURES = dict(reward=0.5, steps_per_second=2.0, tokens_per_second=21_400.0, mfu=0.25, buffer_rows=5000.0)
TRAINER = Told(time=NOW, step=10, figures=FIGURES | dict(staleness_mean=6.0, staleness_max=9.0))


def facts(steps: int = 40, **told: Told) -> dict[str, str]:
    named = {name.replace("_", "-"): each for name, each in told.items()}
    return dict(terminal.facts(named, steps=steps, now=NOW + 1))


def test_all_that_roles_say_is_shown():
    makers = [Told(time=NOW, figures={"tokens_per_second": speed}) for speed in (950, 3.2e6)]
    evaluator = Told(time=NOW, step=8, figures=dict(greedy_reward=0.7, best_step=4.0, best_greedy_reward=0.75))
    shown = facts(trainer=TRAINER, evaluator=evaluator, searcher_0=makers[0], searcher_1=makers[1])
    assert shown == {
        "step": "10/40  25 %  ETA 0:00:15",
        "reward": "0.500",
        "held-out": "0.700 at step 8  best 0.750 at step 4",
        "trainer": "2.0 steps/s  21,400 tokens/s  MFU 25.0 %",
        "searchers": "2 at work  3,200,950 tokens/s",
        "rows": "5,000 in the buffer  staleness 6.0  largest 9.0",
    }
    hostile = {f"joined_{n}": Told(time=NOW, trouble="\x1b[2J\n") for n in range(10)}
    assert facts(**hostile)["joined-0:"] == "\\x1b[2J\\x0a" and facts(**hostile)[""] == "and 4 more roles do not work"
    for change in (dict(waits="rows", since=NOW - 41), dict(phase="compiling the update"), dict(time=NOW - 60), dict(step=40)):
        shown = facts(trainer=Told(**{**vars(TRAINER), **change}))  # it does not work, or is done
        assert "ETA" not in shown["step"] and "steps/s" not in shown.get("trainer", ""), change


def lines(text: str) -> list[str]:
    found = text.splitlines()
    assert all(re.match(r" *\d+ s  ", line) for line in found), text
    return [line.split(" s  ", 1)[1] for line in found]


@pytest.fixture
def run(tmp_path) -> layout.RunDir:
    run = layout.RunDir(tmp_path)
    run.metrics("trainer").mkdir(parents=True)
    return run


def test_lines_come_by_themselves_and_figures_of_an_earlier_start_do_not(run, monkeypatch, capsys):
    before = Status(run.metrics("trainer"), step=7)
    before.point({"reward": 0.25})
    before.close("stopped")
    monkeypatch.setattr(terminal, "PLAIN_SECONDS", 0.05)
    with Progress(run, steps=12) as shown:
        assert re.fullmatch(r"0 s from step 7 on", shown.spent)
        time.sleep(0.1)
        now = Status(run.metrics("trainer"), step=7)
        now.point({"reward": 0.5})
        now.phase("compiling the update")
        now.flush()
        time.sleep(0.2)
    found = lines(capsys.readouterr().out)
    assert found[0] == "step 0/12  0 %"
    assert "step 7/12  58 %  reward 0.500  trainer: compiling the update, 0 s" in found


def test_alarms_are_told_once_also_at_the_last_moment_and_old_ones_not(run, capsys):
    alarms.Alarms(run.metrics("trainer")).tell(kind="disk", sentence="old", advice="none", step=1)
    with Progress(run, steps=12):
        time.sleep(0.05)
        for name in ("joined-3", "trainer"):
            told = alarms.Alarms(run.metrics(name))
            told.tell(kind="never_ends", sentence="no response ends by itself", advice="look at the template", step=5)
    warning = "warning: no response ends by itself. What to do: look at the template"
    assert lines(capsys.readouterr().out) == ["step 0/12  0 %", warning]


def test_storage_and_outputs_that_refuse_cost_the_line_alone(run, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    class Gone(io.StringIO):
        write = refuse

    shown = Progress(run, steps=12)
    with monkeypatch.context() as patch:
        patch.setattr(status, "read", refuse)
        shown.look()
    assert lines(capsys.readouterr().out) == ["step not known  storage does not answer: [Errno 5] Input/output error"]
    monkeypatch.setattr(sys, "stdout", Gone())
    shown.look()
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(content, encoding="ascii", line_buffering=True))
    told = Status(run.metrics("trainer"))
    told.phase("downloading naïve")
    told.flush()
    shown.look()
    assert content.getvalue().endswith(b"step 0/12  0 %  trainer: downloading na?ve, 0 s\n")
