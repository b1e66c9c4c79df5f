"""The one-process schedule, and through it trainer, searcher, evaluator and resume, without processes."""

from typing import Any

import jax
import numpy as np
import pytest

from tba_jax import sharding, trajectory
from tba_jax.replay import success_counts
from tba_jax.roles import results as best_step
from tba_jax.roles.searcher import stream
from tba_jax.storage import layout as layout_lib
from tba_jax.storage import snapshots
from tba_jax.telemetry import metrics
from tests.support import applied, frozen_runs, tiny_checkpoints, tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")


LAG, STEPS = 3, 8


@pytest.fixture(scope="module")
def lagging(tmp_path_factory, one_device_throughout) -> Any:
    """A run whose fresh rows come from the policy of three steps ago, with evaluations, exploration and chosen queries."""
    folder = tmp_path_factory.mktemp("lagging") / "run"
    changes = {"schedule__lag": LAG, "learner__steps": STEPS, "replay__merge_duplicates": False, "evaluation__every_steps": 4}
    changes |= {"searchers__prompt_selection": "posterior", "searchers__prompt_candidates": 3}
    changes |= {"sampling__temperature": 1.3, "sampling__explore_top_p_probability": 0.5}
    assert frozen_runs.run(folder, **changes) == 0
    return tiny_run.settings(folder, tiny_run.config(**changes))


def test_rows_come_from_exactly_lag_steps_ago(lagging):
    lines = metrics.read_lines(lagging.run.metrics("trainer"))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["staleness_max"] for line in lines] == [min(step, LAG) for step in range(STEPS)]


def test_a_batch_comes_early_where_an_update_finds_too_few_rows(tmp_path):
    """Each row is drawn once at most, and four batches hold enough for five updates."""
    changes = {"schedule__updates_per_search": 3, "replay__max_draws_per_row": 1, "evaluation__enabled": False}
    run = layout_lib.RunDir(tmp_path)
    assert frozen_runs.run(tmp_path, learner__steps=5, replay__merge_duplicates=False, **changes) == 0
    rows = [line["rows_seen"] for line in metrics.read_lines(run.metrics("trainer"))]
    assert rows[0] > 0 and rows == [rows[0] * batches for batches in (1, 2, 3, 4, 4)]


def test_queries_are_chosen_by_the_counts_of_the_policy_that_samples(lagging):
    """Batch after batch, by the file beside the snapshot and the searcher's key; a row is made again without the file."""
    s = lagging
    ids = np.array([trajectory.query_id(query.prompt) for query in s.experiment.queries["train"]], np.uint64)
    ((writer, rows),), counted = frozen_runs.rows(s).items(), list[float]()
    for batch, asked in enumerate(rows["query_id"].reshape(STEPS, 4, 4)):
        successes, trials = success_counts.read(s.run.policies, max(0, batch - LAG)).of(ids)
        key = dict(seed=s.config.seed, writer=stream.writer_number(writer), batch=batch)
        taken = stream.chosen_queries(successes, trials, size=4, candidates=3, target=0.5, **key)
        assert asked[:, 0].tolist() == ids[taken].tolist()
        counted.append(trials.sum())
    assert counted[: LAG + 1] == [0] * (LAG + 1) and counted[LAG + 1] > 0, "the rows of the first batches are counted at step 1"
    line = metrics.read_lines(s.run.metrics("searcher-0"))[-1]
    groups = rows["reward"].reshape(STEPS, 4, 4)[-1]
    assert line["equal_reward_groups"] == np.mean([len(set(group)) == 1 for group in groups.tolist()])


