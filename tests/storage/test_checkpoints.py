"""Checkpoints of arrays that are donated to the next update while they are written."""

import resource
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax import sharding
from tba_jax.storage.checkpoints import Checkpoints

ROWS = 2048
ALONE = (ROWS, 1536)  # no other test has arrays of this shape


def test_updates_may_overwrite_what_is_being_written(tmp_path):
    mesh = sharding.make_mesh((8, 1, 1), setting="test")
    places = {"split": sharding.rows_sharding(mesh), "whole": sharding.replicated(mesh)}
    values = {name: np.random.default_rng(0).standard_normal((ROWS, 2048)).astype(np.float32) for name in places}
    update = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.full_like(x, 7) + 0 * x, tree), donate_argnums=0)
    jax.block_until_ready(update(jax.device_put(values, places)))
    state = jax.device_put({name: value.copy() for name, value in values.items()}, places)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    checkpoints = Checkpoints(tmp_path, keep=3)
    checkpoints.save({"state": state}, {"rows": 3}, step=1)
    after = update(state)
    for _ in range(3):
        after = update(after)
    assert float(after["split"][-1, -1]) == 7
    checkpoints.wait()
    found, host = checkpoints.restore(1, {"state": shapes})
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found["state"]), values)
    assert host == {"rows": 3}
    checkpoints.close()


@pytest.mark.gpu
def test_nothing_is_copied_on_the_devices(tmp_path):
    def buffers() -> set[int]:
        """Of arrays on the devices: what is written lies in pinned memory of the host meanwhile."""
        alive = [array for array in jax.live_arrays() if array.shape == ALONE]
        return {array.unsafe_buffer_pointer() for array in alive if array.sharding.memory_kind != sharding.PINNED_HOST}

    state = {"weight": jax.device_put(np.ones(ALONE, np.float32), jax.devices()[0])}
    checkpoints = Checkpoints(tmp_path, keep=3)
    assert len(buffers()) == 1
    checkpoints.save({"state": state}, {}, step=1)
    assert len(buffers()) == 1
    checkpoints.close()


def test_a_save_that_fails_is_told_once_it_has_ended(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        checkpoints.save({"state": {"weight": jax.random.normal(jax.random.key(0), (4096, 2048))}}, {}, step=1)
        with pytest.raises((OSError, ValueError), match="00000001"):
            for _ in range(3000):
                checkpoints.check()
                time.sleep(0.01)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_damage_within_a_chunk_shows_where_arrays_are_read(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    weight = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float32)
    checkpoints.save({"state": {"weight": jnp.asarray(weight)}}, {}, step=1)
    checkpoints.wait()
    assert checkpoints.damage(1, ["state"]) == ""
    largest = max((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(b"\0" * 1000 + content[1000:])
    assert checkpoints.damage(1, ["state"]).startswith("state/manifest.ocdbt: ")
    checkpoints.close()
