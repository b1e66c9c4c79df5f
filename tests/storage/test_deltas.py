"""Differences of arrays: every bit pattern comes back, small moves are small numbers, and a sum tells another array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from tba_jax.models.parameters import Params
from tba_jax.storage import deltas, places, snapshots
from tests.support.tiny_snapshots import SPECS, assert_same_bits, random_params, shardings


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float32"])
def test_every_bit_pattern_comes_back_from_every_other(dtype):
    """Among them −0.0, infinities, subnormals and every NaN of 16 bits; each against patterns that are drawn."""
    rng, unsigned = np.random.default_rng(0), deltas.data_type(dtype)
    most = np.iinfo(unsigned).max
    patterns = np.arange(1 << 16, dtype=np.uint64) % (most + 1) if most <= 0xFFFF else rng.integers(0, most + 1, 1 << 16)
    ends = np.array([0, 1, most // 2, most // 2 + 1, most - 1, most], np.uint64)
    block = np.concatenate([patterns, np.repeat(ends, 6)]).astype(unsigned).view(jnp.dtype(dtype))
    drawn = rng.integers(0, most + 1, len(patterns), np.uint64)
    base = np.concatenate([drawn, np.tile(ends, 6)]).astype(unsigned).view(jnp.dtype(dtype))
    found = deltas.restore(base, deltas.difference(block, base))
    assert found.dtype == block.dtype
    np.testing.assert_array_equal(found.view(unsigned), block.view(unsigned))
    assert not deltas.difference(block, block).any()


def test_a_value_that_moved_to_its_neighbour_is_a_number_of_two_bits():
    base = np.random.default_rng(0).standard_normal(1000).astype(jnp.bfloat16)
    for steps, expected in ((1, 2), (-1, 1), (2, 4)):
        moved = (base.view(np.uint16) + np.uint16(steps % (1 << 16))).view(jnp.bfloat16)
        assert (deltas.difference(moved, base) == expected).all()


def test_few_changes_take_few_bytes(tmp_path):
    rng = np.random.default_rng(0)
    base = (0.02 * rng.standard_normal((512, 1024))).astype(np.float32)
    block = (base + rng.normal(scale=1e-6, size=base.shape)).astype(jnp.bfloat16)
    metadata = {"shape": base.shape, "data_type": deltas.data_type("bfloat16"), "codecs": deltas.codecs("bfloat16")}
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/"}, "metadata": metadata}
    store = ts.open(spec, create=True).result()
    store.write(deltas.difference(block, base.astype(jnp.bfloat16))).result()
    size = sum(path.stat().st_size for path in tmp_path.rglob("c/**/*") if path.is_file())
    assert 0.001 < size / block.nbytes < 0.06
    found = deltas.restore(base.astype(jnp.bfloat16), store.read().result())
    np.testing.assert_array_equal(found.view(np.uint16), block.view(np.uint16))


def test_sums_tell_the_chunk_that_differs_and_join_over_blocks():
    array = np.arange(7 * 6, dtype=np.float32).reshape(7, 6).astype(jnp.bfloat16)
    written = deltas.sums(array, (2, 3), begin=(0, 0))
    assert sorted(written) == [f"{i},{j}" for i in (0, 2, 4, 6) for j in (0, 3)]
    joined = deltas.sums(array[:4], (2, 3), begin=(0, 0)) | deltas.sums(array[4:], (2, 3), begin=(4, 0))
    assert joined == written
    array[5, 4] = -array[5, 4]
    now = deltas.sums(array, (2, 3), begin=(0, 0))
    assert [chunk for chunk in now if now[chunk] != written[chunk]] == ["4,3"]


def written(policies: places.Place, first: Params, second: Params) -> tuple[places.Place, places.Place]:
    """The folders of a full snapshot and of a delta of it."""
    full = policies / snapshots.new_name(4, 1)
    delta = policies / snapshots.new_name(6, 1, base=full.name)
    snapshots.write(full, first, dtype="bfloat16")
    snapshots.write(delta, second, dtype="bfloat16", base=snapshots.as_base(full.name, first))
    return full, delta


@pytest.mark.parametrize("kind", ["folder", "memory"])
@pytest.mark.parametrize("lost", ["base", "delta", "base at rest", "delta.json"])
def test_a_delta_comes_back_on_any_mesh_and_names_what_is_damaged(tmp_path, kind, lost):
    policies = tmp_path if kind == "folder" else places.place(f"memory://deltas-{lost}/policy")
    first = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(1))
    second = jax.tree.map(lambda x: np.where(np.arange(x.size).reshape(x.shape) % 5, x, -x).astype(x.dtype), first)
    full, delta = written(policies, *(jax.device_put(each, shardings((2, 2, 2))) for each in (first, second)))
    as_float = jax.tree.map(lambda x: np.asarray(x).astype(np.float32), second)
    held = deltas.Held()
    for mesh in ((8, 1, 1), (1, 4, 2), (2, 2, 2)):
        assert_same_bits(snapshots.load(delta, SPECS, shardings(mesh)), as_float)  # a reader that is behind: base and delta
        assert_same_bits(snapshots.load(delta, SPECS, shardings(mesh), held=held), as_float)
    folder = full if lost.startswith("base") else delta
    chunk = next(name for name in places.files_in(folder) if name.startswith("embedding.weight/c/"))
    if lost == "base":
        places.remove_tree(folder)
    elif lost == "delta.json":
        places.remove(folder / lost)
    else:
        content = bytearray(places.read_bytes(folder / chunk))
        content[len(content) // 2] ^= 1
        places.write_bytes(folder / chunk, bytes(content))
    if folder == full:  # one who holds the base reads the delta alone
        assert_same_bits(snapshots.load(delta, SPECS, shardings(), held=held), as_float)
    names = full.name if lost == "base at rest" and kind == "folder" else lost if lost == "delta.json" else delta.name
    with pytest.raises(snapshots.Damaged, match=names):
        snapshots.load(delta, SPECS, shardings())


def test_another_base_under_the_same_name_is_damage_of_a_named_parameter(tmp_path):
    first, other = (jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(seed)) for seed in (1, 2))
    full, delta = written(tmp_path, first, first)
    places.remove_tree(full)
    snapshots.write(full, other, dtype="bfloat16")
    with pytest.raises(snapshots.Damaged, match=r"parameter .* is damaged: .*the base is another or damaged"):
        snapshots.load(delta, SPECS, shardings())
