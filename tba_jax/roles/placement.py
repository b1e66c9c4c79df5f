"""Where the roles of one machine run: their cores and their GPUs, by what they need, and why."""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from tba_jax.roles import gpu_layouts
from tba_jax.roles.gpus import Gpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a role runs. cpus: core numbers. gpus: CUDA device names, () on a machine without GPUs. memory_fraction: share of the
    memory of each GPU, 0 = JAX' default. processes: into which the role is divided, see `split`. The reasons say in words why."""

    cpus: tuple[int, ...]
    gpus: tuple[str, ...] = ()
    memory_fraction: float = 0.0
    processes: int = 1
    cpus_reason: str = ""
    gpus_reason: str = ""
    memory_reason: str = ""


def available_cpus() -> tuple[int, ...]:
    """The cores that this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else tuple(range(os.cpu_count() or 1))


def split(placed: Placement) -> list[Placement]:
    """Where each process of a role runs: its cores and GPUs in equal runs; where there are fewer cores, processes share them.

    Raises:
      ValueError: the GPUs of the role do not divide over its processes.
    """
    count = placed.processes
    if len(placed.gpus) % count:
        raise ValueError(
            f"trainer.processes={count} does not divide the {len(placed.gpus)} GPUs of the trainer ({','.join(placed.gpus)})"
        )
    gpus, cpus = len(placed.gpus) // count, len(placed.cpus)

    def cores(number: int) -> tuple[int, ...]:
        own = placed.cpus[number * cpus // count : (number + 1) * cpus // count]
        return own or placed.cpus[number % max(cpus, 1) :][:1]

    return [
        dataclasses.replace(placed, processes=1, cpus=cores(number), gpus=placed.gpus[number * gpus : (number + 1) * gpus])
        for number in range(count)
    ]


def place(config: Any, *, cpus: Sequence[int], gpus: Sequence[Gpu], need: gpu_layouts.Need) -> dict[str, Placement]:
    """Role name -> placement: trainer, searcher-0 …, and evaluator if there is one.

    Cores: the trainer gets half, the searchers share the other half, and the evaluator uses the searchers'. GPUs: see
    gpu_layouts.choose. Where roles have to share GPUs whose memory does not hold all searchers, there are fewer, at least one.

    Raises:
      ValueError: roles need more memory than their GPUs have, or their meshes do not fit the GPUs; names the numbers.
    """
    found = _place(config, cpus=cpus, gpus=gpus, need=need)
    trainer = dataclasses.replace(found["trainer"], processes=config.trainer.processes)
    split(trainer)
    return found | {"trainer": trainer}


def _place(config: Any, *, cpus: Sequence[int], gpus: Sequence[Gpu], need: gpu_layouts.Need) -> dict[str, Placement]:
    if not gpus:
        placed = _on_cores(config, config.searchers.count, cpus)
        return {name: dataclasses.replace(each, gpus_reason="there are none to hand out") for name, each in placed.items()}
    try:
        return _on_gpus(config, config.searchers.count, cpus, gpus, need)
    except gpu_layouts.TooSmall:
        if len(gpus) > config.searchers.count + config.evaluation.enabled:  # then no role need share
            raise
    for count in range(config.searchers.count - 1, 1, -1):
        with contextlib.suppress(gpu_layouts.TooSmall):
            return _on_gpus(config, count, cpus, gpus, need)
    return _on_gpus(config, min(config.searchers.count, 1), cpus, gpus, need)


def _on_cores(config: Any, count: int, cpus: Sequence[int]) -> dict[str, Placement]:
    searchers = [f"searcher-{i}" for i in range(count)]
    cores = _share_cpus(searchers, cpus)
    names = ["trainer", *searchers, *(["evaluator"] if config.evaluation.enabled else [])]
    return {name: Placement(cpus=cores[name][0], cpus_reason=cores[name][1]) for name in names}


def _on_gpus(config: Any, count: int, cpus: Sequence[int], gpus: Sequence[Gpu], need: gpu_layouts.Need) -> dict[str, Placement]:
    placed, wanted = _on_cores(config, count, cpus), config.searchers.count
    shares = gpu_layouts.choose([gpu_layouts.Role.of(config, name, need) for name in placed], gpus)
    fewer = f"; memory for {count} of searchers.count={wanted}" if count < wanted else ""
    return {
        name: dataclasses.replace(
            each,
            gpus=tuple(gpu.name for gpu in shares[name].gpus),
            memory_fraction=shares[name].memory_fraction,
            gpus_reason=shares[name].gpus_reason + (fewer if name.startswith("searcher") else ""),
            memory_reason=shares[name].memory_reason,
        )
        for name, each in placed.items()
    }


def describe(placements: Mapping[str, Placement]) -> str:
    """A line for each role: its devices, and why."""
    lines = ["where --role=all runs its roles on this machine, and why:"]
    for name, placed in placements.items():
        cores = f"cores {_numbers(placed.cpus)} ({placed.cpus_reason})"
        gpus = f"GPUs {','.join(placed.gpus) or 'none'} ({placed.gpus_reason})"
        memory = [f"memory fraction {placed.memory_fraction:.3f} ({placed.memory_reason})"] if placed.gpus else []
        lines.append(f"  {name:12} {'; '.join([cores, gpus, *memory])}")
    return "\n".join(lines)


def _numbers(cpus: Sequence[int]) -> str:
    """Cores 0, 1, 2 and 8 are "0-2,8"."""
    runs = [[cpu for _, cpu in run] for _, run in itertools.groupby(enumerate(cpus), lambda at: at[1] - at[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _share_cpus(searchers: Sequence[str], cpus: Sequence[int]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Role name -> its cores, and why; a role that would get none shares one."""
    half = max(1, len(cpus) // 2)
    of_trainer = tuple(cpus[:half])
    of_search = tuple(cpus[half:]) or of_trainer
    first, rest = (f"{half} of {len(cpus)}", "the others") if len(cpus) > 1 else ("the only one", "the only one")
    shares = {"trainer": (of_trainer, first), "evaluator": (of_search, f"{rest}, with the searchers" if searchers else rest)}
    for i, name in enumerate(searchers):
        mine = of_search[i :: len(searchers)] or (of_search[i % len(of_search)],)
        shares[name] = (mine, rest if len(searchers) == 1 else f"{rest}, dealt out to {len(searchers)} searchers")
    return shares
