"""Which roles get which GPUs, and how they share a GPU's memory: by what they need."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from tba_jax.roles.gpus import Gpu

_GIB = 1 << 30
# Kind of a role -> the section of the config with its mesh, its task_devices and its memory_fraction.
_SECTIONS = {"trainer": "learner", "searcher": "searchers", "evaluator": "evaluation"}


class TooSmall(ValueError):
    """Roles need more memory than their GPUs have."""


class Need(Protocol):
    """Bytes that a role takes on each of its devices. Raises ValueError where the role's mesh does not fit them."""

    def __call__(self, kind: str, *, devices: int, limit: int | None) -> int:
        """Args: limit: bytes that each device has for it, None: not known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """What a role asks of GPUs. section: of the config. fewest: GPUs that its mesh and its task_devices make up at least.
    fraction: of the memory of a GPU that it shares, 0: by need. need: as Need, of this role."""

    name: str
    section: str
    fewest: int
    fraction: float
    need: Callable[..., int]

    @classmethod
    def of(cls, config: Any, name: str, need: Need) -> "Role":
        kind = name.split("-")[0]
        section = config[_SECTIONS[kind]]
        return cls(
            name=name,
            section=_SECTIONS[kind],
            fewest=math.prod(max(size, 1) for size in section.mesh.values()) + section.get("task_devices", 0),
            fraction=float(section.memory_fraction),
            need=functools.cache(functools.partial(need, kind)),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """The GPUs of a role and its share of the memory of each, and why in words."""

    gpus: tuple[Gpu, ...]
    memory_fraction: float
    gpus_reason: str
    memory_reason: str


def choose(roles: Sequence[Role], gpus: Sequence[Gpu]) -> dict[str, Share]:
    """Role name -> its GPUs, by the first layout that has enough memory.

    First every searcher and the evaluator get as many GPUs as their meshes and task_devices make up at least, and the trainer
    gets the most of the others that its mesh fits. Then searchers and evaluator take turns on fewer and fewer GPUs, and at last
    all roles on all.

    Args: roles: the trainer first, the evaluator last.

    Raises:
      TooSmall: roles need more memory than their GPUs have; names the numbers.
      ValueError: the mesh of a role does not fit the GPUs.
    """
    layouts = list(_layouts(roles, tuple(gpus)))
    if not layouts:
        raise _no_layout(roles, len(gpus))
    best = min(layouts, key=lambda layout: max(1.0, layout.worst()[0]))
    strain, gpu = best.worst()
    if round(strain, 6) > 1.0:
        raise TooSmall(best.refusal(gpu))
    return {role.name: best.share(role) for role in roles}


def _layouts(roles: Sequence[Role], gpus: tuple[Gpu, ...]) -> Iterator["_Layout"]:
    trainer, *others = roles
    # A role has one mesh and one memory fraction, whichever GPUs it gets: the smallest memory counts.
    limit = min(int(gpu.memory * gpu.usable_share(1)) if gpu.memory else 0 for gpu in gpus) or None
    fewest, block = [role.fewest for role in others], max((role.fewest for role in others), default=1)

    def layout(own: tuple[Gpu, ...], area: tuple[Gpu, ...], sizes: Sequence[int]) -> _Layout:
        """The trainer on GPUs of its own, each other role on the emptiest of blocks of these sizes."""
        made = _Layout(there=len(gpus), limit=limit)
        made.add(trainer, own)
        ends = itertools.pairwise(itertools.accumulate(sizes, initial=0))
        blocks = [area[begin:end] for begin, end in ends]
        for role in others:
            made.add(role, min((each[-role.fewest :] for each in blocks if len(each) >= role.fewest), key=made.load))
        return made

    for sizes in (fewest, *([block] * count for count in range(len(others) - 1, 0, -1))):
        spare = max(len(gpus) - sum(sizes), 0)
        if own := _of_trainer(trainer, gpus[:spare], limit):
            yield layout(own, gpus[spare:], sizes)
    if others and len(gpus) >= max(block, trainer.fewest) and (own := _of_trainer(trainer, gpus[: trainer.fewest], limit)):
        yield layout(own, gpus, [block] * (len(gpus) // block))


def _of_trainer(trainer: Role, room: tuple[Gpu, ...], limit: int | None) -> tuple[Gpu, ...]:
    """The most of these GPUs that the trainer's mesh fits, and its memory if that can be; () where its mesh fits no number."""
    needs: dict[int, int] = {}
    for count in range(len(room), 0, -1):
        with contextlib.suppress(ValueError):
            needs[count] = trainer.need(devices=count, limit=limit)
    enough = (count for count, size in needs.items() if limit is None or size <= limit)
    return room[: next(enough, next(iter(needs), 0))]


