"""Reads all that a report tells of a run, and writes nothing. What is damaged becomes a sentence, and the rest is read."""

import collections
import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from tba_jax.experiment.schema import SCHEMA
from tba_jax.replay import journal
from tba_jax.replay.reader import LogCorruption, LogReader, RowsGone, RowsPending
from tba_jax.schemas import flatten
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout, places
from tba_jax.telemetry import alarms as alarms_lib
from tba_jax.telemetry import metrics
from tba_jax.telemetry import status as status_lib
from tba_jax.text.tokenizers import Tokenizer
from tba_jax.trajectory import Rows, trained, turns

log = logging.getLogger(__name__)

MOST_POINTS, MOST_ROLES = 1024, 24  # of each curve; of more roles, and of more lines, some are left out
MOST_ROWS, MOST_READ_BYTES, MOST_DRAWS = 2_000_000, 16 << 30, 20_000_000
_BLOCK_BYTES, _MANY_ROWS = 8 << 20, 100_000
_ROW_BITS = 40  # of a key, which is (number of the writer) << _ROW_BITS | row
# key: int64, see `RowTable.name`. newest_step, oldest_step: trainer steps of the weights of the row's tokens, -1 without a token.
# turns: of the policy, -1 without an environment; errors: turns that it could not read; seconds: that it took.
FIGURES = np.dtype([
    ("key", "i8"), ("query_id", "u8"), ("reward", "f4"), ("newest_step", "i4"), ("oldest_step", "i4"), ("finished", "?"),
    ("turns", "i4"), ("errors", "f4"), ("seconds", "f4"),
])  # fmt: skip


