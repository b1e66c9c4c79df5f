"""Changes of a resumed run's schedule: which need leave, which are refused, and what is recorded."""

import pytest

from tba_jax.experiment import composition, stored_run
from tba_jax.storage import contract
from tba_jax.storage.layout import RunDir
from tests.support import tiny_run


def begin(tmp_path, overrides: dict[str, object] | None = None) -> None:
    config = tiny_run.config_with(overrides or {})
    contract.join(RunDir(tmp_path / "run"), config, composition.build(config).contract)


def test_a_changed_schedule_needs_leave_and_is_recorded(tmp_path):
    run = RunDir(tmp_path / "run")
    begin(tmp_path)
    assert stored_run.change_schedule(run, tiny_run.config_with({}), allowed=[], step=3) == {}
    free = {"learner.micro_batch_tokens": 960, "learner.mesh.data": 1, "publish.keep": 9, "searchers.count": 5}
    assert stored_run.change_schedule(run, tiny_run.config_with(free), allowed=[], step=3) == {}
    before = run.config.read_bytes()
    changed = tiny_run.config_with({"learner.steps": 400, "replay.recent_probability": 0.5, "seed": 4})
    with pytest.raises(ValueError, match="the run has another schedule") as refused:
        stored_run.change_schedule(run, changed, allowed=["learner.steps"], step=3)
    assert "replay.recent_probability: 0.95 there, 0.5 here; seed: 0 there, 4 here" in str(refused.value)
    assert "--allow_change=replay.recent_probability,seed" in str(refused.value)
    assert "learner.steps" not in str(refused.value)
    assert run.config.read_bytes() == before
    allowed = ["learner.steps", "replay.recent_probability", "seed"]
    assert stored_run.change_schedule(run, changed, allowed=allowed, step=120)["learner.steps"] == (500, 400)
    stored = contract.read(run)
    assert stored["config"]["learner"]["steps"] == 400 and len(stored["changes"]) == 1
    assert stored["changes"][0]["step"] == 120
    recorded = {"learner.steps": [500, 400], "replay.recent_probability": [0.95, 0.5], "seed": [0, 4]}
    assert stored["changes"][0]["settings"] == recorded
    with pytest.raises(ValueError, match=r"learner.steps=400 is less than the 401 steps that the run has done"):
        stored_run.change_schedule(run, changed, allowed=allowed, step=401)
    # From here on the changed schedule is the run's; the old one would be a change.
    assert stored_run.change_schedule(run, changed, allowed=[], step=130) == {}
    with pytest.raises(ValueError, match=r"learner.steps: 400 there, 500 here"):
        stored_run.change_schedule(run, tiny_run.config_with({}), allowed=[], step=130)


def test_before_the_first_step_the_trainer_sets_the_schedule(tmp_path):
    """Whoever came first: a searcher's own flags about the trainer bind nobody."""
    begin(tmp_path)
    run = RunDir(tmp_path / "run")
    trainers = tiny_run.config_with({"learner.steps": 40, "replay.capacity": 60_000, "replay.mount": ("/a",), "seed": 4})
    begin(tmp_path, {"learner.steps": 40})
    changes = stored_run.change_schedule(run, trainers, allowed=[], step=0)
    assert changes["learner.steps"] == (500, 40) and changes["replay.capacity"] == (50_000, 60_000)
    assert stored_run.schedule_changes(run, trainers) == {} and contract.read(run)["changes"][0]["step"] == 0
    # Not what the index of a checkpoint was built with, which a stop before the first step leaves.
    (run.checkpoints / "00000000").mkdir(parents=True)
    smaller = tiny_run.config_with({"learner.steps": 40, "seed": 4, "replay.mount": ("/a",)})
    with pytest.raises(ValueError, match=r"replay.capacity of a run cannot change: 60000 there, 50000 here"):
        stored_run.change_schedule(run, smaller, allowed=[], step=0)
    # From the first step on it is the run's.
    later = tiny_run.config_with({"seed": 4, "replay.mount": ("/a",), "replay.capacity": 60_000})
    with pytest.raises(ValueError, match=r"learner.steps: 40 there, 500 here"):
        stored_run.change_schedule(run, later, allowed=[], step=1)


