"""How fast responses are sampled: our decoder against transformers' `generate` (torch), and both against the machine.

python -m benchmarks.decode [--cases=v4096_s1,…] [--modes=dynamic,static,…] [--only=ours,torch] [--repeats=5]
  [--tiny_stories=<Hugging Face folder>] [--out=figures.json]
python -m benchmarks.decode --device=gpu [--cases=pythia_s1,pythia_s16,qwen_s1,qwen_s16] [--batch=64]

Both sample at temperature 1 from one checkpoint, with one list of prompts and the same environment: as many CPU cores
(--threads) and GLIBC_TUNABLES=glibc.malloc.hugetlb=1, for which the command starts itself again. Ours gives
log-probabilities as well, `generate` tokens only. torch runs in a process of its own (decode_torch.py) that is idle while ours
runs; the repeats are interleaved, one of ours and one of each mode in turn, and the times are medians. No response ends by an
end-of-sequence token. Before anything is timed, the greedy continuation of a prompt must be the same in both.

Cases: v<vocabulary>_s<responses a query> are uniform, 64 rows of 128 new tokens, on prompts of 64 tokens (s1) or 512 (s16: 4
queries); *_tail and *_s16tail are 256 rows of log-normal lengths (median 32, sigma 0.8, clipped to 4 … 128): ours streams them
through 64 slots, torch takes 64 at a time until the longest of them is done, and only what was asked for counts as tokens.
stories_* is TinyStories-656K. Modes are explained at decode_torch.MODES; "compile" is by default in v4096_s1 only, its warm-up
takes half a minute a case.

The bound is what no decoder of the dtype can beat on this machine: the larger of the bytes that a decode step must read
(weights, caches; the cache of a prompt once for all its rows) over the measured read bandwidth and its FLOPs over the
measured rate of matrix products, and likewise prefill, summed. "bandwidth" and "FLOPs" are the shares of the two rates that a
run attained of these counts.
"""

import dataclasses
import functools
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from tba_jax import sharding
from tba_jax.decoding import sampling as sampling_lib
from tba_jax.decoding.engine import Engine
from tba_jax.decoding.requests import Request
from tba_jax.decoding.slots import row_keys
from tba_jax.models import decoder, parameters
from tba_jax.models.config import DecoderConfig
from tba_jax.models.hugging_face import export, load
from tba_jax.models.presets import PRESETS
from tba_jax.models.response_space import ResponseSpace

_DEVICE = flags.DEFINE_enum(
    "device", "cpu", ["cpu", "gpu"], "cpu: float32, small models; gpu: bfloat16, shapes of published ones."
)
_CASES = flags.DEFINE_list("cases", [], "Which cases; default: v4096_*, v32000_s1, stories_s1 and stories_tail, or all of a GPU.")
_MODES = flags.DEFINE_list("modes", [], "Which modes of torch; default: those of the case.")
_ONLY = flags.DEFINE_list("only", ["ours", "torch"], "Whose decoder.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Of each time.", lower_bound=1)
_TINY_STORIES = flags.DEFINE_string("tiny_stories", "../shared/data/models/TinyStories-656K", "Its Hugging Face folder.")
_BATCH = flags.DEFINE_integer("batch", 64, "Rows decoded at a time, a multiple of 16.", lower_bound=16)
_THREADS = flags.DEFINE_integer("threads", 0, "CPU cores for both; 0: all that this process may use.", lower_bound=0)
_OUT = flags.DEFINE_string("out", "", "A JSON file for all figures.")

TUNABLE = "glibc.malloc.hugetlb=1"
RESPONSE = 128
TAIL_BATCHES, TAIL_MEDIAN, TAIL_SIGMA, TAIL_SHORTEST = 4, 32, 0.8, 4
GREEDY_TOKENS = 32
# Vector that is read to measure bandwidth: far larger than any cache. Sides of the matrices that FLOPs are measured with.
BANDWIDTH_BYTES = {"cpu": 512 << 20, "gpu": 4 << 30}
MATMUL_SIZES = {"cpu": {"float32": 2048, "bfloat16": 2048}, "gpu": {"bfloat16": 8192}}

