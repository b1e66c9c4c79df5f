"""GPUs that are not here: how roles share them, and the TPU chips for which their programs are compiled in their place.

No compiler for GPUs runs without a driver. A TPU's compiler runs anywhere, so as many chips stand in for the GPUs of a role, and
what programs take there is compared with the memory of the GPUs. Such figures are marked "by proxy".
"""

import dataclasses
import math
import re
import time
from collections.abc import Sequence
from typing import Any

from tba_jax.experiment import compiling, planning, topologies
from tba_jax.experiment.composition import Experiment
from tba_jax.experiment.meshes import SECTIONS
from tba_jax.experiment.planning import Place, Planned, Settings
from tba_jax.roles import placement
from tba_jax.run import layout

# GiB of GPUs whose name says how much they have.
MEMORY = {"T4": 16, "L4": 24, "A10G": 24, "L40S": 48, "A100": 80, "H100": 80, "H200": 141, "B200": 180}
# Of a GPU's memory, the share that programs may take: the rest is the driver's, and lost between arrays.
_USABLE = 0.9
# Stand-ins, by how many chips they have.
_CHIPS = {1: "v5p:1x1x1", 4: "v5p:2x2x1", 8: "v5p:2x2x2", 16: "v5p:2x2x4", 64: "v5p:4x4x4"}
_GPUS = re.compile(r"(?P<name>[A-Za-z][\w-]*?)x(?P<count>[1-9]\d*)(@(?P<gib>[1-9]\d*(\.\d+)?))?")


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
    known = {name.lower(): gib for name, gib in MEMORY.items()}
    gib = float(found["gib"] or known.get(found["name"].lower(), 0))
    if not gib:
        raise ValueError(
            f"--gpus={text}: the memory of {found['name']} is not known; say it as {text}@GIB, or name one of {', '.join(MEMORY)}"
        )
    return Gpus(name=found["name"], count=int(found["count"]), memory=int(gib * (1 << 30)))


def stand_in(count: int) -> str:
    """The topology of the TPU chips in the place of `count` GPUs. Raises ValueError where there are too many."""
    fitting = [chips for chips in _CHIPS if chips >= count]
    if not fitting:
        raise ValueError(f"programs can be compiled for up to {max(_CHIPS)} GPUs of a role, not {count}")
    return _CHIPS[fitting[0]] if fitting[0] == count else f"{_CHIPS[fitting[0]]}/{count}"


def place(gpus: Gpus, count: int, *, part: float = 1.0) -> Place:
    """Some of the GPUs. Args: part: of their memory. Raises: see `stand_in`, topologies.devices."""
    chips = stand_in(count)
    of_memory = f", {part:.0%} of their memory" if part < 1 else ""
    name = f"{count} × {gpus.name}{of_memory}, by proxy {chips}"
    return Place(devices=topologies.devices(chips), topology=chips, name=name, limit=int(part * _USABLE * gpus.memory))


def shares(config: Any, count: int) -> dict[str, Share]:
    """Role -> its share of `count` GPUs of one machine, as the supervisor places roles (roles/placement.py).

    Raises:
      ValueError: there are too few GPUs, see placement.place.
    """
    roles = compiling.roles_of(config)
    if config.schedule.mode == "interleaved":  # one process has all GPUs
        return {role: Share(count=count, beside=[other for other in roles if other != role]) for role in roles}
    config = config.copy_and_resolve_references()
    for section in SECTIONS.values():
        config[section].memory_fraction = 0.0  # whether roles fit beside each other is what is to be found out
    placed = placement.place(config, cpus=(0,), gpus=[str(gpu) for gpu in range(count)])
    kinds, found = {name: name.partition("-")[0] for name in placed}, dict[str, Share]()
    for name, its in placed.items():
        on = [[kinds[other] for other in placed if other != name and gpu in placed[other].gpus] for gpu in its.gpus]
        crowded, kind = max(on, key=len), kinds[name]
        if kind not in found or len(crowded) > len(found[kind].beside):
            found[kind] = Share(count=len(its.gpus), beside=crowded)
    return found


class OnGpus:
    """The plan of a run on the GPUs of one machine."""

    def __init__(self, experiment: Experiment, run: layout.RunDir, *, gpus: Gpus, seconds: float):
        self._experiment, self._run, self._gpus = experiment, run, gpus
        self._until = time.monotonic() + seconds
        self._known: dict[tuple[str, int, float], Planned] = {}

    def find(self) -> tuple[Settings, list[Planned]]:
        """Settings of the placement, and the plan of each role: with the most searchers, at most the recipe's, with which all
        fit.

        Raises:
          ValueError: nothing fits; names the smallest number of GPUs with which the role that does not fit would.
        """
        problem = ValueError("")
        for count in range(self._experiment.config.searchers.count, 0, -1) or [0]:
            try:
                return self._with_searchers(count)
            except ValueError as error:
                problem = error
        raise problem

    def _with_searchers(self, count: int) -> tuple[Settings, list[Planned]]:
        experiment = planning.changed(self._experiment, {"searchers.count": count})
        each = shares(experiment.config, self._gpus.count)
        least = {role: self._least(experiment, role, share) for role, share in each.items() if share.beside}
        settings, planned = dict[str, Any]({"searchers.count": count}), list[Planned]()
        for i, (role, share) in enumerate(each.items()):
            until = planning.share_of_time(self._until, roles=len(each) - i)
            part = least[role] / (least[role] + sum(least[other] for other in share.beside)) if share.beside else 1.0
            planned.append(self._role(experiment, role, share.count, math.floor(100 * part) / 100, until))
            if share.beside and experiment.config.schedule.mode != "interleaved":
                # JAX takes this share of the memory when the role starts.
                settings[f"{SECTIONS[role]}.memory_fraction"] = (
                    math.floor(100 * planned[-1].place.limit / self._gpus.memory) / 100
                )
        return settings, planned

    def _least(self, experiment: Experiment, role: str, share: Share) -> int:
        found = place(self._gpus, share.count)
        return planning.Search(experiment, self._run, role=role, place=found, until=self._until).least

    def _role(self, experiment: Experiment, role: str, count: int, part: float, until: float) -> Planned:
        key = role, count, part
        if key not in self._known:
            larger = [more for more in _CHIPS if more > count or (more == count and part < 1)]
            self._known[key] = planning.find(
                experiment,
                self._run,
                role=role,
                place=place(self._gpus, count, part=part),
                larger=(place(self._gpus, more) for more in larger),
                until=until,
            )
        return self._known[key]
