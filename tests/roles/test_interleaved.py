"""The one-process schedule, and through it trainer, searcher, evaluator and resume, without processes."""

import dataclasses
import json
import shutil
import threading

import jax
import numpy as np
import pytest

from tba_jax import sharding, trajectory
from tba_jax.commands import audit
from tba_jax.experiment import jobs
from tba_jax.models.layers import Einsum
from tba_jax.replay import journal
from tba_jax.replay.log import LogWriter
from tba_jax.replay.reader import LogReader
from tba_jax.run import layout as layout_lib
from tba_jax.run import metrics, snapshots
from tba_jax.run.lease import LeaseHeld, StaleEpoch
from tba_jax.run.metrics import TimeAccount
from tests.support import applied, frozen_runs, tiny_checkpoints, tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")


@pytest.mark.parametrize("lag", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_rows_come_from_exactly_lag_steps_ago(tmp_path, lag):
    assert frozen_runs.run(tmp_path, schedule__lag=lag, learner__steps=8, replay__merge_duplicates=False) == 0
    lines = metrics.read_lines(tmp_path / "metrics" / "trainer")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["staleness_max"] for line in lines] == [min(step, lag) for step in range(8)]
    assert [line["staleness_mean"] for line in lines] == [min(step, lag) for step in range(8)]


def test_a_run_leaves_what_the_readme_promises(tmp_path):
    assert frozen_runs.run(tmp_path, learner__steps=6, evaluation__every_steps=3) == 0
    layout = layout_lib.RunDir(tmp_path)
    assert layout_lib.steps_in(layout.evaluations) == [0, 3, 6]
    report = layout_lib.read_json(layout.evaluations / "00000006.json")
    assert report["queries"] == 8 and len(report["samples"]["greedy"]) == 2
    assert {"query", "answer", "response", "reward"} <= set(report["samples"]["greedy"][0])
    assert snapshots.committed_steps(layout.policies) == list(range(7))
    assert (tmp_path / "progress.png").read_bytes()[:4] == b"\x89PNG"
    line = metrics.read_lines(layout.metrics("trainer"))[-1]
    assert {"loss", "reward", "kl_to_ref", "entropy", "log_z", "grad_norm", "draws_per_row", "buffer_rows"} <= set(line)
    assert {"ratio_mean", "ratio_max", "ratio_clipped", "effective_sample_share", "kl_to_ref_k3", "log_z_std"} <= set(line)
    assert {"advantage_std", "log_weight_std", "equal_reward_groups"} <= set(line) and "kl_to_initial" not in line
    assert line["logprob_gap_max"] < 1e-4 and line["logprob_gap_alarm"] == 0
    ledger = layout_lib.read_json(layout.finished)["ledger"]
    for entry in ledger.values():
        assert entry["seen"] == entry["resident"] + sum(entry["evicted"].values()) + sum(entry["rejected"].values())
    assert list(layout.metrics("trainer").glob("events.out.tfevents*"))


