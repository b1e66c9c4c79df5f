"""How fast responses are sampled: our decoder against transformers' `generate` (torch), and both against the machine.

python -m benchmarks.decode [--cases=v4096_s1,…] [--modes=ours,dynamic,static,compile] [--repeats=5] [--out=FILE]
python -m benchmarks.decode --device=gpu [--cases=pythia_s1,pythia_s16,qwen_s1,qwen_s16] [--batch=64]

Both sample at temperature 1 from one checkpoint of random weights, with one list of prompts, on the same cores (`taskset` says
which); GLIBC_TUNABLES=glibc.malloc.hugetlb=1 before the command makes both faster. Ours gives log-probabilities as well. torch
runs in a process of its own (decode_torch.py); the repeats are interleaved, and the times are medians. No response ends by an
end-of-sequence token. Before anything is timed, the greedy continuation of a prompt must be the same in both.

Cases: <model>_s<responses a query> are uniform, 64 rows of 128 new tokens, on prompts of 64 tokens (s1) or 512 (s16: 4 queries);
*_tail and *_s16tail are 256 rows of log-normal lengths (median 32, sigma 0.8, clipped to 4 … 128): ours streams them through 64
slots, torch takes 64 at a time until the longest of them is done, and only what was asked for counts as tokens.

The bound is what no decoder of the dtype can beat on this machine: the larger of the bytes that a decode step must read
(weights, caches; the cache of a prompt once for all its rows) over the read bandwidth and its FLOPs over the rate of matrix
products, and likewise prefill, summed; JAX measures both rates. "bandwidth" is the share of that rate that a run attained.
"""

import dataclasses
import importlib.util
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from benchmarks import json_worker
from tba_jax import sharding
from tba_jax.decoding import sampling as sampling_lib
from tba_jax.decoding.engine import Engine
from tba_jax.decoding.requests import Request
from tba_jax.decoding.slots import row_keys
from tba_jax.models import decoder, parameters
from tba_jax.models.config import PRESETS, DecoderConfig, ResponseSpace
from tba_jax.models.hugging_face import export, load

_DEVICE = flags.DEFINE_enum("device", "cpu", ["cpu", "gpu"], "cpu: float32, small models; gpu: bfloat16, published shapes.")
_CASES = flags.DEFINE_list("cases", [], "Which cases; default: those of the device whose names end with s1, s16 and tail.")
MODES = ("ours", "dynamic", "static", "compile")
_MODES = flags.DEFINE_list(
    "modes", list(MODES[:3]), "ours; or torch's: a cache that grows, one of fixed length, or that compiled."
)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Of each time.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 64, "Rows decoded at a time, a multiple of 16.", lower_bound=16)
_OUT = flags.DEFINE_string("out", "", "A JSON file for all figures.")

RESPONSE = 128
TAIL_BATCHES, TAIL_MEDIAN, TAIL_SIGMA, TAIL_SHORTEST = 4, 32, 0.8, 4
GREEDY_TOKENS = 32
# Vector that is read to measure bandwidth, far larger than any cache; and the side of matrices that FLOPs are measured with.
BANDWIDTH_BYTES = {"cpu": 512 << 20, "gpu": 4 << 30}
MATMUL_SIZE = {"cpu": 2048, "gpu": 8192}

SMALL = DecoderConfig(
    layers=6, width=384, heads=6, kv_heads=6, head_size=64, ffn=1024, max_positions=1024, vocab=4096, compute_dtype="float32"
)
MODELS: dict[str, dict[str, DecoderConfig]] = {
    "cpu": {"v4096": SMALL, "v32000": dataclasses.replace(SMALL, vocab=32_000)},
    "gpu": {
        name: dataclasses.replace(PRESETS[preset], compute_dtype="bfloat16")
        for name, preset in (("pythia", "pythia-410m"), ("qwen", "qwen2.5-1.5b"))
    },
}
_KINDS = ("s1", "s16", "tail", "s16tail")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is decoded. Row i answers query i // samples; rows of a query are consecutive.

    folder: of the checkpoint, in Hugging Face form. model: its config. prompts: int32[Q, P], without padding. samples: rows of a
    query. lengths: int32[Q · samples], new tokens of each row, reached whatever is drawn. slots: rows that are decoded at a time.
    """

    name: str
    folder: Path
    model: DecoderConfig
    prompts: np.ndarray
    samples: int
    lengths: np.ndarray
    slots: int

    @property
    def batches(self) -> list[tuple[int, int]]:
        """(queries, new tokens) of the batches that a decoder without streaming makes of the rows."""
        longest = self.lengths.reshape(-1, self.slots).max(axis=1)
        return [(self.slots // self.samples, int(tokens)) for tokens in longest]


@dataclasses.dataclass(frozen=True)
class Work:
    """What a phase must read and compute: bytes and floating-point operations."""

    bytes: float
    flops: float


@dataclasses.dataclass(frozen=True)
class Machine:
    """Bytes/s read (copied, on a GPU), and FLOP/s of matrix products in the dtype of the device's cases."""

    bytes_per_second: float
    flops_per_second: float


