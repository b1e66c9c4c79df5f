"""Settings whose defaults go by the kind of device (tba_jax/models/hardware.py), each tried on this one.

python -m benchmarks.defaults [--only=remat,decode_chunk,slots] [--repeats=5]

remat: an update of 32 rows of 64 + 64 tokens, 6 layers of width 384, vocabulary 4096; time and the compiler's temporary memory.
decode_chunk: a stream of log-normal lengths through 64 slots of the same model, 16 samples a query; time. slots: the same stream,
a batch of 256 samples, through slots for all of the batch and for parts of it. All values of a setting are timed in turn, and the
table has medians and the median ratio to the first value.
"""

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags

from benchmarks import trainer_update
from tba_jax import sharding
from tba_jax.decoding import sampling
from tba_jax.decoding.engine import Engine
from tba_jax.decoding.requests import Request
from tba_jax.decoding.slots import row_keys
from tba_jax.models import decoder
from tba_jax.models.config import DecoderConfig
from tba_jax.models.response_space import ResponseSpace

_ONLY = flags.DEFINE_list("only", ["remat", "decode_chunk", "slots"], "Which settings.", allow_override=True)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Of each time.", lower_bound=1, allow_override=True)

_VOCAB = 4096
REMAT = ("full", "dots", "none")
CHUNKS = (32, 8, 16, 64)
SHARES = (1.0, 0.5, 0.25)  # of a batch
_BATCH = 256


def interleaved(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, after one that is not counted; all of them in turn."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            if repeat:
                found[name].append(time.perf_counter() - begin)
    return found


def remat() -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """The update by each value of learner.remat, and the memory that it takes."""
    calls: dict[str, Callable[[], Any]] = {}
    told: dict[str, str] = {}
    for name in REMAT:
        changes = {"learner.remat": name}
        program = trainer_update.update_program(changes, _VOCAB)
        rows = trainer_update.random_rows(program, changes, _VOCAB)
        calls[name] = functools.partial(program.apply, rows)
        found = trainer_update.compiled(program, program.place(rows)).memory_analysis()
        told[name] = f"{found.temp_size_in_bytes / 2**20:.0f} MiB" if found else ""
    return calls, told


def decode_chunk() -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """A stream of 256 samples by each value of searchers.decode_chunk."""
    return _streams({str(chunk): dict(slots=64, chunk=chunk) for chunk in CHUNKS})


def slots() -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """The same stream, a batch, by each share of it that is decoded side by side."""
    return _streams({str(share): dict(slots=int(share * _BATCH)) for share in SHARES})


def _streams(settings: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """A stream of 256 samples by each of the settings of an engine."""
    sizes: dict[str, Any] = {
        name.removeprefix("model."): size for name, size in trainer_update.SIZES.items() if name.startswith("model.")
    }
    model = DecoderConfig(**sizes, vocab=_VOCAB, max_positions=1024, compute_dtype="float32")
    params = jax.jit(decoder.define(model).init)(jax.random.key(0))
    mesh = sharding.make_mesh((1, 1, 1), setting="benchmark", devices=jax.devices()[:1])
    space = ResponseSpace(temperature=1.0, banned_tokens=(), eos_id=-1)
    limits = np.clip(np.rint(np.exp(np.random.default_rng(0).normal(np.log(32), 0.8, (16, 16)))), 4, 128).astype(np.int32)
    keys = np.asarray(row_keys(0, 0, np.arange(_BATCH, dtype=np.uint32))).reshape(16, 16, 2)
    prompts = np.random.default_rng(1).integers(3, _VOCAB, (16, 64)).tolist()
    drawn = sampling.constant(16, temperature=1.0)
    asked = [Request(name=str(q), prompt=prompts[q], keys=keys[q], sampling=drawn, limit=limits[q]) for q in range(16)]
    calls: dict[str, Callable[[], Any]] = {}
    told: dict[str, str] = {}
    lengths: dict[str, Any] = dict(samples=16, prompt_length=64, response_length=128, pad_id=0)
    for name, setting in settings.items():
        engine = Engine(model, space, mesh, **lengths, **setting)
        engine.set_policy(params, 0)
        calls[name] = functools.partial(lambda engine: len(engine.generate(asked)), engine)
        told[name] = ""
    return calls, told


SETTINGS = {"remat": remat, "decode_chunk": decode_chunk, "slots": slots}


def main(argv: Sequence[str]) -> None:
    del argv
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    print("| setting | value | ms | of the first | temporary memory |\n|---|---|---|---|---|", flush=True)
    for setting in _ONLY.value:
        if setting not in SETTINGS:
            raise app.UsageError(f"--only={setting} is none of {', '.join(SETTINGS)}")
        calls, told = SETTINGS[setting]()
        times = interleaved(calls, _REPEATS.value)
        first = next(iter(times.values()))
        for name, seconds in times.items():
            ratio = statistics.median(a / b for a, b in zip(seconds, first, strict=True))
            print(f"| {setting} | {name} | {1e3 * statistics.median(seconds):.0f} | {ratio:.2f} | {told[name]} |", flush=True)


if __name__ == "__main__":
    app.run(main)
