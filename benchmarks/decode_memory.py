"""What the programs of a decoding engine need on TPUs, compiled without a TPU: memory, and copies of the caches.

python -m benchmarks.decode_memory --topology=v5p:2x2x1 --preset=qwen2.5-1.5b --slots=384 --prompt=512 --response=512
  [--samples=16] [--chunk=32] [--data=1] [--tensor=1] [--layers=0] [--vocab=0] [--text=DIR]

Needs the extra `tpu`: libtpu holds the compiler, and names of topologies are its own (v5e:2x2, v5p:2x2x1, v6e:2x2). Prefill, the
decode loop and unstacking are the programs of one lane (decoding/programs.py), compiled from shapes. A lane has --tensor devices,
and its slots are --slots / --data. All figures are of one device. A loop is in place where its temporaries are a small part of
the caches. Copies are those of the final program by size; the compiler also copies weights ahead into fast memory, which is
counted apart as prefetches.
"""

import dataclasses
import functools
import math
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.experimental import topologies
from jax.sharding import Mesh

from tba_jax import sharding
from tba_jax.decoding import programs, sizes
from tba_jax.decoding import sampling as sampling_lib
from tba_jax.decoding import slots as slots_lib
from tba_jax.decoding.slots import SlotsConfig
from tba_jax.models import decoder, kv_cache, parameters
from tba_jax.models.config import DecoderConfig
from tba_jax.models.presets import PRESETS
from tba_jax.models.response_space import ResponseSpace

_TOPOLOGY = flags.DEFINE_string("topology", "v5p:2x2x1", "Devices, by libtpu's name.")
_PRESET = flags.DEFINE_enum("preset", "qwen2.5-1.5b", sorted(PRESETS), "Shapes of the model, in bfloat16.")
_SLOTS = flags.DEFINE_integer("slots", 384, "Over all lanes.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 16, "Responses to a query.", lower_bound=1)
_PROMPT = flags.DEFINE_integer("prompt", 512, "Longest prompt.", lower_bound=1)
_RESPONSE = flags.DEFINE_integer("response", 512, "Longest response.", lower_bound=1)
_CHUNK = flags.DEFINE_integer("chunk", 32, "searchers.decode_chunk.", lower_bound=1)
_DATA = flags.DEFINE_integer("data", 1, "Lanes.", lower_bound=1)
_TENSOR = flags.DEFINE_integer("tensor", 1, "Devices of a lane.", lower_bound=1)
_LAYERS = flags.DEFINE_integer("layers", 0, "Fewer layers than the preset's; 0: all.", lower_bound=0)
_VOCAB = flags.DEFINE_integer("vocab", 0, "Another vocabulary than the preset's; 0: its own.", lower_bound=0)
_TEXT = flags.DEFINE_string("text", "", "A folder for the text of each program.")

# What keeps libtpu quiet on a machine without TPUs, and lets two processes compile at a time.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_COPY = re.compile(r"(?m)^\s*(?:ROOT )?%?[\w.\-]+ = \(?(\w+)\[([\d,]*)\](?:\{([^}]*)\})?[^=]*? (copy|transpose|copy-start)\(")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a program on one device. copies, copied: number and bytes of copies, -1 where the text of the program cannot be
    had; prefetches: copies into fast memory."""

    arguments: int
    temporaries: int
    outputs: int
    aliased: int
    copies: int
    copied: int
    prefetches: int


def lane_config(
    model: DecoderConfig, *, slots: int, samples: int, prompt: int, response: int, chunk: int = 32, data: int = 1
) -> tuple[SlotsConfig, int]:
    """The sizes of a lane as Engine makes them, and the prompts of one prefill call."""
    lane = sizes.lane_sizes(slots, samples, data)
    config = SlotsConfig(
        model=model,
        graphdef=kv_cache.define(model).graphdef,
        space=ResponseSpace(temperature=1.0, banned_tokens=(), eos_id=0),
        groups=lane.groups,
        width=lane.width,
        buffers=lane.buffers,
        places=samples,
        prompt_length=prompt,
        response_length=response,
        chunk=min(chunk, response),
    )
    return config, lane.arrivals


def topology_mesh(topology: str, tensor: int) -> Mesh:
    """A mesh of devices that are not there. Raises what libtpu raises where it does not know the topology."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return sharding.make_mesh((1, 1, tensor), setting="tensor", devices=devices[:tensor])


def shaped(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def state_shapes(config: SlotsConfig, mesh: Mesh) -> tuple[slots_lib.Prompts, slots_lib.Slots]:
    return shaped(jax.eval_shape(functools.partial(slots_lib.init, config)), slots_lib.shardings(config, mesh))


def cache_bytes(config: SlotsConfig, mesh: Mesh) -> int:
    """Bytes of all caches on one device, without the padding of layouts."""
    prompts, slots = state_shapes(config, mesh)
    leaves = jax.tree.leaves((prompts.cache, slots.own))
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def compile_unstack(config: SlotsConfig, mesh: Mesh) -> Any:
    """The program that unstacks all weights at once, whose results are the arguments of the others."""
    definition = decoder.define(config.model)
    stacked = shaped(
        jax.eval_shape(functools.partial(parameters.cast, dtype=config.model.compute_dtype), parameters.shapes(definition.specs)),
        definition.shardings(mesh),
    )
    with jax.set_mesh(mesh):
        return programs.make(config, mesh).unstack.lower(stacked).compile()


def compile_prefill(config: SlotsConfig, mesh: Mesh, unstacked: Any, prompts_at_a_time: int) -> Any:
    prompts, slots = state_shapes(config, mesh)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.replicated(mesh)),
        (jnp.zeros((config.groups, config.buffers), jnp.int32), _arrivals(config, prompts_at_a_time), jnp.array(False)),
    )
    with jax.set_mesh(mesh):
        return programs.make(config, mesh).prefill.lower(unstacked, prompts, slots, *arguments, None).compile()


