"""What the programs of a large policy need on each device, by the compiler of that device: scoring, and the update.

python -m benchmarks.fit [--only=score,update] [--preset=qwen2.5-1.5b] [--topology=v5p:2x2x1] [--mesh=1,4,1] [--rows=128]
    [--prompt=512] [--response=512] [--score_tokens=0,65536] [--micro_batch_rows=16]

No such device is needed: with --topology=v5p:2x2x1, `pip install libtpu` and JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1, the TPU's
own compiler runs. Without --topology it compiles for the devices that are there. Where a program does not fit, the compiler's
message says so.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax.experimental import topologies

from tba_jax import sharding
from tba_jax.learner import optimizer, update
from tba_jax.learner import state as state_lib
from tba_jax.models import parameters, scoring
from tba_jax.models.config import DecoderConfig
from tba_jax.models.policy import Policy
from tba_jax.models.presets import PRESETS
from tba_jax.objectives import OBJECTIVES
from tba_jax.objectives.inputs import ObjectiveSettings

_ONLY = flags.DEFINE_list("only", ["score", "update"], "Which programs to compile.")
_PRESET = flags.DEFINE_enum("preset", "qwen2.5-1.5b", sorted(PRESETS), "The shape of the policy.")
_TOPOLOGY = flags.DEFINE_string("topology", "", "Of TPUs, such as v5p:2x2x1; default: the devices that are there.")
_MESH = flags.DEFINE_list("mesh", ["1", "-1", "1"], "data, fsdp, tensor; one may be -1.")
_ROWS = flags.DEFINE_integer("rows", 128, "Of a batch.", lower_bound=1)
_PROMPT = flags.DEFINE_integer("prompt", 512, "Tokens of a prompt.", lower_bound=1)
_RESPONSE = flags.DEFINE_integer("response", 512, "Tokens of a response.", lower_bound=1)
_SCORE_TOKENS = flags.DEFINE_list("score_tokens", ["0", "65536"], "searchers.score_tokens, each in turn.")
_MICRO_BATCH_ROWS = flags.DEFINE_integer("micro_batch_rows", 16, "Rows of the update that go through the model at a time.")

_GIB = 1 << 30
_LOGIT_MEGABYTES = 128
_COMPLETIONS = 16
_SPACE = scoring.ResponseSpace(temperature=1.0, banned_tokens=(), eos_id=-1)


def mesh_of(topology: str, sizes: Sequence[str]) -> jax.sharding.Mesh:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices if topology else jax.devices()
    shape = [int(size) for size in sizes]
    if -1 in shape:
        shape[shape.index(-1)] = len(devices) // -math.prod(shape)
    return sharding.make_mesh((shape[0], shape[1], shape[2]), setting="--mesh", devices=devices)


def placed(shape: tuple[int, ...], dtype: Any, where: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)


def lowered_scoring(model: DecoderConfig, mesh: jax.sharding.Mesh, score_tokens: int) -> jax.stages.Lowered:
    """Reference scoring of a batch as a searcher does it."""
    policy, B, P, R = Policy(model=model), _ROWS.value, _PROMPT.value, _RESPONSE.value
    score = scoring.program(
        mesh,
        graphdef=policy.base.graphdef,
        R=R,
        space=_SPACE,
        logit_megabytes=_LOGIT_MEGABYTES,
        score_tokens=score_tokens,
    )
    shardings = policy.model_shardings(mesh)
    params = parameters.map_specs(lambda _, spec: jax.ShapeDtypeStruct(spec.shape, model.compute_dtype), policy.model_specs)
    params = jax.tree.map(lambda x, s: placed(x.shape, x.dtype, s), params, shardings)
    split = sharding.rows_sharding(mesh)
    rows = [placed(shape, jnp.int32, split) for shape in ((B, P + R), (B,), (B,))]
    return sharding.on_mesh(mesh, score.lower)(params, *rows)


def lowered_update(model: DecoderConfig, mesh: jax.sharding.Mesh) -> jax.stages.Lowered:
    """The learner's update with AdamW, as the trainer compiles it."""
    policy, B, P, R = Policy(model=model), _ROWS.value, _PROMPT.value, _RESPONSE.value
    adamw = optimizer.adamw(lambda step: jnp.float32(1e-5), beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.0, clip_norm=1.0)
    optimizers = {"policy": adamw}
    config = update.LearnerConfig(
        policy=policy,
        objective=OBJECTIVES["trajectory_balance"],
        settings=ObjectiveSettings(completions=_COMPLETIONS),
        micro_batch_rows=_MICRO_BATCH_ROWS.value,
        logit_bytes=(_LOGIT_MEGABYTES << 20) * mesh.size,
        space=_SPACE,
        remat="full",
    )
    one = optimizer.linear_then_constant(start=1.0, end=1.0, steps=0)
    schedules = update.Schedules(beta=one, ref_temperature=one, reward_temperature=one)
    step = functools.partial(update.train_step, optimizers=optimizers, schedules=schedules, config=config)
    state, split = state_lib.state_shapes(policy, optimizers, mesh), sharding.rows_sharding(mesh)
    columns = {"tokens": ((B, P + R), np.int32), "policy_step": ((B, R), np.int32), "reward": ((B,), np.float32)}
    columns |= dict.fromkeys(("prompt_length", "response_length"), ((B,), np.int32))
    columns |= dict.fromkeys(("ref_logprobs", "policy_logprobs", "behavior_logprobs"), ((B, R), np.float32))
    batch = state_lib.Batch(**{name: placed(shape, dtype, split) for name, (shape, dtype) in columns.items()})
    out = (jax.tree.map(lambda x: x.sharding, state), sharding.replicated(mesh))
    return sharding.on_mesh(mesh, jax.jit(step, donate_argnums=0, out_shardings=out).lower)(state, {}, batch)


def tell(what: str, lowered: jax.stages.Lowered) -> None:
    begin = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        print(f"  {what}: {str(error).splitlines()[0]}", flush=True)
        return
    found = compiled.memory_analysis()
    assert found is not None
    sizes = {"arguments": found.argument_size_in_bytes, "temporaries": found.temp_size_in_bytes}
    told = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in sizes.items())
    print(f"  {what}: {told} GiB a device; compiled in {time.perf_counter() - begin:.0f} s", flush=True)


def main(argv: Sequence[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    model = dataclasses.replace(PRESETS[_PRESET.value], compute_dtype="bfloat16")
    mesh = mesh_of(_TOPOLOGY.value, _MESH.value)
    print(
        f"{_PRESET.value}, {_TOPOLOGY.value or jax.devices()[0].device_kind}, mesh {dict(mesh.shape)}: {_ROWS.value} rows of "
        f"{_PROMPT.value} + {_RESPONSE.value} tokens, bfloat16"
    )
    if "score" in _ONLY.value:
        for tokens in map(int, _SCORE_TOKENS.value):
            tell(f"scoring, score_tokens={tokens}", lowered_scoring(model, mesh, tokens))
    if "update" in _ONLY.value:
        tell(f"update, {_MICRO_BATCH_ROWS.value} rows at a time", lowered_update(model, mesh))


if __name__ == "__main__":
    app.run(main)
