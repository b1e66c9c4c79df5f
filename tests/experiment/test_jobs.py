"""Jobs of roles, begun in this process."""

import logging

from tba_jax.experiment import jobs, training
from tba_jax.models import hardware
from tests.support import tiny_run

T4 = hardware.Hardware(platform="gpu", kind="Tesla T4", capability=(7, 5))


def test_roles_compute_with_what_their_devices_have(tmp_path, monkeypatch, caplog, one_device):
    changes = dict(schedule__mode="interleaved", schedule__lag=0, learner__steps=2, evaluation__enabled=False)
    s = tiny_run.settings(tmp_path / "run", tiny_run.config(**changes, model__compute_dtype="bfloat16"))
    monkeypatch.setattr(hardware, "of", lambda _: T4)
    computed = {}
    for role, module in (("trainer", training), ("searcher", jobs)):
        make = getattr(module, f"make_{role}")

        def noting(s, *, make=make, role=role, **settings):
            computed[role] = s.experiment.policy.model.compute_dtype
            return make(s, **settings)

        monkeypatch.setattr(module, f"make_{role}", noting)
    with caplog.at_level(logging.INFO):
        assert jobs.ROLES["all"](s)() == 0
    assert computed == {"trainer": "float32", "searcher": "float32"}
    said = [record.getMessage() for record in caplog.records]
    assert sum("model.compute_dtype=bfloat16: Tesla T4" in message for message in said) == 1
    assert sum("model.compute_dtype=float32" in message for message in said) == 2  # what the trainer and the searcher use
