"""What the models cost: memory and time of the log-prob kernel, compile time by depth, int8 weights for samplers.

python -m benchmarks.models [--only=logprobs,compile,int8] [--model=<Hugging Face folder>] [--repeats=5]

Every comparison is interleaved, its times are medians. Runs on whatever device JAX finds; `int8` then uses that device's dtype
(float32 on CPUs, bfloat16 elsewhere).
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags, logging

from benchmarks.rollout import rollout
from tba_jax import sharding
from tba_jax.decoding import sampling as sampling_lib
from tba_jax.decoding.slots import row_keys
from tba_jax.learner import state as state_lib
from tba_jax.learner import update
from tba_jax.learner.optimizer import linear_then_constant
from tba_jax.models import decoder, kv_cache, parameters, scoring
from tba_jax.models.config import DecoderConfig
from tba_jax.models.hugging_face import load
from tba_jax.models.policy import Policy
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.inputs import ObjectiveSettings
from tba_jax.packing import row_layout, row_packing

_ONLY = flags.DEFINE_list("only", ["logprobs", "compile", "int8"], "Which parts to run.")
_MODEL = flags.DEFINE_string("model", "", "A Hugging Face folder for int8; default: random weights.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Of each time.", lower_bound=1)

_MIB = 1 << 20
# All tokens, at temperature 1.
_SPACE = scoring.ResponseSpace(temperature=1.0, banned_tokens=(), eos_id=-1)


def medians(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Seconds of each function, in turn, after a first call that is not counted."""
    for function in functions.values():
        jax.block_until_ready(function())
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            begin = time.perf_counter()
            jax.block_until_ready(function())
            times[name].append(time.perf_counter() - begin)
    return {name: float(np.median(values)) for name, values in times.items()}


def naive_logprobs(weight: jax.Array, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
    """float32[B, R] by way of all logits [B, R, V]."""
    logits = jnp.einsum("BRD,VD->BRV", hidden, weight)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)[..., 0]


def logprob_gradients(megabytes: int | None, *, B: int, R: int, D: int, V: int) -> Any:
    """Gradients of a weighted sum of log-probs with respect to (weight, hidden); None: the naive form."""
    config = DecoderConfig(layers=1, width=D, heads=1, kv_heads=1, head_size=D, ffn=D, vocab=V, max_positions=R)
    definition = decoder.define(config)
    rest = {name: spec for name, spec in definition.specs.items() if name != "embedding"}  # not read by the head
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), parameters.shapes(rest))

    def loss(weight: jax.Array, hidden: jax.Array, tokens: jax.Array, weights: jax.Array) -> jax.Array:
        if megabytes is None:
            return jnp.sum(weights * naive_logprobs(weight, hidden, tokens))
        model = parameters.module(definition.graphdef, zeros | {"embedding": {"weight": weight}})
        return jnp.sum(weights * scoring.token_logprobs(model, hidden, tokens, space=_SPACE, logit_bytes=megabytes * _MIB)[0])

    return jax.jit(jax.grad(loss, argnums=(0, 1)))


def logprobs(repeats: int) -> None:
    B, R, D, V = 16, 1024, 256, 50_000
    rng = np.random.default_rng(0)
    inputs = (
        jnp.asarray(0.05 * rng.standard_normal((V, D)), jnp.float32),
        jnp.asarray(rng.standard_normal((B, R, D)), jnp.float32),
        jnp.asarray(rng.integers(0, V, (B, R)), jnp.int32),
        jnp.asarray(rng.standard_normal((B, R)), jnp.float32),
    )
    compiled = {
        name: logprob_gradients(megabytes, B=B, R=R, D=D, V=V).lower(*inputs).compile()
        for name, megabytes in {"naive": None, "64 MiB": 64, "128 MiB": 128, "256 MiB": 256}.items()
    }
    memory = {name: program.memory_analysis().temp_size_in_bytes / _MIB for name, program in compiled.items()}
    seconds = medians({name: functools.partial(program, *inputs) for name, program in compiled.items()}, repeats)
    print(f"log-probs with gradients, B={B} T={R} V={V} D={D}, float32 (budget of logits: temporary memory, time)")
    for name in compiled:
        print(
            f"  {name:8} {memory[name]:7.0f} MiB ({memory['naive'] / memory[name]:5.1f}× less)   "
            f"{seconds[name]:6.2f} s ({seconds[name] / seconds['naive']:.2f} of naive)"
        )


