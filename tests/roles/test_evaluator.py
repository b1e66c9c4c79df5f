"""Which snapshots wait for the evaluator, and what asking costs; what its reports hold, against loops."""

import dataclasses
import functools
import itertools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tba_jax import sharding
from tba_jax.experiment import composition, jobs, training
from tba_jax.models import parameters
from tba_jax.roles import evaluator
from tba_jax.storage import contract, layout, places, published, snapshots
from tba_jax.tasks.interface import Scores
from tba_jax.telemetry import alarms, metrics
from tba_jax.telemetry.status import TimeAccount
from tests.support import tiny_decoders, tiny_run, tiny_snapshots


@pytest.fixture
def run(tmp_path):
    shared = places.place("memory://store/shared")
    (tmp_path / "own" / "evaluations").mkdir(parents=True)
    places.make_folder(shared)
    return layout.RunDir(tmp_path / "own", shared)


def publish(run, *steps):
    for step in steps:
        tiny_snapshots.publish(run.policies, step, {"a": np.zeros(3, np.float32)})


def test_a_snapshot_is_pending_from_its_publication_to_its_evaluation(run):
    pending = evaluator.PendingSteps(run, every_steps=10, final_step=45)
    assert pending() == []
    snapshots.write(run.policies / snapshots.new_name(10, 1), {"a": np.zeros(3, np.float32)}, dtype="float32")
    publish(run, 0, 5, 15, 20, 45)
    assert pending() == [0, 20, 45] == pending()
    publish(run, 30, 10)
    layout.write_json(run.evaluations / "00000020.json", {})
    assert pending() == [0, 10, 30, 45]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, one_device_throughout) -> jobs.Invocation:
    """A run whose reference is its snapshot of step 0. Reports hold all responses."""
    changes = dict(evaluation__samples_per_query=4, evaluation__batch_size=8, evaluation__samples=32)
    c = tiny_run.config(**changes, task__arithmetic__digits=1, task__arithmetic__train_queries=20)
    s = tiny_run.settings(tmp_path_factory.mktemp("evaluator"), c)
    training.reference(s)()
    policy, mesh = s.experiment.policy, sharding.make_mesh((-1, 1, 1), setting="evaluation.mesh")
    folder = s.run.reference(layout.read_json(s.run.initial_reference)["id"])
    params = snapshots.load(folder, policy.model_specs, policy.model_shardings(mesh), dtype="float32")
    tiny_snapshots.publish(s.run.policies, 0, params)
    return s


class Changed:
    """The run's task, of which a test changes a part."""

    def __init__(self, task: Any):
        self.task = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)


def test_a_report_of_several_samples(prepared):
    report = jobs.make_evaluator(prepared.experiment, prepared.run).report(0)
    greedy, sampled = report["samples"]["greedy"], report["samples"]["sampled"]
    assert (len(greedy), len(sampled)) == (8, 32)
    prompts = [query.query.prompt for query in composition.heldout_queries(prepared.experiment)]
    assert [response["query"] for response in sampled] == prompts * 4
    of_queries = [[response for response in sampled if response["query"] == prompt] for prompt in prompts]
    assert report["sampled_reward"] == pytest.approx(np.mean([response["reward"] for response in sampled]))
    for k in (1, 2, 4):
        solved = [any(r["reward"] for r in some) for each in of_queries for some in itertools.combinations(each, k)]
        assert report[f"pass@{k}"] == pytest.approx(np.mean(solved))
    means = [np.mean([response["reward"] for response in some]) for some in of_queries]
    assert report["sampled_reward_stderr"] == pytest.approx(np.std(means, ddof=1) / np.sqrt(8)), "queries are the units"
    assert report["unscored"] == 0
    assert {"pass@4_stderr", "greedy_reward_stderr", "accuracy_stderr", "finished_stderr"} <= set(report)


