"""Reads all that a report tells of a run, and writes nothing. What is damaged becomes a sentence, and the rest is read."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from tba_jax.experiment import answering, stored_run
from tba_jax.experiment.schema import SCHEMA
from tba_jax.replay.reader import LogReader
from tba_jax.reporting.rows import RowTable
from tba_jax.schemas import flatten
from tba_jax.storage import best_step, layout, places
from tba_jax.storage import contract as contract_lib
from tba_jax.telemetry import alarms as alarms_lib
from tba_jax.telemetry import metrics
from tba_jax.telemetry import status as status_lib
from tba_jax.text.tokenizers import Tokenizer

# Of each curve; more lines share points. Roles and evaluations that are shown at most; figures of one role.
MOST_POINTS, MOST_ROLES, MOST_EVALUATIONS, _MOST_NAMES = 512, 24, 2000, 400
# What damaged files and storage raise, however they are damaged.
UNREADABLE = (*places.STORAGE_ERRORS, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """What one role left in its folder of metrics.

    curves: name -> float64[points, 3], mean, least and greatest of the lines that share a point, NaN where none has the figure.
    first, last: the first and the newest line of metrics.jsonl, {} without one.
    """

    curves: Mapping[str, np.ndarray]
    first: Mapping[str, Any]
    last: Mapping[str, Any]
    status: status_lib.Told

    def mean(self, name: str) -> np.ndarray:
        """float64[points]."""
        return self.curves[name][:, 0] if name in self.curves else np.full(len(self.curves.get("step", ())), np.nan)

    def shares(self) -> dict[str, float]:
        """What the role did -> the share of its time since its process began to work."""
        named = {name[5:]: value for name, value in self.last.items() if name.startswith("time_") and is_number(value)}
        return {name: value for name, value in named.items() if name != "recording" and value > 0}  # that is within the others


@dataclasses.dataclass(kw_only=True)
class Gathered:
    """A run as it was read. problems: sentences about what could not be read. evaluations: the numbers of each, by step."""

    run: layout.RunDir
    called: str
    stored: Mapping[str, Any]
    table: RowTable
    tokenizer: Tokenizer | None
    problems: list[str]
    roles: dict[str, Role] = dataclasses.field(default_factory=dict)
    left_out_roles: int = 0
    alarms: list[tuple[str, alarms_lib.Alarm]] = dataclasses.field(default_factory=list)
    evaluations: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    finished: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    writers: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def part(self, what: str) -> Iterator[None]:
        """Reads a part: what is wrong with it becomes a sentence."""
        with told(self.problems, what):
            yield

    @property
    def steps(self) -> int:
        """Steps that the run is to do, 0 where the config does not say."""
        value = flatten(self.stored["config"]).get("learner.steps", 0)
        return int(value) if is_number(value) else 0

    @property
    def step(self) -> int:
        """The last step that anything tells of."""
        return max(
            self.table.last_step, *(int(role.last.get("step", 0)) for name, role in self.roles.items() if name == "trainer"), 0
        )

    @property
    def times(self) -> tuple[float, float]:
        """Unix seconds of the first and the last sign of life, 0 without any."""
        first = [role.first.get("time", 0.0) for role in self.roles.values()]
        first += [info.get("started", 0.0) for info in self.writers.values()]
        last = [time for role in self.roles.values() for time in (role.last.get("time", 0.0), role.status.time)]
        known, signs = [[float(time) for time in times if is_number(time) and 0 < time < 1e11] for times in (first, last)]
        begin = min(known, default=0.0)
        return begin, max([begin, *signs])


@contextlib.contextmanager
def told(problems: list[str], what: str) -> Iterator[None]:
    """Adds a sentence where reading inside fails."""
    try:
        yield
    except UNREADABLE as error:
        said = " ".join(str(error).split()) if isinstance(error, OSError | ValueError) else f"{type(error).__name__} {error}"
        problems.append(f"{what} cannot be read: {said}"[:600])


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of JSON is a finite number that a float holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


class Source:
    """A run that is read once or again and again; rows and journal lines that were read are not read again."""

    def __init__(self, workdir: Path | str):
        """
        Raises:
          ValueError: there is no run, its config.json is damaged, another version made it, or its storage does not answer.
        """
        self.called = str(workdir)
        self.run = layout.open_run_dir(workdir)
        answering.check_answers([("--shared", self.run.shared)], limit=answering.DRY_RUN_SECONDS)
        try:
            self._stored = contract_lib.read_run(self.run, called=self.called)
            for name in ("config", "contract"):
                flatten(self._stored[name])
            contract = contract_lib.of(self._stored, called=self.called)
            shape = contract.row_shape()
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.run.config} is damaged and holds no settings: restore the file from a copy") from error
        self._problems: list[str] = []
        self._tokenizer = None
        mounts: tuple[places.Place, ...] = ()
        with told(self._problems, "the tokenizer (tokens are shown by their numbers)"):
            self._tokenizer = tokenizer_of(self._stored)
        with told(self._problems, "a mounted run (its rows are left out)"):
            named = self._stored["config"]["replay"]["mount"]
            answering.check_answers([("replay.mount", places.place(each)) for each in named], limit=answering.DRY_RUN_SECONDS)
            mounts = contract_lib.mounted_logs(named, reward_version=contract.reward_version)
        self._table = RowTable(LogReader(self.run.replay, shape, mounts=mounts, patience_seconds=1.0), self.run.journal)

    def gather(self, tell: Callable[[str], None] = lambda sentence: None) -> Gathered:
        """All that is there now. Args: tell: is given a sentence now and then about how far the reading is."""
        found = Gathered(
            run=self.run, called=self.called, stored=self._stored, table=self._table, tokenizer=self._tokenizer,
            problems=[*self._problems],
        )  # fmt: skip
        with found.part("finished.json"):
            if places.exists(self.run.finished):
                finished = layout.read_json(self.run.finished)
                int(finished["step"])
                found.finished = finished
        self._table.advance(tell)
        found.problems += self._table.problems
        for name in self._table.writers:
            with found.part(f"the registration of writer {name}"):
                found.writers[name] = dict(self._table.reader.info(name))
        _read_roles(found)
        with found.part("the evaluations"):
            _read_evaluations(found)
        return found


def tokenizer_of(stored: Mapping[str, Any]) -> Tokenizer:
    """The run's tokenizer. A config of an older or newer version is taken as far as this version knows its settings.

    Raises:
      ValueError: it is not to be found here, or is another one than that of the run.
    """
    config, there = SCHEMA.defaults(), flatten(stored["config"])
    known = {name: value for name, value in there.items() if name in SCHEMA.rules and not name.startswith("task.custom.")}
    config.update_from_flattened_dict({name: tuple(value) if isinstance(value, list) else value for name, value in known.items()})
    contract = stored["contract"]
    _, tokenizer = stored_run.policy_and_tokenizer(config, alphabet=contract["alphabet"], weights=False)
    if tokenizer.fingerprint != contract["tokenizer"]:
        raise ValueError(f"that of model.path={config.model.path!r} is not the one that the run was made with")
    return tokenizer


def _read_roles(found: Gathered) -> None:
    folder = found.run.root / "metrics"
    names: list[str] = []
    with found.part("the folder of metrics"):
        names = sorted(each.name for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []
    found.alarms = [(name, alarm) for name in names for alarm in alarms_lib.read(folder / name)]
    found.alarms.sort(key=lambda each: each[1].time)
    # The trainer comes first. Searchers are the first to be left out: they are alike.
    shown = sorted(names, key=lambda name: (name != "trainer", name.startswith("searcher"), name))[:MOST_ROLES]
    found.left_out_roles = len(names) - len(shown)
    for name in shown:
        with found.part(f"metrics of {name}"):
            curves, first, last, damaged = read_curves(folder / name)
            found.roles[name] = Role(curves=curves, first=first, last=last, status=status_lib.read(folder / name))
            if damaged:
                found.problems.append(f"damaged lines of metrics in {folder / name} are left out: {damaged}")


def read_curves(folder: Path) -> tuple[dict[str, np.ndarray], Mapping[str, Any], Mapping[str, Any], int]:
    """Returns curves, first line and last line (see `Role`), and how many whole lines are damaged.

    All figures of a role's files of metrics are thinned to at most MOST_POINTS points of equally many lines, in memory that does
    not grow with the files. Raises OSError where the storage refuses.
    """
    curves: dict[str, np.ndarray] = {}
    first: Mapping[str, Any] = {}
    last: Mapping[str, Any] = {}
    damaged = points = 0
    with contextlib.ExitStack() as stack:
        paths = [path for name in (f"{metrics.FILE}.1", metrics.FILE) if (path := folder / name).exists()]
        files = [stack.enter_context(open(path, encoding="utf-8", errors="replace")) for path in paths]
        width = max(1, -(-sum(1 for file in files for _ in file) // MOST_POINTS))
        for file in files:
            file.seek(0)
        every = itertools.chain(*files)
        while texts := [*itertools.islice(every, width)]:
            parsed = [(text, layout.parse_line(text)) for text in texts]
            lines = [line for _, line in parsed if _is_moment(line.get("step")) and _is_moment(line.get("time"))]
            damaged += sum(text.endswith("\n") and bool(text.strip()) for text in texts) - len(lines)
            if not lines:
                continue
            first, last = first or lines[0], lines[-1]
            for name in dict.fromkeys(name for line in lines for name in line):
                values = [value for line in lines if is_number(value := line.get(name))]
                if values and (name in curves or len(curves) < _MOST_NAMES):
                    curve = curves.setdefault(name, np.full((MOST_POINTS + 1, 3), np.nan))
                    curve[min(points, MOST_POINTS)] = np.mean(values), min(values), max(values)
            points += 1
    return {name: curve[:points] for name, curve in curves.items()}, first, last, max(0, damaged)


def _is_moment(value: Any) -> bool:
    """Whether a value can be a step, or a time in unix seconds: damage may leave any number."""
    return is_number(value) and abs(value) < 1e11


def _read_evaluations(found: Gathered) -> None:
    """The numbers of the evaluator's reports: of very many reports some, evenly, and the best."""
    steps = layout.steps_in(found.run.evaluations) if found.run.evaluations.is_dir() else []
    chosen = {steps[i] for i in np.linspace(0, len(steps) - 1, min(len(steps), MOST_EVALUATIONS)).astype(int)} if steps else set()
    if (best := best_step.Scores(found.run.evaluations).best()) is not None:
        chosen.add(best.step)
    for step in sorted(chosen):
        with found.part(f"the evaluation of step {step}"):
            report = layout.read_json(found.run.evaluations / f"{layout.step_name(step)}.json")
            found.evaluations.append({**{k: float(v) for k, v in report.items() if is_number(v)}, "step": step})