def test_rows_in_the_log_are_whole_and_true(tmp_path):
    """Every stored log-prob is what the named weights give the named tokens, recomputed here from the snapshots."""
    assert frozen_runs.run(tmp_path, learner__steps=3, sampling__temperature=1.3, sampling__explore_top_p_probability=0.5) == 0
    s = tiny_run.settings(tmp_path, tiny_run.config())
    contract, policy = s.experiment.contract, s.experiment.policy
    model, specs = policy.model, policy.model_specs
    shape = trajectory.RowShape(prompt_length=7, response_length=6, reward_parts=contract.reward_parts)
    reader = LogReader(s.run.replay, shape)
    ((writer, head),) = reader.heads().items()
    rows = reader.read(writer, 0, head)
    shardings = applied.shardings(model, roles_mesh())
    mask = trajectory.response_mask(rows["response_length"], 6)
    assert set(np.unique(rows["policy_step"][mask])) == {0, 1, 2} and (rows["policy_step"][~mask] == -1).all()
    reference = snapshots.load(s.run.reference(f"{rows['reference_id'][0]:016x}"), specs, shardings)
    expected = {step: snapshots.load_step(s.run.policies, step, specs, shardings) for step in range(3)}
    for i in range(0, head, 16):
        row = {name: column[i] for name, column in rows.items()}
        policy = logprobs_by_prefix(expected[int(row["policy_step"][0])], row, model, contract)
        np.testing.assert_allclose(row["policy_logprobs"], policy, atol=2e-5)
        np.testing.assert_allclose(row["ref_logprobs"], logprobs_by_prefix(reference, row, model, contract), atol=2e-5)
    assert (rows["top_p"] < 1).any() and (rows["top_p"] == 1).any()
    answers = {query.prompt: query.query.answer for query in s.experiment.queries["train"]}
    for i in range(head):
        begin, end = rows["prompt_length"][i], rows["prompt_length"][i] + rows["response_length"][i]
        prompt = tuple(rows["tokens"][i, :begin].tolist())
        text = s.experiment.tokenizer.decode(rows["tokens"][i, begin:end].tolist())
        right = bool(rows["finished"][i]) and text.rpartition("#")[2] == answers[prompt] and "#" in text
        assert rows["reward"][i] == float(right)
        assert rows["query_id"][i] == trajectory.query_id(prompt)


def roles_mesh():
    return sharding.make_mesh((1, 1, 1), setting="test", devices=jax.devices()[:1])


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


ADAPTERS = {"lora__rank": 2, "model__compute_dtype": "bfloat16", "learner__logprob_gap_limit": 0.1}


RESUMED = {
    "whole policy": {},
    "adapters in bfloat16": ADAPTERS,
    "learned log Z": {"learner__objective": "learned_log_z"},
    "value head": {"learner__objective": "ppo"},
    # 5, the checkpoint, is between two resets.
    "reset reference and optimizer": {
        "learner__objective": "tba_prime",
        "learner__reference__kind": "reset",
        "learner__reference__reset_steps": 3,
        "learner__reference__reset_optimizer": True,
    },
    "moving average of adapters in host memory": {
        **ADAPTERS,
        "learner__reference__kind": "ema",
        "learner__reference__ema_decay": 0.8,
        "learner__reference__offload": True,
    },
    "surrogate": {"learner__objective": "tba_prime", "learner__reference__kind": "surrogate"},
}


# Whose states hold what no other's does; the others take their time in the slow tests.
BY_DEFAULT = ("whole policy", "value head", "reset reference and optimizer", "moving average of adapters in host memory")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in BY_DEFAULT else [pytest.mark.slow]) for name in RESUMED])
def test_resume_on_a_frozen_log_is_bit_for_bit(tmp_path, name, frozen):
    """12 steps at once = 8 steps with a checkpoint at 5, dropped, replayed from 5 to 8, and on to 12."""
    changes = RESUMED[name]
    once = frozen(tmp_path / "once", **changes)
    shutil.copytree(tmp_path / "once", tmp_path / "twice")
    twice = tiny_run.settings(tmp_path / "twice", frozen_runs.config(**changes))
    expected = frozen_runs.train(once, until=12, abandon=False)
    policy = once.experiment.policy
    initial = snapshots.load_step(once.run.policies, 0, policy.trained_specs, policy.trained_shardings(roles_mesh()))
    assert all(np.any(a != b) for a, b in zip(jax.tree.leaves(initial), jax.tree.leaves(expected.params["policy"]), strict=True))
    frozen_runs.train(twice, until=8, abandon=True)
    lineage = journal.read_lineage(twice.run.journal)
    assert [line["step"] for line in lineage] == list(range(1, 9))
    got = frozen_runs.train(twice, until=12, abandon=False)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert int(got.step) == 12
    lines = [journal.read_lineage(s.run.journal) for s in (once, twice)]
    assert [line["batch"] for line in lines[0]] == [line["batch"] for line in lines[1]]


