"""What leaves the device for a snapshot."""

import jax
import pytest

from benchmarks import checkpoints
from tests.support.tiny_updates import random_params


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2)])
def test_a_snapshot_costs_the_bytes_of_its_dtype(tmp_path, dtype, size):
    params = jax.device_put(random_params(), jax.devices()[0])
    count = sum(x.size for x in jax.tree.leaves(params))
    assert checkpoints.published_bytes(tmp_path / "policy", params, dtype=dtype) == size * count
