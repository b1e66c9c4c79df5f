"""What the processes of a trainer share by files: the same decisions in the same order, a failure, and a wish to stop."""

import concurrent.futures
import json
import threading

import numpy as np
import pytest

from tba_jax.roles import plan as plan_lib
from tba_jax.roles.plan import Plan, SharedPlan
from tba_jax.run import processes


def plans(folder, count: int = 3) -> list[SharedPlan]:
    return [SharedPlan(folder, process=number, processes=count) for number in range(count)]


def never() -> None:
    raise AssertionError("process 0 decides")


def test_decisions_come_to_all_in_their_order(tmp_path):
    rows = {"tokens": np.arange(6, dtype=np.int32).reshape(2, 3), "reward": np.float32([1.5, np.nan])}
    made = [None, "a", [1, None], {"do": "update", "rows": rows, "takes_gap": True}, *range(40)]
    leader, *others = plans(tmp_path)

    def follow(plan: SharedPlan) -> list:
        return [plan.share(never) for _ in made]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        following = [pool.submit(follow, each) for each in others]
        for decided in made:
            assert leader.share(lambda decided=decided: decided) is decided
        for told in following:
            found = told.result(30)
            batch = found.pop(3)["rows"]
            assert found == made[:3] + made[4:]
            assert {name: array.dtype for name, array in batch.items()} == {name: array.dtype for name, array in rows.items()}
            np.testing.assert_array_equal(batch["tokens"], rows["tokens"])
            np.testing.assert_array_equal(batch["reward"], rows["reward"])


def test_a_decision_stays_until_an_update_tells_that_all_have_read_it(tmp_path):
    leader, slow, _ = plans(tmp_path)

    def share(*decisions: str) -> None:
        for decided in decisions:
            leader.share(lambda decided=decided: decided)

    share(*"the many of the start")
    for _ in range(3):
        shared = leader._next  # an update needs what was shared before the last one had its result
        share("the next batch", "something else")  # while it computes
        while slow._next < shared:
            slow.share(never)
        leader.is_updated()
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [leader._next - 2, leader._next - 1]


def test_what_each_has_written_is_told_to_process_0(tmp_path):
    leader, *others = plans(tmp_path)
    for each in reversed(others):
        each.tell("00000010", {"w": {"0.0": each.process}})
    assert leader.told("00000010") == [{"w": {"0.0": 1}}, {"w": {"0.0": 2}}]
    assert Plan().told("00000010") == [] and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (processes.BadInput("learner.steps=0"), processes.BadInput, processes.BAD_INPUT),
        (FloatingPointError("step 3 is not finite"), FloatingPointError, processes.NOT_FINITE),
        (OSError(28, "No space left on device"), OSError, processes.STORAGE_FAILED),
        (RuntimeError("a defect"), processes.PeerLost, processes.PEER_LOST),
    ],
)
def test_an_error_of_one_process_ends_the_others_by_its_sentence(tmp_path, monkeypatch, error, kind, code):
    exits = []
    monkeypatch.setattr(plan_lib.atexit, "register", lambda function, *arguments: exits.append(arguments))
    monkeypatch.setattr(plan_lib, "_REASON_SECONDS", 0.05)
    leader, other, _ = plans(tmp_path)
    with pytest.raises(type(error)), other.guard():
        raise error
    with pytest.raises(processes.PeerLost):  # what a thread of it waits for
        other.told("00000010")
    with pytest.raises(kind) as told, leader.guard():
        leader.told("00000010")
    assert "process 1 (" in str(told.value) and str(error).split("] ")[-1] in str(told.value)
    assert processes.exit_code(told.value) == code == exits[1][0]
    assert [name.name for name in tmp_path.iterdir()] == ["failed-1"], "nobody tells what another one has told"


def test_a_collective_that_fails_is_told_by_its_cause(tmp_path, monkeypatch):
    """A process that ends breaks the collectives of the others before it can say why."""
    monkeypatch.setattr(plan_lib.atexit, "register", lambda *_: None)
    leader, other, _ = plans(tmp_path)
    told = json.dumps({"code": processes.NOT_FINITE, "sentence": "process 1 (b) of this trainer failed: step 3 is not finite"})
    threading.Timer(0.2, lambda: other._write("failed-1", told.encode())).start()
    with pytest.raises(FloatingPointError, match=r"process 1 .*step 3 is not finite"), leader.guard():
        raise RuntimeError("Gloo all-reduce failed: connection closed by peer")


def test_a_signal_to_any_process_is_seen_by_process_0(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_lib, "_LOOK_FOR_STOP_SECONDS", 0.0)
    leader, other, _ = plans(tmp_path)
    other.on_stop(lambda: True)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.share, never)
        while not leader.is_asked_to_stop():
            threading.Event().wait(0.01)
        leader.share(lambda: {"do": "stop"})
        assert waiting.result(30) == {"do": "stop"}
    assert not Plan().is_asked_to_stop()


def test_settings_and_versions_that_differ_are_named():
    ours = {"versions": {"jax": "1"}, "settings": {"config.learner.steps": 3, "config.seed": 1}}
    plan_lib._check_same(ours, ours, who="process 1 (b)", first="a")
    theirs = {"versions": {"jax": "1"}, "settings": {"config.learner.steps": 4}}
    named = r"process 1 \(b\) has other settings than process 0 \(a\).*learner.steps: 4 there, 3 here"
    with pytest.raises(ValueError, match=named):
        plan_lib._check_same(ours, theirs, who="process 1 (b)", first="a")
    with pytest.raises(ValueError, match=r"other versions .*jax: '2' there, '1' here"):
        plan_lib._check_same(ours, {**ours, "versions": {"jax": "2"}}, who="process 1 (b)", first="a")
