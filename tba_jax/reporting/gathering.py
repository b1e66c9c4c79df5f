"""Reads all that a report tells of a run, and writes nothing.

Each part is read by itself. A part that is damaged leaves a sentence in `Gathered.problems`, and the others are read all the
same.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.experiment import named_policy, storage
from tba_jax.experiment.schema import SCHEMA
from tba_jax.replay import journal
from tba_jax.replay.reader import LogReader
from tba_jax.reporting import marks as marks_lib
from tba_jax.reporting import rows, series, timeline
from tba_jax.reporting.draws import Draws
from tba_jax.run import best_step, layout, places
from tba_jax.run import contract as contract_lib
from tba_jax.schemas import flatten
from tba_jax.telemetry import alarms as alarms_lib
from tba_jax.text.tokenizers import Tokenizer

MOST_ROLES = 24
READ_SECONDS = 300.0  # for rows, and for the journal: those of a large model may take hours
TELL_SECONDS = 5.0
_MOST_EVALUATIONS = 2000
# What damaged files and storage raise, however they are damaged.
UNREADABLE = (*places.STORAGE_ERRORS, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """What one role left in its folder of metrics. by_step: for the trainer; by_time: for the others."""

    name: str
    read: series.Read
    by_step: series.Series
    by_time: series.Series
    ages: series.AgeMap
    shares: timeline.Shares
    status: Mapping[str, Any]


@dataclasses.dataclass(kw_only=True)
class Gathered:
    """A run as it was read. problems: sentences about what could not be read."""

    run: layout.RunDir
    called: str
    stored: Mapping[str, Any]
    problems: list[str] = dataclasses.field(default_factory=list)
    roles: dict[str, Role] = dataclasses.field(default_factory=dict)
    left_out_roles: int = 0
    ended: bool = False  # the processes of all roles, whether or not the run is finished
    marks: marks_lib.Marks = dataclasses.field(default_factory=lambda: marks_lib.Marks(marks=[], counts={}, starts=[]))
    spans: list[timeline.Span] = dataclasses.field(default_factory=list)
    alarms: list[tuple[str, alarms_lib.Alarm]] = dataclasses.field(default_factory=list)
    evaluations: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    finished: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lines: journal.Lineage | None = None
    snapshots: list[int] = dataclasses.field(default_factory=list)
    checkpoints: list[int] = dataclasses.field(default_factory=list)
    writers: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    tokenizer: Tokenizer | None = None
    reader: LogReader | None = None
    table: rows.RowTable | None = None
    draws: Draws | None = None

    @contextlib.contextmanager
    def part(self, what: str) -> Iterator[None]:
        """Reads a part: what is wrong with it becomes a sentence."""
        try:
            yield
        except UNREADABLE as error:
            said = " ".join(str(error).split()) if isinstance(error, OSError | ValueError) else f"{type(error).__name__} {error}"
            self.problems.append(f"{what} cannot be read: {said}"[:600])

    @property
    def steps(self) -> int:
        """Steps that the run is to do, 0 where the config does not say."""
        value = flatten(self.stored.get("config", {})).get("learner.steps", 0)
        return int(value) if series.is_number(value) else 0

    @property
    def step(self) -> int:
        """The last step that anything tells of."""
        lasts = [self.lines.last if self.lines is not None else 0]
        if trainer := self.roles.get("trainer"):
            lasts.append(int(trainer.read.last.get("step", 0)))
        return max(lasts)


def gather(workdir: Path | str, *, tell: Callable[[str], None] = lambda sentence: None) -> Gathered:
    """Reads a run. Args: tell: is given a sentence every few seconds about how far that is.

    Raises:
      ValueError: there is no run, its config.json is damaged, another version made it, or its storage does not answer.
    """
    run = layout.open_run_dir(workdir)
    storage.check([("--shared", run.shared)], limit=storage.DRY_RUN_SECONDS)
    found = Gathered(run=run, called=str(workdir), stored=_stored(run, called=str(workdir)))
    with found.part("finished.json"):
        finished = layout.read_json(run.finished) if places.exists(run.finished) else {"step": 0}
        _ = int(finished["step"])
        found.finished = finished
    with found.part("the tokenizer (tokens are shown by their numbers)"):
        found.tokenizer = tokenizer_of(found.stored)
    with found.part("the replay log"):
        _read_rows(found, tell)
    _read_roles(found)
    with found.part("the evaluations"):
        _read_evaluations(found)
    with found.part("the journal"):
        found.lines = journal.read_lineage(run.journal)
    with found.part("the folder of snapshots"):
        found.snapshots = layout.steps_in(run.policies)
    with found.part("the folder of checkpoints"):
        found.checkpoints = layout.steps_in(run.checkpoints) if run.checkpoints.is_dir() else []
    return found


def _stored(run: layout.RunDir, *, called: str) -> Mapping[str, Any]:
    """config.json with a config and a contract. Raises ValueError, see `gather`."""
    try:
        stored = contract_lib.read_run(run, called=called)
        for name in ("config", "contract"):
            flatten(stored[name])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{run.config} is damaged and holds no settings: restore the file from a copy") from error
    return stored


def _read_roles(found: Gathered) -> None:
    folder = found.run.root / "metrics"
    names: list[str] = []
    with found.part("the folder of metrics"):
        names = sorted(each.name for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []
    for name in names:
        with found.part(f"alarms of {name}"):
            found.alarms += [(name, alarm) for alarm in alarms_lib.read(folder / name)]
    found.alarms.sort(key=lambda each: each[1].time)
    found.left_out_roles = max(0, len(names) - MOST_ROLES)
    folders = {name: folder / name for name in _shown_roles(names)}
    with found.part("events.jsonl"):
        found.marks = marks_lib.read(folders)
        found.ended = marks_lib.has_ended(folders)
    with found.part("timeline.jsonl"):
        found.spans = timeline.spans(folders)
    for name, of_role in folders.items():
        with found.part(f"metrics of {name}"):
            found.roles[name] = _read_role(found, name, of_role)


def _shown_roles(names: list[str]) -> list[str]:
    """At most MOST_ROLES of them: the trainer, then searchers, then others. Searchers are left out first: they are alike."""
    searchers = [name for name in names if name.startswith("searcher")]
    others = [name for name in names if not name.startswith("searcher")]
    others = sorted(others, key=lambda name: (name.startswith("trainer-process"), name))[:MOST_ROLES]
    shown = {*others, *searchers[: MOST_ROLES - len(others)]}
    return sorted(shown, key=lambda name: (name != "trainer", name not in searchers, name))


def _read_role(found: Gathered, name: str, folder: Path) -> Role:
    by_step, by_time = series.Series("step"), series.Series("time", width=0.5)
    ages, shares = series.AgeMap(), timeline.Shares(_starts(found, name))
    trains = name == "trainer"
    read = series.read(folder, [by_step, ages, shares] if trains else [by_time, shares])
    if read.damaged:
        found.problems.append(f"damaged lines of {folder / 'metrics.jsonl'} are left out: {read.damaged}")
    status: Any = {}
    with found.part(f"status of {name}"):
        file = folder / "status.json"
        status = _checked_status(layout.read_json(file)) if file.exists() else {}
    return Role(name=name, read=read, by_step=by_step, by_time=by_time, ages=ages, shares=shares, status=status)


def _checked_status(told: Any) -> Mapping[str, Any]:
    """Raises TypeError or ValueError where a status.json is none."""
    for name in ("waits", "trouble", "phase"):
        if not isinstance(told.get(name, ""), str):
            raise ValueError(f"{name} is no text")
    done, total = told.get("phase_of", [0, 0])
    if not (series.is_number(done) and series.is_number(total)):
        raise ValueError("phase_of holds no numbers")
    return told


def _starts(found: Gathered, role: str) -> list[float]:
    """When processes of a role started, unix seconds; without events, when a searcher's writers were registered."""
    writers = {writer: info for writer, info in found.writers.items() if writer.rpartition("-")[0] == role}
    registered = [float(info["started"]) for info in writers.values() if series.is_moment(info.get("started"))]
    return found.marks.starts_of(role) or registered


