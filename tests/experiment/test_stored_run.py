"""Changes of a resumed run's schedule, and storage that does not answer: a dry run ends, and a role says for what it waits."""

import concurrent.futures
import threading
from typing import Any

import pytest

from tba_jax import main
from tba_jax.commands import command_line
from tba_jax.experiment import composition, stored_run
from tba_jax.storage import contract, places
from tba_jax.storage.layout import RunDir
from tests.support import tiny_run


def begin(tmp_path, overrides: dict[str, Any] | None = None) -> RunDir:
    run, config = RunDir(tmp_path / "run"), tiny_run.config_with(overrides or {})
    contract.join(run, config, composition.build(config).contract)
    return run


def change(run: RunDir, overrides: dict[str, Any], *, allowed: tuple[str, ...] = (), step: int) -> stored_run.Changes:
    return stored_run.change_schedule(run, tiny_run.config_with(overrides), allowed=allowed, step=step)


def test_a_changed_schedule_needs_leave_and_is_recorded(tmp_path):
    run = begin(tmp_path)
    free = {"learner.micro_batch_tokens": 960, "learner.mesh.data": 1, "publish.keep": 9, "searchers.count": 5}
    assert change(run, free, step=3) == {}
    before = run.config.read_bytes()
    changed = {"learner.steps": 400, "replay.recent_probability": 0.5, "seed": 4}
    with pytest.raises(ValueError, match="the run has another schedule") as refused:
        change(run, changed, allowed=("learner.steps",), step=3)
    assert "replay.recent_probability: 0.95 there, 0.5 here; seed: 0 there, 4 here" in str(refused.value)
    assert "--allow_change=replay.recent_probability,seed" in str(refused.value)
    assert "learner.steps" not in str(refused.value) and run.config.read_bytes() == before
    assert change(run, changed, allowed=(*changed,), step=120)["learner.steps"] == (500, 400)
    stored = contract.read(run)
    (entry,) = stored["changes"]
    assert stored["config"]["learner"]["steps"] == 400 and entry["step"] == 120
    assert entry["settings"] == {"learner.steps": [500, 400], "replay.recent_probability": [0.95, 0.5], "seed": [0, 4]}
    with pytest.raises(ValueError, match=r"learner.steps=400 is less than the 401 steps that the run has done"):
        change(run, changed, allowed=(*changed,), step=401)
    # From here on the changed schedule is the run's; the old one would be a change.
    assert change(run, changed, step=130) == {}
    with pytest.raises(ValueError, match=r"learner.steps: 400 there, 500 here"):
        change(run, {}, step=130)


def test_before_the_first_step_the_trainer_sets_the_schedule(tmp_path):
    """Whoever came first. A checkpoint of step 0 fixes what its index was built with."""
    run = begin(tmp_path)
    assert change(run, {"learner.steps": 40, "replay.capacity": 60_000}, step=0)["replay.capacity"] == (50_000, 60_000)
    assert contract.read(run)["changes"][0]["step"] == 0
    (run.checkpoints / "00000000").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"replay.capacity of a run cannot change: 60000 there, 50000 here"):
        change(run, {"learner.steps": 40}, step=0)
    with pytest.raises(ValueError, match=r"learner.steps: 40 there, 500 here"):
        change(run, {"replay.capacity": 60_000}, step=1)


def test_who_joins_takes_the_schedule_over(tmp_path):
    run = begin(tmp_path, {"learner.steps": 40, "replay.mount": ("/a",), "seed": 4})
    mine = tiny_run.config_with({"learner.steps": 1000, "searchers.slots": 7, "replay.poll_seconds": 3.0})
    taken, changes = stored_run.with_schedule_of(run, mine)
    assert changes == {"learner.steps": (40, 1000), "replay.mount": (["/a"], []), "seed": (4, 0)}
    assert (taken.learner.steps, taken.replay.mount, taken.seed) == (40, ("/a",), 4)
    assert (taken.searchers.slots, taken.replay.poll_seconds) == (7, 3.0) and mine.learner.steps == 1000
    assert stored_run.with_schedule_of(run, taken) == (taken, {})
    stored_run.check_no_changes(run, taken, role="searcher")
    with pytest.raises(ValueError, match=r"--role=searcher takes .*/run, which .*; .*seed: 4 there, 0 here"):
        stored_run.check_no_changes(run, mine, role="searcher")


