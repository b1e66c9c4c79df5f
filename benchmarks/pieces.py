"""What benchmarks.against measures: a process that prepares one piece of the project at a time and times it when asked.

python -m benchmarks.pieces

Reads one JSON request a line from stdin and answers each by one JSON line on stdout; everything else goes to stderr:

  {"do": "list"}                                 {"pieces": [names], "code": the folder that holds the imported tba_jax}
  {"do": "prepare", "piece": "update_demo"}      {"figures": {"temporary memory, MiB": 12.3}}, which one measurement settles
  {"do": "run"}                                  {"figures": {"seconds": 0.4}} of the piece that was prepared last

`prepare` makes inputs, compiles and runs the piece once. A piece keeps its state between runs: an update goes on from the state
of the update before. On CPUs there is one device for each core, as searchers.cpu_devices makes them; the decoder uses all of
them, and everything else uses the first. The persistent compilation cache is off.

The functions between model_of and logprobs_of are the only ones that call tba_jax.
"""

import dataclasses
import functools
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np

import tba_jax
from benchmarks.decode import tail_lengths
from benchmarks.rollout import rollout
from benchmarks.trainer_update import SIZES
from configs import base, demo
from tba_jax import sharding
from tba_jax.decoding import sampling as sampling_lib
from tba_jax.decoding.engine import Engine
from tba_jax.decoding.requests import Request
from tba_jax.decoding.slots import row_keys
from tba_jax.experiment import composition
from tba_jax.learner import settings
from tba_jax.learner import state as state_lib
from tba_jax.learner import update as update_lib
from tba_jax.models import decoder, kv_cache, parameters, scoring
from tba_jax.models.config import DecoderConfig
from tba_jax.packing import row_packing
from tba_jax.run import contract as contract_lib

_MIB = 1 << 20
_MEMORY, _SECONDS, _LOWER, _COMPILE = "temporary memory, MiB", "seconds", "trace and lower, seconds", "compile, seconds"

# The depth of Qwen2.5-1.5B at a small width.
_DEEP: dict[str, Any] = SIZES | {
    "model.layers": 28,
    "model.width": 256,
    "model.heads": 8,
    "model.kv_heads": 2,
    "model.head_size": 32,
    "model.ffn": 512,
    "model.compute_dtype": "bfloat16",
}
# Tokens of a prompt that the decoder is given.
_PROMPT = 64


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece that is ready. run: one measurement, figure -> value; figures: those that one measurement settles."""

    run: Callable[[], dict[str, float]]
    figures: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Update:
    """A learner's update. step: (state, batch) -> (state, measurements), not jitted; init: the state of step 0, not jitted;
    batch: a batch, and its rows in sequences."""

    step: Callable[[Any, Any], tuple[Any, dict[str, jax.Array]]]
    init: Callable[[], Any]
    batch: tuple[state_lib.Batch, row_packing.Packed]


def recipe(changes: Mapping[str, Any]) -> Any:
    """The base config with these settings."""
    config = base.get_config()
    config.update_from_flattened_dict(dict(changes))
    return config


def model_of(config: Any, vocab: int) -> DecoderConfig:
    """The policy's shape of a config, with so many tokens."""
    return dataclasses.replace(composition.build(config).policy.model, vocab=vocab)


def space_of_all_tokens() -> scoring.ResponseSpace:
    """All responses at temperature 1, without an end of sequence."""
    return scoring.ResponseSpace(temperature=1.0, banned_tokens=(), eos_id=-1)


def update_of(config: Any, vocab: int = 0) -> Update:
    """The update of a config. vocab: of the policy, 0: that of the config's tokenizer."""
    built = composition.build(config)
    model = model_of(config, vocab) if vocab else built.policy.model
    policy = dataclasses.replace(built.policy, model=model)
    optimizers, schedules = settings.make_optimizers(config.learner), settings.make_schedules(config.learner)
    one = sharding.make_mesh((1, 1, 1), setting="benchmark", devices=jax.devices()[:1])
    learner = settings.make_learner_config(config.learner, built.contract, policy, one)

    batch = random_batch(config, built.contract, model.vocab)
    columns = batch.tokens, batch.prompt_length, batch.response_length
    packed, plan = row_packing.of_rows(*columns, limits=learner.limits)

    def step(state: Any, rows: Any) -> tuple[Any, dict[str, jax.Array]]:
        static: dict[str, Any] = dict(whole_groups=plan.whole_groups, optimizers=optimizers, schedules=schedules)
        return update_lib.train_step(state, {}, *rows, **static, config=learner)

    def init() -> Any:
        return state_lib.init_state(policy, policy.base.init(jax.random.key(0)), optimizers)

    return Update(step, init, jax.device_put((batch, packed), jax.devices()[0]))


