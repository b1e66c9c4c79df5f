"""Reads all that a report tells of a run, and writes nothing. What is damaged becomes a sentence, and the rest is read."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from tba_jax.experiment import stored_run
from tba_jax.experiment.schema import SCHEMA
from tba_jax.replay.reader import LogReader
from tba_jax.reporting.rows import RowTable
from tba_jax.schemas import flatten
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout, places
from tba_jax.telemetry import alarms as alarms_lib
from tba_jax.telemetry import metrics
from tba_jax.telemetry import status as status_lib
from tba_jax.text.tokenizers import Tokenizer

MOST_POINTS, MOST_ROLES = 1024, 24  # of each curve; of more roles, and of more lines, some are left out
# What damaged files and storage raise, however they are damaged.
UNREADABLE = (*places.STORAGE_ERRORS, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """What one role left: at most MOST_POINTS of its lines of metrics, evenly, with the first and the newest."""

    lines: Sequence[Mapping[str, Any]]
    status: status_lib.Told

    @property
    def last(self) -> Mapping[str, Any]:
        """The newest line, {} without one."""
        return self.lines[-1] if self.lines else {}

    def curve(self, name: str) -> np.ndarray:
        """float64[lines] of a figure, NaN where a line has none."""
        values = (line.get(name) for line in self.lines)
        return np.array([value if is_number(value) else math.nan for value in values], np.float64)

    def shares(self) -> dict[str, float]:
        """What the role did -> the share of its time since its process began to work."""
        named = {name[5:]: value for name, value in self.last.items() if name.startswith("time_") and is_number(value)}
        return {name: value for name, value in named.items() if value > 0}


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

    @property
    def steps(self) -> int:
        """Steps that the run is to do, 0 where the config does not say."""
        value = flatten(self.stored["config"]).get("learner.steps", 0)
        return int(value) if is_number(value) else 0

    @property
    def step(self) -> int:
        """The last step that anything tells of."""
        told = self.roles["trainer"].last.get("step", 0) if "trainer" in self.roles else 0
        return max(self.table.last_step, int(told))

    @property
    def times(self) -> tuple[float, float]:
        """Unix seconds of the first and the last sign of life, 0 without any."""
        first = [role.lines[0]["time"] for role in self.roles.values() if role.lines]
        first += [info.get("started", 0.0) for info in self.writers.values()]
        last = [time for role in self.roles.values() for time in (role.last.get("time", 0.0), role.status.time)]
        known, signs = [[float(time) for time in times if _is_moment(time) and time > 0] for times in (first, last)]
        begin = min(known, default=0.0)
        return begin, max([begin, *signs])


@contextlib.contextmanager
def part(problems: list[str], what: str) -> Iterator[None]:
    """Reads a part: where that fails, a sentence says so."""
    try:
        yield
    except UNREADABLE as error:
        said = " ".join(str(error).split()) if isinstance(error, OSError | ValueError) else f"{type(error).__name__} {error}"
        problems.append(f"{what} cannot be read: {said}"[:600])


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of JSON is a finite number that a float holds."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _is_moment(value: Any) -> bool:
    """Whether a value can be a step, or a time in unix seconds."""
    return is_number(value) and abs(value) < 1e11


class Source:
    """A run that is read once or again and again."""

    def __init__(self, workdir: Path | str):
        """Raises ValueError where there is no run that this version can read, or its storage does not answer."""
        self.called = str(workdir)
        self.run = layout.open_run_dir(workdir)
        stored_run.check_answers([("--shared", self.run.shared)], limit=stored_run.DRY_RUN_SECONDS)
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
        with part(self._problems, "the tokenizer (tokens are shown by their numbers)"):
            self._tokenizer = tokenizer_of(self._stored)
        with part(self._problems, "a mounted run (its rows are left out)"):
            named = self._stored["config"]["replay"]["mount"]
            stored_run.check_answers([("replay.mount", places.place(each)) for each in named], limit=stored_run.DRY_RUN_SECONDS)
            mounts = contract_lib.mounted_logs(named, reward_version=contract.reward_version)
        self._reader = LogReader(self.run.replay, shape, mounts=mounts, patience_seconds=1.0)

    def gather(self) -> Gathered:
        """All that is there now."""
        run, table, problems = self.run, RowTable(self._reader, self.run.journal), [*self._problems]
        found = Gathered(
            run=run, called=self.called, stored=self._stored, table=table, tokenizer=self._tokenizer, problems=problems
        )
        problems += table.problems
        with part(problems, "finished.json"):
            if places.exists(run.finished):
                finished = layout.read_json(run.finished)
                int(finished["step"])
                found.finished = finished
        for name in table.writers:
            with part(problems, f"the registration of writer {name}"):
                found.writers[name] = dict(table.reader.info(name))
        with part(problems, "the folder of metrics"):
            _read_roles(found, run.root / "metrics")
        with part(problems, "the evaluations"):
            for step in layout.steps_in(run.evaluations):
                with part(problems, f"the evaluation of step {step}"):
                    report = layout.read_json(run.evaluations / f"{layout.step_name(step)}.json")
                    found.evaluations.append({k: float(v) for k, v in report.items() if is_number(v)} | {"step": step})
        return found


def tokenizer_of(stored: Mapping[str, Any]) -> Tokenizer:
    """The run's tokenizer, also of another version's config. Raises ValueError where it is not here, or another one."""
    config, there = SCHEMA.defaults(), flatten(stored["config"])
    known = {name: value for name, value in there.items() if name in SCHEMA.rules and not name.startswith("task.custom.")}
    config.update_from_flattened_dict({name: tuple(value) if isinstance(value, list) else value for name, value in known.items()})
    contract = stored["contract"]
    _, tokenizer = stored_run.policy_and_tokenizer(config, alphabet=contract["alphabet"], weights=False)
    if tokenizer.fingerprint != contract["tokenizer"]:
        raise ValueError(f"that of model.path={config.model.path!r} is not the one that the run was made with")
    return tokenizer


def _read_roles(found: Gathered, folder: Path) -> None:
    names = sorted(each.name for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []
    found.alarms = [(name, alarm) for name in names for alarm in alarms_lib.read(folder / name)]
    found.alarms.sort(key=lambda each: each[1].time)
    # The trainer comes first. Searchers are the first to be left out: they are alike.
    shown = sorted(names, key=lambda name: (name != "trainer", name.startswith("searcher"), name))[:MOST_ROLES]
    found.left_out_roles = len(names) - len(shown)
    for name in shown:
        with part(found.problems, f"metrics of {name}"):
            found.roles[name] = Role(lines=read_lines(folder / name), status=status_lib.read(folder / name))


def read_lines(folder: Path) -> list[Mapping[str, Any]]:
    """Lines of a role's metrics, see `Role`. Raises OSError where storage refuses."""
    found: list[Mapping[str, Any]] = []
    last: list[Mapping[str, Any]] = []
    width = 1
    whole = (each for each in metrics.each_line(folder) if _is_moment(each.get("step")) and _is_moment(each.get("time")))
    for number, line in enumerate(whole):
        last = [line]
        if number % width == 0:
            found.append(line)
        if len(found) == MOST_POINTS:
            found, width = found[::2], 2 * width
    return found if found[-1:] == last else found + last