def test_journalled_steps_are_done_again_under_the_schedule_they_were_done_with(tmp_path, frozen):
    """8 steps, the last 3 after the checkpoint, then another objective, batch size and rate: the change counts from step 9 on."""
    s = frozen(tmp_path / "run")
    frozen_runs.train(s, until=8, abandon=True)
    policy = s.experiment.policy
    published = snapshots.load_step(s.run.policies, 8, policy.trained_specs, policy.trained_shardings(roles_mesh()))
    changes = {
        "learner__objective": "tba_prime",
        "learner__queries": 2,
        "learner__completions": 3,
        "learner__learning_rate": 0.1,
    }
    changed = tiny_run.settings(tmp_path / "run", frozen_runs.config(**changes))
    names = tuple(name.replace("__", ".") for name in changes)
    with pytest.raises(ValueError, match="to change it, add --allow_change="):
        jobs.join(changed, may_change_schedule=True)
    jobs.join(dataclasses.replace(changed, allow_change=names), may_change_schedule=True)
    trainer, lease = jobs.make_trainer(changed, publish_every_steps=2)
    assert trainer.step_number == 8
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.state.params["policy"]), jax.device_get(published))
    trainer.poll()
    assert trainer.step() is not None and trainer.program.rows == 6
    trainer.close()
    lease.release()
    lines = journal.read_lineage(s.run.journal)
    assert [(line["step"], len(line["rows"])) for line in lines[-2:]] == [(8, 12), (9, 6)]
    # From the reference again, across the change.
    expected = jax.device_get(trainer.state)
    shutil.rmtree(s.run.checkpoints)
    again, lease = jobs.make_trainer(changed, publish_every_steps=2)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again.state), expected)
    again.close()
    lease.release()


@pytest.mark.parametrize("broken", [False, True])
def test_the_alarm_sees_a_learner_whose_adapters_differ_from_what_searchers_merge(tmp_path, monkeypatch, broken):
    if broken:
        merge = Einsum.merge

        def scaled(linear: Einsum) -> None:
            linear.lora_scale *= 5
            merge(linear)

        monkeypatch.setattr(Einsum, "merge", scaled)
    settings = {"learner__logprob_gap_every_steps": 2, "task__missing_eos_reward": -1.0, "learner__learning_rate": 0.1}
    assert frozen_runs.run(tmp_path, lora__rank=2, learner__steps=6, **settings) == 0
    gaps = [line["logprob_gap_max"] for line in metrics.read_lines(tmp_path / "metrics" / "trainer") if "logprob_gap_max" in line]
    alarms = [
        line["logprob_gap_alarm"] for line in metrics.read_lines(tmp_path / "metrics" / "trainer") if "logprob_gap_max" in line
    ]
    assert any(alarms) == broken and (max(gaps) > 1e-3) == broken


def test_a_changed_row_stops_the_replay(tmp_path, frozen):
    """The journal's hash is checked: rows that are not those that were drawn are never trained on again in silence."""
    s = frozen(tmp_path / "run")
    frozen_runs.train(s, until=8, abandon=True)
    path = max(s.run.journal.glob("*.jsonl"))
    lines = path.read_text().splitlines()
    last = json.loads(lines[-1])
    last["rows"][0], last["rows"][-1] = last["rows"][-1], last["rows"][0]
    path.write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    with pytest.raises(ValueError, match=r"step 8.*not those that were drawn"):
        frozen_runs.train(s, until=9, abandon=True)


def test_a_second_trainer_is_refused(tmp_path, frozen):
    s = frozen(tmp_path / "run", batches=2)
    trainer, lease = jobs.make_trainer(s, publish_every_steps=2)
    with pytest.raises(LeaseHeld, match="held by the trainer"):
        jobs.trainer(s)
    trainer.close()
    lease.release()


