"""Temporaries of the programs of an engine's lane, as a share of its caches, compiled for a TPU that is not there.

python -m tests.support.lane_memory RECIPE LAYERS WINDOW PROGRAM…
"""

import dataclasses
import functools
import math
import os
import sys
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.decoding import sizes
from tba_jax.decoding import slots as slots_lib
from tba_jax.decoding.lane import Lane
from tba_jax.models import decoder, kv_cache, parameters
from tba_jax.models.config import ResponseSpace
from tba_jax.models.presets import PRESETS
from tba_jax.programs import Program, shaped

# Recipe -> preset, slots of four chips, samples of a query, prompt, response.
RECIPES = {
    "gsm8k_qwen2_5_1_5b": ("qwen2.5-1.5b", 384, 16, 512, 512),
    "tldr_pythia_1b": ("pythia-1b", 160, 20, 512, 128),
    "gsm8k_rho1b": ("rho-math-1b", 384, 24, 512, 512),
}
# What keeps libtpu quiet on a machine without TPUs, and lets two processes compile at a time.
QUIET = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5p-8"}


def lane(recipe: str, *, tiled: bool, layers: int, dtype: str = "bfloat16") -> tuple[slots_lib.SlotsConfig, int]:
    """The sizes of a lane of one chip as Engine makes them, and the prompts of one prefill call."""
    preset, slots, samples, prompt, response = RECIPES[recipe]
    model = dataclasses.replace(PRESETS[preset], compute_dtype=dtype, layers=layers)
    found = sizes.lane_sizes(slots, samples, 4)
    config = slots_lib.SlotsConfig(
        model=model,
        graphdef=kv_cache.define(model).graphdef,
        space=ResponseSpace(temperature=1.0, banned_tokens=(), eos_id=0),
        groups=found.groups,
        width=found.width,
        buffers=found.buffers,
        places=samples,
        prompt_length=prompt,
        response_length=response,
        chunk=32,
        tiled=tiled,
        together=sizes.heads_together(model.kv_heads, model.head_size, 1, tiled=tiled),
    )
    return config, found.arrivals


def programs(config: slots_lib.SlotsConfig, mesh: Mesh, arrivals: int) -> dict[str, Program]:
    """The programs of a lane by their names. Nothing is allocated or compiled."""
    options: dict[str, Any] = dict(stop_strings=None, drains=False, pad_id=0, lockstep=False, in_place=False)
    definition = decoder.define(config.model)
    cast = functools.partial(parameters.cast, dtype=config.model.compute_dtype)
    policy = shaped(jax.eval_shape(cast, parameters.shapes(definition.specs)), definition.shardings(mesh))
    return Lane(config, mesh, arrivals=arrivals, **options).programs(policy)


def cache_entries(config: slots_lib.SlotsConfig, mesh: Mesh) -> int:
    """Elements of all key and value caches on one device."""
    prompts, slots = shaped(jax.eval_shape(functools.partial(slots_lib.init, config)), slots_lib.shardings(config, mesh))
    return sum(math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves((prompts.cache, slots.own)))


def main() -> None:
    recipe, layers, window, *names = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    for name, value in (QUIET | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}).items():
        os.environ.setdefault(name, value)
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = sharding.make_mesh((1, 1, 1), setting="tensor", devices=devices[:1])
    config, arrivals = lane(recipe, tiled=True, layers=int(layers))
    made = programs(config, mesh, arrivals)
    for name in names:
        program = made[name]
        if int(window) and "window" in program.options:
            program = dataclasses.replace(program, options={**program.options, "window": int(window)})
        share = program.lower().compile().memory_analysis().temp_size_in_bytes / (2 * cache_entries(config, mesh))
        print(f"{name}: {share:.4f}")


if __name__ == "__main__":
    main()
