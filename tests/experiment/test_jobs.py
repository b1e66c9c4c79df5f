"""Jobs of roles, begun in this process."""

import logging

import pytest

from tba_jax.experiment import jobs, training
from tba_jax.models import hardware
from tests.support import tiny_run

T4 = hardware.Hardware(platform="gpu", kind="Tesla T4", capability=(7, 5))


class Begun(Exception):
    pass


def test_roles_compute_with_what_their_devices_have(tmp_path, monkeypatch, caplog, one_device):
    c = tiny_run.config(schedule__mode="interleaved", evaluation__enabled=False, model__compute_dtype="bfloat16")
    s = tiny_run.settings(tmp_path / "run", c)
    monkeypatch.setattr(hardware, "of", lambda _: T4)

    def make_trainer(s, **settings):
        assert s.experiment.policy.model.compute_dtype == "float32"
        raise Begun

    monkeypatch.setattr(training, "make_trainer", make_trainer)
    with caplog.at_level(logging.INFO), pytest.raises(Begun):
        jobs.ROLES["all"](s)()
    said = [record.getMessage() for record in caplog.records]
    assert sum("model.compute_dtype=bfloat16: Tesla T4" in message for message in said) == 1
    assert sum("model.compute_dtype=float32" in message for message in said) == 2  # what the trainer and the searcher use