def lowered_train_step(layers: int) -> Any:
    """The learner's whole update on a small Llama of this depth, lowered."""
    model = DecoderConfig(layers=layers, width=128, heads=4, kv_heads=4, head_size=32, ffn=256, vocab=512, max_positions=64)
    policy, optimizers = Policy(model=model), {"policy": optax.adamw(1e-4)}
    config = update.LearnerConfig(
        policy=policy,
        objective=OBJECTIVES["trajectory_balance"],
        settings=ObjectiveSettings(completions=4),
        limits=row_layout.Limits(rows=16, group=4, prompt=16, response=16, shares=True, tokens=8 * 32),
        logit_bytes=_MIB,
        space=_SPACE,
        remat="full",
    )
    always_one = linear_then_constant(start=1.0, end=1.0, steps=0)
    schedules = update.Schedules(beta=always_one, ref_temperature=always_one, reward_temperature=always_one)
    step = functools.partial(update.train_step, whole_groups=True, optimizers=optimizers, schedules=schedules, config=config)
    state = jax.eval_shape(lambda: state_lib.init_state(policy, policy.base.init(jax.random.key(0)), optimizers))
    rows = {"tokens": jax.ShapeDtypeStruct((16, 32), np.int32)}
    rows |= {name: jax.ShapeDtypeStruct((16,), np.int32) for name in ("prompt_length", "response_length")}
    rows |= {name: jax.ShapeDtypeStruct((16, 16), np.float32) for name in ("ref_logprobs", "behavior_logprobs")}
    batch = state_lib.Batch(**rows, reward=jax.ShapeDtypeStruct((16,), np.float32))
    return jax.jit(step, donate_argnums=0).lower(state, {}, batch, row_packing.empty(config.limits, 8))


def compile_times(repeats: int) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    times: dict[int, list[float]] = {6: [], 24: []}
    for _ in range(repeats):
        for layers, found in times.items():
            begin = time.perf_counter()
            lowered_train_step(layers).compile()
            found.append(time.perf_counter() - begin)
    shallow, deep = (float(np.median(found)) for found in times.values())
    print(f"trace and compile the train step: 6 layers {shallow:.2f} s, 24 layers {deep:.2f} s, ratio {deep / shallow:.2f}")


def int8(repeats: int, folder: str) -> None:
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if folder:
        model = load.read_config(folder, compute_dtype=dtype)
        mesh = sharding.make_mesh((1, 1, 1), setting="benchmark", devices=jax.devices()[:1])
        base = load.load_params(folder, model, decoder.define(model).shardings(mesh))
    else:
        model = DecoderConfig(
            layers=6, width=384, heads=6, kv_heads=6, head_size=64, ffn=1024, vocab=4096, max_positions=192, compute_dtype=dtype
        )
        base = jax.jit(decoder.define(model).init)(jax.random.key(0))
    policy = Policy(model=model)
    params = {
        weights: jax.jit(functools.partial(policy.for_sampling, weights=weights))(base, base) for weights in ("full", "int8")
    }
    B, P, R = 64, 16, 64
    rng = np.random.default_rng(0)
    prompts, lengths = rng.integers(3, model.vocab, (B, P)).astype(np.int32), np.full(B, P, np.int32)
    keys = np.asarray(row_keys(0, 0, np.arange(B, dtype=np.uint32)))
    rows: dict[str, Any] = dict(config=model, space=_SPACE, response_length=R, pad_id=0)
    generate = {
        name: jax.jit(functools.partial(rollout, graphdef=kv_cache.define(model, name).graphdef, **rows)) for name in params
    }
    sampling = sampling_lib.constant(B, temperature=1.0)
    one = sharding.make_mesh((1, 1, 1), setting="benchmark", devices=jax.devices()[:1])
    score = {
        name: scoring.program(
            one,
            graphdef=kv_cache.define(model, name, unstacked=False).graphdef,
            R=R,
            space=_SPACE,
            logit_megabytes=128,
        )
        for name in params
    }
    sampled = generate["int8"](params["int8"], prompts, lengths, keys, sampling)
    packed = row_packing.alone(jnp.concatenate([prompts, sampled.tokens], axis=1), jnp.asarray(lengths), sampled.length, R=R)
    logprobs = {name: np.asarray(score[name](p, packed)) for name, p in params.items()}
    error = np.abs(logprobs["int8"] - logprobs["full"])
    seconds = medians(
        {name: functools.partial(generate[name], p, prompts, lengths, keys, sampling) for name, p in params.items()}, repeats
    )
    size = {name: sum(leaf.nbytes for leaf in jax.tree.leaves(p)) / _MIB for name, p in params.items()}
    print(f"int8 weights, {folder or 'random weights'}, {dtype}, {jax.devices()[0].device_kind}: {B} rows of {R} new tokens")
    for name in params:
        print(f"  {name:5} {size[name]:8.2f} MiB, {B * R / seconds[name]:8.0f} tokens/s ({seconds['full'] / seconds[name]:.2f}×)")
    print(f"  log-probs of sampled tokens differ by {error.mean():.2g} nats on average, {error.max():.2g} at most")


def main(argv: Sequence[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    parts: dict[str, Callable[[], None]] = {
        "logprobs": lambda: logprobs(_REPEATS.value),
        "compile": lambda: compile_times(_REPEATS.value),
        "int8": lambda: int8(_REPEATS.value, _MODEL.value),
    }
    for name in _ONLY.value:
        parts[name]()


if __name__ == "__main__":
    app.run(main)