_SMALL: dict[str, Any] = dict(layers=6, width=384, heads=6, kv_heads=6, head_size=64, ffn=1024, max_positions=1024)
_GPU_MODELS = {"pythia": "pythia-410m", "qwen": "qwen2.5-1.5b"}
_KINDS = ("s1", "s16", "tail", "s16tail")
DEFAULT_CASES = {
    "cpu": ("v4096_s1", "v32000_s1", "v4096_s16", "v4096_tail", "v4096_s16tail", "stories_s1", "stories_tail"),
    "gpu": tuple(f"{name}_s{samples}" for name in _GPU_MODELS for samples in (1, 16)),
}
CASES = {
    "cpu": tuple(f"{name}_{kind}" for name in ("v4096", "v32000", "stories") for kind in _KINDS),
    "gpu": tuple(f"{name}_{kind}" for name in _GPU_MODELS for kind in _KINDS),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is decoded. Row i answers query i // samples; rows of a query are consecutive.

    folder: of the checkpoint, in Hugging Face form. model: its config; compute_dtype is that of ours and of torch but for *_bf16.
    prompts: int32[Q, P], without padding. samples: rows of a query. lengths: int32[Q · samples], new tokens of each row, reached
    whatever is drawn. slots: rows that are decoded at a time.
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

    def seconds(self, machine: "Machine", dtype: str) -> float:
        return max(self.bytes / machine.bytes_per_second, self.flops / machine.flops_per_second[dtype])


@dataclasses.dataclass(frozen=True)
class Machine:
    """The faster of both libraries: bytes/s read, and FLOP/s of matrix products by dtype."""

    bytes_per_second: float
    flops_per_second: Mapping[str, float]


def measure_ours(case: Case, *, repeats: int, between: Callable[[], None]) -> list[float]:
    """Seconds of `repeats` generations by our decoder, log-probabilities included.

    Loads case.folder in case.model.compute_dtype, generates once without counting it (that compiles), then `repeats` times: calls
    `between`, which measures torch once in each mode, and times one generation of all rows of the case at temperature 1, from
    host arrays to host arrays; case.slots rows at a time, each row to its case.lengths, no end-of-sequence token.
    """
    mesh = sharding.make_mesh((-1, 1, 1), setting="benchmark")
    Q, P = case.prompts.shape
    engine = Engine(
        case.model,
        ResponseSpace(temperature=1.0, banned_tokens=(), eos_id=-1),
        mesh,
        slots=case.slots,
        samples=case.samples,
        prompt_length=P,
        response_length=int(case.lengths.max()),
        pad_id=0,
        lockstep=len(case.lengths) == case.slots,
    )
    params = load.load_params(case.folder, case.model, decoder.define(case.model).shardings(mesh))
    engine.set_policy(parameters.cast(params, case.model.compute_dtype), 0)
    S = case.samples
    limits = case.lengths.reshape(Q, S)
    prompts = case.prompts.tolist()

    def generate(repeat: int) -> None:
        keys = np.asarray(row_keys(repeat, 0, np.arange(Q * S, dtype=np.uint32))).reshape(Q, S, 2)
        sampling = sampling_lib.constant(S, temperature=1.0)
        found = engine.generate(
            [Request(name=str(q), prompt=prompts[q], keys=keys[q], sampling=sampling, limit=limits[q]) for q in range(Q)]
        )
        assert all(np.array_equal(made.length, limit) for made, limit in zip(found, limits, strict=True))

    generate(0)
    seconds = []
    for repeat in range(repeats):
        between()
        begin = time.perf_counter()
        generate(repeat)
        seconds.append(time.perf_counter() - begin)
    print(f"  ours: {engine.usage.idle:.1%} of slot-steps gave no token")
    return seconds


class Torch:
    """The process of decode_torch.py. Raises RuntimeError: it ended, after it said why on stderr."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.decode_torch"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, request: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"request": request, **arguments}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"the torch process ended with code {self._process.wait()} at request {request!r}; see above")
        return json.loads(answer)

    def close(self) -> None:
        self._process.terminate()  # it may be in the middle of a long request
        self._process.wait()


def tail_lengths(rows: int) -> np.ndarray:
    """int32[rows]: log-normal response lengths, the same in every run."""
    drawn = np.exp(np.random.default_rng(0).normal(np.log(TAIL_MEDIAN), TAIL_SIGMA, rows))
    return np.clip(np.rint(drawn), TAIL_SHORTEST, RESPONSE).astype(np.int32)


def make_case(name: str, *, folder: Path, model: DecoderConfig, batch: int) -> Case:
    """The case of this name: <model>_<one of _KINDS>."""
    kind = name.rsplit("_", 1)[1]
    samples, P = (16, 512) if kind.startswith("s16") else (1, 64)
    P = min(P, model.max_positions - RESPONSE)
    lengths = tail_lengths(TAIL_BATCHES * batch) if kind.endswith("tail") else np.full(batch, RESPONSE, np.int32)
    prompts = np.random.default_rng(1).integers(3, model.vocab, (len(lengths) // samples, P)).astype(np.int32)
    return Case(name=name, folder=folder, model=model, prompts=prompts, samples=samples, lengths=lengths, slots=batch)


def default_modes(name: str, device: str) -> tuple[str, ...]:
    """A default run takes a quarter of an hour on two cores: slow modes where they say something new."""
    if device == "gpu":
        modes: tuple[str, ...] = ("dynamic", "static", "compile")
    elif name.endswith("_s16tail"):
        modes = ("static",)
    elif name.endswith("_tail"):
        modes = ("dynamic", "static")
    else:
        modes = ("dynamic", "static", "static_bf16", *(("compile",) if name == "v4096_s1" else ()))
    return (*modes, "shared") if name.endswith("_s16") else modes


def mode_dtype(mode: str, model: DecoderConfig) -> str:
    return "bfloat16" if mode.endswith("_bf16") else model.compute_dtype


def write_random_checkpoint(folder: Path, model: DecoderConfig) -> None:
    """A Hugging Face folder with weights as they are before training, in the dtype that the model computes in."""
    params = jax.jit(decoder.define(model).init)(jax.random.key(0))
    export.save(folder, model, params, dtype=model.compute_dtype)


def phases(case: Case, dtype: str) -> list[Work]:
    """Prefill and decode of a case, at their least.

    Prefill computes each query once, and logits of its last token only. Decode step: the weights are read once for `slots` rows;
    token t ≥ 1 of a row needs one step, which attends to P + t keys; the keys and values of a prompt are read once for the rows
    of its query, of which `samples` run together. Token 0 comes from prefill. Multiplications and additions count as two.
    """
    c, item = case.model, jnp.dtype(dtype).itemsize
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


def measure_jax(device: str) -> dict[str, Any]:
    """What decode_torch.Peer.roofline measures, by JAX."""
    read = jax.jit(jnp.sum) if device == "cpu" else jax.jit(lambda x: x + 1)
    vector = jnp.ones(BANDWIDTH_BYTES[device] // 4, jnp.float32)
    moved = BANDWIDTH_BYTES[device] * (1 if device == "cpu" else 2)
    answer: dict[str, Any] = {"bytes_per_second": moved / _best(functools.partial(read, vector)), "flops_per_second": {}}
    multiply = jax.jit(jnp.matmul)
    for dtype, size in MATMUL_SIZES[device].items():
        a, b = (jax.random.normal(jax.random.key(i), (size, size)).astype(dtype) for i in range(2))
        answer["flops_per_second"][dtype] = 2 * size**3 / _best(functools.partial(multiply, a, b))
    return answer


def _best(function: Callable[[], Any]) -> float:
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def measure_machine(peer: Torch | None, device: str) -> tuple[Machine, dict[str, Any]]:
    """The machine's rates, and those of each library."""
    found = {"jax": measure_jax(device)}
    if peer is not None:
        sizes = MATMUL_SIZES[device]
        found["torch"] = peer.ask(
            "roofline", device=_torch_device(device), dtypes=list(sizes), bandwidth_bytes=BANDWIDTH_BYTES[device], sizes=sizes
        )
    for name, rates in found.items():
        flops = ", ".join(f"{dtype} {rate / 1e9:.0f} GFLOP/s" for dtype, rate in rates["flops_per_second"].items())
        print(f"  {name:6} {rates['bytes_per_second'] / 1e9:.1f} GB/s, {flops}")
    machine = Machine(
        bytes_per_second=max(rates["bytes_per_second"] for rates in found.values()),
        flops_per_second={
            dtype: max(rates["flops_per_second"][dtype] for rates in found.values()) for dtype in MATMUL_SIZES[device]
        },
    )
    return machine, found


def _torch_device(device: str) -> str:
    return "cuda" if device == "gpu" else "cpu"


def check_greedy(case: Case, peer: Torch) -> None:
    """Compares torch's greedy continuation of the first prompt with what our model finds most likely after each of its tokens.

    Raises ValueError: they differ, by more than what bfloat16 cannot tell apart (two logits within 2 % of the largest).
    """
    tokens = peer.ask("greedy", prompt=0, new_tokens=GREEDY_TOKENS)["tokens"]
    P = case.prompts.shape[1]
    row = np.concatenate([case.prompts[0], np.asarray(tokens[:-1], np.int32)])[None]
    mesh = sharding.make_mesh((1, 1, 1), setting="benchmark", devices=jax.devices()[:1])
    definition = decoder.define(case.model)
    params = load.load_params(case.folder, case.model, definition.shardings(mesh))

    def logits_after(params: Any, row: jax.Array) -> jax.Array:
        model = parameters.module(definition.graphdef, params)
        return model.head()(model(row)[0, P - 1 :])

    logits = np.asarray(jax.jit(logits_after)(params, row))
    chosen = logits[np.arange(len(tokens)), tokens]
    tolerance = 0.0 if case.model.compute_dtype == "float32" else 0.02 * np.abs(logits).max(axis=-1)
    wrong = np.flatnonzero(chosen < logits.max(axis=-1) - tolerance)
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(
            f"{case.name}: greedy token {i} is {tokens[i]} in torch and {int(logits[i].argmax())} in ours: "
            "they do not compute the same model"
        )
    print(f"  greedy: {len(tokens)} tokens are the same in both")


def warm_up(case: Case, modes: Sequence[str], peer: Torch) -> dict[str, Any]:
    """Every mode once, uncounted. Says of compiled ones whether what was compiled runs."""
    found = {}
    for mode in modes:
        found[mode] = answer = peer.ask("warm_up", mode=mode, queries=case.batches[0][0])
        if "graphs" in answer:
            print(
                f"  {mode}: warm-up {answer['seconds']:.0f} s, {answer['graphs']} graphs compiled, "
                f"{answer['graph_breaks']} breaks, {answer['runs_per_step']:.1f} compiled graphs run a decode step"
                + ("" if answer["runs_per_step"] else ": NOTHING COMPILED IS USED"),
                flush=True,
            )
    return found


def measure(case: Case, modes: Sequence[str], peer: Torch | None, *, ours: bool, repeats: int) -> dict[str, list[float]]:
    """Seconds of each decoder, interleaved."""
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}

    def between() -> None:
        for mode in modes:
            assert peer is not None
            answer = peer.ask("generate", mode=mode, batches=case.batches)
            if answer["compilations"]:
                print(f"  {mode}: {answer['compilations']} graphs were compiled while repeat {len(seconds[mode])} was timed")
            seconds[mode].append(answer["seconds"])

    if ours:
        return {"ours": measure_ours(case, repeats=repeats, between=between), **seconds}
    for _ in range(repeats):
        between()
    return seconds