def compile_decode(config: SlotsConfig, mesh: Mesh, unstacked: Any, *, buffers: int = 0, window: int = 0) -> Any:
    """Args: buffers, window: see decode_loop.decode; 0: all."""
    prompts, slots = state_shapes(config, mesh)
    whole = sharding.replicated(mesh)
    oldest_first = jax.ShapeDtypeStruct((config.groups, config.buffers), jnp.int32, sharding=whole)
    enough = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    static = dict(buffers=buffers or config.buffers, window=window or slots_lib.own_entries(config))
    with jax.set_mesh(mesh):
        return programs.make(config, mesh).decode.lower(unstacked, prompts, slots, oldest_first, enough, None, **static).compile()


def unstacked_shapes(unstack: Any) -> Any:
    """The weights as the program `unstack` gives them."""
    return shaped(unstack.out_info, unstack.output_shardings)


def _arrivals(config: SlotsConfig, prompts: int) -> slots_lib.Arrivals:
    I, K = prompts, config.places
    index = jnp.zeros(I, jnp.int32)
    samples = slots_lib.Samples(
        key=jnp.zeros((I, K, 2), jnp.uint32),
        sampling=sampling_lib.constant((I, K), temperature=1.0),
        limit=jnp.zeros((I, K), jnp.int32),
    )
    return slots_lib.Arrivals(
        group=index,
        buffer=index,
        valid=jnp.zeros(I, bool),
        tokens=jnp.zeros((I, config.prompt_length), jnp.int32),
        length=index,
        given=index,
        stop_state=index,
        samples=samples,
    )


def memory(compiled: Any, text_file: Path | None = None) -> Memory:
    """Args: text_file: where the text of the program is written."""
    found = compiled.memory_analysis()
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError:  # jaxlib cannot read every program that a newer libtpu makes
        text, copies = "", [(-1, "")]
    else:
        copies = copies_in(text)
    if text_file is not None and text:
        text_file.write_text(text, encoding="utf-8")
    slow = [size for size, layout in copies if "S(1)" not in layout]
    return Memory(
        arguments=found.argument_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
        outputs=found.output_size_in_bytes,
        aliased=found.alias_size_in_bytes,
        copies=len(slow) if text else -1,
        copied=sum(slow),
        prefetches=len(copies) - len(slow) if text else -1,
    )


def copies_in(text: str) -> list[tuple[int, str]]:
    """(bytes, layout of the result) of every copy and transposition that a program names."""
    found = []
    for dtype, shape, layout, _ in _COPY.findall(text):
        bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype) or 32)
        found.append((math.prod(int(size) for size in shape.split(",") if size) * bits // 8, layout))
    return found


def report(name: str, compiled: Any, caches: int, seconds: float) -> None:
    m = memory(compiled, Path(_TEXT.value) / f"{name}.txt" if _TEXT.value else None)
    gib = {field.name: getattr(m, field.name) / 2**30 for field in dataclasses.fields(m)}
    copies = f"{m.copies:5} copies of {gib['copied']:6.3f} GiB, {m.prefetches:4} prefetches" if m.copies >= 0 else "no text"
    print(
        f"{name:8} arguments {gib['arguments']:7.3f}  temporaries {gib['temporaries']:7.3f} ({m.temporaries / caches:6.1%} of "
        f"the caches)  outputs {gib['outputs']:7.3f}  aliased {gib['aliased']:7.3f} GiB  {copies}  ({seconds:.0f} s)",
        flush=True,
    )


def main(argv: Sequence[str]) -> None:
    del argv
    jax.config.update("jax_platforms", "cpu")
    changes: dict[str, Any] = {"layers": _LAYERS.value or PRESETS[_PRESET.value].layers}
    changes["vocab"] = _VOCAB.value or PRESETS[_PRESET.value].vocab
    model = dataclasses.replace(PRESETS[_PRESET.value], compute_dtype="bfloat16", **changes)
    lengths = dict(prompt=_PROMPT.value, response=_RESPONSE.value, chunk=_CHUNK.value, data=_DATA.value)
    config, arrivals = lane_config(model, slots=_SLOTS.value, samples=_SAMPLES.value, **lengths)
    mesh = topology_mesh(_TOPOLOGY.value, _TENSOR.value)
    caches = cache_bytes(config, mesh)
    print(
        f"{_PRESET.value} on {_TOPOLOGY.value}, jax {jax.__version__}: {config.groups} groups of {config.width} slots, "
        f"{config.buffers} prompts of {config.prompt_length} each, responses of {config.response_length}, {model.layers} layers; "
        f"a lane has {_TENSOR.value} devices, and on each the caches are {caches / 2**30:.3f} GiB",
        flush=True,
    )
    begin = time.perf_counter()
    unstack = compile_unstack(config, mesh)
    report("unstack", unstack, caches, time.perf_counter() - begin)
    weights = unstacked_shapes(unstack)
    begin = time.perf_counter()
    report("prefill", compile_prefill(config, mesh, weights, arrivals), caches, time.perf_counter() - begin)
    begin = time.perf_counter()
    report("decode", compile_decode(config, mesh, weights), caches, time.perf_counter() - begin)


if __name__ == "__main__":
    app.run(main)