def test_a_non_finite_update_stops_the_run(tmp_path, frozen):
    s = frozen(tmp_path / "run", batches=2)
    trainer, lease = jobs.make_trainer(s, publish_every_steps=2)
    trainer.poll()
    assert trainer.step() is not None
    trainer.index._columns["ref_logprobs"][:] = np.inf
    before = jax.device_get(trainer.state.params)
    with pytest.raises(
        FloatingPointError, match=r"step 2 is not finite .* 12 of 12 rows are not, frozen-\w{8}:\d+, .* …; its batch"
    ):
        trainer.step()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.state.params), before)
    trainer.close()
    lease.release()


def log_with_an_absurd_reward(frozen, workdir, **changes):
    """A frozen log, and four rows of one query by another writer: the square of the third one's reward is not finite."""
    s = frozen(workdir, batches=1, replay__merge_duplicates=False, **changes)
    reader = LogReader(s.run.replay, s.experiment.contract.row_shape())
    ((writer, _),) = reader.heads().items()
    rows = {name: column.copy() for name, column in reader.read(writer, 0, 4).items()}
    rows["reward"][2] = 1e30
    log = LogWriter(s.run.replay, "planted-1", reader.shape, rows_per_append=4, segment_appends=4, info={})
    log.append(rows | {"row": np.arange(4)})
    return s


def test_a_run_that_stops_names_the_row_and_goes_on_when_told_to_skip(tmp_path, frozen):
    s = log_with_an_absurd_reward(frozen, tmp_path / "run")
    names_it = r"1 of 12 rows are not, planted-1:2; .*--config.learner.non_finite=skip --allow_change=learner.non_finite"
    with pytest.raises(FloatingPointError, match=names_it):
        frozen_runs.train(s, until=8, abandon=True)
    with pytest.raises(FloatingPointError, match=names_it):  # the journal ends with that step
        frozen_runs.train(s, until=8, abandon=True)
    skipping = tiny_run.settings(tmp_path / "run", frozen_runs.config(replay__merge_duplicates=False, learner__non_finite="skip"))
    state = frozen_runs.train(skipping, until=8, abandon=True)
    # A journal that ends with a refused step would stop a run again that does not skip.
    while ("planted-1", 2) in journal.line_ids(journal.read_lineage(s.run.journal)[-1]):
        state = frozen_runs.train(skipping, until=int(state.step) + 1, abandon=True)
    assert 0 < int(state.skipped) < int(state.step)
    # What was passed is passed again, whatever the setting says now.
    shutil.rmtree(s.run.checkpoints)
    again, lease = jobs.make_trainer(s, publish_every_steps=2)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again.state), state)
    again.close()
    lease.release()


def test_a_run_that_skips_counts_and_resumes_exactly(tmp_path, caplog, frozen):
    s = log_with_an_absurd_reward(frozen, tmp_path / "run", learner__non_finite="skip")
    state = frozen_runs.train(s, until=8, abandon=False)
    told = [record.message for record in caplog.records if "the update is left out" in record.message]
    assert 0 < len(told) < 8 and all("1 of 12 rows are not, planted-1:2;" in sentence for sentence in told)
    assert (int(state.step), int(state.skipped)) == (8, len(told))
    assert len(journal.read_lineage(s.run.journal)) == 8 and layout_lib.read_json(s.run.finished)["balanced"]
    policy = s.experiment.policy
    initial = snapshots.load_step(s.run.policies, 0, policy.trained_specs, policy.trained_shardings(roles_mesh()))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(initial), jax.tree.leaves(state.params["policy"]), strict=True))
    shutil.rmtree(s.run.checkpoints)  # every step again from the reference
    again, lease = jobs.make_trainer(s, publish_every_steps=2)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again.state), state)
    again.close()
    lease.release()