def blocks(
    reader: LogReader, writer: str, rows: range, *, lost: Callable[[RowsGone | LogCorruption], None], wait: bool = True
) -> Iterator[Rows]:
    """Reads rows of a writer in whole appends of about 8 MB, and goes around those that are damaged or removed.

    Args: lost: is told of such rows. wait: for storage that lags, see LogReader.read. Raises RowsPending, ValueError: as there.
    """
    size = max(1, _BLOCK_BYTES // reader.shape.row_bytes)
    start = end = rows.start
    while start < rows.stop:
        if end <= start:
            together = reader.appends(writer, start, min(start + size, rows.stop))
            end = min(together[-1].stop if together else start + size, rows.stop)
        try:
            yield reader.read(writer, start, end, wait=wait)
            start = end
        except (RowsGone, LogCorruption, RowsPending) as error:
            if error.start > start:
                end = error.start
            elif isinstance(error, RowsPending):
                raise
            else:
                lost(error)
                start = max(error.stop, start + 1)


def damage_of(lost: Sequence[RowsGone | LogCorruption]) -> list[str]:
    """A sentence about the rows that are damaged, if any. Args: lost: what `blocks` told."""
    damaged = [error for error in lost if isinstance(error, LogCorruption)]
    count = sum(error.stop - error.start for error in damaged)
    return [f"{count} rows are damaged and left out, such as: {damaged[0]}"] if damaged else []


def steps_of_rows(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """int32[B] each: the newest and the oldest policy step of the tokens of each row, -1 without a token."""
    steps = rows["policy_step"]
    newest = steps.max(axis=1, initial=-1)
    oldest = np.where(steps < 0, np.iinfo(np.int32).max, steps).min(axis=1, initial=np.iinfo(np.int32).max)
    return newest, np.where(newest < 0, -1, oldest).astype(np.int32)


class RowTable:
    """The figures of a run's rows, and which steps drew them. Memory is bounded.

    Attributes:
      rows: FIGURES[n]. Steps of rows of mounted runs are -1 there, as they count the updates of another run.
      writers: names, by number. committed: rows of all logs.
      last_step: the newest journalled step, 0 without one. resumes: steps after which a trainer went on.
    """

    def __init__(self, reader: LogReader, folder: Path, problems: list[str]):
        """Reads both. Args: folder: RunDir.journal; problems: takes sentences about what cannot be read."""
        self.reader, self.rows = reader, np.zeros(0, FIGURES)
        self.writers, self.resumes, self.committed, self.last_step = list[str](), list[int](), 0, 0
        self._draws = np.zeros((2, 0), np.int64)  # the row's key, and the step, of each draw
        with part(problems, "a part of the replay log"):
            self._read_rows(problems)
        with part(problems, "the journal (steps that drew rows are missing)"):
            self._read_journal(folder)
        problems += [*reader.problems.values()][:20]

    def name(self, key: int) -> tuple[str, int]:
        """Writer and row."""
        return self.writers[key >> _ROW_BITS], key & (1 << _ROW_BITS) - 1

    def of_writer(self, name: str) -> np.ndarray:
        """bool[n]: which rows are of a writer."""
        return self.rows["key"] >> _ROW_BITS == self.writers.index(name)

    def counts(self) -> np.ndarray:
        """int64[n]: how often steps drew each row."""
        keys, wanted = np.sort(self._draws[0]), self.rows["key"]
        return np.searchsorted(keys, wanted, side="right") - np.searchsorted(keys, wanted, side="left")

    def draws_of(self, wanted: Sequence[int]) -> Mapping[int, list[int]]:
        """Key -> the steps that drew the row, ascending; a step that drew it twice stands there twice."""
        found: dict[int, list[int]] = {key: [] for key in wanted}
        for key, step in self._draws.T[np.isin(self._draws[0], np.asarray(wanted, np.int64))].tolist():
            found[key].append(step)
        return found

    def _number(self, writer: str) -> int:
        if writer not in self.writers:
            self.writers.append(writer)
        return self.writers.index(writer)

    def _read_rows(self, problems: list[str]) -> None:
        heads = self.reader.heads()
        self.committed = sum(heads.values())
        kept = {writer: self.reader.kept(writer) for writer in sorted(heads)}
        there = sum(len(each) for ranges in kept.values() for each in ranges)
        most = min(MOST_ROWS, MOST_READ_BYTES // self.reader.shape.row_bytes)
        if there > _MANY_ROWS:
            log.info("reading the newest %d of %d rows", min(there, most), there)
        found = [self.rows]
        lost: list[RowsGone | LogCorruption] = []
        for writer, ranges in kept.items():
            number, own, mine = self._number(writer), self.reader.is_own(writer), sum(map(len, ranges))
            # Of more rows than are kept, each writer's newest, in proportion.
            begin = heads[writer] - mine * most // there if there > most else 0
            with part(problems, f"a part of the rows of writer {writer}"):
                for each in ranges:
                    span = range(max(begin, each.start), each.stop)
                    for rows in blocks(self.reader, writer, span, lost=lost.append, wait=False):
                        found.append(_figures(rows, number, own=own))
        self.rows = np.concatenate(found)
        problems += damage_of(lost)
        if there > most:
            told = f"about {len(self.rows):,} rows are read, the newest of each writer; {self.committed:,} are committed"
            problems.append(told)

    def _read_journal(self, folder: Path) -> None:
        lines = journal.read_lineage(folder)
        self.resumes = [stretch.first - 1 for stretch in lines.stretches if stretch.first > 1]
        draws, count = collections.deque([self._draws]), 0
        for line in lines:
            numbers = np.array([self._number(writer) for writer in line["writers"]], np.int64)
            which, rows = np.array(line["rows"], np.int64).reshape(-1, 2).T
            draws.append(np.stack([numbers[which] << _ROW_BITS | rows, np.full(len(rows), line["step"])]))
            count, self.last_step = count + len(rows), int(line["step"])
            while count > MOST_DRAWS:
                count -= draws.popleft().shape[1]
        self._draws = np.concatenate(draws, axis=1)


def _figures(rows: Rows, writer: int, *, own: bool) -> np.ndarray:
    found = np.zeros(len(rows["row"]), FIGURES)
    found["turns"] = -1
    found["key"] = writer << _ROW_BITS | rows["row"]
    for name in ("query_id", "reward", "finished"):
        found[name] = rows[name]
    found["newest_step"], found["oldest_step"] = steps_of_rows(rows) if own else (-1, -1)
    if "environment" in rows:
        found["turns"] = turns(trained(rows)).sum(axis=1)
        _, found["errors"], found["seconds"] = rows["environment"].T
    return found


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
    def trainer(self) -> Role:
        return self.roles.get("trainer", Role(lines=(), status=status_lib.Told()))

    @property
    def step(self) -> int:
        """The last step that anything tells of."""
        return max(self.table.last_step, int(self.trainer.last.get("step", 0)))

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
        from tba_jax.experiment import stored_run  # imports JAX

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
        self._problems, self._tokenizer, mounts = list[str](), None, tuple[places.Place, ...]()
        with part(self._problems, "the tokenizer (tokens are shown by their numbers)"):
            self._tokenizer = tokenizer_of(self._stored)
        with part(self._problems, "a mounted run (its rows are left out)"):
            named = self._stored["config"]["replay"]["mount"]
            stored_run.check_answers([("replay.mount", places.place(each)) for each in named], limit=stored_run.DRY_RUN_SECONDS)
            mounts = contract_lib.mounted_logs(named, reward_version=contract.reward_version)
        self._reader = LogReader(self.run.replay, shape, mounts=mounts, patience_seconds=1.0)

    def gather(self) -> Gathered:
        """All that is there now."""
        run, problems = self.run, [*self._problems]
        table = RowTable(self._reader, run.journal, problems)
        read = dict[str, Any](stored=self._stored, tokenizer=self._tokenizer, table=table, problems=problems)
        found = Gathered(run=run, called=self.called, **read)
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
    from tba_jax.experiment import stored_run  # imports JAX

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
