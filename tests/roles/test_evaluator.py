"""Which snapshots wait for the evaluator, and what asking costs; what its reports hold."""

import dataclasses
import itertools
import os
import shutil
from typing import Any

import numpy as np
import pytest

from tba_jax import sharding
from tba_jax.experiment import composition, jobs, training
from tba_jax.roles import evaluator
from tba_jax.run import alarms, contract, layout, places, snapshots
from tba_jax.run.metrics import TimeAccount
from tba_jax.run.record import Record
from tba_jax.run.snapshots import COMMIT, SnapshotInfo
from tba_jax.tasks.interface import Scores
from tests.support import tiny_run


@pytest.fixture(params=["folder", "memory"])
def run(request, tmp_path):
    shared = places.place("memory://store/shared") if request.param == "memory" else tmp_path / "shared"
    (tmp_path / "own" / "evaluations").mkdir(parents=True)
    places.make_folder(shared)
    return layout.RunDir(tmp_path / "own", shared)


def publish(run, *steps):
    for step in steps:
        folder = run.policies / layout.step_name(step)
        snapshots.save(folder, {"a": np.zeros(3, np.float32)}, SnapshotInfo(step=step, epoch=1), dtype="float32")


def test_only_what_is_newer_is_looked_at(run, monkeypatch):
    pending = evaluator.PendingSteps(run, every_steps=10, final_step=45)
    assert pending() == []
    publish(run, 0, 5, 10, 15, 20, 45)
    assert pending() == [0, 10, 20, 45]
    names_in, asked = places.names_in, []
    monkeypatch.setattr(places, "names_in", lambda *a, **k: (asked.extend(names := names_in(*a, **k)), names)[1])
    monkeypatch.setattr(places, "exists", None)
    layout.write_json(run.evaluations / "00000010.json", {})
    assert pending() == [0, 20, 45]
    assert asked == ["00000010.json"], "what is known is not listed again"


def test_a_snapshot_that_is_committed_later_is_not_missed(run):
    """A killed trainer may leave one without a commit, which the next one writes again, behind others or not."""
    pending = evaluator.PendingSteps(run, every_steps=10, final_step=99)
    places.make_folder(run.policies / "00000010" / "a", below=3)
    places.write_bytes(run.policies / "00000010" / "a" / "zarr.json", b"{")
    publish(run, 0, 20)
    assert pending() == [0, 20] == pending()
    layout.write_json(run.policies / "00000010" / COMMIT, {})
    publish(run, 30)
    assert pending() == [0, 10, 20, 30]


@pytest.mark.parametrize("samples, right", [(1, 1), (4, 0), (4, 1), (4, 3), (4, 4), (7, 2), (16, 5)])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_one(samples, right):
    given = [True] * right + [False] * (samples - right)
    for k in range(1, samples + 1):
        subsets = [any(subset) for subset in itertools.combinations(given, k)]
        found = evaluator.pass_at(np.array([right, samples]), samples, k)
        np.testing.assert_allclose(found, [np.mean(subsets), 1], rtol=1e-12)


@pytest.mark.parametrize(
    "answers, right, share",
    [
        (["3", "4", "3"], [True, False, True], 1),
        (["3", "4", "4"], [True, False, False], 0),
        (["3", "4"], [True, False], 0.5),
        (["", "", "3"], [False, False, True], 1),  # nothing is no answer
        (["", ""], [False, False], 0),
        (["3", "3"], [True, False], 0.5),  # one was cut at the limit, say
    ],
)
def test_the_majority_is_right_as_its_most_frequent_answers(answers, right, share):
    assert evaluator.majority(answers, right) == share


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, one_device_throughout) -> jobs.Invocation:
    """A run whose reference is its snapshot of step 0. Reports hold all responses."""
    c = tiny_run.config(
        evaluation__samples_per_query=4, evaluation__batch_size=8, evaluation__samples=32, task__arithmetic__digits=1
    )
    c.task.arithmetic.train_queries, c.task.arithmetic.heldout_queries = 20, 8
    s = tiny_run.settings(tmp_path_factory.mktemp("evaluator"), c)
    training.reference(s)()
    policy, mesh = s.experiment.policy, sharding.make_mesh((-1, 1, 1), setting="evaluation.mesh")
    folder = s.run.reference(layout.read_json(s.run.initial_reference)["id"])
    params = snapshots.load(folder, policy.model_specs, policy.model_shardings(mesh), dtype="float32")
    snapshots.save(s.run.policies / "00000000", params, SnapshotInfo(step=0, epoch=1), dtype="float32")
    return s


def evaluated(s: jobs.Invocation, task: Any = None) -> dict[str, Any]:
    experiment = dataclasses.replace(s.experiment, task=task or s.experiment.task)
    return jobs.make_evaluator(experiment, s.run).evaluate(0)


class Changed:
    """The run's task, of which a test changes a part."""

    def __init__(self, task: Any):
        self.task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)


