"""One S3 server for all tests of this folder, and places of every kind."""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tba_jax.storage import places
from tests.support import moto_server


@pytest.fixture(scope="package")
def s3() -> Iterator[dict[str, str]]:
    with moto_server.serving() as environment:
        yield environment


@pytest.fixture(params=["local", "memory", "s3"])
def root(request, tmp_path) -> Any:
    """A place that is not there yet."""
    if request.param == "local":
        return tmp_path / "shared"
    if request.param == "s3":
        request.getfixturevalue("s3")
    return places.place(f"{request.param}://{moto_server.BUCKET}/{uuid.uuid4().hex}")