def summarise(case: Case, seconds: Mapping[str, Sequence[float]], machine: Machine) -> dict[str, Any]:
    """Prints the table of a case and returns its figures."""
    tokens = int(case.lengths.sum())
    medians = {name: float(np.median(times)) for name, times in seconds.items()}
    ours, figures = medians.get("ours"), {}
    columns = ("tokens/s", "least", "most", "ours ×", "bound", "of it", "bandwidth", "FLOPs")
    print("  {:12} {:>9} {:>8} {:>8} {:>7} {:>8} {:>6} {:>9} {:>6}".format("", *columns))
    for name, median in medians.items():
        dtype = mode_dtype(name, case.model)
        work = phases(case, dtype)
        bound = tokens / sum(phase.seconds(machine, dtype) for phase in work)
        read, computed = sum(phase.bytes for phase in work), sum(phase.flops for phase in work)
        figures[name] = {
            "seconds": list(seconds[name]),
            "dtype": dtype,
            "tokens_per_second": tokens / median,
            "bound_tokens_per_second": bound,
            "share_of_bound": tokens / median / bound,
            "share_of_bandwidth": read / median / machine.bytes_per_second,
            "share_of_flops": computed / median / machine.flops_per_second[dtype],
        }
        f = figures[name]
        print(
            f"  {name:12} {f['tokens_per_second']:9.0f} {tokens / max(seconds[name]):8.0f} {tokens / min(seconds[name]):8.0f} "
            f"{f'{median / ours:.2f}' if ours else '':>7} {bound:8.0f} {f['share_of_bound']:6.0%} "
            f"{f['share_of_bandwidth']:9.0%} {f['share_of_flops']:6.0%}"
        )
    if "static" in medians and "compile" in medians:
        print(f"  compile is {medians['static'] / medians['compile']:.2f}× as fast as static")
    Q, P = case.prompts.shape
    return {"tokens": tokens, "rows": len(case.lengths), "queries": Q, "prompt_length": P, "decoders": figures}


