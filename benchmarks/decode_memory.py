"""What the programs of a searcher's decoder need on TPUs, compiled without a TPU: caches and temporaries.

python -m benchmarks.decode_memory [--recipe=math_qwen2_5_7b] [--recipe=…] [--topologies=v5e:2x2,v5p:2x2x1,v6e:2x2]
  [--programs=prefill,decode,rotate,swap] [--window=0] [--layers=0]

Needs the extra `tpu`: libtpu holds the compiler, and names of topologies are its own. The programs are those of a lane
(decoding/lane.py), compiled from shapes on one host of four chips: `tensor` chips make a lane, and the slots are divided over the
lanes. The longest bucket of prompts is prefilled, and all entries of the caches are read unless --window says otherwise. `swap`
makes a policy's weights what the loop reads.

The table has one row a program, with figures of one device. The loop is in place where its temporaries are a small part of the
caches.
"""

import dataclasses
import functools
import importlib.metadata
import itertools
import math
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
from absl import app, flags
from jax.experimental import topologies
from jax.sharding import Mesh

from benchmarks import summary
from tba_jax import sharding
from tba_jax.decoding import sizes
from tba_jax.decoding import slots as slots_lib
from tba_jax.decoding.lane import Lane
from tba_jax.decoding.slots import SlotsConfig
from tba_jax.models import decoder, kv_cache, parameters
from tba_jax.models.config import DecoderConfig
from tba_jax.models.presets import PRESETS
from tba_jax.models.response_space import ResponseSpace
from tba_jax.programs import Program, shaped


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A searcher of a recipe on one host. tensor: devices of a lane; others: see Engine."""

    preset: str
    slots: int
    samples: int
    prompt: int
    response: int
    tensor: int = 1
    compute_dtype: str = "bfloat16"


_TLDR: dict[str, Any] = dict(slots=160, samples=20, prompt=512, response=128)
# The prompt is a quarter of the recipes', as in the figures of RESULTS.md.
_RED_TEAM: dict[str, Any] = dict(slots=128, samples=128, prompt=16, response=20)
RECIPES = {
    "red_team_gpt2": Recipe(preset="gpt2", compute_dtype="float32", **_RED_TEAM),
    "red_team_llama3_2_1b": Recipe(preset="llama-3.2-1b", **_RED_TEAM),
    "tldr_pythia 410m": Recipe(preset="pythia-410m", **_TLDR),
    "tldr_pythia 1b": Recipe(preset="pythia-1b", **_TLDR),
    "tldr_pythia 2.8b": Recipe(preset="pythia-2.8b", **_TLDR),
    "gsm8k_rho1b": Recipe(preset="rho-math-1b", slots=384, samples=24, prompt=512, response=512),
    "gsm8k_qwen2_5_1_5b": Recipe(preset="qwen2.5-1.5b", slots=384, samples=16, prompt=512, response=512),
    "math_qwen2_5_7b": Recipe(preset="qwen2.5-7b", slots=96, samples=16, prompt=1024, response=3072, tensor=4),
}
# The programs of Lane.programs by the names of --programs.
PROGRAMS = {"prefill": "prefill", "decode": "decode", "rotate": "rotation of a ring", "swap": "weights as decoded with"}

_RECIPES = flags.DEFINE_multi_enum("recipe", list(RECIPES), list(RECIPES), "May be given more than once.")
_TOPOLOGIES = flags.DEFINE_list("topologies", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"], "Hosts of four chips, by libtpu's names.")
_PROGRAMS = flags.DEFINE_list("programs", ["prefill", "decode", "swap"], "Programs to compile.")
_WINDOW = flags.DEFINE_integer("window", 0, "Entries of the own caches that `decode` and `rotate` take; 0: all.", lower_bound=0)
_LAYERS = flags.DEFINE_integer("layers", 0, "Fewer layers than the preset's; 0: all.", lower_bound=0)

# What keeps libtpu quiet on a machine without TPUs, and lets two processes compile at a time.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_CHIPS = 4
_GIB = 1 << 30


def lane_config(recipe: Recipe, *, tiled: bool, layers: int = 0) -> tuple[SlotsConfig, int]:
    """The sizes of a lane as Engine makes them, and the prompts of one prefill call. Args: layers: 0: the preset's."""
    preset = PRESETS[recipe.preset]
    model = dataclasses.replace(preset, compute_dtype=recipe.compute_dtype, layers=layers or preset.layers)
    lane = sizes.lane_sizes(recipe.slots, recipe.samples, _CHIPS // recipe.tensor)
    config = SlotsConfig(
        model=model,
        graphdef=kv_cache.define(model).graphdef,
        space=ResponseSpace(temperature=1.0, banned_tokens=(), eos_id=0),
        groups=lane.groups,
        width=lane.width,
        buffers=lane.buffers,
        places=recipe.samples,
        prompt_length=recipe.prompt,
        response_length=recipe.response,
        chunk=min(32, recipe.response),
        tiled=tiled,
        together=sizes.heads_together(model.kv_heads, model.head_size, recipe.tensor, tiled=tiled),
    )
    return config, lane.arrivals


def topology_mesh(topology: str, tensor: int) -> Mesh:
    """The mesh of a lane of devices that are not there. Raises what libtpu raises where it does not know the topology."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return sharding.make_mesh((1, 1, tensor), setting="tensor", devices=devices[:tensor])


def programs(config: SlotsConfig, mesh: Mesh, arrivals: int) -> dict[str, Program]:
    """The programs of a lane by their names in --programs. Nothing is allocated or compiled."""
    options: dict[str, Any] = dict(
        stop_strings=None, drains=False, pad_id=0, lock=threading.Lock(), lockstep=False, in_place=False
    )
    made = Lane(config, mesh, arrivals=arrivals, **options).programs(policy_shapes(config.model, mesh))
    return {name: made[told] for name, told in PROGRAMS.items() if told in made}


def policy_shapes(model: DecoderConfig, mesh: Mesh) -> Any:
    """The shapes of what Engine.prepare takes."""
    definition = decoder.define(model)
    weights = parameters.shapes(definition.specs)
    return shaped(
        jax.eval_shape(functools.partial(parameters.cast, dtype=model.compute_dtype), weights), definition.shardings(mesh)
    )


def cache_shapes(config: SlotsConfig, mesh: Mesh) -> list[tuple[int, ...]]:
    """The shape of every key and value cache on one device."""
    prompts, slots = shaped(jax.eval_shape(functools.partial(slots_lib.init, config)), slots_lib.shardings(config, mesh))
    return [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves((prompts.cache, slots.own))]


def cache_bytes(config: SlotsConfig, mesh: Mesh) -> int:
    """Bytes of all caches on one device, without the padding of layouts."""
    size = jax.numpy.dtype(config.model.compute_dtype).itemsize
    return sum(math.prod(shape) * size for shape in cache_shapes(config, mesh))


def main(argv: Sequence[str]) -> None:
    del argv
    jax.config.update("jax_platforms", "cpu")
    print(f"jax {jax.__version__}, libtpu {importlib.metadata.version('libtpu')}; GiB on one device; % of the caches")
    summary.table("recipe", "topology", "program", "arguments", "caches", "temporaries", "outputs", "aliased", "seconds")
    for name, topology in itertools.product(_RECIPES.value, _TOPOLOGIES.value):
        recipe = RECIPES[name]
        config, arrivals = lane_config(recipe, tiled=True, layers=_LAYERS.value)
        mesh = topology_mesh(topology, recipe.tensor)
        made, caches = programs(config, mesh, arrivals), cache_bytes(config, mesh)
        for program in _PROGRAMS.value:
            begin = time.perf_counter()
            found: Any = with_window(made[program], _WINDOW.value).lower().compile().memory_analysis()
            taken = (found.argument_size_in_bytes, caches, found.temp_size_in_bytes, found.output_size_in_bytes)
            told = [f"{size / _GIB:.3f}" for size in (*taken, found.alias_size_in_bytes)]
            told[2] += f" ({found.temp_size_in_bytes / caches:.1%})"
            summary.row(name, topology, program, *told, f"{time.perf_counter() - begin:.0f}")


def with_window(program: Program, window: int) -> Program:
    """The program with another window, if it has one. Args: window: 0: its own."""
    if not window or "window" not in program.options:
        return program
    return dataclasses.replace(program, options={**program.options, "window": window})


if __name__ == "__main__":
    app.run(main)
