"""The alarm of a learner that differs from its samplers."""

import os
import threading

import pytest

from tba_jax.models.layers import Einsum
from tba_jax.storage import published, snapshots
from tba_jax.telemetry import alarms, metrics
from tests.support import frozen_runs

pytestmark = pytest.mark.usefixtures("one_device_throughout")


def test_the_alarm_sees_adapters_that_searchers_merge_otherwise(tmp_path, monkeypatch):
    merge = Einsum.merge

    def scaled(linear: Einsum) -> None:
        linear.lora_scale *= 5
        merge(linear)

    monkeypatch.setattr(Einsum, "merge", scaled)
    settings = {"learner__logprob_gap_every_steps": 1, "task__missing_eos_reward": -1.0, "learner__learning_rate": 0.1}
    assert frozen_runs.run(tmp_path, lora__rank=2, learner__steps=3, evaluation__enabled=False, **settings) == 0
    lines = [line for line in metrics.read_lines(tmp_path / "metrics" / "trainer") if "logprob_gap_max" in line]
    assert any(line["logprob_gap_alarm"] for line in lines) and max(line["logprob_gap_max"] for line in lines) > 1e-3
    (told,) = [alarm for alarm in alarms.read(tmp_path / "metrics" / "trainer") if alarm.kind == "logprob_gap"]
    assert "(limit 0.001)" in told.sentence


def test_steps_go_on_while_a_snapshot_loads_and_one_that_is_damaged_is_passed_over(tmp_path, monkeypatch, frozen, caplog):
    """One comparison at a time; its result is in the measurements of the step after which it is found."""
    s = frozen(tmp_path / "run", batches=2, learner__logprob_gap_every_steps=2)
    goes_on, loads, load = threading.Event(), [], snapshots.load

    def slow(folder, *arguments, **settings):
        if folder.parent == s.run.policies:
            loads.append(folder)
            assert goes_on.wait(60)
        return load(folder, *arguments, **settings)

    monkeypatch.setattr(snapshots, "load", slow)
    with frozen_runs.trainer(s, polls=True) as trainer:
        for _ in range(5):
            measurements = trainer.step(ahead=True)
            assert measurements is not None and "logprob_gap_max" not in measurements
        assert len(loads) == 1
        goes_on.set()
        trainer._scores._thread.submit(lambda: None).result()
        measurements = trainer.step(ahead=True)
        assert measurements is not None and measurements["logprob_gap_max"] < 1e-3 and not measurements["logprob_gap_alarm"]
        os.truncate(published.kept(s.run.policies)[0] / "embedding.weight" / "c" / "0" / "0", 100)
        for _ in range(6):
            measurements = trainer.step()
        assert measurements is not None and "logprob_gap_max" not in measurements
    (told,) = [record.message for record in caplog.records if "is damaged" in record.message]
    assert "step 0" in told