@pytest.mark.parametrize(
    "broken, sentence", [("every row", "all rows are at fault"), ("no row", "it is step 10 of such in a row")]
)
def test_weights_that_are_broken_stop_a_run_that_skips(tmp_path, broken, sentence, frozen):
    s = frozen(tmp_path / "run", batches=2, learner__non_finite="skip")
    trainer, lease = jobs.make_trainer(s, publish_every_steps=100)
    trainer.poll()
    update = trainer.program._update

    def broken_update(state, frozen, batch):
        state, measurements = update(state, frozen, batch)
        return state, measurements | {"finite": np.float32(0), "row_finite": np.full(12, broken == "no row")}

    trainer.program._update = broken_update
    steps = []
    with pytest.raises(FloatingPointError, match=f"{sentence}, so the run stops in spite of learner.non_finite=skip"):
        while True:
            assert trainer.step() is not None
            steps.append(trainer.step_number)
    assert len(steps) == (9 if broken == "no row" else 0)
    trainer.close()
    lease.release()


def test_the_update_is_compiled_while_rows_are_awaited_and_not_again(tmp_path, caplog, frozen):
    s = frozen(tmp_path / "run", batches=1)
    trainer, lease = jobs.make_trainer(s, publish_every_steps=2)

    def updates_compiled():
        return sum("Finished XLA compilation of jit(train_step)" in record.getMessage() for record in caplog.records)

    with jax.log_compiles():
        trainer.start()
        assert updates_compiled() == 1
        trainer.poll()
        assert trainer.step() is not None
    assert updates_compiled() == 1
    trainer.close()
    lease.release()


def test_nothing_shows_an_update_whose_line_was_refused(tmp_path, monkeypatch, frozen):
    """The line is written while the devices compute: the update must not be seen before it is durable."""
    s = frozen(tmp_path / "run", batches=2)
    trainer, lease = jobs.make_trainer(s, publish_every_steps=1)
    trainer.poll()
    assert trainer.step() is not None
    trainer.flush_snapshot()

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal.os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        trainer.step()
    monkeypatch.undo()
    assert snapshots.committed_steps(s.run.policies) == [0, 1]
    assert [line["step"] for line in journal.read_lineage(s.run.journal)] == [1]
    trainer.close()
    lease.release()
    again, lease = jobs.make_trainer(s, publish_every_steps=1)
    assert again.step_number == 1
    again.poll()
    assert again.step() is not None
    again.flush_snapshot()
    assert snapshots.committed_steps(s.run.policies) == [0, 1, 2]
    again.close()
    lease.release()


def test_rows_that_came_before_a_stop_are_journalled_after_it(tmp_path, frozen):
    """Seen by a trainer that was stopped before it had enough of them: the next one's first line must tell of them."""
    s = frozen(tmp_path / "run", batches=1, replay__min_rows=40)
    trainer, lease = jobs.make_trainer(s, publish_every_steps=2)
    trainer.poll()
    assert trainer.step() is None and len(trainer.index)
    trainer.save_checkpoint()
    trainer.close()
    lease.release()
    searcher = jobs.make_searcher(s, name="late", account=TimeAccount())
    searcher.refresh()
    for _ in range(4):
        searcher.search()
    state = frozen_runs.train(s, until=3, abandon=False)
    accounts = audit.accounts(audit.open_run(s.run.root))
    assert len(accounts) == 2 and all(account.balances and not account.unseen for account in accounts.values())
    shutil.rmtree(s.run.checkpoints)  # every step again from the reference
    again, lease = jobs.make_trainer(s, publish_every_steps=2)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again.state), state)
    again.close()
    lease.release()