def cases(names: Sequence[str], *, device: str, batch: int, tiny_stories: Path, scratch: Path) -> Iterator[Case]:
    """The cases, each checkpoint written when first needed; a sentence in place of those whose checkpoint is absent."""
    for name in names:
        family = name.rsplit("_", 1)[0]
        folder = tiny_stories if family == "stories" else scratch / family
        if family == "stories":
            if not (folder / "config.json").is_file():
                print(
                    f"\n{name} is skipped: {folder} holds no config.json; name the folder of TinyStories-656K by --tiny_stories"
                )
                continue
            model = load.read_config(folder, compute_dtype="float32")
        elif device == "gpu":
            model = dataclasses.replace(PRESETS[_GPU_MODELS[family]], compute_dtype="bfloat16")
        else:
            model = DecoderConfig(**_SMALL, vocab=int(family.removeprefix("v")), compute_dtype="float32")
        if not folder.is_dir():
            write_random_checkpoint(folder, model)
        yield make_case(name, folder=folder, model=model, batch=batch)


def run_case(case: Case, modes: Sequence[str], peer: Torch | None, machine: Machine) -> dict[str, Any]:
    Q, P = case.prompts.shape
    print(
        f"\n{case.name}: {len(case.lengths)} rows of {Q} queries, {case.slots} at a time, prompt {P}, new tokens "
        f"{case.lengths.min()} to {case.lengths.max()}, mean {case.lengths.mean():.1f}; vocabulary {case.model.vocab}, "
        f"{case.model.compute_dtype}",
        flush=True,
    )
    ours, warm = "ours" in _ONLY.value, {}
    if peer is not None:
        peer.ask(
            "load",
            folder=str(case.folder),
            dtype=case.model.compute_dtype,
            device=_torch_device(_DEVICE.value),
            prompts=case.prompts.tolist(),
            samples=case.samples,
            response_length=int(case.lengths.max()),
        )
        check_greedy(case, peer)
        warm = warm_up(case, modes, peer)
    seconds = measure(case, modes if peer is not None else (), peer, ours=ours, repeats=_REPEATS.value)
    figures = summarise(case, seconds, machine) | {"warm_up": warm, "load_average": os.getloadavg()[0]}
    print(f"  load average of the last minute {figures['load_average']:.1f}; more than the cores disturbs torch above all")
    return figures


