"""One S3 server for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.support import moto_server


@pytest.fixture(scope="package")
def s3() -> Iterator[dict[str, str]]:
    with moto_server.serving() as environment:
        yield environment
