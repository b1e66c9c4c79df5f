"""What checkpoints and snapshots cost a trainer: seconds of its steps, the time that a save blocks, and the bytes that leave.

python -m benchmarks.checkpoints [--parts=steps,blocked,publish] [--reps=9] [--steps=40] [--megabytes=64,512] [--preset=gpt2]

`steps`: the demo's update, with a checkpoint every 2 and every 20 steps and without any, in blocks of --steps that take turns.
What a block has begun to write ends before the next block, outside of its time. `blocked`: how long `Checkpoints.save` keeps
the trainer from its next update, against copying the same arrays from the device to the host and nothing else, in turn.
`publish`: the bytes of all blocks that the host gets of a policy with float32 masters, by publish.dtype. Each line has the median
and the quartiles.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from benchmarks import pieces
from configs import demo
from tba_jax.models import parameters
from tba_jax.models.policy import Policy
from tba_jax.models.presets import PRESETS
from tba_jax.run import publisher, snapshots
from tba_jax.run.checkpoints import Checkpoints

_PARTS = flags.DEFINE_list("parts", ["steps", "blocked", "publish"], "Which parts to measure.")
_REPS = flags.DEFINE_integer("reps", 9, "Of each part.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 40, "Updates of a block.", lower_bound=1)
_MEGABYTES = flags.DEFINE_list("megabytes", ["64", "512"], "Sizes of the state, for `blocked`.")
_PRESET = flags.DEFINE_enum("preset", "gpt2", sorted(PRESETS), "The shape of the policy, for `publish`.")

EVERY_STEPS = (0, 2, 20)  # 0: no checkpoints


def told(values: Sequence[float], unit: float = 1.0) -> str:
    low, median, high = (unit * each for each in statistics.quantiles(values, n=4, method="inclusive"))
    return f"{median:8.3f}  ({low:.3f} to {high:.3f})"


class Trainer:
    """The demo's update in a loop that saves its state."""

    def __init__(self, folder: Path):
        update = pieces.update_of(demo.get_config())
        self._batch, self._state = update.batch, jax.jit(update.init)()
        self._update = jax.jit(update.step, donate_argnums=0)
        self._checkpoints, self._saved = Checkpoints(folder, keep=2), 0

    def block(self, steps: int, every_steps: int) -> float:
        """Seconds of one step of a block."""
        begin = time.perf_counter()
        for step in range(1, steps + 1):
            self._state, measurements = self._update(self._state, self._batch)
            jax.device_get(measurements)
            if every_steps and step % every_steps == 0:
                self._saved += 1
                self._checkpoints.save({"state": self._state}, {}, step=self._saved)
        jax.block_until_ready(self._state)
        seconds = (time.perf_counter() - begin) / steps
        self._checkpoints.wait()
        return seconds

    def close(self) -> None:
        self._checkpoints.close()


def steps(folder: Path) -> None:
    trainer, found = Trainer(folder), {every: list[float]() for every in EVERY_STEPS}
    for every in EVERY_STEPS:
        trainer.block(4, every)
    for rep in range(_REPS.value):
        for every in EVERY_STEPS[rep % 3 :] + EVERY_STEPS[: rep % 3]:
            found[every].append(trainer.block(_STEPS.value, every))
    trainer.close()
    for every, values in found.items():
        ratios = [value / plain for value, plain in zip(values, found[0], strict=True)]
        print(f"step, checkpoint every {every or '-':>2}: {told(values, 1e3)} ms, ratio {told(ratios)}", flush=True)


def blocked(folder: Path, megabytes: int) -> None:
    """Arrays of 4 MiB, as of a model whose layers are stacked or not, on the device."""
    state = {str(i): jnp.full((1 << 20,), float(i)) for i in range(megabytes // 4)}
    jax.block_until_ready(state)
    checkpoints = Checkpoints(folder, keep=1)

    def copy(_: int) -> None:
        for x in state.values():
            np.array(x)  # np.asarray would give a CPU's own memory

    def save(step: int) -> None:
        checkpoints.save({"state": state}, {}, step=step)

    found = {what: list[float]() for what in (copy, save)}
    for rep in range(_REPS.value + 1):
        for what in (copy, save) if rep % 2 else (save, copy):
            seconds = _seconds(what, rep)
            checkpoints.wait()
            if rep:  # the first makes folders and threads
                found[what].append(seconds)
    checkpoints.close()
    ratios = [saved / copied for saved, copied in zip(found[save], found[copy], strict=True)]
    print(f"{megabytes} MiB: copy to the host {told(found[copy], 1e3)} ms, save blocks {told(found[save], 1e3)} ms", flush=True)
    print(f"  save / copy {told(ratios)}", flush=True)


def _seconds(what: Callable[[int], Any], rep: int) -> float:
    begin = time.perf_counter()
    what(rep)
    return time.perf_counter() - begin


def publish(folder: Path) -> None:
    folder.mkdir()
    policy = Policy(model=PRESETS[_PRESET.value])
    params = jax.jit(policy.base.init)(jax.random.key(0))
    count = parameters.count(policy.model_specs)
    for dtype in ("float32", "bfloat16"):
        moved = published_bytes(folder / dtype, params, dtype=dtype)
        print(f"{_PRESET.value}, {count:,} float32 parameters, publish.dtype={dtype}: {moved:,} bytes to the host", flush=True)


def published_bytes(folder: Path, params: parameters.Params, *, dtype: str) -> int:
    """Bytes of all blocks that a Publisher takes from the device to write a snapshot of `params`."""
    moved, on_host = 0, snapshots._host_shards

    def counted(array: Any) -> list[tuple[Any, np.ndarray]]:
        nonlocal moved
        shards = on_host(array)
        moved += sum(block.nbytes for _, block in shards)
        return shards

    snapshots._host_shards = counted
    try:
        made = publisher.Publisher(folder, dtype=dtype, keep=0, keep_every=1, final_step=1)
        made.publish(params, snapshots.SnapshotInfo(step=1, epoch=1))
        made.close()
    finally:
        snapshots._host_shards = on_host
    return moved


def main(argv: Sequence[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        if "steps" in _PARTS.value:
            steps(Path(folder) / "steps")
        for size in map(int, _MEGABYTES.value) if "blocked" in _PARTS.value else ():
            blocked(Path(folder) / str(size), size)
        if "publish" in _PARTS.value:
            publish(Path(folder) / "publish")


if __name__ == "__main__":
    app.run(main)
