"""Meshes: which of their programs come from the compilation cache."""

import os
import subprocess
import sys

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
