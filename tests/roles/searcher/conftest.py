"""Searchers on one device, by one name."""

import functools
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from tba_jax.experiment import jobs, training
from tba_jax.roles.searcher import stream
from tba_jax.roles.searcher.searcher import Searcher
from tba_jax.telemetry import status
from tests.support.tiny_searcher import make_searcher, publish, settings


@pytest.fixture(autouse=True)
def _one_writer(monkeypatch, one_device_throughout) -> None:
    """Searchers take half of their name by chance, and what they say is to be read soon."""
    monkeypatch.setattr(status, "FLUSH_SECONDS", 0.02)
    monkeypatch.setattr(stream, "uuid", types.SimpleNamespace(uuid4=lambda: types.SimpleNamespace(hex="0" * 32)))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, one_device_throughout) -> Path:
    """A run with its reference and snapshot 0."""
    s = settings(tmp_path_factory.mktemp("searcher") / "run")
    training.reference(s)()
    s.run.root.joinpath("policy").mkdir()
    publish(s, 0)
    return s.run.root


@pytest.fixture
def make(prepared, tmp_path) -> Callable[..., tuple[jobs.Invocation, Searcher]]:
    return functools.partial(make_searcher, prepared, tmp_path)
