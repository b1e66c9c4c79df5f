"""The comparison of systems as a whole: a peer that cannot be installed, and what is done already."""

import dataclasses
import json

import pytest

from benchmarks.peers import __main__ as main
from benchmarks.peers import cases, environments, jobs, table
from benchmarks.peers.environments import Environment
from benchmarks.peers.table import Group

RECORD = {
    "seconds": [9.0] * jobs.WARM_UP_STEPS + [2.0, 2.0],
    "parts": {},
    "tokens": [64] * (jobs.WARM_UP_STEPS + 2),
    "rows_per_second": 16.0,
}


@pytest.fixture
def bench(tmp_path) -> jobs.Bench:
    return jobs.Bench(root=tmp_path, environments=tmp_path / "environments", gsm8k=None, steps=2, cores=(0,))


def done(bench: jobs.Bench, system: str, case: str) -> None:
    job = jobs.Job(bench=bench, system=system, case=case, reference=True, repeat=0)
    job.result.parent.mkdir(parents=True, exist_ok=True)
    job.result.write_text(json.dumps(RECORD))


def test_a_peer_that_cannot_be_installed_is_named_once_and_the_others_go_on(bench, monkeypatch):
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(jobs.ENVIRONMENTS, "trl", Environment("trl", ("trl==0.0.99",)))
    names = ["fixed", "slow_rewards"]
    for case in names:
        done(bench, "tba_interleaved", case)
    (inputs := bench.root / "inputs" / "fixed").mkdir(parents=True)
    (inputs / "prompts.json").write_text("[]")
    tries: list[Environment] = []
    make = environments.python
    monkeypatch.setattr(environments, "python", lambda environment, root: tries.append(environment) or make(environment, root))
    found = main.measure(bench, [Group(case, True) for case in names], ["trl", "tba_interleaved"], repeats=1)
    assert len(tries) == 1
    for case in names:
        assert "trl==0.0.99 cannot be installed" in found[Group(case, True)]["trl"]
        assert found[Group(case, True)]["tba_interleaved"] == [RECORD]
    assert not (bench.environments / "trl").exists()
    assert any(line.startswith("| tba_jax interleaved | 2.00") for line in table.lines(found))


def test_a_case_without_its_data_is_left_out_with_a_sentence(bench):
    found = main.measure(bench, [Group("long_tailed", True)], ["trl", "tunix"], repeats=1)
    (line,) = [line for line in table.lines(found) if "--data" in line]
    assert line.startswith("TRL GRPO, Tunix GRPO: no figure.")


def test_a_bare_update_is_timed_with_the_sizes_of_a_case(bench, monkeypatch):
    monkeypatch.setitem(cases.CASES, "fixed", dataclasses.replace(cases.CASES["fixed"], prompt_length=10, response_length=4))
    for case in ("fixed", "slow_rewards"):
        (inputs := bench.root / "inputs" / case).mkdir(parents=True)
        (inputs / "prompts.json").write_text("[]")
    groups = [Group(case, True) for case in ("fixed", "slow_rewards")]
    found = main.measure(bench, groups, ["bare"], repeats=1)
    (record,) = found[groups[0]]["bare"]
    assert len(record["seconds"]) == jobs.WARM_UP_STEPS + 2 and record["tokens"] == [4 * 8 * 4] * 4
    assert 0 < record["parts"]["update"][0] <= record["seconds"][0]
    assert found[groups[1]]["bare"] == "it has rows of one length, and no rewards"


def test_runs_of_other_steps_or_cores_are_others(bench):
    done(bench, "trl", "fixed")
    for change in ({}, {"steps": 3}, {"cores": (0, 1)}):
        job = jobs.Job(bench=dataclasses.replace(bench, **change), system="trl", case="fixed", reference=True, repeat=0)
        assert job.result.exists() == (not change)


def test_an_environment_of_the_same_requirements_is_used_again(tmp_path):
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "requirements.txt").write_text("trl==1\ntorch==2")
    assert environments.python(Environment("trl", ("trl==1", "torch==2")), tmp_path) == tmp_path / "trl" / "bin" / "python"


def test_the_reason_is_the_last_line_that_says_something(tmp_path):
    log = tmp_path / "log"
    log.write_text("Traceback\nImportError: vLLM is required\n\nWARNING: old pip\n")
    assert environments.reason(log) == "ImportError: vLLM is required"
    log.write_text("")
    assert environments.reason(log)
