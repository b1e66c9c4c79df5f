"""The seconds of a system's steps: parts add up, and a part that contains another one counts without it."""

import json

import pytest

from benchmarks.peers import recording


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still but for `pass_`."""
    now = [100.0]
    monkeypatch.setattr(recording.time, "perf_counter", lambda: now[0])

    def pass_(seconds: float) -> None:
        now[0] += seconds

    return pass_


class Trainer:
    def __init__(self, clock):
        self._clock = clock

    def generate(self) -> int:
        self._clock(4.0)
        return 64

    def score(self) -> None:
        self.generate()
        self.generate()
        self._clock(1.0)

    def step(self) -> None:
        self.score()
        self._clock(2.0)


def test_parts_of_a_step_are_told_apart(tmp_path, clock):
    record, trainer = recording.Recording(), Trainer(clock)
    for name, part, after in (("generate", "generate", record.count), ("score", "score", None), ("step", "update", None)):
        record.timed(trainer, name, part, **({"after": after} if after else {}))
    clock(50.0)  # before training
    record.begin()
    for wait in (0.5, 0.0):
        trainer.step()
        clock(wait)
        record.step_ends()
    record.write(str(tmp_path / "result.json"), versions={})
    told = json.loads((tmp_path / "result.json").read_text())
    assert told["seconds"] == [11.5, 11.0]
    assert told["parts"] == {"generate": [8.0, 8.0], "score": [1.0, 1.0], "update": [2.0, 2.0]}
    assert told["tokens"] == [128, 128]


def test_time_after_a_call_is_the_parts(clock):
    record, trainer = recording.Recording(), Trainer(clock)
    record.timed(trainer, "generate", "generate", after=lambda _: clock(3.0))  # a device that is waited for
    record.begin()
    trainer.generate()
    record.step_ends()
    assert record.parts == {"generate": [7.0]}


def test_the_reward_is_the_share_of_digits_after_its_seconds(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(recording.time, "sleep", slept.append)
    assert recording.digits(["1a2b", "", "77"], seconds=2.0) == [0.5, 0.0, 1.0]
    assert slept == [2.0]
