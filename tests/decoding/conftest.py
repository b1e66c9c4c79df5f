"""Engines that the tests of decoding share."""

import pytest

from tba_jax.decoding.engine import Engine
from tests.support.tiny_engine import SIZES, R, make_engine


@pytest.fixture(scope="session")
def single() -> Engine:
    return make_engine(1, 1, chunk=R)


@pytest.fixture(scope="session")
def grouped() -> Engine:
    return make_engine(*SIZES)