def test_a_run_leaves_what_the_readme_promises(lagging):
    layout = lagging.run
    assert layout_lib.steps_in(layout.evaluations) == [0, 4, 8]
    report = layout_lib.read_json(layout.evaluations / "00000008.json")
    assert report["queries"] == 8 and {"query", "answer", "response", "reward"} <= set(report["samples"]["greedy"][0])
    evaluated, scores = metrics.read_lines(layout.metrics("evaluator")), best_step.Scores(layout.evaluations)
    assert (evaluated[-1]["best_step"], evaluated[-1]["best_greedy_reward"]) == scores.best()
    assert report["score_name"] == "accuracy" and report["accuracy"] == report["greedy_reward"] == scores()[8]
    assert snapshots.committed_steps(layout.policies) == list(range(STEPS + 1))
    assert (layout.root / "progress.png").read_bytes()[:4] == b"\x89PNG"
    line = metrics.read_lines(layout.metrics("trainer"))[-1]
    names = "loss reward kl_to_ref entropy log_z grad_norm draws_per_row buffer_rows ratio_mean ratio_max ratio_clipped log_z_std"
    assert {*names.split(), "effective_sample_share", "kl_to_ref_k3", "advantage_std", "log_weight_std"} <= set(line)
    assert line["logprob_gap_max"] < 1e-4 and line["logprob_gap_alarm"] == 0 and "kl_to_initial" not in line
    assert list(layout.metrics("trainer").glob("events.out.tfevents*"))


def test_rows_in_the_log_are_whole_and_true(lagging):
    """Every stored log-prob is what the named weights give the named tokens, recomputed here from the snapshots."""
    s = lagging
    contract, policy = s.experiment.contract, s.experiment.policy
    model, specs = policy.model, policy.model_specs
    (rows,) = frozen_runs.rows(s).values()
    shardings = applied.shardings(model, sharding.make_mesh((1, 1, 1), setting="test", devices=jax.devices()[:1]))
    mask = trajectory.response_mask(rows["response_length"], 6)
    steps = range(STEPS - LAG)
    assert set(np.unique(rows["policy_step"][mask])) == set(steps) and (rows["policy_step"][~mask] == -1).all()
    reference = snapshots.load(s.run.reference(f"{rows['reference_id'][0]:016x}"), specs, shardings)
    expected = {step: snapshots.load_step(s.run.policies, step, specs, shardings) for step in steps}
    for i in range(0, 16 * STEPS, 16):
        row = {name: column[i] for name, column in rows.items()}
        policy = logprobs_by_prefix(expected[int(row["policy_step"][0])], row, model, contract)
        np.testing.assert_allclose(row["policy_logprobs"], policy, atol=2e-5)
        np.testing.assert_allclose(row["ref_logprobs"], logprobs_by_prefix(reference, row, model, contract), atol=2e-5)
    assert (rows["top_p"] < 1).any() and (rows["top_p"] == 1).any()
    answers = {query.prompt: query.query.answer for query in s.experiment.queries["train"]}
    for i in range(16 * STEPS):
        begin, end = rows["prompt_length"][i], rows["prompt_length"][i] + rows["response_length"][i]
        prompt = tuple(rows["tokens"][i, :begin].tolist())
        text = s.experiment.tokenizer.decode(rows["tokens"][i, begin:end].tolist())
        right = bool(rows["finished"][i]) and text.rpartition("#")[2] == answers[prompt] and "#" in text
        assert rows["reward"][i] == float(right)
        assert rows["query_id"][i] == trajectory.query_id(prompt)


def logprobs_by_prefix(params, row, model, contract):
    """Token log-probs from one whole row, without cache or the scoring code; its padding is behind what is looked at."""
    begin, tokens = row["prompt_length"], row["tokens"][None]
    result, response = np.zeros(6, np.float32), row["tokens"][begin : begin + row["response_length"]]
    logits = np.array(tiny_checkpoints.logits(params, tokens, np.ones_like(tokens, bool), model))[0].astype(np.float64)
    logits[:, list(contract.banned_tokens)] = -np.inf
    logits /= contract.scoring_temperature
    for t, token in enumerate(response):
        at = logits[begin + t - 1]
        result[t] = at[token] - np.log(np.exp(at - at.max()).sum()) - at.max()
    return result
