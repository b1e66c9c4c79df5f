"""What deltas of snapshots save: how many values of bfloat16 an update changes, and bytes and seconds at a real model's shapes.

    python -m benchmarks.deltas --workdir=DIR --data=DATA [--preset=qwen2.5-0.5b] [--rates=1e-6,1e-5] [--distances=1,2,4,8]

First TinyStories-656K learns happy endings at each learning rate (configs/story_sentiment.py, search and training in turn), and
publishes each update in float32. The share of values that differ in bfloat16 from those so many updates before is told of its
own weights, and of normal ones of std 0.02, as large models have them, to which the same changes are added. Then normal weights
of the preset's shapes, with changes drawn from the real ones, are published and loaded, full and as a delta in turn; the reader
holds the base. A delta that does not come back bit by bit ends the benchmark. The folder --data has models/ and tinystories/.
"""

import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from absl import app, flags

from benchmarks import side_by_side, summary
from tba_jax import sharding
from tba_jax.models import parameters
from tba_jax.models.config import PRESETS
from tba_jax.models.policy import Policy
from tba_jax.storage import deltas, places, published, snapshots

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for runs and snapshots.", required=True)
_DATA = flags.DEFINE_string("data", None, "Folder with models/TinyStories-656K and tinystories/.", required=True)
_PRESET = flags.DEFINE_enum("preset", "qwen2.5-0.5b", [*PRESETS], "Whose shapes are published.")
_RATES = flags.DEFINE_list("rates", ["1e-6", "1e-5"], "Learning rates.")
_DISTANCES = flags.DEFINE_list("distances", ["1", "2", "4", "8"], "Updates between the base and a delta.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Of each measurement; the median is told.", lower_bound=1)

# Updates before the base: the moments of Adam have settled by then.
_BEFORE, _STD = 32, 0.02

T = TypeVar("T")


def job(rate: str, steps: int) -> side_by_side.Job:
    data = Path(_DATA.value).resolve()
    settings = side_by_side.in_turn(steps, 0) | {
        "model.path": data / "models" / "TinyStories-656K",
        "task.story_sentiment.data_path": data / "tinystories" / "tinystories_1000.json",
        "learner.learning_rate": rate,
        "publish.dtype": "float32",
        "publish.keep": 0,
        "evaluation.every_steps": steps,
    }
    root = Path(_WORKDIR.value)
    return side_by_side.Job(root=root, name=f"rate-{rate}", recipe="configs/story_sentiment.py", settings=settings)


def weights_of(workdir: Path, step: int) -> np.ndarray:
    """float32[N], all weights of a snapshot."""
    folder = published.kept(workdir / "policy")[step]
    names = places.folders_with(folder, "zarr.json")
    stores = [ts.open(places.ARRAY | {"kvstore": places.kvstore(folder / name)}, open=True).result() for name in names]
    return np.concatenate([store.read().result().ravel() for store in stores])


def changed(before: np.ndarray, change: np.ndarray) -> float:
    """The share of values that differ in bfloat16."""
    first, second = (x.astype(jnp.bfloat16).view(np.uint16) for x in (before, before + change))
    return float((first != second).mean())


def normal_params(policy: Policy, mesh: jax.sharding.Mesh, changes: np.ndarray | None = None) -> Any:
    """bfloat16 weights, always the same; with changes that are drawn for each value, where there are any."""
    shardings = parameters.flatten(policy.trained_shardings(mesh))

    def make(name: str, spec: parameters.ParamSpec) -> jax.Array:
        rng, drawing = (np.random.default_rng([seed, *name.encode()]) for seed in (0, 1))
        value = _STD * rng.standard_normal(spec.shape, dtype=np.float32)
        if changes is not None:
            value += changes[drawing.integers(len(changes), size=spec.shape, dtype=np.int32)]
        return jax.device_put(value.astype(jnp.bfloat16), shardings[name])

    return parameters.map_specs(make, policy.trained_specs)


def timed(work: Callable[..., T], *arguments: Any, **settings: Any) -> tuple[float, T]:
    begin = time.perf_counter()
    result = jax.block_until_ready(work(*arguments, **settings))
    return time.perf_counter() - begin, result


def on_disk(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in places.files_in(folder))


def compare(policy: Policy, mesh: jax.sharding.Mesh, base: deltas.Base, changes: np.ndarray) -> list[str]:
    """The cells of a row: bytes, seconds to publish and seconds to load."""
    policies, after = Path(_WORKDIR.value) / "snapshots", normal_params(policy, mesh, changes)
    specs, shardings = policy.trained_specs, policy.trained_shardings(mesh)
    held, seconds, sizes = deltas.Held(), dict[tuple[str, str], list[float]](), dict[str, int]()
    for repeat in range(_REPEATS.value + 1):  # the first is not told, and lets the reader hold the base
        for kind in ("full", "delta"):
            of = base if kind == "delta" else None
            folder = policies / snapshots.new_name(1 + repeat, 1, base=base.name if of else "")
            wrote, _ = timed(snapshots.write, folder, after, dtype="bfloat16", durable=False, base=of)
            sizes[kind] = on_disk(folder)
            read, loaded = timed(snapshots.load, folder, specs, shardings, dtype="bfloat16", held=held if of else None)
            assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), loaded, after))), folder
            del loaded
            shutil.rmtree(folder)
            if repeat:
                seconds.setdefault((kind, "publish"), []).append(wrote)
                seconds.setdefault((kind, "load"), []).append(read)
    took = {key: f"{statistics.median(each):.2f}" for key, each in seconds.items()}
    cells = [f"{took['full', what]} -> {took['delta', what]}" for what in ("publish", "load")]
    return [f"{sizes['full'] / 1e6:,.0f} -> {sizes['delta'] / 1e6:,.1f} ({sizes['delta'] / sizes['full']:.1%})", *cells]


def main(argv: Sequence[str]) -> None:
    del argv
    distances = [int(each) for each in _DISTANCES.value]
    jobs = {rate: job(rate, _BEFORE + max(distances)) for rate in _RATES.value}
    side_by_side.run_all([*jobs.values()])
    policy, mesh = Policy(model=PRESETS[_PRESET.value]), sharding.make_mesh((1, 1, 1), setting="benchmark")
    first, name = normal_params(policy, mesh), snapshots.new_name(0, 1)
    snapshots.write(Path(_WORKDIR.value) / "snapshots" / name, first, dtype="bfloat16")
    base = snapshots.as_base(name, first)
    summary.table("rate", "updates since the base", "changed, own weights", "std 0.02", "MB", "s to publish", "s to load")
    for rate, made in jobs.items():
        before = weights_of(made.workdir, _BEFORE)
        normal = _STD * np.random.default_rng(0).standard_normal(before.shape, dtype=np.float32)
        for distance in distances:
            change = weights_of(made.workdir, _BEFORE + distance) - before
            shares = [f"{changed(each, change):.2%}" for each in (before, normal)]
            summary.row(rate, str(distance), *shares, *compare(policy, mesh, base, change))


if __name__ == "__main__":
    app.run(main)
