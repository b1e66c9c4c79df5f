"""What benchmarks.against measures: a process that prepares one piece of the project at a time and times it when asked.

python -m benchmarks.pieces

Reads one JSON request a line from stdin and answers each by one JSON line on stdout; everything else goes to stderr:

  {"do": "list"}                                 {"pieces": [names], "code": the folder that holds the imported tba_jax}
  {"do": "prepare", "piece": "update_demo"}      {"figures": {"temporary memory, MiB": 12.3}}, which one measurement settles
  {"do": "run"}                                  {"figures": {"seconds": 0.4}} of the piece that was prepared last

`prepare` makes inputs, compiles and runs the piece once. A piece keeps its state between runs: an update goes on from the state
of the update before. On CPUs there is one device for each core, as searchers.cpu_devices makes them; the decoder uses all of
them, and everything else uses the first. The persistent compilation cache is off.
"""

import dataclasses
import gc
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tba_jax
from benchmarks import decode, json_worker, trainer_update
from benchmarks.random_rows import VOCAB, make_rows
from configs import base
from tba_jax.models import decoder, parameters, scoring
from tba_jax.models.config import DecoderConfig
from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.log import LogWriter
from tba_jax.replay.reader import LogReader
from tba_jax.roles.trainer.publishing import Publisher
from tba_jax.trajectory import RowShape

_MIB = 1 << 20
_MEMORY, _SECONDS = "temporary memory, MiB", "seconds"
# Folders of pieces, which go with the process.
held: list[tempfile.TemporaryDirectory[str]] = []


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece that is ready. run: one measurement, figure -> value; figures: those that one measurement settles."""

    run: Callable[[], dict[str, float]]
    figures: dict[str, float] = dataclasses.field(default_factory=dict)


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Seconds until the result is computed, and the result."""
    begin = time.perf_counter()
    result = jax.block_until_ready(function(*arguments))
    return time.perf_counter() - begin, result


def memory_of(program: jax.stages.Compiled) -> dict[str, float]:
    """What a program takes besides its arguments and results."""
    analysis = program.memory_analysis()
    assert analysis is not None
    return {_MEMORY: analysis.temp_size_in_bytes / _MIB}


def demo_sizes() -> dict[str, Any]:
    """The demo's model and batch, which are the base recipe's, and its lengths."""
    config = base.get_config()
    return {name: config[name.split(".")[0]][name.split(".")[1]] for name in trainer_update.SIZES} | {
        "task.prompt_length": 9,
        "task.response_length": 32,
    }


def update_piece(changes: Mapping[str, Any], vocab: int, *, updates: int = 1) -> Piece:
    """Seconds of one update, the least of `updates` in a row, each on the state that the one before left."""
    program = trainer_update.update_program(changes, vocab)
    placed = program.place(trainer_update.random_rows(program, changes, vocab))

    def one() -> float:
        seconds, measurements = timed(lambda: (program.dispatch(placed), program.state))
        if not measurements[0]["finite"]:
            raise FloatingPointError(f"an update was refused: loss {float(measurements[0]['loss'])} or a gradient is not finite")
        return seconds

    def run() -> dict[str, float]:
        return {_SECONDS: min(one() for _ in range(updates))}

    run()
    return Piece(run, memory_of(trainer_update.compiled(program, placed)))


def compile_piece(changes: Mapping[str, Any], vocab: int) -> Piece:
    """Seconds until an update is traced, lowered and compiled, as if the process were new."""
    program = trainer_update.update_program(changes, vocab, begins=False)
    placed = program.place(trainer_update.random_rows(program, changes, vocab))

    def run() -> dict[str, float]:
        jax.clear_caches()
        return {_SECONDS: timed(trainer_update.compiled, program, placed)[0]}

    run()
    return Piece(run)


def decode_piece(lengths: np.ndarray, *, samples: int = 1, prompt: int = 64, model: DecoderConfig = decode.SMALL) -> Piece:
    """Seconds of one generation by the decoder of searchers, 64 rows at a time, from host arrays to host arrays.

    Args: lengths: int32[Q · samples], tokens of the responses, those of a query side by side; samples: responses to a query;
      prompt: tokens of a prompt.
    """
    params = jax.jit(decoder.define(model).init)(jax.random.key(0))
    prompts = np.random.default_rng(1).integers(3, model.vocab, (len(lengths) // samples, prompt)).astype(np.int32)
    _, generate = decode.generator(model, params, prompts, lengths, samples=samples, slots=64)
    numbers = itertools.count()

    def run() -> dict[str, float]:
        return {_SECONDS: timed(generate, next(numbers))[0]}

    run()
    return Piece(run)


def logprobs_piece(*, B: int, R: int, D: int, V: int, timed_R: int) -> Piece:
    """Memory and seconds of the gradients of a weighted sum of log-probs with respect to the head and the hidden states, where
    logits may take 128 MiB at a time. Args: timed_R: response length for the seconds."""
    model = dataclasses.replace(decode.SMALL, width=D, vocab=V)
    definition, space = decoder.define(model), scoring.ResponseSpace(temperature=1.0, banned_tokens=(), eos_id=-1)
    rest = {name: spec for name, spec in definition.specs.items() if name != "embedding"}  # not read
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), parameters.shapes(rest))

    def loss(head: jax.Array, hidden: jax.Array, tokens: jax.Array, weights: jax.Array) -> jax.Array:
        module = parameters.module(definition.graphdef, zeros | {"embedding": {"weight": head}})
        found = scoring.token_logprobs(module, hidden, tokens, space=space, logit_bytes=128 * _MIB)[0]
        return jnp.sum(weights * found)

    def inputs(R: int) -> tuple[jax.Array, ...]:
        rng = np.random.default_rng(0)

        def normal(*shape: int) -> jax.Array:
            return jnp.asarray(rng.standard_normal(shape), jnp.float32)

        return 0.05 * normal(V, D), normal(B, R, D), jnp.asarray(rng.integers(0, V, (B, R)), jnp.int32), normal(B, R)

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
    memory, arguments = memory_of(gradients.lower(*jax.eval_shape(lambda: inputs(R))).compile()), inputs(timed_R)

    def run() -> dict[str, float]:
        return {_SECONDS: timed(gradients, *arguments)[0]}

    run()
    return Piece(run, memory)


