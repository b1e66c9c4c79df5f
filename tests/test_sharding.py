"""Meshes: which of their programs come from the compilation cache, and which may be started side by side."""

import concurrent.futures
import os
import subprocess
import sys
import threading

import jax
from jax.sharding import Mesh

from tba_jax import sharding
from tests.support import tiny_run

COMPILES = """
import jax, numpy as np
from tba_jax import sharding
for sizes in ((1, 1, 1), (2, 1, 1)):
    mesh = sharding.make_mesh(sizes, setting="test", devices=jax.devices()[: sizes[0]])
    def total(x):
        return x.sum(axis=0)
    total.__name__ = f"total_of_{mesh.size}"
    rows = sharding.put_rows(mesh, np.ones((2, 3), np.float32))
    assert jax.jit(total, out_shardings=sharding.replicated(mesh))(rows).sum() == 6
"""


def test_programs_of_several_cpu_devices_are_not_cached(tmp_path):
    """XLA loses the order of their collectives there. The process has used the cache before, for programs of one device."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    subprocess.run([sys.executable, "-c", COMPILES], cwd=tiny_run.ROOT, env=os.environ | cache | flags, check=True)
    cached = {file.name.split("-")[0] for file in tmp_path.iterdir()}
    assert "jit_total_of_1" in cached and "jit_total_of_2" not in cached


def mesh_of(first: int, last: int) -> Mesh:
    return sharding.make_mesh((last - first, 1, 1), setting="test", devices=jax.devices()[first:last])


def are_started_side_by_side(mesh: Mesh, other: Mesh) -> bool:
    """Whether a thread starts a program of `other` while one of `mesh` is being started."""
    is_starting, other_starts = threading.Event(), threading.Event()

    def program() -> bool:
        is_starting.set()
        return other_starts.wait(0.5)

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        started = threads.submit(sharding.on_mesh(mesh, program))
        is_starting.wait()
        threads.submit(sharding.on_mesh(other, other_starts.set))
        return started.result()


def test_threads_start_programs_that_share_a_device_one_after_the_other():
    """In different orders, devices would wait for ever in each other's collectives. A program of one device has none."""
    whole, way, other_way, one = mesh_of(0, 4), mesh_of(0, 2), mesh_of(2, 4), mesh_of(0, 1)
    assert not are_started_side_by_side(whole, whole)
    assert not are_started_side_by_side(way, whole) and not are_started_side_by_side(whole, other_way)
    assert are_started_side_by_side(way, other_way)
    assert are_started_side_by_side(whole, one) and are_started_side_by_side(one, one)