def generator(
    model: DecoderConfig, params: Any, prompts: np.ndarray, lengths: np.ndarray, *, samples: int, slots: int
) -> tuple[Engine, Callable[[int], None]]:
    """Our decoder, on all devices, and a call that generates all rows from host arrays to host arrays; its argument numbers the
    random keys. Args: params: in the model's compute dtype; else as Case has them."""
    (Q, P), S = prompts.shape, samples
    engine = Engine(
        model,
        ResponseSpace(temperature=1.0, banned_tokens=(), eos_id=-1),
        sharding.make_mesh((-1, 1, 1), setting="benchmark"),
        slots=slots,
        samples=S,
        prompt_length=P,
        response_length=int(lengths.max()),
        pad_id=0,
        lockstep=len(lengths) == slots,
    )
    engine.set_policy(params, 0)
    limits, tokens, sampling = lengths.reshape(Q, S), prompts.tolist(), sampling_lib.constant(S, temperature=1.0)

    def generate(number: int) -> None:
        keys = np.asarray(row_keys(number, 0, np.arange(Q * S, dtype=np.uint32))).reshape(Q, S, 2)
        asked = [Request(name=str(q), prompt=tokens[q], keys=keys[q], sampling=sampling, limit=limits[q]) for q in range(Q)]
        found = engine.generate(asked)
        assert all(np.array_equal(made.length, limit) for made, limit in zip(found, limits, strict=True))

    return engine, generate


def measure_ours(case: Case, *, repeats: int, between: Callable[[], None]) -> list[float]:
    """Seconds of `repeats` generations by our decoder, log-probabilities included.

    The first generation compiles and is not counted. Args: between: called before each that is, to measure torch in turn.
    """
    mesh = sharding.make_mesh((-1, 1, 1), setting="benchmark")
    params = load.load_params(case.folder, case.model, decoder.define(case.model).shardings(mesh))
    params = parameters.cast(params, case.model.compute_dtype)
    sizes = dict(samples=case.samples, slots=case.slots)
    engine, generate = generator(case.model, params, case.prompts, case.lengths, **sizes)
    generate(0)
    seconds = []
    for repeat in range(repeats):
        between()
        begin = time.perf_counter()
        generate(repeat)
        seconds.append(time.perf_counter() - begin)
    print(f"  ours: {engine.usage.idle:.1%} of slot-steps gave no token")
    return seconds


def tail_lengths(rows: int) -> np.ndarray:
    """int32[rows]: log-normal response lengths, the same in every run."""
    drawn = np.exp(np.random.default_rng(0).normal(np.log(TAIL_MEDIAN), TAIL_SIGMA, rows))
    return np.clip(np.rint(drawn), TAIL_SHORTEST, RESPONSE).astype(np.int32)