def logprobs(params: Any, s: jobs.Invocation, responses: Sequence[dict[str, Any]], *, temperature: float) -> list[float]:
    """log π(y|x) of each response by a loop over its tokens."""
    c, encode, model = s.experiment.contract, s.experiment.tokenizer.encode, s.experiment.policy.model
    tokens = np.full((len(responses), c.prompt_length + c.response_length), c.pad_id, np.int32)
    sums = []
    for i, response in enumerate(responses):
        row = [*encode(response["query"]), *encode(response["response"])[1:], *[c.eos_id] * response["finished"]]
        tokens[i, : len(row)] = row
    all_logits = np.array(tiny_decoders.logits_of_whole(params, tokens, model), np.float64)
    for i, response in enumerate(responses):
        logits = all_logits[i] / temperature
        logits[:, list(c.banned_tokens)] = -np.inf
        begin = len(encode(response["query"]))
        places = range(begin, begin + response["tokens"])
        sums.append(sum(logits[t - 1, tokens[i, t]] - np.log(np.exp(logits[t - 1]).sum()) for t in places))
    return sums


def test_kl_and_perplexities_are_of_the_policy_of_step_0(prepared, tmp_path):
    """Of a policy that has moved, in a run that trains without a reference, at the scoring temperature and at 1."""
    temperature = 0.5
    shutil.copytree(prepared.run.root, tmp_path / "run", ignore=shutil.ignore_patterns("evaluations"))
    c = prepared.config.copy_and_resolve_references()
    c.sampling.scoring_temperature, c.learner.reference.kind = temperature, "none"
    s = tiny_run.settings(tmp_path / "run", c)
    policy, mesh = s.experiment.policy, sharding.make_mesh((-1, 1, 1), setting="test")
    initial = published.Published(s.run.policies).load(0, policy.model_specs, policy.model_shardings(mesh), dtype="float32")
    moved = {name: 1.5 * np.asarray(leaf) for name, leaf in parameters.flatten(initial).items()}
    moved = parameters.map_specs(lambda name, _: moved[name], policy.model_specs)
    tiny_snapshots.publish(s.run.policies, 100, moved)
    report = jobs.make_evaluator(s.experiment, s.run).evaluate(100)
    for name in ("greedy", "sampled"):
        responses = report["samples"][name]
        lengths = [len(s.experiment.tokenizer.encode(each["query"])) + each["tokens"] for each in responses]
        paper = np.exp(-np.array(logprobs(initial, s, responses, temperature=1.0)) / lengths)
        assert report[f"{name}_ref_perplexity_paper"] == pytest.approx(paper.mean(), rel=1e-4)
        scored = logprobs(initial, s, responses, temperature=temperature)
        nll = -sum(scored) / sum(each["tokens"] for each in responses)
        assert report[f"{name}_ref_perplexity_per_response_token"] == pytest.approx(np.exp(nll), rel=1e-4)
    assert report["ref_nll_per_token"] == pytest.approx(nll, rel=1e-4)
    of_policy = logprobs(moved, s, responses, temperature=temperature)
    kl = np.array(of_policy) - np.array(scored)
    assert report["kl_to_initial"] == pytest.approx(kl.mean(), rel=1e-3) and abs(kl.mean()) > 0.01
    of_queries = kl.reshape(4, 8).mean(axis=0)
    assert report["kl_to_initial_stderr"] == pytest.approx(of_queries.std(ddof=1) / np.sqrt(8), rel=1e-3)


def test_greedy_responses_may_be_drawn_at_a_low_temperature(prepared):
    c = prepared.config.copy_and_resolve_references()
    c.evaluation.greedy_temperature = prepared.experiment.contract.scoring_temperature
    drawn = jobs.make_evaluator(dataclasses.replace(prepared.experiment, config=c), prepared.run).report(0)["samples"]
    assert [r["response"] for r in drawn["greedy"]] == [r["response"] for r in drawn["sampled"][:8]]


