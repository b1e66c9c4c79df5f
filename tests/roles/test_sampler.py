"""Runs without a reference policy: their rows, metrics, reports, commands, and what they refuse."""

import numpy as np
import pytest

from tba_jax.commands import append, audit
from tba_jax.roles import sampler
from tba_jax.storage import layout
from tba_jax.telemetry import metrics
from tests.support import frozen_runs, tiny_run
from tests.support.summaries import write_rows

pytestmark = pytest.mark.usefixtures("one_device_throughout")
NONE = {"learner__reference__kind": "none"}


@pytest.fixture
def loads(monkeypatch) -> list[object]:
    """Grows with each load of the weights of step 0."""
    load, found = sampler.load_reference, list[object]()
    monkeypatch.setattr(sampler, "load_reference", lambda *given: (found.append(given), load(*given))[1])
    return found


def test_a_whole_run_scores_in_evaluations_alone(tmp_path, loads):
    changes = NONE | {"learner__steps": 2, "evaluation__every_steps": 2}
    assert frozen_runs.run(tmp_path, task__missing_eos_reward=-1.0, **changes) == 0
    s = tiny_run.settings(tmp_path, frozen_runs.config(**changes))
    (rows,) = frozen_runs.rows(s).values()
    assert not rows["ref_logprobs"].any() and not rows["reference_id"].any()
    assert (rows["policy_logprobs"].sum(axis=1) < 0).all()
    for line in metrics.read_lines(s.run.metrics("trainer")):
        assert not {name for name in line if "ref" in name and "kl" in name} and line["loss"] > 0
        assert np.isfinite(line["log_z"]) and line["log_weight_std"] > 0
    report = layout.read_json(s.run.evaluations / "00000002.json")
    before = layout.read_json(s.run.evaluations / "00000000.json")
    assert abs(before["kl_to_initial"]) < 1e-4 < abs(report["kl_to_initial"])
    assert all(report[f"{kind}_ref_perplexity_paper"] > 1 for kind in ("greedy", "sampled")) and report["ref_nll_per_token"] > 0
    assert len(loads) == 1, "the evaluator's"


def test_adapters_have_the_frozen_weights_that_they_belong_to(tmp_path, loads):
    frozen_runs.make(tmp_path / "run", batches=0, lora__rank=2, **NONE)
    assert len(loads) == 1


@pytest.mark.parametrize("here", ["none", "initial"])
def test_rows_of_another_reference_are_left_out_and_counted(here, tmp_path, caplog, frozen):
    s = frozen(tmp_path / "run", batches=3, **(NONE if here == "none" else {}))
    id_of_run = layout.reference_id(s.run)
    theirs = int(id_of_run, 16) if here == "none" else 0
    frozen_runs.append_changed(s, "other-1", reference_id=(slice(None), theirs), tokens=((slice(None), 0), 3))
    with frozen_runs.trainer(s, polls=True) as trainer:
        for _ in range(2):
            assert trainer.step() is not None
        trainer.report_problems()
    run = audit.open_run(s.run.root)
    account = audit.accounts(run)["other-1"]
    assert account.rejected["reference"] == account.committed > 0 and account.balances and not account.resident
    assert audit.trained_rows(run)["other-1"] == 0
    of_run = "no reference" if here == "none" else f"reference {id_of_run}"
    assert f"writer other-1: row 0 is not valid (its log-probs are not of {of_run}" in caplog.text


def test_responses_of_a_file_are_rows_of_step_0_without_a_reference(tmp_path, frozen):
    """The columns for policy and behaviour are the log-probs of the policy of step 0 all the same."""
    scored, without = frozen(tmp_path / "with", batches=3), frozen(tmp_path / "without", batches=3, **NONE)
    texts = [{"prompt": query.query.prompt, "response": "12"} for query in scored.experiment.queries["train"][:4]]
    path = write_rows(tmp_path / "given.jsonl", texts)
    found = []
    for s in (scored, without):
        append.append(s.run.root, path, unfit="refuse")
        found += [rows for writer, rows in frozen_runs.rows(s).items() if writer.startswith("given-")]
    for name in ("policy_logprobs", "behavior_logprobs"):
        np.testing.assert_array_equal(found[0][name], found[1][name])
        assert found[1][name].any()
    assert found[0]["ref_logprobs"].any() and not found[1]["ref_logprobs"].any() and not found[1]["reference_id"].any()
