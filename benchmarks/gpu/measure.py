"""One measurement of the suite, in its own process: an update, a decoder, or the way of weights to the samplers.

python -m benchmarks.gpu.measure --what=update|decode|wire --preset=NAME --answer=FILE [--tiny] [--attention=auto] [--remat=full]
  [--nodonate] [--weights=full|int8] [--samples=16]

Writes the rows as a JSON list. Before an update or a decoder is made, the compiler's figure of its memory is held against what
JAX may take of the device; a case that does not fit is left out by a row that says so.
"""

import dataclasses
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import trainer_update
from benchmarks.gpu import worker
from benchmarks.gpu.worker import row
from tba_jax import sharding
from tba_jax.decoding import sampling
from tba_jax.decoding.engine import Engine
from tba_jax.decoding.requests import Request
from tba_jax.decoding.slots import row_keys
from tba_jax.models import attention, hardware, parameters
from tba_jax.models.config import DecoderConfig, ResponseSpace
from tba_jax.models.policy import Policy
from tba_jax.roles.work import Work
from tba_jax.storage import snapshots
from tba_jax.telemetry import metrics

_WHAT = flags.DEFINE_enum("what", None, ["update", "decode", "wire"], "What is measured.", required=True)
_ATTENTION = flags.DEFINE_string("attention", "auto", "model.attention of the update.", allow_override=True)
_REMAT = flags.DEFINE_string("remat", "full", "learner.remat of the update.", allow_override=True)
_DONATE = flags.DEFINE_bool("donate", True, "Whether an update takes the state's memory.")
_WEIGHTS = flags.DEFINE_enum("weights", "full", ["full", "int8"], "Of the decoder.", allow_override=True)
_SAMPLES = flags.DEFINE_integer("samples", 16, "Responses to a query, S of the decoder.", lower_bound=1, allow_override=True)

_GIB = 1 << 30
# The share of JAX's memory that the compiler's figure may have: the rest is for fragments, and for what libraries take.
_MOST = 0.95


class DoesNotFit(Exception):
    """The case needs more memory than the device has."""


def shape() -> DecoderConfig:
    """The model that is measured, in bfloat16 on accelerators."""
    return worker.shape("float32" if jax.default_backend() == "cpu" else "bfloat16")


def compiled_bytes(compiled: Any) -> int:
    """The memory of a program and its arguments on its device, by the compiler; 0 where it does not say."""
    found = compiled.memory_analysis()
    if found is None:
        return 0
    return found.argument_size_in_bytes + found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes


def check_fit(size: int) -> None:
    """Raises DoesNotFit."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if limit and size > _MOST * limit:
        raise DoesNotFit(f"it needs {size / _GIB:.1f} GiB by the compiler, JAX may take {limit / _GIB:.1f}")


def peak_bytes() -> int:
    """The most that arrays and programs have taken of the device, 0 where it does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def seconds(call: Callable[[], Any], *, before: Callable[[], Any] = lambda: None) -> list[float]:
    """Seconds of each of the repeats, after two calls that are not counted. Args: before: called before each, not counted."""
    found = []
    for _ in range(2 + worker.REPEATS.value):
        before()
        begin = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - begin)
    return found[2:]


def shares(done: Work, took: float) -> str:
    """The shares of the device's peaks, in words; "" where they are not known."""
    found = done.shares(took, metrics.peaks_of(jax.devices()[:1]))
    names = {"mfu": "MFU, attention counted causally", "bandwidth_share": "of the memory's bandwidth"}
    return ", ".join(f"{100 * share:.1f} % {names[name]}" for name, share in found.items())


def memory_row(size: int) -> dict[str, str]:
    peak = peak_bytes()
    beside = f"{told(peak)} at the most on the device" if peak else "the device does not say what was taken"
    return row("memory by the compiler", told(size) if size else "it does not say", beside)


def told(size: int) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / 2**20:.1f} MiB"


def update_changes(model: DecoderConfig) -> dict[str, Any]:
    """Settings of the update: two queries of eight rows of 512 + 512 tokens, 8 rows at a time."""
    fields = ("layers", "width", "heads", "kv_heads", "head_size", "ffn")
    length, rows = (16, 4) if worker.TINY.value else (512, 8)
    preset = (
        {f"model.{name}": getattr(model, name) for name in fields} if worker.TINY.value else {"model.preset": worker.PRESET.value}
    )
    return preset | {
        "model.compute_dtype": model.compute_dtype,
        "model.attention": _ATTENTION.value,
        "learner.remat": _REMAT.value,
        "learner.queries": 2,
        "learner.completions": rows,
        "learner.micro_batch_tokens": rows * 2 * length,
        "task.prompt_length": length,
        "task.response_length": length,
    }