def test_a_damaged_snapshot_is_told_once_and_holds_up_nobody(prepared, tmp_path, caplog):
    shutil.copytree(prepared.run.root, tmp_path / "run")
    s = dataclasses.replace(prepared, run=layout.RunDir(tmp_path / "run"))
    every, last = s.config.evaluation.every_steps, s.config.learner.steps

    def publish_copy(step: int) -> Path:
        folder = s.run.policies / snapshots.new_name(step, 1)
        shutil.copytree(published.kept(s.run.policies)[0], folder)
        tiny_snapshots.point(s.run.policies, {**published.kept(s.run.policies), step: folder})
        return folder

    damaged, _ = publish_copy(every), publish_copy(last)
    os.truncate(damaged / "embedding.weight" / "c" / "0" / "0", 100)
    contract.join(s.run, s.config, s.experiment.contract)
    looks = []

    def publish_again() -> bool:
        looks.append(layout.steps_in(s.run.evaluations))
        if len(looks) == 6:
            publish_copy(every)
        if len(looks) == 9:
            layout.write_json(s.run.finished, {"step": last})
        return len(looks) > 100

    made, account = jobs.make_evaluator(s.experiment, s.run), TimeAccount()
    evaluator.run_evaluator(made, s.config, s.run, account=account, stop=publish_again)
    assert looks[5] == [0, last] and layout.steps_in(s.run.evaluations) == sorted([0, last, every])
    (told,) = [record.message for record in caplog.records if "is damaged" in record.message]
    assert f"step {every} is damaged" in told and str(damaged) in told


def test_rewards_that_could_not_be_found_count_nowhere(prepared, tmp_path):
    class Failing(Changed):
        def rewards(self, queries, responses, finished):
            reward = np.where(np.arange(len(queries)) % 2 == 0, 1, np.nan).astype(np.float32)
            return Scores(reward, reward[:, None])

        def final_answer(self, response):
            return response[:1]

    shutil.copytree(prepared.run.root, tmp_path / "run", ignore=shutil.ignore_patterns("evaluations"))
    run, experiment = layout.RunDir(tmp_path / "run"), prepared.experiment
    contract.join(run, prepared.config, experiment.contract)
    made = jobs.make_evaluator(dataclasses.replace(experiment, task=Failing(experiment.task)), run)
    done = functools.partial(places.exists, run.evaluations / "00000000.json")
    evaluator.run_evaluator(made, prepared.config, run, account=TimeAccount(), stop=done)
    report = layout.read_json(run.evaluations / "00000000.json")
    assert report["unscored"] == 20 and report["greedy_reward"] == report["sampled_reward"] == report["pass@4"] == 1
    assert 0 < report["majority@4"] <= 1
    assert [response["reward"] for response in report["samples"]["greedy"]] == [1, None] * 4
    (line,) = metrics.read_lines(run.metrics("evaluator"))
    assert {"pass@4_stderr", "kl_to_initial_stderr", "tokens_per_second", "best_step"} <= set(line)
    (told,) = alarms.read(run.metrics("evaluator"))
    assert told.kind == "evaluation_fails" and "20 of the 40 held-out responses" in told.sentence


def test_a_tasks_own_measures_are_of_all_responses(prepared):
    class Measuring(Changed):
        measure, wrong = "count", 0.0

        def measures(self, queries, responses, finished, rewards):
            second = np.arange(len(responses)) % 8 == 1
            return {self.measure: len(responses), "unmeasured": np.nan, "of_each": second, "wrong": self.wrong}

    task = Measuring(prepared.experiment.task)
    made = jobs.make_evaluator(dataclasses.replace(prepared.experiment, task=task), prepared.run)
    report = made.evaluate(0)
    assert report["greedy_count"] == 8 and report["sampled_count"] == 32 and np.isnan(report["greedy_unmeasured"])
    assert layout.read_json(prepared.run.evaluations / "00000000.json")["sampled_unmeasured"] is None
    for kind in ("greedy", "sampled"):  # one of eight queries, however many samples it has
        assert report[f"{kind}_of_each"] == 1 / 8 and report[f"{kind}_of_each_stderr"] == pytest.approx(1 / 8)
    for measure, wrong, told in (
        ("count", np.zeros(3), r"of shape \(3,\) for 8 responses"),
        ("reward", 0.0, "gave 'reward', and"),
    ):
        task.measure, task.wrong = measure, wrong
        with pytest.raises(ValueError, match=told):
            made.report(0)