def test_a_report_of_several_samples(prepared):
    report = evaluated(prepared)
    greedy, sampled = report["samples"]["greedy"], report["samples"]["sampled"]
    assert (len(greedy), len(sampled)) == (8, 32)
    prompts = [query.query.prompt for query in composition.heldout_queries(prepared.experiment)]
    assert [response["query"] for response in sampled] == prompts * 4
    assert len({response["response"] for response in sampled}) > 8
    of_queries = [[response for response in sampled if response["query"] == prompt] for prompt in prompts]
    assert report["sampled_reward"] == pytest.approx(np.mean([response["reward"] for response in sampled]))
    for k in (1, 2, 4):
        solved = [any(r["reward"] for r in some) for each in of_queries for some in itertools.combinations(each, k)]
        assert report[f"pass@{k}"] == pytest.approx(np.mean(solved))
    assert report["unscored"] == 0 and {name for name in report if "@" in name} == {"pass@1", "pass@2", "pass@4"}


def test_a_damaged_snapshot_is_told_once_and_holds_up_nobody(prepared, tmp_path, caplog):
    """The others are evaluated, the run ends, and the damaged one is evaluated once it is published again."""
    shutil.copytree(prepared.run.root, tmp_path / "run")
    s = dataclasses.replace(prepared, run=layout.RunDir(tmp_path / "run"))
    every, last = s.config.evaluation.every_steps, s.config.learner.steps
    whole = s.run.policies / "00000000"
    for step in (every, last):
        shutil.copytree(whole, s.run.policies / layout.step_name(step))
    damaged = s.run.policies / layout.step_name(every)
    os.truncate(damaged / "embedding.weight" / "c" / "0" / "0", 100)
    contract.join(s.run, s.config, s.experiment.contract)
    looks = []

    def publish_again() -> bool:
        looks.append(layout.steps_in(s.run.evaluations))
        if len(looks) == 6:
            shutil.rmtree(damaged)
            shutil.copytree(whole, damaged)
            (damaged / COMMIT).write_text('{"step": 100, "epoch": 2, "dtype": "float32"}')
        if len(looks) == 9:
            layout.write_json(s.run.finished, {"step": last})
            os.truncate(damaged / "embedding.weight" / "c" / "0" / "0", 100)
        return len(looks) > 100

    made = jobs.make_evaluator(s.experiment, s.run)
    evaluator.run_evaluator(made, s.config, s.run, account=TimeAccount(), stop=publish_again)
    assert looks[5] == [0, last] and layout.steps_in(s.run.evaluations) == [0, last, every] == sorted([0, last, every])
    (told,) = [record.message for record in caplog.records if "is damaged" in record.message]
    assert f"step {every} is damaged" in told and "It is not evaluated" in told and str(damaged) in told


def test_a_damaged_snapshot_is_no_phase_that_stays(prepared, tmp_path):
    shutil.copytree(prepared.run.root, tmp_path / "run")
    s = dataclasses.replace(prepared, run=layout.RunDir(tmp_path / "run"))
    (s.run.policies / "00000000" / COMMIT).write_bytes(b"")
    record = Record()
    with pytest.raises(snapshots.Damaged):
        jobs.make_evaluator(s.experiment, s.run, record).evaluate(0)
    assert record.status.now == ""


def test_rewards_that_could_not_be_found_count_nowhere(prepared, tmp_path):
    class Failing(Changed):
        def rewards(self, queries, responses, finished):
            reward = np.where(np.arange(len(queries)) % 2 == 0, 1, np.nan).astype(np.float32)
            return Scores(reward, reward[:, None])

        def final_answer(self, response):
            return response[:1]

    report = evaluated(prepared, Failing(prepared.experiment.task))
    assert report["unscored"] == 20 and report["greedy_reward"] == report["sampled_reward"] == report["pass@4"] == 1
    assert 0 < report["majority@4"] <= 1
    assert [response["reward"] for response in report["samples"]["greedy"]] == [1, None] * 4

    for name, task in {"whole": prepared.experiment.task, "failing": Failing(prepared.experiment.task)}.items():
        shutil.copytree(prepared.run.root, tmp_path / name, ignore=shutil.ignore_patterns("evaluations"))
        run = layout.RunDir(tmp_path / name)
        contract.join(run, prepared.config, prepared.experiment.contract)
        made = jobs.make_evaluator(dataclasses.replace(prepared.experiment, task=task), run)
        done = lambda run=run: bool(layout.steps_in(run.evaluations))  # noqa: E731
        evaluator.run_evaluator(made, prepared.config, run, account=TimeAccount(), stop=done)
    assert not alarms.read(tmp_path / "whole" / "metrics" / "evaluator")
    (told,) = alarms.read(tmp_path / "failing" / "metrics" / "evaluator")
    assert told.kind == "evaluation_fails" and "20 of the 40 held-out responses" in told.sentence


def test_a_tasks_own_measures_are_of_all_responses(prepared):
    prompts = [query.query.prompt for query in composition.heldout_queries(prepared.experiment)]

    class Measuring(Changed):
        measure = "count"

        def measures(self, queries, responses, finished, rewards):
            assert [query.prompt for query in queries] == prompts * (len(queries) // 8)
            assert finished.dtype == bool and rewards.dtype == np.float32
            return {self.measure: len(responses), "unmeasured": np.nan}

    task = Measuring(prepared.experiment.task)
    report = evaluated(prepared, task)
    assert report["greedy_count"] == 8 and report["sampled_count"] == 32 and np.isnan(report["greedy_unmeasured"])
    assert layout.read_json(prepared.run.evaluations / "00000000.json")["sampled_unmeasured"] is None
    task.measure = "reward"
    with pytest.raises(ValueError, match=r"measures\(\) of task Measuring gave 'reward', and greedy_reward is another figure"):
        evaluated(prepared, task)