def random_batch(config: Any, contract: contract_lib.Contract, vocab: int) -> state_lib.Batch:
    """A learner's batch, on the host, of responses whose lengths are between a half and the whole of the longest."""
    B, P, R = config.learner.queries * config.learner.completions, contract.prompt_length, contract.response_length
    rng = np.random.default_rng(0)
    allowed = np.setdiff1d(np.arange(vocab), [*contract.banned_tokens, contract.eos_id])
    length = rng.integers(R // 2, R, B, endpoint=True).astype(np.int32)
    masked = np.arange(R)[None, :] >= length[:, None]
    prompts = rng.choice(allowed, (config.learner.queries, P)).repeat(config.learner.completions, axis=0)
    responses = rng.choice(allowed, (B, R))

    def logprobs() -> np.ndarray:
        return np.where(masked, 0, -rng.exponential(np.log(vocab), (B, R))).astype(np.float32)

    return state_lib.Batch(
        tokens=np.concatenate([prompts, np.where(masked, contract.pad_id, responses)], axis=1).astype(np.int32),
        prompt_length=np.full(B, P, np.int32),
        response_length=length,
        ref_logprobs=logprobs(),
        behavior_logprobs=logprobs(),
        reward=rng.integers(0, 2, B).astype(np.float32),
    )


def generator_of(
    config: Any, vocab: int, *, rows: int, lengths: np.ndarray, samples: int = 1, prompt: int = _PROMPT
) -> Callable[[int], None]:
    """A function that generates responses of these lengths by the decoder of searchers, `rows` at a time.

    The function's argument numbers the random keys.

    Args: lengths: int32[Q · samples], tokens of the responses, those of a query side by side; samples: responses to a query;
      prompt: tokens of a prompt.
    """
    model, mesh = model_of(config, vocab), sharding.make_mesh((-1, 1, 1), setting="benchmark")
    engine = Engine(
        model,
        space_of_all_tokens(),
        mesh,
        slots=rows,
        samples=samples,
        prompt_length=prompt,
        response_length=int(lengths.max()),
        pad_id=0,
        lockstep=len(lengths) == rows,
    )
    params = jax.jit(decoder.define(model).init)(jax.random.key(0))
    engine.set_policy(parameters.cast(params, model.compute_dtype), 0)
    limits = lengths.reshape(-1, samples)
    prompts = np.random.default_rng(1).integers(3, vocab, (len(limits), prompt)).tolist()
    sampling = sampling_lib.constant(samples, temperature=1.0)

    def generate(number: int) -> None:
        keys = np.asarray(row_keys(number, 0, np.arange(len(lengths), dtype=np.uint32))).reshape(*limits.shape, 2)
        requests = [
            Request(name=str(q), prompt=prompts[q], keys=keys[q], sampling=sampling, limit=limits[q]) for q in range(len(limits))
        ]
        made = np.concatenate([made.length for made in engine.generate(requests)])
        if (made < lengths).any():
            raise ValueError(f"responses have {made.sum()} of {lengths.sum()} tokens, so there was less work than meant")

    return generate


def rollout_of(config: Any, vocab: int, *, rows: int, response_length: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A whole generation as one function of arrays, not jitted, and the shapes of its arguments."""
    model = model_of(config, vocab)
    params = parameters.shapes(decoder.define(model).specs)
    keys = jax.ShapeDtypeStruct((rows, 2), np.uint32)
    prompts, lengths = jax.ShapeDtypeStruct((rows, _PROMPT), np.int32), jax.ShapeDtypeStruct((rows,), np.int32)
    static: dict[str, Any] = {"config": model, "graphdef": kv_cache.define(model).graphdef, "space": space_of_all_tokens()}
    function = functools.partial(rollout, **static, response_length=response_length, pad_id=0)
    return function, (params, prompts, lengths, keys, sampling_lib.constant(rows, temperature=1.0))


def logprobs_of(config: Any, vocab: int, megabytes: int) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """(head float32[V, D], hidden [B, R, D], tokens int32[B, R]) -> the tokens' log-probs float32[B, R].

    Args: config: of a model with a tied embedding; megabytes: what logits may take at a time.
    """
    definition, space = decoder.define(model_of(config, vocab)), space_of_all_tokens()
    rest = {name: spec for name, spec in definition.specs.items() if name != "embedding"}  # not read
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), parameters.shapes(rest))

    def logprobs(head: jax.Array, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
        model = parameters.module(definition.graphdef, zeros | {"embedding": {"weight": head}})
        return scoring.token_logprobs(model, hidden, tokens, space=space, logit_bytes=megabytes * _MIB)[0]

    return logprobs


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


def update_piece(config: Any, vocab: int = 0, *, updates: int = 1) -> Piece:
    """Seconds of one update, the least of `updates` in a row, each on the state that the one before left."""
    update = update_of(config, vocab)
    state = jax.jit(update.init)()
    program = jax.jit(update.step, donate_argnums=0).lower(state, update.batch).compile()

    def one() -> float:
        nonlocal state
        seconds, (state, measurements) = timed(program, state, update.batch)
        if not measurements["finite"]:
            raise FloatingPointError(f"an update was refused: loss {float(measurements['loss'])} or a gradient is not finite")
        return seconds

    def run() -> dict[str, float]:
        return {_SECONDS: min(one() for _ in range(updates))}

    run()
    return Piece(run, memory_of(program))


def uniform(rows: int, tokens: int) -> np.ndarray:
    """int32[rows], responses of one length."""
    return np.full(rows, tokens, np.int32)


def decode_piece(config: Any, vocab: int, **sizes: Any) -> Piece:
    """Seconds of one generation, from host arrays to host arrays. Args: sizes: see generator_of."""
    generate, numbers = generator_of(config, vocab, **sizes), itertools.count()

    def run() -> dict[str, float]:
        return {_SECONDS: timed(generate, next(numbers))[0]}

    run()
    return Piece(run)


def compile_piece(function: Callable[..., Any], arguments: tuple[Any, ...], *, donate: tuple[int, ...] = ()) -> Piece:
    """Seconds until a function is traced and lowered, and from then until it is compiled, as if the process were new.

    Args: function: not jitted; arguments: its arguments or their shapes.
    """

    def compiled() -> tuple[dict[str, float], jax.stages.Compiled]:
        lower, lowered = timed_lowering(function, arguments, donate)
        seconds, program = timed(lowered.compile)
        return {_LOWER: lower, _COMPILE: seconds}, program

    _, program = compiled()
    return Piece(lambda: compiled()[0], memory_of(program))


def lower_piece(function: Callable[..., Any], arguments: tuple[Any, ...], *, donate: tuple[int, ...] = ()) -> Piece:
    """As compile_piece, without compilation. The seconds are the least of two."""

    def run() -> dict[str, float]:
        return {_LOWER: min(timed_lowering(function, arguments, donate)[0] for _ in range(2))}

    run()
    return Piece(run)


def timed_lowering(
    function: Callable[..., Any], arguments: tuple[Any, ...], donate: tuple[int, ...]
) -> tuple[float, jax.stages.Lowered]:
    """Seconds until a function is traced and lowered, with none of JAX's caches filled, and what it is lowered to."""
    jax.clear_caches()
    return timed(lambda: jax.jit(function, donate_argnums=donate).lower(*arguments))


def update_to_compile(config: Any, vocab: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    update = update_of(config, vocab)
    return update.step, (jax.eval_shape(update.init), update.batch)


def logprobs_piece(
    *, B: int, R: int, D: int, V: int, dtype: str = "float32", megabytes: int = 128, timed_R: int = 0, calls: int = 1
) -> Piece:
    """Memory and seconds of the gradients of a weighted sum of log-probs with respect to the head and the hidden states.

    Args: dtype: of the hidden states and of the model's computation; timed_R: response length for the seconds, 0: R; calls: the
      seconds are the least of so many.
    """
    config = recipe({"model.width": D, "model.compute_dtype": dtype})
    logprobs = logprobs_of(config, V, megabytes)

    def loss(head: jax.Array, hidden: jax.Array, tokens: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(weights * logprobs(head, hidden, tokens))

    shapes = (
        jax.ShapeDtypeStruct((V, D), jnp.float32),
        jax.ShapeDtypeStruct((B, R, D), dtype),
        jax.ShapeDtypeStruct((B, R), jnp.int32),
        jax.ShapeDtypeStruct((B, R), jnp.float32),
    )
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
    memory = memory_of(gradients.lower(*shapes).compile())
    rng, R = np.random.default_rng(0), timed_R or R
    inputs = (
        jnp.asarray(0.05 * rng.standard_normal((V, D)), jnp.float32),
        jnp.asarray(rng.standard_normal((B, R, D)), dtype),
        jnp.asarray(rng.integers(0, V, (B, R)), jnp.int32),
        jnp.asarray(rng.standard_normal((B, R)), jnp.float32),
    )

    def run() -> dict[str, float]:
        return {_SECONDS: min(timed(gradients, *inputs)[0] for _ in range(calls))}

    run()
    return Piece(run, memory)


# Sizes are meant for nine pairs of all pieces in ten minutes on two quiet cores. What takes a fraction of a second is repeated
# within a measurement: what disturbs it only adds to its time, so that the least time is measured.
PIECES: dict[str, Callable[[], Piece]] = {
    "update_demo": lambda: update_piece(demo.get_config(), updates=4),
    "update_v4096": lambda: update_piece(recipe(SIZES), 4096),
    "update_v32000": lambda: update_piece(recipe(SIZES | {"learner.queries": 2}), 32_000),
    "decode_v4096": lambda: decode_piece(recipe(SIZES), 4096, rows=64, lengths=uniform(64, 64)),
    "decode_samples": lambda: decode_piece(recipe(SIZES), 4096, rows=64, lengths=uniform(64, 64), samples=16, prompt=512),
    "decode_tail": lambda: decode_piece(recipe(SIZES), 4096, rows=64, lengths=tail_lengths(256)),
    # Programs of decoding hold each layer by itself, so that fewer are compiled sooner; here the vocabulary is most of the work.
    "decode_v32000": lambda: decode_piece(recipe(SIZES | {"model.layers": 2}), 32_000, rows=64, lengths=uniform(64, 32)),
    "compile_update": lambda: compile_piece(*update_to_compile(recipe(SIZES), 4096), donate=(0,)),
    "compile_decode": lambda: compile_piece(*rollout_of(recipe(SIZES | {"model.layers": 1}), 4096, rows=4, response_length=128)),
    "lower_28_layers": lambda: lower_piece(*update_to_compile(recipe(_DEEP), 4096), donate=(0,)),
    # The budget takes 41 steps at a time: the seconds are those of two whole blocks.
    "logprobs_v50000": lambda: logprobs_piece(B=16, R=1024, D=256, V=50_000, timed_R=82),
    "logprobs_v8192": lambda: logprobs_piece(B=32, R=64, D=384, V=8192, calls=4),
    # Four blocks of 64 steps; the budget of the others would take all steps at once.
    "logprobs_bfloat16": lambda: logprobs_piece(B=4, R=256, D=256, V=8192, dtype="bfloat16", megabytes=8, calls=8),
}


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answers requests until there are no more."""
    piece: Piece | None = None
    for line in requests:
        request = json.loads(line)
        gc.collect()
        if request["do"] == "list":
            answer: dict[str, Any] = {"pieces": list(PIECES), "code": str(Path(tba_jax.__file__).resolve().parents[1])}
        elif request["do"] == "prepare":
            piece = None  # its arrays and programs go before those of the next are made
            gc.collect()
            jax.clear_caches()
            piece = PIECES[request["piece"]]()
            answer = {"figures": piece.figures}
        elif request["do"] == "run" and piece is not None:
            answer = {"figures": piece.run()}
        else:
            raise ValueError(f"{request} is no request, or comes before anything is prepared")
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))
    # What a library prints must not come between the answers.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
