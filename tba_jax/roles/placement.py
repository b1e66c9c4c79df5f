"""Where the roles of one machine run: their cores and their GPUs."""

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a role runs. cpus: core numbers. gpus: CUDA device names, () on a machine without GPUs. memory_fraction: share of the
    memory of each GPU, 0 = JAX' default."""

    cpus: tuple[int, ...]
    gpus: tuple[str, ...] = ()
    memory_fraction: float = 0.0


def visible_gpus() -> tuple[str, ...]:
    """CUDA devices that this process may hand out. Looks at none of them: a process that initialises a GPU takes its memory."""
    if os.environ.get("JAX_PLATFORMS", "").startswith(("cpu", "tpu")):
        return ()
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return tuple(name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip() not in ("", "-1"))
    if shutil.which("nvidia-smi") is None:
        return ()
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return tuple(str(i) for i, line in enumerate(listed.stdout.splitlines()) if line.startswith("GPU"))


def available_cpus() -> tuple[int, ...]:
    """The cores that this process may run on."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else tuple(range(os.cpu_count() or 1))


def place(config: Any, *, cpus: Sequence[int], gpus: Sequence[str]) -> dict[str, Placement]:
    """Role name -> placement: trainer, searcher-0 …, and evaluator if there is one.

    Cores: the trainer gets half, the searchers share the other half, and the evaluator uses the searchers'. GPUs: each searcher
    gets one and its searchers.task_devices, the trainer gets the others. Where there are too few GPUs for that and
    searchers.task_devices is 0, roles take turns on them, and share them by the memory fractions of the config.

    Raises:
      ValueError: there are too few GPUs for task_devices, or memory fractions of roles that share one exceed its memory.
    """
    searchers = [f"searcher-{i}" for i in range(config.searchers.count)]
    names = ["trainer", *searchers, *(["evaluator"] if config.evaluation.enabled else [])]
    shares = _share_cpus(searchers, cpus)
    if not gpus:
        return {name: Placement(cpus=shares[name]) for name in names}
    own = _share_gpus(config, searchers, gpus)
    fractions = {"trainer": config.learner.memory_fraction, "evaluator": config.evaluation.memory_fraction}
    fractions |= dict.fromkeys(searchers, config.searchers.memory_fraction)
    placements = {}
    for name in names:
        sharing = [other for other in names if set(own[other]) & set(own[name])]
        total = sum(fractions[other] for other in sharing)
        if len(sharing) > 1 and round(total, 6) > 0.95:
            raise ValueError(
                f"{', '.join(sharing)} share GPU {own[name][0]} and would take {total:.2f} of its memory, at most 0.95 is "
                "allowed; lower learner.memory_fraction, searchers.memory_fraction or evaluation.memory_fraction"
            )
        alone = len(sharing) == 1
        placements[name] = Placement(cpus=shares[name], gpus=own[name], memory_fraction=0.0 if alone else fractions[name])
    return placements


def _share_cpus(searchers: Sequence[str], cpus: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Role name -> its cores; a role that would get none shares one."""
    half = max(1, len(cpus) // 2)
    of_trainer = tuple(cpus[:half])
    of_search = tuple(cpus[half:]) or of_trainer
    shares = {"trainer": of_trainer, "evaluator": of_search}
    for i, name in enumerate(searchers):
        shares[name] = of_search[i :: len(searchers)] or (of_search[i % len(of_search)],)
    return shares


def _share_gpus(config: Any, searchers: Sequence[str], gpus: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Role name -> its GPUs, the evaluator's included. Raises: see `place`."""
    each = 1 + config.searchers.task_devices
    spare = len(gpus) - each * len(searchers)
    if spare > 0:
        own = {"trainer": tuple(gpus[: _trainer_gpus(config, spare)])}
        own |= {name: tuple(gpus[spare + each * i : spare + each * (i + 1)]) for i, name in enumerate(searchers)}
    elif each > 1 and searchers:
        raise ValueError(
            f"searchers.task_devices={each - 1} makes {each} GPUs for each of searchers.count={len(searchers)}, which with the "
            f"trainer's are {each * len(searchers) + 1}; there are {len(gpus)}. Lower searchers.count, or let the models share"
        )
    else:
        own = {name: (gpus[i % len(gpus)],) for i, name in enumerate(["trainer", *searchers])}
    idle = [gpu for gpu in gpus if not any(gpu in used for used in own.values())]
    wanted = 1 + config.evaluation.task_devices
    shared = own[searchers[-1] if searchers else "trainer"]
    return own | {"evaluator": tuple(idle[:wanted]) if len(idle) >= wanted else shared[-wanted:]}


def _trainer_gpus(config: Any, spare: int) -> int:
    """How many of `spare` GPUs the trainer gets: the most that fit its mesh and divide its rows, all where mesh.data is set."""
    mesh, learner = config.learner.mesh, config.learner
    rows = learner.queries * learner.completions
    batches = [rows, config.warm_start.batch_size] if config.warm_start.steps else [rows]
    # A micro-batch has a row for each of the mesh's data ways.
    ways = learner.micro_batch_tokens // (config.task.prompt_length + config.task.response_length) or rows
    fitting = [
        n
        for n in range(1, spare + 1)
        if n % (mesh.fsdp * mesh.tensor) == 0
        and n // mesh.tensor <= ways
        and all(batch % (n // mesh.tensor) == 0 for batch in batches)
    ]
    return fitting[-1] if mesh.data == -1 and fitting else spare