def _read_evaluations(found: Gathered) -> None:
    """The figures of the evaluation reports: numbers alone, and of very many reports some, evenly, and the best."""
    steps = layout.steps_in(found.run.evaluations) if found.run.evaluations.is_dir() else []
    chosen = (
        {steps[i] for i in np.linspace(0, len(steps) - 1, min(len(steps), _MOST_EVALUATIONS)).astype(int)} if steps else set()
    )
    if (best := best_step.Scores(found.run.evaluations).best()) is not None:
        chosen.add(best.step)
    for step in sorted(chosen):
        with found.part(f"the evaluation of step {step}"):
            report = layout.read_json(found.run.evaluations / f"{layout.step_name(step)}.json")
            numbers = {name: float(value) for name, value in report.items() if series.is_number(value)}
            found.evaluations.append({**numbers, "step": step})


def tokenizer_of(stored: Mapping[str, Any]) -> Tokenizer:
    """The run's tokenizer. A config of an older or newer version is taken as far as this version knows its settings.

    Raises:
      ValueError: it is not to be found here, or is another one than that of the run.
    """
    config, there = SCHEMA.defaults(), flatten(stored["config"])
    known = {name: value for name, value in there.items() if name in SCHEMA.rules and not name.startswith("task.custom.")}
    config.update_from_flattened_dict({name: tuple(value) if isinstance(value, list) else value for name, value in known.items()})
    contract = stored["contract"]
    _, tokenizer = named_policy.policy_and_tokenizer(config, alphabet=contract["alphabet"], weights=False)
    if tokenizer.fingerprint != contract["tokenizer"]:
        raise ValueError(f"that of model.path={config.model.path!r} is not the one that the run was made with")
    return tokenizer


