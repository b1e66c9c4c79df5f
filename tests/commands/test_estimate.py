"""Estimates from the rows of small runs: which rows count, their weights, what queries teach, and what is refused."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from tba_jax import trajectory
from tba_jax.commands import audit, command_line, estimate, export
from tests.commands.test_command_line import refusal
from tests.support import frozen_runs, random_checkpoints, tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")


def measured(run, policy, count=0, **options):
    opened = estimate.open_policy(run.root, policy, **options)
    return opened, estimate.measure(opened, count)


@pytest.fixture(scope="module")
def untrained(frozen, tmp_path_factory):
    """96 rows that the policy of step 0 drew at another temperature than that at which it is scored."""
    return frozen(tmp_path_factory.mktemp("untrained") / "run", batches=6, sampling__temperature=0.7)


def test_every_row_counts_or_is_left_out_for_one_reason(finished):
    ((writer, rows),) = frozen_runs.rows(finished).items()
    _, found = measured(finished.run, "2")
    trained = {row for line in audit.open_run(finished.run.root).lines if line["step"] <= 2 for _, row in line["rows"]}
    whole = rows["top_p"] == 1
    drawn = np.isin(rows["row"], list(trained))
    assert 0 < drawn[whole].sum() < whole.sum() < 96
    assert sorted(found.figures["row"]) == rows["row"][whole & ~drawn].tolist() and found.writers == [writer]
    left_out = {why: count for why, count in found.left_out.items() if count}
    assert left_out == {"are truncated or greedy": (~whole).sum(), "trained this policy": (drawn & whole).sum()}
    assert len(measured(finished.run, "0")[1].figures) == whole.sum(), "nothing has trained the policy of step 0"


def test_rows_of_the_policy_itself_weigh_1_and_others_do_not(finished):
    ((_, rows),) = frozen_runs.rows(finished).items()
    step = int(rows["policy_step"].max())
    mine = (np.where(trajectory.trained(rows), rows["policy_step"], step) == step).all(axis=1)
    _, found = measured(finished.run, str(step))
    f, own = found.figures, mine[found.figures["row"]]
    assert 0 < own.sum() < len(own) and step > 0
    np.testing.assert_allclose(f["log_weight"][own], 0.0, atol=1e-4)
    assert np.abs(f["log_weight"][~own]).max() > 1e-3
    np.testing.assert_array_equal(f["reward"], rows["reward"][f["row"]])
    np.testing.assert_array_equal(f["length"], rows["response_length"][f["row"]])


def test_a_policy_is_weighed_as_it_is_sampled(untrained):
    ((_, rows),) = frozen_runs.rows(untrained).items()
    _, found = measured(untrained.run, "0")
    np.testing.assert_allclose(found.figures["log_weight"], 0.0, atol=1e-4)
    _, found = measured(untrained.run, "0", temperature=1.0)
    expected = (rows["policy_logprobs"] - rows["behavior_logprobs"]).sum(axis=1)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found.figures["log_weight"], expected[found.figures["row"]], atol=1e-4)
    for temperature in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"--temperature={temperature} must be a number above 0"):
            estimate.open_policy(untrained.run.root, "0", temperature=temperature)


def test_a_forced_end_is_weighed_otherwise_than_one_that_was_drawn(frozen, tmp_path):
    s = frozen(tmp_path / "run", batches=2, task__force_eos=True)
    ((_, rows),) = frozen_runs.rows(s).items()
    forced = ~rows["finished"]
    assert forced.any()
    opened, found = measured(s.run, "0", temperature=0.25)
    contract = dataclasses.replace(opened.run.contract, force_eos=False)
    as_drawn = estimate.measure(dataclasses.replace(opened, run=dataclasses.replace(opened.run, contract=contract)))
    np.testing.assert_array_equal(found.figures["row"], as_drawn.figures["row"])
    differs = np.abs(found.figures["log_weight"] - as_drawn.figures["log_weight"]) > 1e-5
    np.testing.assert_array_equal(differs, forced[found.figures["row"]])


def test_the_newest_rows_alone(untrained, tmp_path):
    shutil.copytree(untrained.run.root, tmp_path / "run")
    s = tiny_run.settings(tmp_path / "run", untrained.config)
    frozen_runs.append_changed(s, "last")
    _, found = measured(s.run, "0", count=20)
    (first,) = (writer for writer in found.writers if writer != "last")
    by = {name: sorted(found.figures["row"][found.figures["writer"] == i]) for i, name in enumerate(found.writers)}
    assert by == {"last": [0, 1, 2, 3], first: [*range(80, 96)]}
    assert len(measured(s.run, "0", count=1000)[1].figures) == 100


def test_rows_whose_weight_is_not_known_are_left_out(untrained, tmp_path, capsys):
    shutil.copytree(untrained.run.root, tmp_path / "run")
    s = tiny_run.settings(tmp_path / "run", untrained.config)
    frozen_runs.append_changed(s, "a-unscored", reward=(..., [np.nan, 1.0, np.inf, 1.0]))
    frozen_runs.append_changed(s, "a-greedy", temperature=(..., [0.0, 0.7, 0.7, 0.7]), top_k=(..., [0, 0, 0, 3]))
    frozen_runs.append_changed(s, "given-1")
    _, found = measured(s.run, "0")
    left_out = {why: count for why, count in found.left_out.items() if count}
    assert left_out == {"are responses of files": 4, "are not valid or have no reward": 2, "are truncated or greedy": 2}
    assert len(found.figures) == 96 + 2 + 2
    said = refusal(capsys, estimate, f"--workdir={s.run.root}", "--policy=0", "--rows=4")
    assert "no row whose weight under --policy is known" in said and "4 are responses of files" in said


def test_too_few_effective_rows_are_no_estimate(finished, capsys):
    arguments = [f"--workdir={finished.run.root}", "--policy=2"]
    assert command_line.execute(estimate, arguments) == 1
    told = capsys.readouterr().out
    _, found = measured(finished.run, "2")
    effective = np.exp(found.figures["log_weight"]).sum() ** 2 / np.exp(2 * found.figures["log_weight"]).sum()
    assert f"no estimate: {effective:.1f} effective rows (ESS) of {len(found.figures)}" in told
    assert "fewer than --min_effective=100" in told and "mean reward of the policy" not in told
    assert command_line.execute(estimate, [*arguments, "--min_effective=2", "--queries=1"]) == 0
    told = capsys.readouterr().out
    w, r = np.exp(found.figures["log_weight"]), found.figures["reward"]
    assert f"mean reward of the policy  {(w * r).sum() / w.sum():.4f}, 95 % interval" in told
    assert f"mean reward of these rows  {r.mean():.4f}" in told and "trained this policy" in told


def test_an_exported_folder_is_the_snapshot_that_it_was(finished, tmp_path, capsys):
    export.export(finished.run.root, tmp_path / "model", step=2, dtype="float32")
    _, of_step = measured(finished.run, "2")
    opened, of_folder = measured(finished.run, str(tmp_path / "model"))
    by_row = dict(zip(of_folder.figures["row"], of_folder.figures["log_weight"], strict=True))
    there = [by_row[row] for row in of_step.figures["row"]]
    np.testing.assert_allclose(there, of_step.figures["log_weight"], atol=1e-4)
    assert len(by_row) == len(of_step.figures) + of_step.left_out["trained this policy"]
    text, good = estimate.describe(opened, of_folder, min_effective=2, queries=3)
    assert good and "all rows count: rows on which this policy was trained" in text


def test_other_tokens_are_refused(finished, tmp_path, capsys):
    other = random_checkpoints.write(tmp_path / "model", "qwen2.5-0.5b", random_checkpoints.byte_tokenizer(tmp_path / "tokens"))
    arguments = [f"--workdir={finished.run.root}"]
    said = refusal(capsys, estimate, *arguments, f"--policy={other}")
    assert f"--policy={other} cannot score the rows of this run: it has a vocabulary of" in said
    export.export(finished.run.root, tmp_path / "exported", step=2, dtype=None)
    file = tmp_path / "exported" / "tokenizer.json"
    definition = json.loads(file.read_text())
    vocab = definition["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    file.write_text(json.dumps(definition))
    assert "its tokenizer has other texts" in refusal(capsys, estimate, *arguments, f"--policy={tmp_path / 'exported'}")
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    file.write_text(json.dumps(definition))
    config = tmp_path / "exported" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 12}))
    said = refusal(capsys, estimate, *arguments, f"--policy={tmp_path / 'exported'}")
    assert "they have up to 13 tokens, and it has 12 positions" in said


def test_adapters_are_part_of_the_policy(tmp_path):
    changes = {"lora__rank": 2, "lora__targets": ("layers.*",), "publish__every_steps": 2, "learner__learning_rate": 0.1}
    assert frozen_runs.run(tmp_path, task__missing_eos_reward=-1.0, learner__steps=6, **changes) == 0
    s = tiny_run.settings(tmp_path, frozen_runs.config(**changes))
    ((_, rows),) = frozen_runs.rows(s).items()
    step = int(rows["policy_step"].max())
    own = (np.where(trajectory.trained(rows), rows["policy_step"], step) == step).all(axis=1)
    _, found = measured(s.run, str(step))
    of_row = own[found.figures["row"]]
    assert step >= 2 and of_row.any()
    np.testing.assert_allclose(found.figures["log_weight"][of_row], 0.0, atol=1e-4)
    _, begun = measured(s.run, "0")
    others = own[begun.figures["row"]]
    assert np.abs(begun.figures["log_weight"][others]).max() > 1e-2, "the adapters count"


def test_queries_come_first_that_teach_most(untrained):
    ((_, rows),) = frozen_runs.rows(untrained).items()
    opened, found = measured(untrained.run, "0")
    text, _ = estimate.describe(opened, found, min_effective=2, queries=100)
    beta = untrained.config.learner.beta_start
    ratio = rows["ref_logprobs"].sum(axis=1) + rows["reward"] / beta - rows["policy_logprobs"].sum(axis=1)
    ids, decode = np.unique(rows["query_id"]), untrained.experiment.tokenizer.decode
    expected = {}
    for each in ids:
        mine = rows["query_id"] == each
        prompt = decode(rows["tokens"][mine][0, : rows["prompt_length"][mine][0]].tolist())
        expected[prompt] = [mine.sum(), rows["reward"][mine].mean(), rows["reward"][mine].std(), ratio[mine].std()]
    *_, lines = text.partition("  query\n")
    told = {line.split()[-1]: [float(value) for value in line.split()[:-1]] for line in lines.splitlines()}
    assert told.keys() == expected.keys() and len(told) > 10
    np.testing.assert_allclose([*told.values()], [expected[prompt] for prompt in told], atol=2e-3)
    stds = [values[3] for values in told.values()]
    assert stds == sorted(stds, reverse=True) and stds[0] > 10 > stds[-1]
    differ = sum(rows["reward"][rows["query_id"] == each].std() > 0 for each in ids)
    assert differ and f"{differ} of {len(ids)} queries with several rows have rewards that differ" in text


def test_without_a_reference_the_rewards_decide(tmp_path):
    s = frozen_runs.make(tmp_path / "run", batches=2, learner__reference__kind="none")
    opened, found = measured(s.run, "0")
    text, _ = estimate.describe(opened, found, min_effective=2, queries=1)
    assert "no log_weight_std: the run has no reference" in text and text.splitlines()[-1].split()[3] == "-"


def test_gradients_are_told_by_size_and_length(untrained, capsys):
    arguments = [f"--workdir={untrained.run.root}", "--policy=0", "--min_effective=2", "--queries=0"]
    assert command_line.execute(estimate, [*arguments, "--gradients=24"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.partition("signal/variance\n")[2].splitlines()]
    assert [line[0] for line in lines] == ["2"] * 4 + ["4"] * 4
    for begin in (0, 4):
        whole, *bins = lines[begin : begin + 4]
        assert int(whole[4]) == sum(int(each[4]) for each in bins) == 24
        lengths = [(float(each[1]), float(each[3])) for each in bins]
        assert lengths == sorted(lengths) and (lengths[0][0], lengths[-1][1]) == (float(whole[1]), float(whole[3]))
        assert float(whole[6]) > 0
        np.testing.assert_allclose(float(whole[9]), float(whole[5]) / float(whole[6]), rtol=0.02)
    assert "--gradients=1 must be at least 2" in refusal(capsys, estimate, *arguments, "--gradients=1")
    said = refusal(capsys, estimate, *arguments, "--gradients=10", "--rows=16")
    assert "--gradients=10 needs at least 10 groups" in said and "8 groups of 2 rows" in said


def test_an_objective_with_a_head_has_no_gradients_from_rows_alone(tmp_path):
    s = frozen_runs.make(tmp_path / "run", batches=1, learner__objective="learned_log_z")
    opened, found = measured(s.run, "0")
    with pytest.raises(ValueError, match=r"learner\.objective=learned_log_z reads what rows alone do not give \(log z head\)"):
        estimate.gradients(opened, found, 4)


def test_a_reference_that_moves_is_not_in_the_rows(tmp_path):
    s = frozen_runs.make(tmp_path / "run", batches=1, learner__reference__kind="reset")
    opened, found = measured(s.run, "0")
    assert np.isnan(found.figures["log_ratio"]).all()
    with pytest.raises(ValueError, match=r"reads the reference, and learner\.reference\.kind=reset"):
        estimate.gradients(opened, found, 4)


def test_mistakes_are_one_sentence(finished, tmp_path, capsys):
    def said(*flags: str) -> str:
        return refusal(capsys, estimate, f"--workdir={finished.run.root}", *flags)

    assert "--policy=7 is not a kept snapshot" in (told := said("--policy=7")) and "there are 0, 1, 2, 3, 4, 5, 6" in told
    assert f"--policy={tmp_path / 'none'} is neither the number of a step nor a folder" in said(f"--policy={tmp_path / 'none'}")
    for name in ("rows", "queries", "gradients", "min_effective"):
        assert f"--{name}=-1" in said("--policy=2", f"--{name}=-1")