def publish_piece(*, values: int) -> Piece:
    """Seconds of publishing a policy in bfloat16, until readers can find it."""
    folder = tempfile.TemporaryDirectory(prefix="publish-")
    keeps: dict[str, Any] = dict(keep=2, keep_every=10**6, final_step=-1)
    publisher = Publisher(Path(folder.name), epoch=1, dtype="bfloat16", every_steps=1, **keeps)
    width, steps = 1024, itertools.count(1)
    params = {str(n): jnp.full((width, width), n, jnp.float32) for n in range(values // width**2)}

    def run() -> dict[str, float]:
        begin = time.perf_counter()
        publisher.publish(params, next(steps))
        publisher.wait()
        return {_SECONDS: time.perf_counter() - begin}

    run()
    held.append(folder)
    return Piece(run)


def restore_piece(*, appends: int, writers: int, rows: int = 64) -> Piece:
    """Seconds in which a trainer that resumes reads all resident rows again."""
    shape = RowShape(prompt_length=64, response_length=64, reward_parts=())
    folder = tempfile.TemporaryDirectory(prefix="restore-")
    root, rng = Path(folder.name) / "replay", np.random.default_rng(0)
    root.mkdir()
    index = ReplayIndex(shape=shape, capacity=10**6, capacity_per_query=10**6, vocab_size=VOCAB)
    for writer in range(writers):
        log = LogWriter(root, f"w{writer}", shape, info={})
        for append in range(appends // writers):
            made = make_rows(shape, append * rows, rows, rng)
            log.append(made)
            index.add(f"w{writer}", made, step=1)
    state = json.loads(json.dumps(index.state()))
    del index

    def run() -> dict[str, float]:
        begin = time.perf_counter()
        restored, lost = ReplayIndex.restore(state, LogReader(root, shape), closed=root.parent / "closed")
        assert not lost and len(restored) == appends * rows
        return {_SECONDS: time.perf_counter() - begin}

    run()
    held.append(folder)
    return Piece(run)


# Sizes are meant for nine pairs of all pieces in ten minutes on two quiet cores. What takes a fraction of a second is repeated
# within a measurement: what disturbs it only adds to its time, so that the least time is measured.
PIECES: dict[str, Callable[[], Piece]] = {
    "update_demo": lambda: update_piece(demo_sizes(), 32, updates=4),
    "update_v4096": lambda: update_piece({}, 4096),
    "update_v32000": lambda: update_piece({"learner.queries": 2}, 32_000),
    "decode_v4096": lambda: decode_piece(np.full(64, 64, np.int32)),
    "decode_samples": lambda: decode_piece(np.full(64, 64, np.int32), samples=16, prompt=512),
    "decode_tail": lambda: decode_piece(decode.tail_lengths(256)),
    "publish": lambda: publish_piece(values=32 << 20),
    "restore": lambda: restore_piece(appends=512, writers=4),
    "compile_update": lambda: compile_piece({}, 4096),
    # The budget takes 41 steps at a time: the seconds are those of two whole blocks.
    "logprobs_v50000": lambda: logprobs_piece(B=16, R=1024, D=256, V=50_000, timed_R=82),
}


_prepared: list[Piece] = []


def listed() -> dict[str, Any]:
    return {"pieces": list(PIECES), "code": str(Path(tba_jax.__file__).resolve().parents[1])}


def prepare(piece: str) -> dict[str, Any]:
    _prepared.clear()  # its arrays and programs go before those of the next are made
    gc.collect()
    jax.clear_caches()
    _prepared.append(PIECES[piece]())
    return {"figures": _prepared[0].figures}


def run() -> dict[str, Any]:
    gc.collect()
    return {"figures": _prepared[0].run()}


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))
    json_worker.serve({"list": listed, "prepare": prepare, "run": run})
