"""Finds by compiling the mesh and the budgets with which a role fits its devices.

Candidates are ordered by the estimate from shapes (experiment/estimate.py), so that few programs are compiled; what fits is
decided by the compiler alone (compiling.fit).
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tba_jax.experiment import compiling, estimate, meshes, topologies
from tba_jax.experiment.composition import Experiment
from tba_jax.experiment.fitting import Measure, device_memory
from tba_jax.run import layout

log = logging.getLogger(__name__)

# Role -> the setting that says how much goes through the model at a time, which is made as large as fits.
SIZES = {"trainer": "learner.micro_batch_tokens", "searcher": "searchers.slots", "evaluator": "evaluation.batch_size"}
# Role -> the program that mostly decides, which is compiled first, in a run with a reference.
_DECIDES = {"trainer": "update", "searcher": "decode", "evaluator": "scoring by the reference"}
_LEAST_LOGIT_MEGABYTES = 16
# Before anything was compiled, estimates count so many times: programs that nearly fill a device take minutes to compile.
_CAUTION = 2.0
# A size that two others say to take more than so many times the limit is not compiled to confirm it.
_CLEARLY = 1.25
Settings = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """What a role runs on. devices: of `topology`, see topologies.parse; name: what they are called; limit: bytes of each that
    the role may take."""

    devices: Sequence[Any]
    topology: str
    name: str
    limit: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """settings: name -> value, all that was found; fit: with these settings; binds: what keeps the role from a larger value of
    its setting of SIZES, in words."""

    role: str
    place: Place
    settings: Settings
    fit: compiling.RoleFit
    binds: str


@dataclasses.dataclass(kw_only=True)
class _Candidate:
    """One mesh with one level of budgets, and what is known of the sizes that it may have.

    level: place in `_budgets`. settings: of budgets and mesh. split: parts that computation is split into and which communicate.
    estimates: size -> bytes of a device by the estimate, ascending by size. peaks: size -> bytes by the compiler, of what was
    tried. low, high: the largest index of a size that fits, the smallest of one that does not; -1 and their number: not known.
    """

    level: int
    settings: Settings
    split: tuple[int, int]
    estimates: Mapping[int, int]
    peaks: dict[int, int] = dataclasses.field(default_factory=dict)
    low: int = -1
    high: int = 0

    def __post_init__(self) -> None:
        self.sizes = list(self.estimates)
        self.high = len(self.sizes)

    def expected(self, size: int, correction: float) -> float:
        """Bytes that a size will take: linear in the size from two sizes that were tried on, else the corrected estimate.

        Args: correction: of estimates, from trials of other candidates.
        """
        if len(self.peaks) < 2:
            known = [(peak, self.estimates[tried]) for tried, peak in self.peaks.items()]
            return self.estimates[size] * (known[0][0] / known[0][1] if known else correction)
        (a, of_a), (b, of_b) = sorted(self.peaks.items(), key=lambda item: abs(item[0] - size))[:2]
        return of_a + (size - a) * (of_b - of_a) / (b - a)

    def next(self, limit: int, correction: float) -> int | None:
        """The index to try: the largest of those not known that are expected to fit. None: there is none.

        After a size that fits, the next larger one is tried as well, unless it is clearly too large.
        """
        open_ = range(self.low + 1, self.high)
        if fitting := [i for i in open_ if self.expected(self.sizes[i], correction) <= limit]:
            return fitting[-1]
        if self.low < 0 or not open_ or self.clearly_too_large(self.low + 1, limit):
            return None
        return self.low + 1

    def clearly_too_large(self, index: int, limit: int) -> bool:
        """Whether two sizes that were tried say so."""
        return len(self.peaks) > 1 and self.expected(self.sizes[index], 1.0) > _CLEARLY * limit


def changed(experiment: Experiment, settings: Settings) -> Experiment:
    """The experiment with other values of settings that its contract, policy and queries do not depend on."""
    config = experiment.config.copy_and_resolve_references()
    config.update_from_flattened_dict(dict(settings))
    return dataclasses.replace(experiment, config=config)


class NothingFits(ValueError):
    """A role does not fit its devices, or no mesh of theirs divides its rows and parameters."""


class TimeIsOver(ValueError):
    """No settings were found in the time of the search."""


class Search:
    """The search for the settings of one role on its devices. Raises NothingFits where no mesh divides."""

    def __init__(self, experiment: Experiment, run: layout.RunDir, *, role: str, place: Place, until: float):
        """Args: until: time.monotonic() after which nothing more is tried."""
        self._experiment, self._run = experiment.on_device(place.devices[0]), run
        self._role, self._place, self._until = role, place, until
        self._decides = _DECIDES[role]
        self._measure, self._correction, self._candidates = Measure(), _CAUTION, self._all_candidates()
        # The trial that came nearest, for a role for which nothing fits, and the last that did not fit of each candidate.
        self.nearest: compiling.RoleFit | None = None
        self._too_large: dict[int, compiling.RoleFit] = {}  # by identity

    @property
    def least(self) -> int:
        """Bytes that the smallest candidate takes by the estimate."""
        return min(next(iter(candidate.estimates.values())) for candidate in self._candidates)

    def best(self) -> Planned | None:
        """The settings of the largest size that fits, of equal sizes with the least communication; None: nothing fits, or the
        time is over."""
        while True:
            while not self._time_is_over() and (trial := self._next()):
                self._try(*trial, only=self._decides)
            if (best := self._largest()) is None:
                return None
            found = self._try(best, best.low)
            if self._fits(found):
                planned = self._planned(best, found)
                log.info("%s: found %s", self._role, " ".join(f"{name}={value}" for name, value in planned.settings.items()))
                return planned
            self._decides = found.worst.name
            for candidate in self._candidates:  # what is known is of another program
                candidate.low, candidate.peaks = -1, {}

    def _next(self) -> tuple[_Candidate, int] | None:
        """The candidate and the index of its size to try: the largest that is expected to fit, None: no larger one than fits."""
        best, found = self._largest(), []
        for candidate in self._candidates:
            i = candidate.next(self._place.limit, self._correction)
            if i is not None and (best is None or candidate is best or candidate.sizes[i] > best.sizes[best.low]):
                found.append((candidate.level, -candidate.sizes[i], candidate.split, candidate, i))
        if best is not None:
            found = [each for each in found if each[0] <= best.level]
        elif not found:  # nothing is expected to fit: perhaps the estimate is wrong
            leanest = max(candidate.level for candidate in self._candidates)
            untried = [each for each in self._candidates if each.level == leanest and each.high > 0]
            least = min(untried, key=lambda each: each.expected(each.sizes[0], self._correction), default=None)
            return (least, 0) if least else None
        return min(found, key=lambda each: each[:3])[3:] if found else None

    def _largest(self) -> _Candidate | None:
        """The candidate of the largest size that is known to fit; of equal sizes, the one with the least communication."""
        fitting = [candidate for candidate in self._candidates if candidate.low >= 0]
        return min(fitting, key=lambda each: (-each.sizes[each.low], each.level, each.split), default=None)

    def fits_at_all(self) -> bool:
        """Whether one of the leanest candidates fits: that of the least estimate, or of the most tensor ways."""
        leanest = max(candidate.level for candidate in self._candidates)
        lean = [each for each in self._candidates if each.level == leanest]
        least = min(lean, key=lambda each: each.estimates[each.sizes[0]])
        tensor = max(lean, key=lambda each: each.settings[f"{meshes.SECTIONS[self._role]}.mesh.tensor"])
        return any(self._fits(self._try(each, 0)) for each in ([least] if tensor is least else [least, tensor]))

    def _all_candidates(self) -> list[_Candidate]:
        problem: ValueError | None = None
        found = []
        for level, budget in enumerate(_budgets(self._experiment.config, self._role)):
            for mesh in meshes_of(self._experiment, self._role, len(self._place.devices)):
                try:
                    found.append(self._candidate(level, {**budget, **mesh}))
                except ValueError as error:
                    problem = problem or error
        if not found:
            raise NothingFits(f"no mesh of {self._place.name} suits the {self._role}: {problem}")
        return found

    def _candidate(self, level: int, settings: Settings) -> _Candidate:
        """Raises ValueError where the mesh does not divide what it must, for every size."""
        experiment, role = changed(self._experiment, settings), self._role
        estimates = {}
        for size in sizes(experiment, role, devices=len(self._place.devices)):
            estimates[size] = estimate.on_device(estimate.memory(changed(experiment, {SIZES[role]: size}))[role])
        fsdp, tensor = (settings[f"{meshes.SECTIONS[role]}.mesh.{axis}"] for axis in ("fsdp", "tensor"))
        # Decoding reads all weights at each step: where they are split over fsdp, they are gathered each time.
        split = (tensor, fsdp) if role == "trainer" else (fsdp, tensor)
        return _Candidate(level=level, settings=settings, split=split, estimates=estimates)

    def _try(self, candidate: _Candidate, index: int, *, only: str = "") -> compiling.RoleFit:
        """Compiles one program of the role, or all, with one of the candidate's sizes, and notes the result."""
        size = candidate.sizes[index]
        settings = {**candidate.settings, SIZES[self._role]: size}
        log.info("%s: trying %s", self._role, " ".join(f"{name}={value}" for name, value in settings.items()))
        found = compiling.fit(
            changed(self._experiment, settings),
            self._run,
            role=self._role,
            devices=self._place.devices,
            name=self._place.name,
            limit=self._place.limit,
            measure=self._measure,
            only=only,
        )
        peak = candidate.peaks[size] = found.worst.peak
        self._correction = peak / candidate.estimates[size]
        if self._fits(found):
            candidate.low = max(candidate.low, index)
            return found
        candidate.high = index
        self._too_large[id(candidate)] = found
        if self.nearest is None or peak < self.nearest.worst.peak:
            self.nearest = found
        return found

    def _planned(self, candidate: _Candidate, fit: compiling.RoleFit) -> Planned:
        size, name = candidate.sizes[candidate.low], SIZES[self._role]
        settings = {**candidate.settings, name: size}
        if candidate.low + 1 == len(candidate.sizes):
            binds = f"nothing, the role has no use for a larger {name}"
        elif candidate.low + 1 == candidate.high:
            worst = self._too_large[id(candidate)].worst
            part, most = max(worst.parts().items(), key=lambda item: item[1])
            binds = (
                f"memory of {worst.name}, which would take {compiling.in_words(worst.peak)} with "
                f"{name}={candidate.sizes[candidate.high]}, most of it {part} ({compiling.in_words(most)})"
            )
        elif candidate.clearly_too_large(candidate.low + 1, self._place.limit):
            larger = candidate.sizes[candidate.low + 1]
            taken = compiling.in_words(int(candidate.expected(larger, 1.0)))
            binds = f"memory of {self._decides}, which would take about {taken} with {name}={larger}, as smaller sizes say"
        else:
            binds = f"the time of the search, which ended before {name}={candidate.sizes[candidate.low + 1]} was tried"
        return Planned(role=self._role, place=self._place, settings=settings, fit=fit, binds=binds)

    def _fits(self, found: compiling.RoleFit) -> bool:
        return found.worst.peak <= self._place.limit

    def _time_is_over(self) -> bool:
        """Not before something was tried."""
        return time.monotonic() > self._until and any(candidate.peaks for candidate in self._candidates)


