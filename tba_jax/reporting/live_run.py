"""A run that is looked at while it goes on: tables that a thread keeps up to date, and what pages read besides."""

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tba_jax.experiment import storage
from tba_jax.replay.reader import LogReader
from tba_jax.reporting import gathering
from tba_jax.reporting import rows as rows_lib
from tba_jax.reporting import tokens as tokens_lib
from tba_jax.reporting.draws import Draws
from tba_jax.reporting.gathering import UNREADABLE
from tba_jax.reporting.metric_lines import MetricLines
from tba_jax.reporting.row_filter import Orders
from tba_jax.reporting.series import is_moment
from tba_jax.run import best_step, json_lines, layout, places
from tba_jax.run import contract as contract_lib
from tba_jax.telemetry import alarms as alarms_lib
from tba_jax.telemetry import status as status_lib
from tba_jax.text.visible import visible
from tba_jax.trajectory import Rows

log = logging.getLogger(__name__)

POLL_SECONDS = 2.0
# A slice of the thread's work: pages take turns with it.
_SLICE_SECONDS = 0.2
_MOST_ROLES = 200


class RoleNow(NamedTuple):
    """What a role says now. line: its newest metrics; seconds: since that line, infinite without one."""

    name: str
    told: status_lib.Told
    line: dict[str, Any]
    seconds: float
    alarms: list[alarms_lib.Alarm]


