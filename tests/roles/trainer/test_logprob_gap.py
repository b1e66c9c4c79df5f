"""The alarm of a learner that differs from its samplers."""

import pytest

from tba_jax.models.layers import Einsum
from tba_jax.run import metrics
from tests.support import frozen_runs

pytestmark = pytest.mark.usefixtures("one_device_throughout")


# That whole policies give no alarm, the run of test_interleaved shows.
@pytest.mark.parametrize("broken", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_alarm_sees_adapters_that_searchers_merge_otherwise(tmp_path, monkeypatch, broken):
    if broken:
        merge = Einsum.merge

        def scaled(linear: Einsum) -> None:
            linear.lora_scale *= 5
            merge(linear)

        monkeypatch.setattr(Einsum, "merge", scaled)
    settings = {
        "learner__logprob_gap_every_steps": 2,
        "task__missing_eos_reward": -1.0,
        "learner__learning_rate": 0.1,
        "evaluation__enabled": False,
    }
    assert frozen_runs.run(tmp_path, lora__rank=2, learner__steps=6, **settings) == 0
    lines = [line for line in metrics.read_lines(tmp_path / "metrics" / "trainer") if "logprob_gap_max" in line]
    assert any(line["logprob_gap_alarm"] for line in lines) == broken
    assert (max(line["logprob_gap_max"] for line in lines) > 1e-3) == broken
