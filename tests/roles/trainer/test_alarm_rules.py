"""What the rules of a trainer say of its points, and what runs that learn nothing tell."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tba_jax.experiment import training
from tba_jax.roles.trainer import alarm_rules, loop
from tba_jax.roles.trainer.recorder import Recorder
from tba_jax.telemetry import alarms
from tests.support import frozen_runs, task_files, tiny_run
from tests.support.small_disk import SmallDisk

HEALTHY = dict(
    equal_reward_groups=0.4,
    reward=0.5,
    reward_low=0.0,
    reward_high=1.0,
    resident_rows=100,
    entropy=0.5,
    grad_norm=4.0,
    beta=0.012,
    ratio_clipped=0.0,
    newest_row_lag=6,
    rows_rejected=0,
    rows_seen=1000,
    skipped_steps=0,
    disk_free=2.0**30,
    checkpoint_bytes=2.0**20,
)


def kinds(points: list[dict[str, float]], **settings: Any) -> list[str]:
    """The kinds of alarm that these points give, the last one being the newest."""
    c = tiny_run.config(**{"learner__steps": 1000, **settings})
    return [kind for kind, rule in alarm_rules.RULES.items() if rule(points, c) is not None]


def points(count: int = alarm_rules.SOLVED_POINTS, **changes: float) -> list[dict[str, float]]:
    return [{**HEALTHY, "step": 5 * i, **changes} for i in range(1, count + 1)]


def test_a_healthy_run_gives_none():
    assert kinds(points()) == [] and kinds(points(1)) == []
    assert kinds([{"step": 1, "reward": 0.5}]) == []  # one completion a query, and nothing else is known


@pytest.mark.parametrize(
    ("equal", "reward", "found"),
    [
        (0.86, 0.99, []),  # the end of the demo: most queries are solved
        (0.96, 0.99, []),  # its best stretch
        (0.7, 0.75, []),  # late in training many groups are all right
        (1.0, 0.02, ["equal_rewards"]),  # nearly nothing succeeds
        (0.8, 0.1, ["equal_rewards"]),
        (0.97, 0.5, ["equal_rewards"]),  # half of the queries are always solved, the others never
        (1.0, 1.0, ["solved"]),
    ],
)
def test_equal_rewards_are_an_alarm_below_the_best_reward(equal, reward, found):
    assert kinds(points(equal_reward_groups=equal, reward=reward)) == found


def test_one_reward_for_all_rows_is_told_as_such():
    same = points(equal_reward_groups=1.0, reward=-1.0, reward_low=-1.0, reward_high=-1.0, distinct_rows_per_group=1.5)
    assert kinds(same) == ["equal_rewards"]
    told = alarm_rules.equal_rewards(same, tiny_run.config())
    assert told is not None and "all 100 resident rows have the reward -1" in told.sentence
    assert "1.5 of the K rows of a group are distinct" in told.sentence


def test_one_bad_batch_is_no_alarm():
    assert kinds([*points(19), *points(1, equal_reward_groups=1.0, reward=0.0, grad_norm=1e9, newest_row_lag=500)]) == []


def test_solved_queries_matter_while_much_of_the_run_is_left():
    solved = points(equal_reward_groups=1.0, reward=1.0)
    assert kinds(solved, learner__steps=200) == ["solved"] and kinds(solved, learner__steps=110) == []
    assert kinds(solved[-8:]) == []  # a lucky stretch


@pytest.mark.parametrize(
    ("objective", "norm", "found"),
    [
        ("trajectory_balance", 9.0, []),  # the demo's largest
        ("trajectory_balance", 100.0, ["gradient_clipped"]),
        ("rloo", 20.0, []),
        ("rloo", 100.0, ["gradient_clipped"]),
    ],
)
def test_a_clip_that_is_always_active_is_told_at_every_beta(objective, norm, found):
    for beta in (0.012, 0.5):
        assert kinds(points(grad_norm=norm, beta=beta), learner__objective=objective) == found
    assert kinds(points(grad_norm=norm), learner__objective=objective, learner__clip_norm=0.0) == []


def test_a_clip_that_the_objective_lacks_is_no_alarm():
    clipped = points(ratio_clipped=0.1, grad_norm=1.0)
    assert kinds(clipped) == []
    assert kinds(clipped, learner__objective="tba_prime") == ["ratio_clipped"]
    assert kinds(clipped, learner__objective="tba_prime", learner__importance_clip=0.0) == []


def test_what_a_schedule_asks_for_is_not_behind():
    assert kinds(points(newest_row_lag=100)) == ["searchers_behind"]
    assert kinds(points(newest_row_lag=100), publish__every_steps=20) == []
    assert kinds(points(newest_row_lag=100), schedule__mode="interleaved", schedule__lag=100) == []
    assert kinds(points(newest_row_lag=100), searchers__lag=100) == []
    assert kinds(points(newest_row_lag=100), searchers__count=0) == []


def test_one_reward_of_all_resident_rows_may_be_the_best_where_others_were_evicted(tmp_path, frozen):
    """A resumed trainer knows nothing of rows that are gone."""
    s = frozen(tmp_path / "run", replay__capacity=48, replay__capacity_per_query=48, replay__merge_duplicates=False)
    for number in range(12):
        frozen_runs.append_changed(s, f"solved-{number}", reward=(slice(None), 1.0))
    with frozen_runs.trainer(s) as trainer:
        circumstances = alarm_rules.Circumstances(trainer)
        trainer.poll()
        assert trainer.step() is None  # it has taken the rows in, which are of too few queries
        assert circumstances()["reward_high"] == 1 and circumstances()["resident_rows"] == 48
        trainer.save_checkpoint()
    with frozen_runs.trainer(s) as trainer:
        assert len(trainer.index) == 48
        assert "reward_low" not in alarm_rules.Circumstances(trainer)()


# What follows are runs. A random policy gets no sum right.

pytestmark = pytest.mark.usefixtures("one_device_throughout")


def told(workdir: Path, role: str = "trainer") -> dict[str, alarms.Alarm]:
    return {alarm.kind: alarm for alarm in alarms.read(workdir / "metrics" / role)}


def test_a_run_without_any_reward_says_so_once(tmp_path):
    settings: dict[str, Any] = {"evaluation__enabled": False, "learner__steps": 10}
    assert frozen_runs.run(tmp_path / "run", **settings) == 0
    found = told(tmp_path / "run")
    assert found.keys() == {"equal_rewards"}
    assert "rows have the reward 0" in found["equal_rewards"].sentence and found["equal_rewards"].step == alarm_rules.POINTS
    assert len(alarms.read(tmp_path / "run" / "metrics" / "trainer")) == 1


def test_a_run_whose_responses_differ_gives_no_alarm(tmp_path):
    settings: dict[str, Any] = {"evaluation__every_steps": 10, "learner__steps": 24, "task__missing_eos_reward": -1.0}
    assert frozen_runs.run(tmp_path / "run", **settings) == 0
    assert not [*(tmp_path / "run" / "metrics").glob("*/alarms.jsonl")]
    assert len([*(tmp_path / "run" / "metrics").glob("*/metrics.jsonl")]) >= 3


@pytest.mark.slow
def test_a_clip_far_below_every_gradient_is_named(tmp_path):
    # A batch of equal rewards has no gradient, and rows differ from run to run: in 40 steps there are 8 in a row that have one.
    settings: dict[str, Any] = {"evaluation__enabled": False, "learner__steps": 40, "task__missing_eos_reward": -1.0}
    assert frozen_runs.run(tmp_path / "run", learner__clip_norm=1e-4, **settings) == 0
    assert "learner.clip_norm=0.0001" in told(tmp_path / "run")["gradient_clipped"].sentence


def test_a_trainer_without_new_rows_says_that_searchers_are_behind(tmp_path, frozen):
    s = frozen(tmp_path / "run", learner__steps=80, checkpoint__every_steps=100, learner__logprob_gap_every_steps=0)
    made, lease = training.make_trainer(s, publish_every_steps=2)
    assert loop.run_trainer(made, s.run, stop=lambda: False)
    lease.release()
    found = told(s.run.root)
    assert found.keys() <= {"searchers_behind", "equal_rewards"}  # the rows differ from run to run
    assert found["searchers_behind"].step == 64 + alarm_rules.POINTS and "of 72 steps ago" in found["searchers_behind"].sentence
    assert "publish.every_steps=2" in found["searchers_behind"].sentence


def run_of(tmp_path: Path, reward: str, **settings: Any) -> dict[str, alarms.Alarm]:
    """A run with this reward of a response. Returns what its trainer told."""
    file = task_files.write(tmp_path)
    text = file.read_text()
    assert text.count('response.count("1")') == 1
    file.write_text(text.replace('response.count("1")', reward))
    settings = {"evaluation__enabled": False, "task__name": f"{file}:Ones", "learner__logprob_gap_every_steps": 0, **settings}
    frozen_runs.run(tmp_path / "run", **settings)
    return told(tmp_path / "run")


@pytest.mark.slow
def test_rewards_that_are_not_finite_are_named_by_all_who_see_them(tmp_path):
    found = run_of(tmp_path, 'np.nan if response.count("1") % 2 else len(response)', learner__steps=12, evaluation__enabled=True)
    assert found.keys() == {"rows_rejected"} and "are not valid" in found["rows_rejected"].sentence
    fails = told(tmp_path / "run", "searcher-0")
    assert fails.keys() == {"rewards_fail"} and "rewards fail: " in fails["rewards_fail"].sentence
    assert told(tmp_path / "run", "evaluator").keys() == {"evaluation_fails"}


def test_updates_that_are_left_out_again_and_again_are_named(tmp_path):
    absurd = '1e30 if response[:2] == "01" else len(response)'
    settings: dict[str, Any] = {"learner__steps": 40, "learner__non_finite": "skip", "searchers__samples_per_query": 8}
    found = run_of(tmp_path, absurd, **settings)
    assert "updates_refused" in found and "learner.non_finite=skip" in found["updates_refused"].sentence


@pytest.mark.slow
def test_a_run_that_has_solved_its_queries_is_told_so(tmp_path):
    """The first four rewards are 0, and all others 1: a single one might never be resident, as a duplicate of a later one."""
    reward = 'float(len(self.__dict__.setdefault("seen", [])) >= 4 or bool(self.seen.append(1)))'
    assert "of 120 steps are left" in run_of(tmp_path, reward, learner__steps=120)["solved"].sentence


def test_clipped_importance_ratios_are_named(tmp_path):
    """A policy that changes much faster than its rows become fresh."""
    tba_prime: dict[str, Any] = {"learner__objective": "tba_prime", "learner__importance_clip": 2.0}
    late: dict[str, Any] = {"learner__learning_rate": 0.05, "learner__steps": 30, "schedule__lag": 8}
    found = run_of(tmp_path, '-float(response[:1] == "0")', **tba_prime, **late)
    assert "learner.importance_clip=2" in found["ratio_clipped"].sentence


def test_a_disk_without_room_for_the_next_checkpoint_is_named(tmp_path, frozen):
    s = frozen(tmp_path / "made", checkpoint__every_steps=100, publish__every_steps=100)
    with SmallDisk(tmp_path / "disk", megabytes=8) as disk:
        if disk.missing:
            pytest.skip(disk.missing)
        workdir = disk.folder / "run"
        shutil.copytree(s.run.root, workdir)
        with frozen_runs.trainer(tiny_run.settings(workdir, s.config), publish_every_steps=100) as trainer:
            recorder = Recorder(trainer, trainer.run)
            trainer.poll()
            assert (measurements := trainer.step()) is not None and recorder.note(measurements)
            assert told(workdir) == {}
            needed = alarm_rules.Circumstances(trainer)()["checkpoint_bytes"]
            room = os.statvfs(workdir)
            (disk.folder / "ballast").write_bytes(bytes(int(room.f_bavail * room.f_frsize - needed / 2)))
            assert (measurements := trainer.step()) is not None and recorder.note(measurements)
            (disk.folder / "ballast").unlink()
            recorder.close()
        found = told(workdir)["disk"]
        assert found.sentence.endswith("MiB") and "next checkpoint takes about" in found.sentence