def test_who_joins_takes_the_schedule_over(tmp_path):
    begin(tmp_path, {"learner.steps": 40, "replay.mount": ("/a",), "seed": 4})
    run = RunDir(tmp_path / "run")
    mine = tiny_run.config_with({"learner.steps": 1000, "searchers.slots": 7, "replay.poll_seconds": 3.0})
    taken, changes = stored_run.with_schedule_of(run, mine)
    assert changes == {"learner.steps": (40, 1000), "replay.mount": (["/a"], []), "seed": (4, 0)}
    assert (taken.learner.steps, taken.replay.mount, taken.seed) == (40, ("/a",), 4)
    assert (taken.searchers.slots, taken.replay.poll_seconds) == (7, 3.0) and mine.learner.steps == 1000
    assert stored_run.schedule_changes(run, taken) == {} and stored_run.with_schedule_of(run, taken) == (taken, {})
    stored_run.check_no_changes(run, taken, role="searcher")
    with pytest.raises(ValueError, match=r"--role=searcher takes .*/run, which .*; .*seed: 4 there, 0 here"):
        stored_run.check_no_changes(run, mine, role="searcher")


def test_past_schedules_of_steps_after_a_checkpoint(tmp_path):
    """Three changes, at steps 10, 30 and 50."""
    begin(tmp_path)
    run = RunDir(tmp_path / "run")
    rate, steps = "learner.learning_rate", "learner.steps"
    for step, values in ((10, {rate: 2e-5}), (30, {rate: 3e-5, steps: 600}), (50, {rate: 3e-5, steps: 700})):
        assert stored_run.change_schedule(run, tiny_run.config_with(values), allowed=[rate, steps], step=step)
    first, second = {rate: 1e-5, steps: 500}, {rate: 2e-5, steps: 500}
    assert stored_run.past_schedules(run, after=0) == [(10, first), (30, second), (50, {steps: 600})]
    assert stored_run.past_schedules(run, after=30) == [(50, {steps: 600})]
    assert stored_run.past_schedules(run, after=50) == []
    with pytest.raises(ValueError, match=r"--allow_change=learner\.step: there is no setting learner\.step"):
        stored_run.change_schedule(run, tiny_run.config_with({}), allowed=["learner.step"], step=60)


@pytest.mark.parametrize(
    "name, there, here, refused",
    [
        ("learner.reference.kind", "initial", "ema", "its checkpoints hold another state"),
        ("learner.reference.kind", "reset", "ema", ""),
        ("learner.objective", "trajectory_balance", "learned_log_z", "its checkpoints hold another state"),
        ("learner.objective", "learned_log_z", "flowrl", "its checkpoints hold another state"),
        ("learner.objective", "grpo", "ppo", "its checkpoints hold another state"),
        ("learner.objective", "rloo", "grpo", ""),
        ("replay.capacity", 50_000, 60_000, "50000 there, 60000 here"),  # the index was built with it
    ],
)
def test_what_checkpoints_hold_cannot_change(tmp_path, name, there, here, refused):
    begin(tmp_path, {name: there})
    run, changed = RunDir(tmp_path / "run"), tiny_run.config_with({name: here})
    if refused:
        with pytest.raises(ValueError, match=f"{name} of a run cannot change.* {refused}"):
            stored_run.change_schedule(run, changed, allowed=[name], step=3)
    else:
        assert stored_run.change_schedule(run, changed, allowed=[name], step=3) == {name: (there, here)}


def test_mounts_can_only_grow(tmp_path):
    begin(tmp_path, {"replay.mount": ("/a", "/b")})
    run, allowed = RunDir(tmp_path / "run"), ["replay.mount"]
    grown, other = (tiny_run.config_with({"replay.mount": mounts}) for mounts in (("/a", "/b", "/c"), ("/c", "/b")))
    with pytest.raises(ValueError, match=r"replay.mount: \['/a', '/b'\] there, \['/a', '/b', '/c'\] here; .*allow_change"):
        stored_run.change_schedule(run, grown, allowed=[], step=3)
    with pytest.raises(ValueError, match=r"replay.mount of a run can only grow: its journal names rows of '/a'"):
        stored_run.change_schedule(run, other, allowed=allowed, step=3)
    stored_run.change_schedule(run, grown, allowed=allowed, step=3)
    assert contract.read(run)["config"]["replay"]["mount"] == ["/a", "/b", "/c"]
