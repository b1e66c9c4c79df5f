"""What the programs of a searcher's decoder need on TPUs, compiled without a TPU: caches, temporaries, and copies of the caches.

python -m benchmarks.decode_memory [--recipe=math_qwen2_5_7b] [--recipe=…] [--topologies=v5e:2x2,v5p:2x2x1,v6e:2x2]
  [--programs=prefill,decode,rotate,swap] [--window=0] [--untiled] [--layers=0] [--text=DIR]

Needs the extra `tpu`: libtpu holds the compiler, and names of topologies are its own. The programs are those of a lane
(decoding/lane.py), compiled from shapes on one host of four chips: `tensor` chips make a lane, and the slots are divided over the
lanes. The longest bucket of prompts is prefilled, and all entries of the caches are read unless --window says otherwise. `swap`
makes a policy's weights what the loop reads. --untiled takes the forms that CPUs and GPUs have, as TPUs did before.

The table has one row a program, with figures of one device. "Weights and caches" are what a decode step must read, without the
padding of tiles; "a step" is what the body of the loop reads and writes (benchmarks/step_bytes.py). The loop is in place where
its temporaries are a small part of the caches. "Copies of caches" are the copies and transpositions that the program names whose
results have the axes of a cache, in any order; copies into fast memory are left out. "Caches in other forms" are arrays with the
axes of a cache in another precision, or with its keys or values repeated for the query heads that share them. A dash: jaxlib
cannot read the program that libtpu made.
"""

import dataclasses
import functools
import importlib.metadata
import itertools
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import app, flags
from jax.experimental import topologies
from jax.sharding import Mesh

from benchmarks.step_bytes import Traffic
from tba_jax import sharding
from tba_jax.decoding import sizes, usage
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
_UNTILED = flags.DEFINE_bool("untiled", False, "The forms of other devices than TPUs.")
_LAYERS = flags.DEFINE_integer("layers", 0, "Fewer layers than the preset's; 0: all.", lower_bound=0)
_TEXT = flags.DEFINE_string("text", "", "A folder for the text of each program.")

# What keeps libtpu quiet on a machine without TPUs, and lets two processes compile at a time.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_CHIPS = 4
_GIB = 1 << 30
_ARRAY = re.compile(r"(?m)^\s*(?:ROOT )?%?[\w.\-]+ = \(?(\w+)\[([\d,]+)\](?:\{([^}]*)\})?[^=\n]*? ([\w\-]+)\(")
_FUSED = re.compile(r"(?ms)^%?fused_computation[^\n]*\{\n.*?^\}\n")
_COPIES = ("copy", "transpose", "copy-start")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a program on one device; and numbers of arrays in its text, -1 where the text cannot be had.

    copies: of the size of a cache, see above; other: arrays that hold a cache in another precision or expanded; step: bytes of
    one pass of the loop, 0 without one.
    """

    arguments: int
    temporaries: int
    outputs: int
    aliased: int
    copies: int
    other: int
    step: int


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


def weight_bytes(config: SlotsConfig, mesh: Mesh) -> int:
    """Bytes of the weights that a decode step reads on one device: of embeddings that are no head, a row a slot."""
    model = config.model
    prepared = kv_cache.unstacked_shapes(policy_shapes(model, mesh), model, mesh)
    of_device = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype), prepared)
    return usage.weight_bytes(of_device, model)


def memory(compiled: Any, config: SlotsConfig, mesh: Mesh, text_file: Path | None = None) -> Memory:
    """Args: text_file: where the text of the program is written."""
    found = compiled.memory_analysis()
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError:  # jaxlib cannot read every program that a newer libtpu makes
        text = ""
    if text_file is not None and text:
        text_file.write_text(text, encoding="utf-8")
    return Memory(
        arguments=found.argument_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
        outputs=found.output_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        **(_arrays_of_caches(text, config, mesh) if text else {"copies": -1, "other": -1}),
        step=_step_bytes(text),
    )


def _step_bytes(text: str) -> int:
    """Memory.step of a program's text, -1 where the text cannot be had."""
    if not text:
        return -1
    traffic = Traffic(text)
    return traffic.of_loop() if traffic.loops() else 0


