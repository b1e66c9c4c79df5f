"""Where the roles of one machine run: their cores, their GPUs and the share of a GPU's memory that each may take."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tba_jax.roles.gpus import Gpu, filled

# Kind of a role -> the section of the config with its mesh, its task_devices and its memory_fraction.
_SECTIONS = {"trainer": "learner", "searcher": "searchers", "evaluator": "evaluation"}


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a role runs. cpus: core numbers. gpus: CUDA device names. memory_fraction: share of the memory of each GPU, 0: JAX'
    default. processes: into which the role is divided, see `split`."""

    cpus: tuple[int, ...]
    gpus: tuple[str, ...] = ()
    memory_fraction: float = 0.0
    processes: int = 1


def available_cpus() -> tuple[int, ...]:
    """The cores that this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else tuple(range(os.cpu_count() or 1))


def split(placed: Placement) -> list[Placement]:
    """Where each process of a role runs: its cores and GPUs in equal runs; where there are fewer cores, processes share them.
    Raises ValueError where the GPUs of the role do not divide over its processes."""
    count, names = placed.processes, ",".join(placed.gpus)
    if len(placed.gpus) % count:
        raise ValueError(f"trainer.processes={count} does not divide the {len(placed.gpus)} GPUs of the trainer ({names})")
    gpus, cpus = len(placed.gpus) // count, len(placed.cpus)

    def cores(number: int) -> tuple[int, ...]:
        own = placed.cpus[number * cpus // count : (number + 1) * cpus // count]
        return own or placed.cpus[number % max(cpus, 1) :][:1]

    return [
        dataclasses.replace(placed, processes=1, cpus=cores(number), gpus=placed.gpus[number * gpus : (number + 1) * gpus])
        for number in range(count)
    ]


def place(
    config: Any, *, cpus: Sequence[int], gpus: Sequence[Gpu], check: Callable[[int], object] = lambda devices: None
) -> dict[str, Placement]:
    """Role name -> placement: trainer, searcher-0 …, and evaluator if there is one.

    Cores: the trainer gets half, the searchers share the other half, and the evaluator uses the searchers'. GPUs: searchers and
    evaluator take turns on the last GPUs, each on as many as the largest of their meshes makes up; the trainer gets the most of
    the others that its mesh fits. Where the GPUs are too few for that, all roles are on the same ones.

    Args: check: raises ValueError where the trainer's mesh does not fit so many GPUs.

    Raises: ValueError: the mesh of a role does not fit the GPUs, or they do not divide over trainer.processes; names the numbers.
    """
    searchers = [f"searcher-{i}" for i in range(config.searchers.count)]
    half = max(1, len(cpus) // 2)
    search = tuple(cpus[half:]) or tuple(cpus[:half])
    cores = {"trainer": tuple(cpus[:half]), "evaluator": search}
    cores |= {name: search[i :: len(searchers)] or (search[i % len(search)],) for i, name in enumerate(searchers)}
    names = ["trainer", *searchers, *(["evaluator"] if config.evaluation.enabled else [])]
    on = _deal(config, names, gpus, check) if gpus else {}
    found = {
        name: Placement(
            cores[name],
            tuple(gpu.name for gpu in on.get(name, ())),
            memory_fraction=_memory_fraction(config, name, on) if name in on else 0.0,
            processes=config.trainer.processes if name == "trainer" else 1,
        )
        for name in names
    }
    split(found["trainer"])  # which refuses GPUs that do not divide over its processes
    return found


def _fewest(config: Any, name: str) -> int:
    """GPUs that the mesh and the task_devices of a role make up at least."""
    section = config[_SECTIONS[name.split("-")[0]]]
    return math.prod(max(size, 1) for size in section.mesh.values()) + int(section.get("task_devices", 0))


def _deal(config: Any, names: Sequence[str], gpus: Sequence[Gpu], check: Callable[[int], object]) -> dict[str, tuple[Gpu, ...]]:
    """Role name -> its GPUs. Args, Raises: see `place`; names: the trainer first."""
    for name in names:
        if (fewest := _fewest(config, name)) > len(gpus):
            section = _SECTIONS[name.split("-")[0]]
            also = "" if name == "trainer" else f" and {section}.task_devices"
            raise ValueError(f"{section}.mesh{also} make up {fewest} GPUs for {name}; there are {len(gpus)}")
    trainer, *others = names
    least, block = _fewest(config, trainer), max((_fewest(config, name) for name in others), default=1)
    blocks = min(len(others), (len(gpus) - least) // block)
    own = len(gpus) - blocks * block  # all of them where no block is left
    area = gpus[own:] if blocks else gpus
    blocks = max(blocks, len(area) // block)
    on = {trainer: tuple(gpus[: _of_trainer(own, least, check)])}
    for i, name in enumerate(others):
        its = area[i % blocks * block :][:block]
        on[name] = tuple(its[block - _fewest(config, name) :])
    return on


def _of_trainer(room: int, least: int, check: Callable[[int], object]) -> int:
    """The largest number of GPUs up to `room` that the trainer's mesh fits. Raises the ValueError about the least."""
    for count in range(room, least, -1):
        with contextlib.suppress(ValueError):
            check(count)
            return count
    check(least)
    return least


def _memory_fraction(config: Any, name: str, on: Mapping[str, Sequence[Gpu]]) -> float:
    """A role's memory_fraction where it shares a GPU. Where that is 0, a trainer takes half of what such roles leave, and the
    others equal parts of the rest. A role alone takes all that may be taken. Raises ValueError where the fractions of the roles
    on a GPU exceed that."""

    def fixed(role: str) -> float:
        return float(config[_SECTIONS[role.split("-")[0]]].memory_fraction)

    shares = []
    for gpu in on[name]:
        roles = [role for role, its in on.items() if gpu in its]
        usable, given = gpu.usable_share(len(roles)), sum(map(fixed, roles)) if len(roles) > 1 else 0.0
        if given > usable or usable <= 0:
            settings = ", ".join(f"{_SECTIONS[role.split('-')[0]]}.memory_fraction={fixed(role)} of {role}" for role in roles)
            raise ValueError(f"GPU {gpu.name}: {usable:.2f} of its memory may be taken, too little for {settings}{filled([gpu])}")
        open_roles = [role for role in roles if not (given and fixed(role))]
        weights = {role: max(len(open_roles) - 1, 1) if role == "trainer" else 1 for role in open_roles}
        share = (usable - given) * weights[name] / sum(weights.values()) if name in weights else fixed(name)
        shares.append(share)
    return math.floor(min(shares) * 1000 + 1e-6) / 1000