def _no_layout(roles: Sequence[Role], there: int) -> ValueError:
    """The mistake because of which there is no layout."""
    for role in roles:
        if role.fewest > there:
            also = "" if role.section == "learner" else f" and {role.section}.task_devices"
            return ValueError(f"{role.section}.mesh{also} make up {role.fewest} GPUs for {role.name}; there are {there}")
    try:
        roles[0].need(devices=roles[0].fewest, limit=None)
    except ValueError as error:
        return error
    raise AssertionError("a trainer whose mesh fits the GPUs has a layout")


class _Layout:
    """Roles on GPUs."""

    def __init__(self, *, there: int, limit: int | None):
        """Args: there: GPUs in all; limit: see Need."""
        self._there, self._limit = there, limit
        self._gpus: dict[Role, tuple[Gpu, ...]] = {}

    def add(self, role: Role, gpus: tuple[Gpu, ...]) -> None:
        self._gpus[role] = gpus

    def load(self, gpus: tuple[Gpu, ...]) -> int:
        """The most that the roles so far need of one of these GPUs, in bytes."""
        return max(sum(self._need(role) for role in self._on(gpu)) for gpu in gpus)

    def _need(self, role: Role) -> int:
        return role.need(devices=len(self._gpus[role]), limit=self._limit)

    def _on(self, gpu: Gpu) -> list[Role]:
        return [role for role, gpus in self._gpus.items() if gpu in gpus]

    def worst(self) -> tuple[float, Gpu]:
        """Returns the GPU whose roles need the largest share of the memory that they may take, and that share."""
        used = dict.fromkeys(itertools.chain(*self._gpus.values()))
        return max(((self._strain(gpu), gpu) for gpu in used), key=lambda found: found[0])

    def _strain(self, gpu: Gpu) -> float:
        roles = self._on(gpu)
        fractions = sum(role.fraction for role in roles)
        if len(roles) == 1 and fractions:  # the config sets this role's fraction, and the role has the GPU to itself
            return 0.0
        needs = sum(self._need(role) for role in roles if not role.fraction)
        return (fractions + (needs / gpu.memory if gpu.memory else 0.0)) / max(gpu.usable_share(len(roles)), 1e-9)

    def refusal(self, gpu: Gpu) -> str:
        """The sentence about a GPU that has too little memory for its roles."""
        roles, share = self._on(gpu), gpu.usable_share(len(self._on(gpu)))
        wanted = [
            f"{role.name} {role.fraction} of it ({role.section}.memory_fraction)"
            if role.fraction
            else f"{role.name} {self._need(role) / _GIB:.2f} GiB"
            for role in roles
        ]
        there = f"{share:.2f} of it may be taken"
        if gpu.memory is not None:
            there = f"{share * gpu.memory / _GIB:.1f} of its {gpu.memory / _GIB:.1f} GiB may be taken"
            if gpu.free is not None:
                there += f" ({gpu.free / _GIB:.1f} GiB are free)"
        mend = "Lower searchers.count, searchers.slots or learner.micro_batch_tokens, or split a model by its mesh over more GPUs"
        if gpu.is_filled:
            mend = "Another process holds the rest: end that process, or name other GPUs by CUDA_VISIBLE_DEVICES"
        return f"GPU {gpu.name} is too small for its roles: {', '.join(wanted)}; {there}. {mend}"

    def share(self, role: Role) -> Share:
        mine, sharing = self._gpus[role], [other for other in self._gpus if set(self._gpus[other]) & set(self._gpus[role])]
        if len(sharing) > 1:
            gpus_reason = f"shared with {', '.join(other.name for other in sharing if other is not role)}"
        elif role.section == "learner":
            spare = self._there - len({gpu for other, gpus in self._gpus.items() if other is not role for gpu in gpus})
            gpus_reason = f"the most that its mesh fits of {spare} which the others leave"
        else:
            gpus_reason = "its own"
        smallest = min((gpu.memory for gpu in mine if gpu.memory), default=None)
        there = f"of {smallest / _GIB:.1f} GiB" if smallest else "GiB, the driver does not say of how many"
        reason = (
            f"{role.section}.memory_fraction"
            if role.fraction and len(sharing) > 1
            else f"needs {self._need(role) / _GIB:.2f} {there}"
        )
        return Share(gpus=mine, memory_fraction=self._fraction(role), gpus_reason=gpus_reason, memory_reason=reason)

    def _fraction(self, role: Role) -> float:
        """Its own fraction, or what such roles leave, in proportion to the needs; rounded down. A role that is alone has all."""
        shares = []
        for gpu in self._gpus[role]:
            roles = self._on(gpu)
            kept = {other: other.fraction for other in roles if other.fraction and len(roles) > 1}
            left = gpu.usable_share(len(roles)) - sum(kept.values())
            needs = sum(self._need(other) for other in roles if other not in kept)
            shares.append(kept.get(role) or left * self._need(role) / max(needs, 1))
        return math.floor(min(shares) * 1000 + 1e-6) / 1000
