"""GPUs that are not here: how roles share them, and the TPU chips for which their programs are compiled in their place.

No compiler for GPUs runs without a driver. A TPU's compiler runs anywhere, so as many chips stand in for the GPUs of a role, and
what programs take there is compared with the memory of the GPUs. Such figures are marked "by proxy".
"""

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tba_jax.experiment import meshes, planning, topologies
from tba_jax.experiment.composition import Experiment
from tba_jax.experiment.planning import Place, Planned, Settings
from tba_jax.roles import gpu_layouts, placement
from tba_jax.roles.gpus import CONTEXT_BYTES, DEFAULT_SHARE, Gpu
from tba_jax.run import layout

_GIB = 1 << 30
# GiB of GPUs whose name says how much they have, as the driver reports them: error correction takes a part of some.
MEMORY = {"T4": 14.7, "L4": 22.4, "A10G": 22.4, "L40S": 44.9, "A100": 80, "H100": 79.6, "H200": 140, "B200": 179}
# The share of a GPU's memory that programs may take at most: another compiler's figures stand for them, and gaps between arrays
# are lost.
_PROXY_SHARE = 0.9
# Stand-ins, by how many chips they have.
_CHIPS = {1: "v5p:1x1x1", 4: "v5p:2x2x1", 8: "v5p:2x2x2", 16: "v5p:2x2x4", 64: "v5p:4x4x4"}
# Numbers of GPUs that are tried for a role.
_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_GPUS = re.compile(r"(?P<name>[A-Za-z][\w-]*?)x(?P<count>[1-9]\d*)(@(?P<gib>[1-9]\d*(\.\d+)?))?")