def environment(device: str, threads: int) -> dict[str, str]:
    """The environment that both processes are to have: huge pages, threads, and where JAX runs."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if TUNABLE not in tunables.split(":"):
        tunables = ":".join(filter(None, (tunables, TUNABLE)))
    wanted = {"GLIBC_TUNABLES": tunables, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    if device == "cpu":
        return wanted | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return wanted | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # torch needs room on the same device


def restart_as_wanted() -> None:
    """Starts the command again where glibc, OpenMP or JAX were given other settings: they are read once, at the start.

    Raises ValueError: more threads than cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    threads = _THREADS.value or len(cores)
    if threads > len(cores):
        raise ValueError(f"--threads={threads} is more than the {len(cores)} cores that this process may use")
    wanted = environment(_DEVICE.value, threads)
    if len(cores) == threads and all(os.environ.get(name) == value for name, value in wanted.items()):
        return
    os.sched_setaffinity(0, cores[:threads])  # JAX has as many threads as it may use cores
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | wanted)


def check_flags() -> None:
    """Raises ValueError: a flag names what there is not."""
    device = _DEVICE.value
    for flag, given, known in (
        ("cases", _CASES.value, CASES[device]),
        ("only", _ONLY.value, ("ours", "torch")),
    ):
        if unknown := [name for name in given if name not in known]:
            raise ValueError(f"--{flag}={unknown[0]} is none of {', '.join(known)}")
    if _BATCH.value % 16:
        raise ValueError(f"--batch={_BATCH.value} must be a multiple of 16, the responses to a query of *_s16")
    if not _ONLY.value:
        raise ValueError("--only= names neither ours nor torch; there is nothing to measure")