def _read_rows(found: Gathered, tell: Callable[[str], None]) -> None:
    contract = contract_lib.of(found.stored, called=found.called)
    mounts: tuple[places.Place, ...] = ()
    with found.part("a mounted run (its rows are left out)"):
        named = found.stored["config"]["replay"]["mount"]
        storage.check([("replay.mount", places.place(each)) for each in named], limit=storage.DRY_RUN_SECONDS)
        mounts = contract_lib.mounted_logs(named, reward_version=contract.reward_version)
    found.reader = LogReader(found.run.replay, contract.row_shape(), mounts=mounts, patience_seconds=1.0)
    found.table, found.draws = table, draws = rows.RowTable(found.reader), Draws(found.run.journal)
    if not _in_time(table.advance, lambda: tell("read {:,} of {:,} rows".format(*table.progress))):
        read, committed = table.progress
        found.problems.append(
            f"the newest {read} of {committed} rows are read: reading rows took {READ_SECONDS:g} s and was ended"
        )
    if not _in_time(draws.advance, lambda: tell(f"read the journal up to step {draws.last_step:,}")):
        found.problems.append(
            f"draws up to step {draws.last_step} are read: reading the journal took {READ_SECONDS:g} s and was ended"
        )
    found.problems += [*found.table.problems, *found.draws.problems]
    for name in found.reader.heads():
        with found.part(f"the registration of writer {name}"):
            found.writers[name] = found.reader.info(name)


def _in_time(advance: Callable[..., bool], tell: Callable[[], None]) -> bool:
    """Reads until all is read, or for READ_SECONDS, and tells now and then. Returns whether all is read."""
    deadline = time.monotonic() + READ_SECONDS
    while not advance(seconds=min(TELL_SECONDS, READ_SECONDS)):
        if time.monotonic() >= deadline:
            return False
        tell()
    return True


def newest_sign(found: Gathered) -> float:
    """Unix seconds of the last thing that any role wrote, 0 without any."""
    times = [role.read.last.get("time", 0.0) for role in found.roles.values()]
    times += [role.status.get("time", 0.0) for role in found.roles.values()]
    times += [mark.time for mark in found.marks.marks]
    return max((float(each) for each in times if series.is_moment(each)), default=0.0)


def oldest_sign(found: Gathered) -> float:
    """Unix seconds of the first thing that any role wrote, 0 without any."""
    times = [role.read.first.get("time", 0.0) for role in found.roles.values()]
    times += [mark.time for mark in found.marks.marks]
    times += [info.get("started", 0.0) for info in found.writers.values()]
    return min((float(each) for each in times if series.is_moment(each) and each > 0), default=0.0)