def meshes_of(experiment: Experiment, role: str, devices: int) -> list[Settings]:
    """The meshes that make up the devices of a role, less those of the task's models."""
    section = meshes.SECTIONS[role]
    left = devices - (experiment.config[section].task_devices if role != "trainer" else 0)
    splits = [(fsdp, tensor) for fsdp in range(1, left + 1) for tensor in range(1, left + 1) if left % (fsdp * tensor) == 0]
    return [
        {f"{section}.mesh.data": left // (fsdp * tensor), f"{section}.mesh.fsdp": fsdp, f"{section}.mesh.tensor": tensor}
        for fsdp, tensor in splits
    ]


def sizes(experiment: Experiment, role: str, *, devices: int) -> list[int]:
    """Values of the role's setting of SIZES that its mesh and its rows allow, ascending.

    Raises:
      ValueError: there are none, see meshes.check.
    """
    found, problem = [], ValueError(f"no {SIZES[role]} divides")
    for size in _sizes(experiment, role):
        try:
            meshes.check(changed(experiment, {SIZES[role]: size}), role=role, devices=devices)
        except ValueError as error:
            problem = error
        else:
            found.append(size)
    if not found:
        raise problem
    return found


def _sizes(experiment: Experiment, role: str) -> list[int]:
    """Values of the role's setting of SIZES in steps of about two, the largest that the role has a use for included."""
    c, section = experiment.config, meshes.SECTIONS[role]
    ways = c[section].mesh.data * c[section].mesh.fsdp
    if role == "trainer":
        row, batch = c.task.prompt_length + c.task.response_length, c.learner.queries * c.learner.completions
        budgets = [{SIZES[role]: ways * rows * row} for rows in _doubled(1, batch // ways)]
        made = {meshes.micro_batch_rows(changed(experiment, each).config, ways=ways) for each in budgets}
        return [rows * row for rows in sorted(made | {batch})]
    if role == "evaluator":
        return sorted(_halved(c.evaluation.batch_size))
    s = c.searchers
    most = max(s.queries_per_batch * s.samples_per_query, s.slots)
    return sorted({*_halved(most), *_doubled(s.mesh.data * s.samples_per_query, most)})


def _halved(size: int) -> list[int]:
    return [size] if size % 2 else [size, *_halved(size // 2)]


def _doubled(size: int, most: int) -> list[int]:
    return [size, *_doubled(2 * size, most)] if size <= most else []


def _budgets(config: Any, role: str) -> list[Settings]:
    """Other budgets of a role, from the recipe's to the smallest, each tried where nothing fits with the one before."""
    section = meshes.SECTIONS[role]
    logits = f"{section}.logit_megabytes"
    lean: dict[str, Any] = {logits: min(config[section].logit_megabytes, _LEAST_LOGIT_MEGABYTES)}
    found: list[dict[str, Any]] = [{}]
    if role != "trainer":
        row, tokens = config.task.prompt_length + config.task.response_length, config[section].score_tokens
        found += [{f"{section}.score_tokens": tokens // 4}] if tokens // 4 > row else []
        lean[f"{section}.score_tokens"] = row
    return [*found, lean]


def find(experiment: Experiment, run: layout.RunDir, *, role: str, place: Place, until: float) -> Planned:
    """The settings with which a role fits, see Search.

    Raises:
      NothingFits: there are none.
      TimeIsOver: none were found in time.
      ValueError: the models of the task do not fit, see compiling.check_task_fits.
    """
    compiling.check_task_fits(experiment, role=role, devices=place.devices, name=place.name, limit=place.limit)
    search = Search(experiment, run, role=role, place=place, until=until)
    if (found := search.best()) is not None:
        return found
    nearest = ""
    if (tried := search.nearest) is not None:
        nearest = f"; the least that was tried takes {compiling.in_words(tried.worst.peak)} ({tried.worst.name})"
    if time.monotonic() > until:
        raise TimeIsOver(f"no settings with which the {role} fits {place.name} were found in time{nearest}; try more --seconds")
    raise NothingFits(
        f"the {role} does not fit {place.name} of {compiling.in_words(place.limit)} by any mesh and budget{nearest}"
    )


def smallest(experiment: Experiment, run: layout.RunDir, *, role: str, larger: Iterable[Place], until: float) -> str:
    """In words, the first place where the candidate that takes least fits. Args: larger: ascending."""
    tried: list[str] = []
    for place in larger:
        if time.monotonic() > until:
            return f"the time was over before more than {', '.join(tried) or 'this'} was tried"
        with contextlib.suppress(NothingFits):
            if Search(experiment, run, role=role, place=place, until=until).fits_at_all():
                return f"the smallest that would do: {place.name}"
        tried.append(place.name)
    return f"nor does it fit {', '.join(tried)}" if tried else "nothing larger is known"


def on_topologies(experiment: Experiment, run: layout.RunDir, asked: Mapping[str, str], *, seconds: float) -> list[Planned]:
    """The plan of each role on TPUs. Args: asked: role -> topology; seconds: of the whole search.

    Raises:
      ValueError: nothing fits a role; names the smallest known topology of its generation that would.
    """
    until = time.monotonic() + seconds
    parts = dict.fromkeys(asked, 1.0)
    if experiment.config.schedule.mode == "interleaved":  # all roles have the same devices
        least = {
            role: Search(experiment, run, role=role, place=on_topology(name), until=until).least for role, name in asked.items()
        }
        parts = {role: taken / sum(least.values()) for role, taken in least.items()}
    planned = []
    for i, (role, topology) in enumerate(asked.items()):
        place, of_role = on_topology(topology, part=parts[role]), share_of_time(until, roles=len(asked) - i)
        try:
            planned.append(find(experiment, run, role=role, place=place, until=of_role))
        except NothingFits as error:
            larger = (on_topology(name, part=parts[role]) for name in topologies.larger(topology))
            raise ValueError(f"{error}; {smallest(experiment, run, role=role, larger=larger, until=until)}") from error
    return planned


def on_topology(topology: str, *, part: float = 1.0) -> Place:
    """A role's place. Args: part: of the memory of its devices. Raises: see topologies.devices."""
    devices = topologies.devices(topology)
    memory = device_memory(devices[0])
    if memory is None:
        raise ValueError(f"the compiler does not say how much memory {topology} has")
    return Place(devices=devices, topology=topology, name=topology, limit=int(part * memory))


def share_of_time(until: float, *, roles: int) -> float:
    """The time.monotonic() until which the first of `roles` roles may take, so that each has an equal part of what is left."""
    now = time.monotonic()
    return now + (until - now) / roles