def update() -> list[dict[str, str]]:
    model = shape()
    changes = update_changes(model)
    program = trainer_update.update_program(changes, model.vocab, begins=False, donates=_DONATE.value)
    rows = trainer_update.random_rows(program, changes, model.vocab)
    placed = program.place(rows)
    size = compiled_bytes(trainer_update.compiled(program, placed))
    check_fit(size)
    trainer_update.begin(program)
    took = statistics.median(seconds(lambda: (program.dispatch(placed), program.state)))
    T = changes["task.prompt_length"] + changes["task.response_length"]
    value = f"{1e3 * took:.1f} ms, {program.rows * T / took:.0f} tokens/s of rows"
    kernel = _ATTENTION.value
    if kernel == hardware.AUTO:
        kernel = attention.fastest(jax.default_backend(), jnp.dtype(model.compute_dtype), model.head_size)
    figure = f"an update of {program.rows} rows of {T}, attention by {kernel}"
    return [row(figure, value, shares(placed.work, took)), memory_row(size)]


def decode() -> list[dict[str, str]]:
    model, S = shape(), _SAMPLES.value
    slots, P, R = (2 * S, 16, 8) if worker.TINY.value else (64, 512 if S > 1 else 64, 128)
    mesh = sharding.make_mesh((1, 1, 1), setting="benchmark", devices=jax.devices()[:1])
    space = ResponseSpace(temperature=1.0, banned_tokens=(), eos_id=-1)
    sizes: dict[str, Any] = dict(slots=slots, samples=S, prompt_length=P, response_length=R, pad_id=0, lockstep=True)
    engine = Engine(model, space, mesh, weights=_WEIGHTS.value, **sizes)
    policy = Policy(model=model)
    shapes = jax.eval_shape(
        lambda base: policy.for_sampling(base, base, _WEIGHTS.value), policy.model_shapes(mesh, dtype="float32")
    )
    replicated = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.replicated(mesh)), shapes)
    size = compiled_bytes(engine.programs(replicated)["decode"].lower().compile())
    check_fit(size)
    base = jax.jit(lambda key: parameters.cast(policy.base.init(key), model.compute_dtype))(jax.random.key(0))
    engine.set_policy(jax.jit(lambda params: policy.for_sampling(params, params, _WEIGHTS.value))(base), 0)
    del base
    Q = slots // S
    prompts = np.random.default_rng(1).integers(3, model.vocab, (Q, P)).tolist()
    keys = np.asarray(row_keys(0, 0, np.arange(slots, dtype=np.uint32))).reshape(Q, S, 2)
    asked = [
        Request(name=str(q), prompt=prompts[q], keys=keys[q], sampling=sampling.constant(S, temperature=1.0)) for q in range(Q)
    ]
    engine.generate(asked)
    before = dataclasses.replace(engine.usage)
    took = statistics.median(seconds(lambda: len(engine.generate(asked))))
    calls, after = 2 + worker.REPEATS.value, engine.usage
    read = (after.bytes - before.bytes) // calls
    value = f"{slots * R / took:.0f} tokens/s"
    return [row(f"{slots} rows of {P} + {R}, S = {S}, prefill included", value, shares(Work(bytes=read), took)), memory_row(size)]


def wire() -> list[dict[str, str]]:
    """Publishing a policy, loading it beside a decoder, and preparing it for the decode loop."""
    model = shape()
    policy = Policy(model=model)
    mesh = sharding.make_mesh((1, 1, 1), setting="benchmark", devices=jax.devices()[:1])
    trained = jax.jit(policy.base.init, out_shardings=policy.trained_shardings(mesh))(jax.random.key(0))
    copy = sharding.copy_program("bfloat16")
    made = jax.block_until_ready(copy(trained))
    space = ResponseSpace(temperature=1.0, banned_tokens=(), eos_id=-1)
    engine = Engine(model, space, mesh, slots=4, samples=2, prompt_length=32, response_length=8, pad_id=0)
    number = iter(range(1_000_000))
    with tempfile.TemporaryDirectory(prefix="wire-") as folder:
        last = Path(folder) / "0"

        def publish() -> None:
            nonlocal last
            last = Path(folder) / str(next(number))
            snapshots.write(last, made, dtype="bfloat16", durable=False)

        def load() -> Any:
            return snapshots.load(last, policy.trained_specs, policy.trained_shardings(mesh), dtype=model.compute_dtype)

        times = {"copying it on the device": seconds(lambda: copy(trained))}
        # A folder of its own each time, of which the disk holds one.
        times["writing the snapshot"] = seconds(publish, before=lambda: shutil.rmtree(last, ignore_errors=True))
        times["loading it onto the device"] = seconds(load)
        loaded = load()
        times["preparing it for the decode loop"] = seconds(lambda: engine.prepare(loaded))
    size = parameters.count(policy.trained_specs) * 2
    return [row(name, f"{1e3 * statistics.median(took):.1f} ms", f"{told(size)} in bfloat16") for name, took in times.items()]


MEASURES: dict[str, Callable[[], list[dict[str, str]]]] = {"update": update, "decode": decode, "wire": wire}


def main(argv: Sequence[str]) -> None:
    del argv
    try:
        rows = MEASURES[_WHAT.value]()
    except DoesNotFit as error:
        rows = [row("left out", str(error))]
    worker.write(rows)


if __name__ == "__main__":
    app.run(main)