def main(argv: Sequence[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    with_torch, device = "torch" in _ONLY.value, _DEVICE.value
    if with_torch and not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")):
        sys.exit("error: torch is not installed: `make parity` makes .venv-parity, which has it; --only=ours goes without")
    try:
        check_flags()
        restart_as_wanted()
        if device == "cpu":
            # One device for each core, as searchers.cpu_devices makes them: attention of one device uses one core.
            jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))
    except ValueError as error:
        sys.exit(f"error: {error}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the torch process ends as well
    peer = Torch() if with_torch else None
    try:
        with tempfile.TemporaryDirectory(prefix="decode-") as scratch:
            run(peer, device, Path(scratch))
    finally:
        if peer is not None:
            peer.close()


def run(peer: Torch | None, device: str, scratch: Path) -> None:
    names = _CASES.value or DEFAULT_CASES[device]
    versions = {"jax": jax.__version__}
    if peer is not None:
        versions |= peer.ask("versions")
        known = peer.ask("modes")["modes"]
        if unknown := [mode for mode in _MODES.value if mode not in known]:
            sys.exit(f"error: --modes={unknown[0]} is none of {', '.join(known)}")
    settings = {name: os.environ[name] for name in environment(device, 1)}
    print(f"{jax.devices()[0].device_kind}, {len(os.sched_getaffinity(0))} cores; {versions}; {settings}")
    print("the machine, by each library (read bandwidth, or copy on a GPU; matrix products):", flush=True)
    machine, rates = measure_machine(peer, device)
    figures: dict[str, Any] = {"versions": versions, "environment": settings, "rates": rates, "cases": {}}
    tiny_stories = Path(_TINY_STORIES.value)
    for case in cases(names, device=device, batch=_BATCH.value, tiny_stories=tiny_stories, scratch=scratch):
        modes = _MODES.value or default_modes(case.name, device)
        figures["cases"][case.name] = run_case(case, modes, peer, machine)
        if _OUT.value:
            written = Path(f"{_OUT.value}.new")  # whole at any time, whenever the command is ended
            written.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
            written.replace(_OUT.value)


if __name__ == "__main__":
    app.run(main)