def test_past_schedules_of_steps_after_a_checkpoint(tmp_path):
    run, rate, steps = begin(tmp_path), "learner.learning_rate", "learner.steps"
    for step, values in ((10, {rate: 2e-5}), (30, {rate: 3e-5, steps: 600}), (50, {rate: 3e-5, steps: 700})):
        assert change(run, values, allowed=(rate, steps), step=step)
    first, second = {rate: 1e-5, steps: 500}, {rate: 2e-5, steps: 500}
    assert stored_run.past_schedules(run, after=0) == [(10, first), (30, second), (50, {steps: 600})]
    assert stored_run.past_schedules(run, after=30) == [(50, {steps: 600})]
    assert stored_run.past_schedules(run, after=50) == []


@pytest.mark.parametrize(
    "name, there, here, refused",
    [
        ("learner.reference.kind", "initial", "ema", "its checkpoints hold another state"),
        ("learner.reference.kind", "reset", "ema", ""),
        ("learner.objective", "learned_log_z", "flowrl_linear_z", "its checkpoints hold another state"),
        ("learner.objective", "grpo", "ppo", "its checkpoints hold another state"),
        ("learner.objective", "rloo", "grpo", ""),
        ("replay.capacity", 50_000, 60_000, "50000 there, 60000 here"),
        ("replay.mount", ("/a", "/b"), ("/c", "/b"), "only grow: its journal names rows of '/a'"),
        ("replay.mount", ("/a", "/b"), ("/a", "/b", "/c"), ""),
    ],
)
def test_what_checkpoints_hold_cannot_change(tmp_path, name, there, here, refused):
    run = begin(tmp_path, {name: there})
    if refused:
        with pytest.raises(ValueError, match=f"{name} of a run can.*{refused}"):
            change(run, {name: here}, allowed=(name,), step=3)
    else:
        assert [*change(run, {name: here}, allowed=(name,), step=3)] == [name]


@pytest.fixture
def mount(tmp_path, monkeypatch):
    """A folder below which nothing answers before the event is set, as on a mount whose server is away."""
    answers, asked = threading.Event(), places._asked

    def waiting(folder):
        if not str(folder).startswith(str(tmp_path / "mount")):
            return asked(folder)
        never: concurrent.futures.Future[None] = concurrent.futures.Future()
        threading.Thread(target=lambda: (answers.wait(30), never.set_result(None)), daemon=True).start()
        return never

    monkeypatch.setattr(places, "_asked", waiting)
    monkeypatch.setattr(places, "REPORT_SECONDS", 0.05)
    monkeypatch.setattr(stored_run, "DRY_RUN_SECONDS", 0.12)
    yield tmp_path / "mount" / "run", answers
    answers.set()


@pytest.mark.parametrize("setting", ["--workdir", "--shared", "replay.mount", "--init_from"])
def test_a_dry_run_ends_where_a_mount_does_not_answer(setting, mount, tmp_path, capsys, caplog):
    place, _ = mount
    flag = {"replay.mount": f"--config.replay.mount=('{place}',)", "--init_from": f"--init_from={place}@3"}
    with pytest.raises(SystemExit, match="2"):
        command_line.execute(main, tiny_run.command(tmp_path / "run", "--dry_run", flag.get(setting, f"{setting}={place}"))[3:])
    said = capsys.readouterr().err
    assert f"{setting}={place} has not answered within 0.12 s, and is not waited for any longer" in said
    assert f"{setting}={place} has not answered for 0.1 s; still trying" in said + caplog.text


def test_a_role_waits_until_the_place_answers_and_says_so(mount, caplog):
    place, answers = mount
    waiter = threading.Thread(target=stored_run.check_answers, args=([("replay.mount", place)],))
    waiter.start()
    waiter.join(0.2)  # longer than a dry run waits
    assert waiter.is_alive() and caplog.text.count(f"replay.mount={place} has not answered for") >= 2
    answers.set()
    waiter.join(5)
    assert not waiter.is_alive()
