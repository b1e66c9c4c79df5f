"""Parameters of a small decoder, with the values that lossy writes lose, and their places on meshes."""

import functools
import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tba_jax import sharding
from tba_jax.models import parameters
from tba_jax.models.parameters import Params
from tba_jax.storage import fenced, places, published, snapshots
from tba_jax.storage.places import Place
from tests.support import applied
from tests.support.tiny_updates import MODEL

SPECS = applied.specs(MODEL)


@functools.cache
def shardings(sizes: tuple[int, int, int] = (8, 1, 1)) -> Params:
    return applied.shardings(MODEL, sharding.make_mesh(sizes, setting="learner.mesh"))


def random_params(seed: int = 0) -> Params:
    rng = np.random.default_rng(seed)
    params = parameters.map_specs(lambda _, spec: rng.standard_normal(spec.shape).astype(np.float32), SPECS)
    # Values that lossy writes lose: zeros (a chunk of fill values), subnormals, the largest numbers.
    params["final_norm"]["scale"][:] = 0.0
    params["layers"]["attention_norm"]["scale"][0, :4] = [1e-42, -3.4e38, -0.0, np.inf]
    return params


def assert_same_bits(found: Params, expected: Params) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32)), found, expected
    )


def publish(
    policies: Place,
    step: int,
    params: Params | None = None,
    *,
    epoch: int = 1,
    dtype: str = "float32",
    beside: Mapping[str, bytes] | None = None,
) -> Any:
    """Writes a snapshot and has the pointer name it, as a trainer of the epoch does. Returns its folder."""
    name = snapshots.new_name(step, epoch)
    snapshots.write(policies / name, random_params(step) if params is None else params, dtype=dtype, beside=beside)
    point(policies, {**published.kept(policies), step: policies / name}, epoch=epoch)
    return policies / name


def withdraw(policies: Place, step: int) -> None:
    """Removes the snapshot of a step, as a trainer does."""
    there = published.kept(policies)
    folder = there.pop(step)
    point(policies, there)
    places.remove_tree(folder)


def tear(fenced_value: Any) -> None:
    """A power cut tears the newest version of a fenced value in a folder; of a lease, nobody holds the one before."""
    newest = max(fenced_value.iterdir())
    os.truncate(newest, 0)
    for file in {*fenced_value.iterdir()} - {newest}:
        facts = json.loads(file.read_bytes() or b"[]")
        if isinstance(facts, dict):
            file.write_text(json.dumps(facts | {"pid_start": "1"}))


def point(policies: Place, there: Mapping[int, Any], *, epoch: int = 1) -> None:
    """Has the pointer name these folders."""
    pointer = policies / published.POINTER
    epoch = max(epoch, fenced.read(pointer).epoch)
    fenced.write(pointer, [folder.name for _, folder in sorted(there.items())], epoch=epoch)
