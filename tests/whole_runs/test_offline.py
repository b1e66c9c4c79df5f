"""Training on rows of other runs: from a log alone, beside a run's own rows, and while the other run goes on."""

import shutil

import numpy as np
import pytest

from tba_jax.commands import audit
from tba_jax.experiment import initial_policy, jobs, training
from tba_jax.replay import journal
from tba_jax.storage import layout
from tba_jax.telemetry import metrics
from tba_jax.telemetry.status import TimeAccount
from tests.support import frozen_runs, tiny_run
from tests.support.tiny_log import objects

pytestmark = pytest.mark.usefixtures("one_device_throughout")


def test_a_trainer_learns_from_a_log_and_leaves_it_as_it_was(tmp_path, frozen):
    source = frozen(tmp_path / "source")
    before = frozen_runs.contents(source.run.root)
    s = frozen_runs.offline(tmp_path / "run", source.run.root, learner__logprob_gap_every_steps=2)
    assert training.trainer(s)() == 0
    assert frozen_runs.contents(source.run.root) == before
    assert layout.read_json(s.run.finished)["step"] == 12 and not s.run.replay.exists()
    assert layout.read_json(s.run.initial_reference) == layout.read_json(source.run.initial_reference)
    lines = [*journal.read_lineage(s.run.journal)]
    (writer,) = {writer for line in lines for writer in line["writers"]}
    assert objects(source.run.replay, writer)
    points = metrics.read_lines(s.run.metrics("trainer"))
    assert [point["mounted_share"] for point in points] == [1.0] * 12
    assert all(point["reward_mounted"] == pytest.approx(point["reward"]) and "reward_own" not in point for point in points)
    assert [point["staleness_max"] for point in points] == list(range(12))
    assert not any("logprob_gap_max" in point for point in points), "no snapshot of this run made these rows"
    run = audit.open_run(s.run.root)
    account = audit.accounts(run)[writer]
    assert account.balances and account.committed == 96 and account.unseen == 0
    text, same = audit.rebuild_batch(run, 7)
    assert same and f"{writer}:" in text


IN_TURN = {"schedule__mode": "interleaved", "evaluation__enabled": False, "learner__learning_rate": 0.1}


@pytest.fixture(scope="module")
def source(tmp_path_factory, one_device_throughout) -> jobs.Invocation:
    """A run of four steps."""
    s = tiny_run.settings(tmp_path_factory.mktemp("source") / "run", frozen_runs.config(learner__steps=4, **IN_TURN))
    assert jobs.everything(s)() == 0
    return s


def test_rows_of_another_run_join_without_an_alarm(tmp_path, source):
    """The other run's weights of a step are not this run's: only rows of its own are compared with its snapshots."""
    mixed = {"learner__logprob_gap_every_steps": 1, "replay__recent_probability": 0.0, "learner__steps": 8, "seed": 3}
    s = tiny_run.settings(tmp_path / "run", frozen_runs.config(replay__mount=(str(source.run.root),), **IN_TURN, **mixed))
    assert jobs.everything(s)() == 0
    points = metrics.read_lines(s.run.metrics("trainer"))
    both = [point for point in points if 0 < point["mounted_share"] < 1]
    assert both
    for point in both:
        share = point["mounted_share"]
        assert share * point["reward_mounted"] + (1 - share) * point["reward_own"] == pytest.approx(point["reward"])
    gaps = [point["logprob_gap_max"] for point in points if "logprob_gap_max" in point]
    assert gaps and max(gaps) < 1e-3
    run = audit.open_run(s.run.root)
    assert all(account.balances for account in audit.accounts(run).values())
    (writer,) = [path.stem for path in (source.run.replay / "writers").iterdir()]
    newest = run.reader.heads()[writer] - 1
    assert run.reader.read_ids([(writer, newest)])["policy_step"].max() == 3
    assert audit.regenerate(run, f"{writer}:{newest}")[1], "a mounted row is made again from the snapshots of its own run"


def test_rows_of_another_run_count_as_of_step_0(tmp_path, source):
    """Steps of the other run say nothing of this run's: its rows of step 3 are not of a future of ours."""
    s = frozen_runs.offline(tmp_path / "run", source.run.root, learner__steps=7)
    training.reference(s)()
    for until in (6, 7):  # the second begins with the checkpoint of step 5
        with frozen_runs.trainer(s, polls=True) as trainer:
            while trainer.step_number < until:
                measurements = trainer.step()
            assert set(measurements["staleness"]) == {until - 1}
            assert trainer.index.gather(np.arange(len(trainer.index)))["policy_step"].max() == 3