class LiveRun:
    """One run of a viewer. Any thread may call its methods.

    Attributes: called: what pages call the run. run, stored, contract: see contract_lib. table, draws, trainer: kept up to date.
    tokenizer: None where the run's cannot be read here; problems: sentences about what cannot be read, found at the start.
    is_read: whether all that was there has been read. scores: of the held-out queries.
    """

    def __init__(self, workdir: Path | str):
        """
        Raises:
          ValueError: there is no run, its config.json is damaged, another version made it, or its storage does not answer.
        """
        self.called = str(workdir)
        self.run = layout.open_run_dir(workdir)
        storage.check([("--shared", self.run.shared)], limit=storage.DRY_RUN_SECONDS)
        self.stored = contract_lib.read_run(self.run, called=self.called)
        self.contract = contract_lib.of(self.stored, called=self.called)
        self.problems: list[str] = []
        self.is_read = False
        self.tokenizer = None
        try:
            self.tokenizer = gathering.tokenizer_of(self.stored)
        except UNREADABLE as error:
            self.problems.append(f"the tokenizer cannot be read, tokens are shown by their numbers: {error}")
        self.pieces = tokens_lib.Pieces(self.tokenizer)
        try:
            shape = self.contract.row_shape()
        except UNREADABLE as error:
            raise ValueError(f"the contract in {self.run.config} is damaged: restore the file from a copy") from error
        mounts = self._mounts()
        self.reader = LogReader(self.run.replay, shape, mounts=mounts, patience_seconds=1.0)
        self.table = rows_lib.RowTable(LogReader(self.run.replay, shape, mounts=mounts, patience_seconds=5.0))
        self.draws, self.trainer = Draws(self.run.journal), MetricLines(self.run.metrics("trainer"))
        self.orders = Orders()
        self._reading = threading.Lock()
        self._snapshots: tuple[float, list[int]] = (-float("inf"), [])
        self._evaluations: dict[int, dict[str, Any]] = {}
        self.scores = best_step.Scores(self.run.evaluations)
        self._odd = ""

    def _mounts(self) -> tuple[places.Place, ...]:
        try:
            named = self.stored["config"]["replay"]["mount"]
            storage.check([("replay.mount", places.place(each)) for each in named], limit=storage.DRY_RUN_SECONDS)
            mounts = contract_lib.mounted_logs(named, reward_version=self.contract.reward_version)
            # An object store has no folders that could be missing.
            gone = [mount for mount in mounts if isinstance(mount, Path) and not places.exists(mount)]
        except UNREADABLE as error:
            self.problems.append(f"a mounted run cannot be read, its rows are left out: {error}")
            return ()
        self.problems += [f"{mount} of a mounted run is not there: its rows are left out" for mount in gone]
        return tuple(mount for mount in mounts if mount not in gone)

    def follow(self, stopped: threading.Event) -> None:
        """Keeps the tables up to date until `stopped` is set."""
        while not stopped.is_set():
            # The rows first: they are what most pages show.
            complete = [self._advance(part) for part in (self.table, self.draws, self.trainer)]
            self.is_read = all(complete)
            stopped.wait(POLL_SECONDS if self.is_read else 0.01)

    def _advance(self, part: MetricLines | Draws | rows_lib.RowTable) -> bool:
        try:
            complete = part.advance(seconds=_SLICE_SECONDS)
        except UNREADABLE as error:
            self._odd = f"nothing new is read: {error}"
            return True
        if isinstance(part, MetricLines):
            self._odd = ""
        return complete

    def complaints(self) -> list[str]:
        """What cannot be read, in sentences."""
        gone = [] if self.is_there() else [f"the folder {self.called} is not there any more: pages show what was read before"]
        damaged = (
            [f"damaged lines of the trainer's metrics.jsonl are left out: {self.trainer.damaged}"] if self.trainer.damaged else []
        )
        odd = [self._odd] if self._odd and not gone else []
        return [*gone, *self.problems, *self.table.problems, *self.draws.problems, *damaged, *odd]

    def is_there(self) -> bool:
        try:
            return places.exists(self.run.config)
        except OSError:
            return False

    def rows(self, ids: Sequence[tuple[str, int]]) -> tuple[Rows, list[int], dict[tuple[str, int], str]]:
        """See rows.read_some."""
        with self._reading:
            return rows_lib.read_some(self.reader, ids)

    def is_known(self, writer: str) -> bool:
        """Whether the run has a log of this writer."""
        try:
            with self._reading:
                return writer in self.reader.heads()
        except UNREADABLE:
            return True

    @property
    def columns(self) -> rows_lib.Columns:
        """The table's rows, with -1 as the steps of mounted rows: they are those of another run, and rank as older than any."""
        columns = self.table.columns
        own = [self.table.is_own(writer) for writer in tuple(self.table.writers)]
        return columns if all(own) else rows_lib.with_steps_of_run(columns, own)

    def is_own(self, writer: str) -> bool:
        """Whether a writer's rows are of this run, and not of one that it mounts."""
        with self._reading:
            return self.reader.is_own(writer)

    def writer_info(self, writer: str) -> dict[str, Any]:
        """What the process that wrote a log says of itself, {} where it cannot be read."""
        try:
            with self._reading:
                info = self.reader.info(writer)
        except UNREADABLE:
            return {}
        return info if isinstance(info, dict) else {}

    def prompt(self, rows: Rows, i: int) -> str:
        """The text of a row's prompt, without control characters."""
        ids = rows["tokens"][i, : rows["prompt_length"][i]].tolist()
        return self._text(ids) if self.tokenizer is None else visible(self.tokenizer.decode(ids))

    def response(self, rows: Rows, i: int) -> str:
        """The text of a row's response, without control characters."""
        begin = int(rows["prompt_length"][i])
        prompt, ids = rows["tokens"][i, :begin].tolist(), rows["tokens"][i, begin : begin + rows["response_length"][i]].tolist()
        return self._text(ids) if self.tokenizer is None else visible(self.tokenizer.decode_continuation(prompt, ids))

    def _text(self, ids: Sequence[int]) -> str:
        return "".join(text for text, _ in self.pieces.texts(ids))

    def snapshots(self) -> list[int]:
        """Steps whose policies are kept, as of a few seconds ago."""
        told, steps = self._snapshots
        if time.monotonic() - told > POLL_SECONDS:
            try:
                steps = layout.steps_in(self.run.policies)
            except OSError:
                steps = []
            self._snapshots = time.monotonic(), steps
        return steps

    def newest_step(self) -> int:
        """The last step that anything tells of."""
        return max(self.draws.last_step, int(self.trainer.last.get("step", 0)), max(self.snapshots(), default=0))

    def roles(self) -> list[RoleNow]:
        """All roles, the trainer first."""
        folder = self.run.root / "metrics"
        try:
            names = sorted((each.name for each in folder.iterdir() if each.is_dir()), key=lambda name: (name != "trainer", name))
        except OSError:
            return []
        return [_role_now(folder / name) for name in names[:_MOST_ROLES]]

    def evaluation_steps(self) -> list[int]:
        """Steps with a report of the evaluator."""
        try:
            return layout.steps_in(self.run.evaluations) if self.run.evaluations.is_dir() else []
        except OSError:
            return []

    def evaluation(self, step: int) -> dict[str, Any]:
        """The evaluator's report of a step. Raises ValueError or OSError, with its path, where it cannot be read."""
        if step not in self._evaluations:
            file = self.run.evaluations / f"{layout.step_name(step)}.json"
            report = layout.read_json(file)
            if not isinstance(report, dict):
                raise ValueError(f"{file} is no report of an evaluation")
            if len(self._evaluations) >= 64:
                self._evaluations.pop(next(iter(self._evaluations)))
            self._evaluations[step] = report
        return self._evaluations[step]


def _role_now(folder: Path) -> RoleNow:
    try:
        told = status_lib.read(folder)
    except UNREADABLE:
        told = status_lib.Told()
    line = _newest_line(folder / "metrics.jsonl")
    when = line.get("time")
    seconds = max(0.0, time.time() - when) if is_moment(when) else float("inf")
    return RoleNow(folder.name, told, line, seconds, alarms_lib.read(folder))


def _newest_line(path: Path) -> dict[str, Any]:
    """The newest whole line of a file of JSON lines, {} where there is none. Reads only the end of the file."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - 65536))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return {}
    for content in reversed(lines):
        if line := json_lines.parse_line(content.decode(errors="replace")):
            return line
    return {}
