"""Searchers on one device, by one name."""

import functools
import types
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from tba_jax.experiment import jobs, training
from tba_jax.roles import sampler
from tba_jax.roles.searcher import stream
from tba_jax.roles.searcher.searcher import Searcher
from tba_jax.telemetry import status
from tests.support.tiny_searcher import InstantEngine, make_searcher, publish, settings


@pytest.fixture(autouse=True)
def _one_writer(monkeypatch, one_device_throughout) -> None:
    """Searchers take half of their name by chance, and what they say is to be read soon."""
    monkeypatch.setattr(status, "FLUSH_SECONDS", 0.02)
    monkeypatch.setattr(stream, "uuid", types.SimpleNamespace(uuid4=lambda: types.SimpleNamespace(hex="0" * 32)))


@pytest.fixture(scope="package")
def prepared(tmp_path_factory) -> Path:
    """A run with its reference and snapshot 0."""
    s, first = settings(tmp_path_factory.mktemp("searcher") / "run"), jax.local_devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: first)
        training.reference(s)()
    s.run.root.joinpath("policy").mkdir()
    publish(s, 0)
    return s.run.root


@pytest.fixture
def make(prepared, tmp_path) -> Callable[..., tuple[jobs.Invocation, Searcher]]:
    return functools.partial(make_searcher, prepared, tmp_path)


@pytest.fixture
def quick(make, monkeypatch) -> Callable[..., tuple[jobs.Invocation, Searcher]]:
    """As `make`, for tests of what is done with responses: nothing is decoded, and no reference scores."""
    monkeypatch.setattr(sampler, "Engine", InstantEngine)
    monkeypatch.setattr(sampler, "_for_sampling", lambda *_: lambda published, base: published)
    zeros = sampler.NoReference.logprobs
    monkeypatch.setattr(sampler.ReferencePolicy, "_response_length", 12, raising=False)
    monkeypatch.setattr(sampler.ReferencePolicy, "logprobs", zeros)
    return make