def test_a_mounted_run_may_still_be_running(tmp_path, frozen):
    source = frozen(tmp_path / "source", batches=2)
    s = frozen_runs.offline(tmp_path / "run", source.run.root)
    training.reference(s)()
    with frozen_runs.trainer(s, polls=True) as trainer:
        assert trainer.step() is not None and trainer.scalars()["rows_seen"] == 32
        searcher = jobs.make_searcher(source, name="late", account=TimeAccount())
        searcher.refresh()
        searcher.search()
        trainer.poll()
        assert trainer.step() is not None and trainer.scalars()["rows_seen"] == 48


@pytest.mark.slow
def test_without_searchers_the_supervisor_starts_a_trainer_alone(tmp_path, frozen):
    source = frozen(tmp_path / "source")
    flags = ["--config.searchers.count=0", f"--config.replay.mount={source.run.root}", "--config.task.missing_eos_reward=-1.0"]
    done = tiny_run.call(tiny_run.command(tmp_path / "run", *flags, "--config.evaluation.enabled=False"))
    assert done.returncode == 0, done.stderr
    assert layout.read_json(tmp_path / "run" / "finished.json")["step"] == 12
    assert sorted(path.name for path in (tmp_path / "run" / "logs").iterdir()) == ["reference.log", "trainer.log"]


REFUSALS = {
    "no run": ({}, "holds no run: there is no"),
    "twice": ({}, "is this run itself, or mounted twice"),
    "response limit": ({"task__response_length": 5}, "response_length: 6 there, 5 here"),
    "reward": ({"task__missing_eos_reward": -2.0}, "missing_eos_reward: -1.0 there, -2.0 here"),
    "copied writer": ({}, "has a log in"),
    "no reference": ({}, "has no reference policy yet"),
    "other reference": ({"seed": 5}, "have log-probs of reference"),
    "another response space": (
        {"task__min_response_length": 2, "searchers__scores_reference": False},
        "min_response_length: 0 there, 2",
    ),
    "without a reference": ({"learner__reference__kind": "none"}, "learner.reference.kind: 'initial' there, 'none' here"),
    "not kept": ({}, "has replay.retention=checkpoints: its trainer may remove rows"),
    "other origin": ({}, "init_from: '' there, '/elsewhere@3' here"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_rows_that_mean_something_else_are_refused(case, tmp_path, frozen):
    changes, sentence = REFUSALS[case]
    kept = {"replay__retention": "checkpoints"} if case == "not kept" else {}
    source = frozen(tmp_path / "source", batches=1, **kept)
    workdir, init_from = tmp_path / "run", ""
    mounts = {
        "no run": [tmp_path / "nothing"],
        "twice": [source.run.root, tmp_path / "." / "source"],
        "copied writer": [source.run.root, tmp_path / "copy"],
    }.get(case, [source.run.root])
    if case == "copied writer":
        shutil.copytree(source.run.root, tmp_path / "copy")
    if case == "no reference":
        source.run.initial_reference.unlink()
    if case == "other origin":
        init_from = "/elsewhere@3"
    if case == "other reference":
        own = tiny_run.settings(workdir, frozen_runs.config(**changes))
        training.reference(own)()
    before = frozen_runs.contents(workdir)
    settings = {"task__missing_eos_reward": -1.0, "replay__mount": tuple(map(str, mounts))} | changes
    s = tiny_run.settings(workdir, tiny_run.config(**settings))
    with pytest.raises(ValueError, match=sentence) as refused:
        initial_policy.check_mounts(s.run, s.config, s.experiment.contract, init_from=init_from)
    if not init_from:
        with pytest.raises(ValueError, match=sentence):
            training.trainer(s)
    if case == "other reference":
        ids = [layout.read_json(run.initial_reference)["id"] for run in (source.run, s.run)]
        assert all(one in str(refused.value) for one in ids)
    assert frozen_runs.contents(workdir) == before


def test_what_does_not_change_rows_may_differ(tmp_path, frozen):
    source = frozen(tmp_path / "source", batches=1)
    changes = {"lora__rank": 2, "seed": 9, "learner__queries": 2, "learner__learning_rate": 1e-5}
    s = frozen_runs.offline(tmp_path / "run", source.run.root, **changes)
    initial_policy.check_mounts(s.run, s.config, s.experiment.contract, init_from="")
