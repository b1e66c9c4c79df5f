"""Requests to object stores are counted as tensorstore counts them."""

import time

from tba_jax.storage import places, requests
from tests.support import moto_server


def test_reads_writes_and_lists_are_counted(tmp_path):
    with moto_server.serving():
        root = places.place(f"s3://{moto_server.BUCKET}/counted")
        rate, before = requests.RequestRate([tmp_path, root]), requests.sent()
        for number in range(3):
            places.write_bytes(root / str(number), b"x")
        places.read_bytes(root / "1")
        assert places.names_in(root) == ["0", "1", "2"]
        assert requests.sent() - before == 5
        time.sleep(0.1)
        (found,) = rate.scalars().values()
        assert 0 < found < 5 * 60 / 0.1
