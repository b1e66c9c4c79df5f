"""Trackers of a busy machine."""

import pytest

from tba_jax.telemetry import metrics


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A role that ends waits five seconds for its tracker, whose library may take longer to import on a busy machine."""
    monkeypatch.setattr(metrics, "CLOSE_SECONDS", 60.0)