def make_case(name: str, *, folder: Path, batch: int) -> Case:
    """The case <model>_<one of _KINDS>. Its checkpoint, random weights in the model's compute dtype, is written once."""
    family, kind = name.rsplit("_", 1)
    model, folder = MODELS[_DEVICE.value][family], folder / family
    if not folder.is_dir():
        export.save(folder, model, jax.jit(decoder.define(model).init)(jax.random.key(0)), dtype=model.compute_dtype)
    samples, P = (16, 512) if kind.startswith("s16") else (1, 64)
    lengths = tail_lengths(TAIL_BATCHES * batch) if kind.endswith("tail") else np.full(batch, RESPONSE, np.int32)
    prompts = np.random.default_rng(1).integers(3, model.vocab, (len(lengths) // samples, P)).astype(np.int32)
    return Case(name=name, folder=folder, model=model, prompts=prompts, samples=samples, lengths=lengths, slots=batch)


def phases(case: Case) -> list[Work]:
    """Prefill and decode of a case, at their least.

    Prefill computes each query once, and logits of its last token only. Decode step: the weights are read once for `slots` rows;
    token t ≥ 1 of a row needs one step, which attends to P + t keys; the keys and values of a prompt are read once for the rows
    of its query, of which `samples` run together. Token 0 comes from prefill. Multiplications and additions count as two.
    """
    c, item = case.model, jnp.dtype(case.model.compute_dtype).itemsize
    sizes = {name: math.prod(spec.shape) for name, spec in parameters.flatten(decoder.define(c).specs).items()}
    head = c.vocab * c.width
    layers = sum(size for name, size in sizes.items() if name.startswith("layers."))
    weight_bytes = item * (layers + head)  # an embedding that is not the head as well is read for a few rows only
    kv_elements = c.layers * 2 * c.kv_heads * c.head_size  # of one position
    attention_flops = c.layers * 4 * c.heads * c.head_size  # of one query and one position

    Q, P = case.prompts.shape
    prefill = Work(
        bytes=weight_bytes * Q * case.samples / case.slots,
        flops=Q * (P * 2 * layers + 2 * head + attention_flops * P * (P + 1) / 2),
    )
    steps = case.lengths.astype(np.int64) - 1
    tokens = int(steps.sum())
    # Σ over t = 1 … n of t, for n = steps: the positions that are the row's own.
    own = float((steps * (steps + 1) / 2).sum())
    decode = Work(
        bytes=weight_bytes * tokens / case.slots + item * kv_elements * (tokens * P / case.samples + own),
        flops=tokens * 2 * (layers + head) + attention_flops * (tokens * P + own),
    )
    return [prefill, decode]


def measure_machine(device: str, dtype: str) -> Machine:
    """On a CPU a long vector is summed (read once), on a GPU copied (read and written). The best of five times counts."""

    def best(function: Callable[..., Any], *arguments: Any) -> float:
        times = []
        for _ in range(6):
            begin = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            times.append(time.perf_counter() - begin)
        return min(times[1:])

    read, times_moved = (jax.jit(jnp.sum), 1) if device == "cpu" else (jax.jit(lambda x: x + 1), 2)
    vector, size = jnp.ones(BANDWIDTH_BYTES[device] // 4, jnp.float32), MATMUL_SIZE[device]
    a, b = (jax.random.normal(jax.random.key(i), (size, size)).astype(dtype) for i in range(2))
    made = Machine(times_moved * BANDWIDTH_BYTES[device] / best(read, vector), 2 * size**3 / best(jax.jit(jnp.matmul), a, b))
    print(f"by JAX: {made.bytes_per_second / 1e9:.1f} GB/s, {dtype} {made.flops_per_second / 1e9:.0f} GFLOP/s", flush=True)
    return made


def check_greedy(case: Case, tokens: Sequence[int]) -> None:
    """Compares torch's greedy continuation of the first prompt with what our model finds most likely after each of its tokens.

    Raises ValueError: they differ, by more than what bfloat16 cannot tell apart (two logits within 2 % of the largest).
    """
    P = case.prompts.shape[1]
    row = np.concatenate([case.prompts[0], np.asarray(tokens[:-1], np.int32)])[None]
    mesh = sharding.make_mesh((1, 1, 1), setting="benchmark", devices=jax.devices()[:1])
    definition = decoder.define(case.model)
    params = load.load_params(case.folder, case.model, definition.shardings(mesh))

    def logits_after(params: Any, row: jax.Array) -> jax.Array:
        model = parameters.module(definition.graphdef, params)
        return model.head()(model(row)[0, P - 1 :])

    logits = np.asarray(jax.jit(logits_after)(params, row))
    tolerance = 0.0 if case.model.compute_dtype == "float32" else 0.02 * np.abs(logits).max(axis=-1)
    wrong = np.flatnonzero(logits[np.arange(len(tokens)), tokens] < logits.max(axis=-1) - tolerance)
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(
            f"{case.name}: greedy token {i} is {tokens[i]} in torch and {int(logits[i].argmax())} in ours: "
            "they do not compute the same model"
        )


def measure(case: Case, modes: Sequence[str], peer: json_worker.Worker | None, *, repeats: int) -> dict[str, list[float]]:
    """Seconds of each decoder, interleaved."""
    seconds: dict[str, list[float]] = {mode: [] for mode in modes if mode != "ours"}

    def between() -> None:
        for mode in seconds:
            assert peer is not None
            seconds[mode].append(peer.ask("generate", mode=mode, batches=case.batches)["seconds"])

    if peer is not None:
        sizes = dict(samples=case.samples, response_length=int(case.lengths.max()), dtype=case.model.compute_dtype)
        told = dict(folder=str(case.folder), device="cuda" if _DEVICE.value == "gpu" else "cpu", prompts=case.prompts.tolist())
        check_greedy(case, peer.ask("load", **sizes, **told, greedy=GREEDY_TOKENS)["tokens"])
        between()  # compiles and allocates
        seconds.update({mode: [] for mode in seconds})
    if "ours" in modes:
        return {"ours": measure_ours(case, repeats=repeats, between=between), **seconds}
    for _ in range(repeats):
        between()
    return seconds


def summarise(case: Case, seconds: Mapping[str, Sequence[float]], machine: Machine) -> dict[str, Any]:
    """Prints the table of a case and returns its figures."""
    tokens, figures, (Q, P) = int(case.lengths.sum()), {}, case.prompts.shape
    work = phases(case)
    bound = tokens / sum(max(phase.bytes / machine.bytes_per_second, phase.flops / machine.flops_per_second) for phase in work)
    print(f"\n{case.name}: {len(case.lengths)} rows of {Q} queries, {case.slots} at a time, prompt {P}; bound {bound:.0f}")
    print("  {:10} {:>9} {:>8} {:>8} {:>7} {:>9} {:>10}".format("", "tokens/s", "least", "most", "ours ×", "bound", "bandwidth"))
    for name, times in seconds.items():
        median = float(np.median(times))
        figures[name] = found = {
            "seconds": list(times),
            "tokens_per_second": tokens / median,
            "share_of_bound": tokens / median / bound,
            "share_of_bandwidth": sum(phase.bytes for phase in work) / median / machine.bytes_per_second,
        }
        ratio = f"{median / float(np.median(seconds['ours'])):.2f}" if "ours" in seconds else ""
        print(
            f"  {name:10} {tokens / median:9.0f} {tokens / max(times):8.0f} {tokens / min(times):8.0f} {ratio:>7} "
            f"{found['share_of_bound']:9.0%} {found['share_of_bandwidth']:10.0%}",
            flush=True,
        )
    return {"tokens": tokens, "rows": len(case.lengths), "queries": Q, "prompt_length": P, "decoders": figures}


def check_flags() -> None:
    """Raises ValueError: a flag names what there is not."""
    cases = [f"{model}_{kind}" for model in MODELS[_DEVICE.value] for kind in _KINDS]
    for flag, given, known in (("cases", _CASES.value, cases), ("modes", _MODES.value or [""], MODES)):
        if unknown := [name for name in given if name not in known]:
            raise ValueError(f"--{flag}={unknown[0]} is none of {', '.join(known)}")
    if _BATCH.value % 16:
        raise ValueError(f"--batch={_BATCH.value} must be a multiple of 16, the responses to a query of *_s16")
    if set(_MODES.value) - {"ours"} and not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")):
        raise ValueError("torch is not installed: `make parity` makes .venv-parity, which has it; --modes=ours goes without")


def main(argv: Sequence[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    device = _DEVICE.value
    try:
        check_flags()
    except ValueError as error:
        sys.exit(f"error: {error}")
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # on a GPU, torch needs room on the same device
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        # One device for each core, as searchers.cpu_devices makes them: attention of one device uses one core.
        jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))
    if not set(_MODES.value) - {"ours"}:
        return run(None, device)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the torch process ends as well
    try:
        with json_worker.started("benchmarks.decode_torch", folder=Path.cwd(), environment=os.environ) as peer:
            run(peer, device)
    except RuntimeError as error:
        sys.exit(f"error: {error}")


def run(peer: json_worker.Worker | None, device: str) -> None:
    versions = {"jax": jax.__version__} | (peer.ask("versions") if peer else {})
    print(f"{jax.devices()[0].device_kind}, {len(os.sched_getaffinity(0))} cores; {versions}")
    machine = measure_machine(device, next(iter(MODELS[device].values())).compute_dtype)
    names = _CASES.value or [f"{model}_{kind}" for model in MODELS[device] for kind in _KINDS[:3]]
    figures: dict[str, Any] = {"versions": versions, "machine": dataclasses.asdict(machine), "cases": {}}
    with tempfile.TemporaryDirectory(prefix="decode-") as scratch:
        for name in names:
            case = make_case(name, folder=Path(scratch), batch=_BATCH.value)
            seconds = measure(case, _MODES.value, peer, repeats=_REPEATS.value)
            figures["cases"][name] = summarise(case, seconds, machine)
            if _OUT.value:
                written = Path(f"{_OUT.value}.new")  # whole at any time, whenever the command is ended
                written.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
                written.replace(_OUT.value)


if __name__ == "__main__":
    app.run(main)