@pytest.mark.parametrize("steps", [0, 3])
def test_a_trainer_that_begins_publishes_once_however_slow_the_storage(steps, tmp_path, frozen, monkeypatch):
    """A second snapshot of the same step would take the first one away from whoever reads it."""
    s = frozen(tmp_path / "run", batches=2)
    if steps:
        frozen_runs.train(s, until=steps, abandon=True)
    shutil.rmtree(s.run.policies)
    saved, goes_on, save = [], threading.Event(), snapshots.save

    def slow(folder, params, info, **settings):
        saved.append(info.step)
        assert goes_on.wait(30)
        save(folder, params, info, **settings)

    monkeypatch.setattr(snapshots, "save", slow)
    trainer, lease = jobs.make_trainer(s, publish_every_steps=100)
    goes_on.set()
    trainer.flush_snapshot()
    assert saved == sorted({0, steps}) == snapshots.committed_steps(s.run.policies)
    trainer.close()
    lease.release()


def test_a_replaced_trainer_publishes_nothing_more(tmp_path, frozen):
    """It checks its lease when it hands a snapshot over, and again when the snapshot is about to become visible."""
    s = frozen(tmp_path / "run", batches=2)
    trainer, lease = jobs.make_trainer(s, publish_every_steps=100)
    trainer.poll()
    assert trainer.step() is not None
    trainer.publish()
    trainer.flush_snapshot()
    later = lease.epoch + 1
    (s.run.journal / f"epoch-{later:06d}.lease").write_text(json.dumps({"epoch": later, "released": True}))
    with pytest.raises(StaleEpoch, match=f"epoch {later} has been taken"):
        trainer.publish()
    info = snapshots.SnapshotInfo(step=7, epoch=lease.epoch)
    trainer.publishing._publisher.publish(trainer.state.params["policy"], info)  # as if the lease was lost after that first look
    with pytest.raises(StaleEpoch):
        trainer.flush_snapshot()
    assert snapshots.committed_steps(s.run.policies) == [0, 1]
    with pytest.raises(StaleEpoch):
        trainer.step()
    trainer.close()
    lease.release()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of orbax, whose read failed
def test_a_trainer_without_its_state_does_not_begin_again(tmp_path, frozen):
    s = frozen(tmp_path / "run", batches=2)
    frozen_runs.train(s, until=5, abandon=False)
    damaged = max((s.run.checkpoints / layout_lib.step_name(5) / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"00000005 cannot be restored: .*If it is damaged, remove that folder"):
        jobs.make_trainer(s, publish_every_steps=2)
    shutil.rmtree(s.run.checkpoints)
    journals = list(s.run.journal.glob("*.jsonl"))
    for path in journals:
        path.rename(path.with_suffix(".away"))
    with pytest.raises(ValueError, match=r"holds the policy of step 4 of a trainer whose checkpoints and journal are not in"):
        jobs.make_trainer(s, publish_every_steps=2)
    for path in journals:
        path.with_suffix(".away").rename(path)
    trainer, lease = jobs.make_trainer(s, publish_every_steps=2)
    assert trainer.step_number == 5
    trainer.close()
    lease.release()


def test_rows_that_are_not_valid_are_reported_by_writer_and_row(tmp_path, caplog, frozen):
    s = frozen(tmp_path / "run", batches=2)
    reader = LogReader(s.run.replay, s.experiment.contract.row_shape())
    ((writer, _),) = reader.heads().items()
    rows = {name: column.copy() for name, column in reader.read(writer, 0, 4).items()}
    rows["tokens"][2, 0] = 9999
    log = LogWriter(s.run.replay, "bad-1", reader.shape, rows_per_append=4, segment_appends=4, info={})
    log.append(rows | {"row": np.arange(4)})
    trainer, lease = jobs.make_trainer(s, publish_every_steps=2)
    trainer.poll()
    assert trainer.step() is not None
    for _ in range(2):
        trainer.report_problems()
    told = [record.message for record in caplog.records if "bad-1" in record.message]
    assert told == ["replay log of writer bad-1: row 2 is not valid (tokens), it and others like it are left out and counted"]
    trainer.close()
    lease.release()
