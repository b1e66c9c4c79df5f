"""Alarms of a role, as they are told and as others read them."""

import json
import logging
from pathlib import Path

import pytest
from tba_jax.run.sinks import TRACKERS
from tba_jax.supervised.alarm_rules import REWARD_MODEL_GUESSES

from tba_jax.experiment import prompt_check
from tba_jax.roles import evaluation_alarms
from tba_jax.roles.searcher import alarm_rules as searcher_rules
from tba_jax.roles.trainer import alarm_rules as trainer_rules
from tba_jax.telemetry import alarms

EXAMPLE = dict(kind="equal_rewards", sentence="all rewards are 0", advice="easier queries")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "metrics" / "trainer"


def test_an_alarm_is_read_as_it_was_told(folder, caplog):
    told = alarms.Alarms(folder)
    told.tell(**EXAMPLE, step=40)
    (read,) = alarms.read(folder)
    assert {"kind": read.kind, "sentence": read.sentence, "advice": read.advice, "step": read.step} == {**EXAMPLE, "step": 40}
    assert read.time > 1e9
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "all rewards are 0" in record.message and "easier queries" in record.message


def test_a_kind_is_told_once_a_run(folder, caplog):
    told = alarms.Alarms(folder)
    for step in (40, 80):
        told.tell(**EXAMPLE, step=step)
    restarted = alarms.Alarms(folder)
    assert restarted.is_told("equal_rewards") and not restarted.is_told("disk")
    restarted.tell(**EXAMPLE, step=120)
    restarted.tell(**EXAMPLE | {"kind": "disk"}, step=120)
    assert [(alarm.kind, alarm.step) for alarm in alarms.read(folder)] == [("equal_rewards", 40), ("disk", 120)]
    assert len(caplog.records) == 2


def test_a_torn_line_is_left_out_and_the_next_begins_on_its_own(folder):
    alarms.Alarms(folder).tell(**EXAMPLE, step=40)
    file = folder / "alarms.jsonl"
    file.write_bytes(file.read_bytes() + b'{"time": 1.0, "step": 41, "kind": "disk"')
    alarms.Alarms(folder).tell(**EXAMPLE | {"kind": "logprob_gap"}, step=42)
    assert [alarm.kind for alarm in alarms.read(folder)] == ["equal_rewards", "logprob_gap"]


@pytest.mark.parametrize("line", ["[]", "{}", "null", "7", json.dumps({**EXAMPLE, "time": "x", "step": 1}), "\x00", "{"])
def test_lines_of_another_kind_are_left_out(folder, line):
    folder.mkdir(parents=True)
    (folder / "alarms.jsonl").write_text(line + "\n")
    assert alarms.read(folder) == []


def test_storage_that_refuses_stops_nobody(tmp_path, caplog):
    away = tmp_path / "away" / "metrics" / "trainer"
    alarms.Alarms(away).tell(**EXAMPLE, step=40)
    assert not (tmp_path / "away").exists() and alarms.read(away) == []
    assert len(caplog.records) == 1  # the log has it


def test_the_page_lists_every_kind():
    page = (Path(__file__).parent.parent.parent / "docs" / "watching.md").read_text()
    section = page.partition("\n## Alarms\n")[2].partition("\n## ")[0]
    listed = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    told = [
        *trainer_rules.RULES,
        *searcher_rules.RULES,
        *evaluation_alarms.RULES,
        prompt_check.KIND,
        REWARD_MODEL_GUESSES,
        *TRACKERS,
    ]
    assert sorted(listed) == sorted(told) and len(set(told)) == len(told)


def test_only_what_the_page_lists_is_told():
    """Who tells an alarm: the watch over a role's rules, and those that have one kind each."""
    package = Path(__file__).parent.parent.parent / "tba_jax"
    tellers = {str(path.relative_to(package)) for path in package.rglob("*.py") if ".tell(" in path.read_text()}
    with_kinds = {path for path in tellers if "kind=" in (package / path).read_text() and "larms" in (package / path).read_text()}
    assert with_kinds == {"roles/watchdog.py", "experiment/prompt_check.py", "supervised/tuning.py", "run/metrics.py"}