def arrays_in(text: str) -> Iterator[tuple[str, tuple[int, ...], str, str]]:
    """(dtype, shape, layout, operation) of the results in a program's text; of a tuple, the first. Without the inside of fusions,
    which is not in memory."""
    for dtype, shape, layout, operation in _ARRAY.findall(_FUSED.sub("", text)):
        yield dtype, tuple(int(size) for size in shape.split(",")), layout, operation


def _arrays_of_caches(text: str, config: SlotsConfig, mesh: Mesh) -> Mapping[str, int]:
    """Memory.copies and Memory.other."""
    caches = [sorted(shape) for shape in cache_shapes(config, mesh)]
    head, expansion = config.model.head_size, config.model.heads // config.model.kv_heads
    # Sizes and lengths of caches whose heads are repeated for the query heads that share them.
    expanded = {(math.prod(shape) * expansion, shape[2]) for shape in cache_shapes(config, mesh)} if expansion > 1 else set()
    own = {"bfloat16": "bf16", "float32": "f32"}[config.model.compute_dtype]
    copies = other = 0
    for dtype, shape, layout, operation in arrays_in(text):
        is_cache = sorted(shape) in caches
        copies += is_cache and operation in _COPIES and "S(1)" not in layout
        is_expanded = head in shape and any((math.prod(shape), entries) in expanded and entries in shape for entries in shape)
        other += is_expanded or (is_cache and dtype != own)
    return {"copies": copies, "other": other}


def row(name: str, topology: str, program: str, found: Memory, caches: int, weights: int, seconds: float) -> str:
    """Args: weights: weight_bytes of the decode program, 0 of others."""

    def gib(size: int) -> str:
        return f"{size / _GIB:.3f}"

    share = f"{gib(found.temporaries)} ({found.temporaries / caches:.1%})"
    counts = [str(count) if count >= 0 else "–" for count in (found.copies, found.other)]
    step = ["", "", ""]
    if weights and found.step > 0:
        step = [gib(weights + caches), gib(found.step), f"{found.step / (weights + caches):.2f}"]
    memories = (gib(found.arguments), gib(caches), share, gib(found.outputs), gib(found.aliased))
    figures = (*memories, *counts, *step, f"{seconds:.0f}")
    return "| " + " | ".join((name, topology, program, *figures)) + " |"


def main(argv: Sequence[str]) -> None:
    del argv
    jax.config.update("jax_platforms", "cpu")
    print(f"jax {jax.__version__}, libtpu {importlib.metadata.version('libtpu')}; GiB on one device; % of the caches")
    memories = ("arguments", "caches", "temporaries", "outputs", "aliased", "copies of caches", "caches in other forms")
    columns = (*memories, "weights and caches", "a step", "ratio", "seconds")
    print("| recipe | topology | program | " + " | ".join(columns) + " |")
    print("|" + "---|" * (3 + len(columns)), flush=True)
    for name, topology in itertools.product(_RECIPES.value, _TOPOLOGIES.value):
        recipe = RECIPES[name]
        config, arrivals = lane_config(recipe, tiled=not _UNTILED.value, layers=_LAYERS.value)
        mesh = topology_mesh(topology, recipe.tensor)
        made = programs(config, mesh, arrivals)
        for program in _PROGRAMS.value:
            begin = time.perf_counter()
            compiled = with_window(made[program], _WINDOW.value).lower().compile()
            file = Path(_TEXT.value) / f"{name} {topology} {program}.txt".replace(" ", "_") if _TEXT.value else None
            found = memory(compiled, config, mesh, file)
            weights = weight_bytes(config, mesh) if program == "decode" else 0
            print(
                row(name, topology, program, found, cache_bytes(config, mesh), weights, time.perf_counter() - begin), flush=True
            )


def with_window(program: Program, window: int) -> Program:
    """The program with another window, if it has one. Args: window: 0: its own."""
    if not window or "window" not in program.options:
        return program
    return dataclasses.replace(program, options={**program.options, "window": window})


if __name__ == "__main__":
    app.run(main)