# The sections whose roles sample.
_SAMPLING = ("searchers", "evaluation")
# Settings that leave it to the placement how many GPUs a role gets.
_OPEN: Settings = {
    f"{section}.{name}": value
    for section in meshes.SECTIONS.values()
    for name, value in {"mesh.data": -1, "mesh.fsdp": 1, "mesh.tensor": 1, "memory_fraction": 0.0}.items()
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs of one machine. memory: bytes of each."""

    name: str
    count: int
    memory: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """The GPUs of a role. count: how many. beside: the roles that the most crowded of them has besides, one entry for each."""

    count: int
    beside: Sequence[str]


def parse(text: str) -> Gpus:
    """The GPUs that NAMExCOUNT or NAMExCOUNT@GIB tells of, such as H100x8 or MI300Xx4@192.

    Raises:
      ValueError: the text is not of this form, or does not say the memory of a GPU that is not in MEMORY.
    """
    found = _GPUS.fullmatch(text)
    if found is None:
        raise ValueError(f"--gpus={text} must be NAMExCOUNT or NAMExCOUNT@GIB, such as H100x8 or L4x2@24")
    if int(found["count"]) > max(_CHIPS):
        raise ValueError(f"--gpus={text}: a run can be planned for up to {max(_CHIPS)} GPUs, not {found['count']}")
    known = {name.lower(): gib for name, gib in MEMORY.items()}
    gib = float(found["gib"] or known.get(found["name"].lower(), 0))
    if not gib:
        raise ValueError(
            f"--gpus={text}: the memory of {found['name']} is not known; say it as {text}@GIB, or name one of {', '.join(MEMORY)}"
        )
    return Gpus(name=found["name"], count=int(found["count"]), memory=int(gib * _GIB))


def stand_in(count: int) -> str:
    """The topology of the TPU chips in the place of `count` GPUs. Raises ValueError where there are too many."""
    fitting = [chips for chips in _CHIPS if chips >= count]
    if not fitting:
        raise ValueError(f"programs can be compiled for up to {max(_CHIPS)} GPUs of a role, not {count}")
    return _CHIPS[fitting[0]] if fitting[0] == count else f"{_CHIPS[fitting[0]]}/{count}"


def usable_share(experiment: Experiment, gpus: Gpus, roles: int) -> float:
    """The share of a GPU's memory that so many roles may take together: by the supervisor's rule, or JAX' own where one process
    runs all roles; and no more than figures by proxy allow."""
    one_process = experiment.config.schedule.mode == "interleaved"
    return min(_PROXY_SHARE, DEFAULT_SHARE if one_process else Gpu(name="", memory=gpus.memory).usable_share(roles))


def place(gpus: Gpus, count: int, *, share: float, part: float = 1.0) -> Place:
    """Some of the GPUs. Args: share: of their memory, see `usable_share`; part: of this share. Raises: see `stand_in`,
    topologies.devices."""
    chips = stand_in(count)
    of_memory = f", {part:.0%} of the memory that roles may take" if part < 1 else ""
    name = f"{count} × {gpus.name}{of_memory}, by proxy {chips}"
    return Place(devices=topologies.devices(chips), topology=chips, name=name, limit=int(part * share * gpus.memory))


def shares(experiment: Experiment, gpus: Gpus, *, each: int) -> dict[str, Share]:
    """Role -> its share of the GPUs, as the supervisor places roles (roles/placement.py) that fit wherever a mesh divides.

    Args: each: GPUs of a searcher, and of the evaluator.

    Raises:
      ValueError: there are too few GPUs, see placement.place.
    """
    roles = meshes.roles_of(experiment.config)
    if experiment.config.schedule.mode == "interleaved":  # one process has all GPUs
        return {role: Share(count=gpus.count, beside=[other for other in roles if other != role]) for role in roles}

    def need(kind: str, *, devices: int, limit: int | None) -> int:
        """Returns 1 byte, so that only meshes decide: the plan finds out what fits by compiling."""
        del limit
        if not _some_mesh_divides(experiment, kind, devices=devices):
            raise ValueError(f"no mesh of {devices} GPUs divides what the {kind} computes")
        return 1

    config = planning.changed(experiment, {**_OPEN, **{f"{section}.mesh.tensor": each for section in _SAMPLING}}).config
    there = [Gpu(name=str(gpu), memory=gpus.memory) for gpu in range(gpus.count)]
    try:
        placed = placement.place(config, cpus=(0,), gpus=there, need=need)
    except gpu_layouts.TooSmall as error:  # although each role needs next to nothing
        raise ValueError(
            f"{gpus.name} has too little memory for roles that share a GPU: each keeps {CONTEXT_BYTES / _GIB:.2f} GiB beside its "
            f"arrays, and that leaves none of the {gpus.memory / _GIB:.2f} GiB for them"
        ) from error
    kinds, found = {name: name.partition("-")[0] for name in placed}, dict[str, Share]()
    for name, its in placed.items():
        on = [[kinds[other] for other in placed if other != name and gpu in placed[other].gpus] for gpu in its.gpus]
        crowded, kind = max(on, key=len), kinds[name]
        if kind not in found or len(crowded) > len(found[kind].beside):
            found[kind] = Share(count=len(its.gpus), beside=crowded)
    return found


def _some_mesh_divides(experiment: Experiment, role: str, *, devices: int) -> bool:
    """Whether a mesh of so many devices allows some size."""
    for mesh in planning.meshes_of(experiment, role, devices):
        with contextlib.suppress(ValueError):
            return bool(planning.sizes(planning.changed(experiment, mesh), role, devices=devices))
    return False


class OnGpus:
    """The plan of a run on the GPUs of one machine."""

    def __init__(self, experiment: Experiment, run: layout.RunDir, *, gpus: Gpus, seconds: float):
        self._experiment, self._run, self._gpus = experiment, run, gpus
        self._until = time.monotonic() + seconds
        self._known: dict[tuple[str, int, int], Planned | planning.NothingFits] = {}

    def find(self) -> tuple[Settings, list[Planned]]:
        """Settings of the placement, and the plan of each role: with as few GPUs for a searcher as it fits, and then with as many
        searchers, at most the recipe's.

        Raises:
          ValueError: nothing fits; names the smallest number of GPUs on which the role that does not fit would.
        """
        problem: ValueError | None = None
        for each in (count for count in _COUNTS if count <= self._gpus.count):
            for searchers in range(self._experiment.config.searchers.count, 0, -1) or [0]:
                experiment = planning.changed(self._experiment, {"searchers.count": searchers})
                try:
                    return self._with_placement(experiment, shares(experiment, self._gpus, each=each))
                except planning.NothingFits as error:
                    problem = error
                except planning.TimeIsOver:
                    raise
                except ValueError as error:  # too few GPUs for this placement
                    problem = problem or error
        assert problem is not None
        role = next((key[0] for key, known in self._known.items() if known is problem), "")
        if not role:
            raise problem
        share = usable_share(self._experiment, self._gpus, 1)
        more = (place(self._gpus, count, share=share) for count in _COUNTS if count > self._gpus.count)
        would = planning.smallest(self._experiment, self._run, role=role, larger=more, until=self._until)
        raise ValueError(f"{problem}; {would}")

    def _with_placement(self, experiment: Experiment, placed: Mapping[str, Share]) -> tuple[Settings, list[Planned]]:
        least = {role: self._least(experiment, role, its) for role, its in placed.items() if its.beside}
        settings, planned = dict[str, Any]({"searchers.count": experiment.config.searchers.count}), list[Planned]()
        for i, (role, its) in enumerate(placed.items()):
            until = planning.share_of_time(self._until, roles=len(placed) - i)
            part = least[role] / (least[role] + sum(least[other] for other in its.beside)) if its.beside else 1.0
            share = usable_share(experiment, self._gpus, 1 + len(its.beside))
            where = place(self._gpus, its.count, share=share, part=math.floor(100 * part) / 100)
            planned.append(self._role(experiment, role, where, until))
            if its.beside and experiment.config.schedule.mode != "interleaved":
                fraction = where.limit / self._gpus.memory  # JAX takes it when the role starts
                settings[f"{meshes.SECTIONS[role]}.memory_fraction"] = math.floor(100 * fraction) / 100
        return settings, planned

    def _least(self, experiment: Experiment, role: str, its: Share) -> int:
        whole = place(self._gpus, its.count, share=1.0)
        return planning.Search(experiment, self._run, role=role, place=whole, until=self._until).least

    def _role(self, experiment: Experiment, role: str, where: Place, until: float) -> Planned:
        key = role, len(where.devices), where.limit
        if key not in self._known:
            try:
                self._known[key] = planning.find(experiment, self._run, role=role, place=where, until=until)
            except planning.NothingFits as error:
                self._known[key] = error
        if isinstance(known := self._known[key], planning.NothingFits):
            raise known
        return known
