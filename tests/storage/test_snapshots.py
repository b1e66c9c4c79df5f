"""Snapshots: exact round trips into other meshes, damage, storage that refuses, and file systems without locks."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.models import parameters
from tba_jax.models.parameters import Params
from tba_jax.run import processes
from tba_jax.storage import file_systems, places, published, snapshots
from tests.support import applied, without_locks
from tests.support.tiny_snapshots import MODEL, SPECS, assert_same_bits, random_params, shardings


def save(policies: Path, step: int, params: Params | None = None, *, dtype: str = "float32") -> Path:
    folder = policies / str(step)
    snapshots.write(folder, random_params(step) if params is None else params, dtype=dtype)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_come_back_bit_by_bit_on_any_mesh(tmp_path, dtype):
    folder = save(tmp_path, 5, jax.device_put(random_params(), shardings((2, 2, 2))), dtype=dtype)
    found = snapshots.load(folder, SPECS, shardings((8, 1, 1)))
    assert_same_bits(found, jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)).astype(np.float32), random_params()))
    assert jax.tree.map(lambda x: x.sharding, found) == shardings((8, 1, 1))
    sizes = [path.stat().st_size for path in folder.rglob("c/**/*") if path.is_file()]
    assert sum(sizes) < (jnp.dtype(dtype).itemsize + 1) * applied.count(MODEL)


def test_large_shards_are_cut_into_chunks(tmp_path, monkeypatch):
    written = (2, 2, 2)
    sharding_of = parameters.flatten(shardings(written))
    monkeypatch.setattr(snapshots, "CHUNK_BYTES", size := 64)
    folder = save(tmp_path, 1, jax.device_put(random_params(), shardings(written)))
    for name, spec in parameters.flatten(SPECS).items():
        sizes = [path.stat().st_size - 4 for path in (folder / name).rglob("c/**/*") if path.is_file()]  # and a checksum
        assert sum(sizes) >= 4 * np.prod(spec.shape) and max(sizes) <= 2 * size, name
        chunk = json.loads((folder / name / "zarr.json").read_text())["chunk_grid"]["configuration"]["chunk_shape"]
        for whole, part, length in zip(spec.shape, sharding_of[name].shard_shape(spec.shape), chunk, strict=True):
            assert part == whole or part % length == 0, "two shards share a chunk"
    assert_same_bits(snapshots.load(folder, SPECS, shardings((1, 4, 2))), random_params())


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_files_beside_the_parameters_are_there_with_them_or_not_at_all(tmp_path, kind):
    folder = (places.place("memory://beside/policy") if kind == "memory" else tmp_path) / snapshots.new_name(5, 3)
    assert snapshots.step_and_epoch(folder.name) == (5, 3) and snapshots.step_and_epoch("00000005") is None
    snapshots.write(folder, random_params(), dtype="float32", beside={"counts": b"\0 and more"})
    assert places.read_bytes(folder / "counts") == b"\0 and more"
    assert_same_bits(snapshots.load(folder, SPECS, shardings()), random_params())

    class Together:
        leads = True

        def told(self, name: str) -> None:
            raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        snapshots.write(folder.parent / "other", random_params(), dtype="float32", beside={"counts": b""}, together=Together())
    assert places.files_in(folder.parent / "other") == []


def test_storage_that_refuses_is_no_mistake_of_the_user(tmp_path):
    """An OSError, whatever tensorstore raises: a ValueError at the start of a trainer would end its run."""
    save(tmp_path, 4)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match=r"snapshot .*6 could not be written: .*File too large") as refused:
            save(tmp_path, 6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert processes.is_storage_failure(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["4"]


def test_a_damaged_byte_is_an_error_that_names_the_parameter(tmp_path):
    folder = save(tmp_path, 5)
    path = max((folder / "embedding.weight" / "c").rglob("0"), key=lambda path: path.stat().st_size * path.is_file())
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=rf"{folder}: parameter embedding.weight is damaged"):
        snapshots.load(folder, SPECS, shardings())
    (folder / "embedding.weight" / "zarr.json").write_bytes((folder / "final_norm.scale" / "zarr.json").read_bytes())
    with pytest.raises(ValueError, match=r"embedding.weight has shape \(16,\), the model needs \(12, 16\)"):
        snapshots.load(folder, SPECS, shardings())


@pytest.mark.parametrize("moment", ["opening", "reading"])
def test_storage_that_does_not_answer_is_no_damage(tmp_path, monkeypatch, moment):
    folder = save(tmp_path, 5)

    class Failing:
        def result(self, *_):
            raise ValueError("UNAVAILABLE: CURL error [source locations='tensorstore/…']")

    if moment == "opening":
        monkeypatch.setattr(snapshots.ts, "open", lambda *_, **__: Failing())
    else:
        monkeypatch.setattr(jax, "make_array_from_callback", Failing().result)
    with pytest.raises(OSError, match=rf"{folder}: parameter .* UNAVAILABLE") as refused:
        snapshots.load(folder, SPECS, shardings())
    assert processes.is_storage_failure(refused.value)


def test_the_fingerprint_is_that_of_the_weights(tmp_path):
    folders = save(tmp_path / "a", 1), save(tmp_path / "b", 2, random_params(1)), save(tmp_path, 3)
    first, same, other = map(snapshots.fingerprint, folders)
    assert first == same != other and len(first) == 16 and int(first, 16) < 2**64


WRITES = """
import fcntl, sys
from pathlib import Path
try:
    fcntl.flock(open(__file__), fcntl.LOCK_EX)
except OSError:
    pass
else:
    sys.exit("this process can lock files")
from tba_jax.storage import snapshots
from tests.support.tiny_snapshots import SPECS, publish, random_params, shardings
folder = publish(Path(sys.argv[1]), 3)
snapshots.load(folder, SPECS, shardings((1, 1, 1)))
"""


def test_a_file_system_without_locks_holds_snapshots(tmp_path):
    (tmp_path / "writes.py").write_text(WRITES)
    environment = {**os.environ, "LD_PRELOAD": str(without_locks.built(tmp_path)), "PYTHONPATH": str(Path(__file__).parents[2])}
    environment |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "JAX_COMPILATION_CACHE_DIR": ""}
    command = [sys.executable, tmp_path / "writes.py", tmp_path / "policy"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert_same_bits(published.Published(tmp_path / "policy").load(3, SPECS, shardings()), random_params(3))


def test_a_refusal_names_its_place_to_whoever_looks_how_full_it_is(tmp_path):
    told = places.failure(tmp_path, "snapshot 3 could not be written: No space left on device")
    assert file_systems.no_room(told, Path("/proc")).startswith(f"the file system of {tmp_path}")
    assert str(told) == "snapshot 3 could not be written: No space left on device"
