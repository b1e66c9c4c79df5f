"""The replay buffer of a trainer: the one reader of the log, the index of resident rows, the draw of a batch, and retention.

A resume from a checkpoint reads its resident rows and everything above its heads: other appends may go.
"""

import collections
import concurrent.futures
import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax import trajectory
from tba_jax.replay import journal, ledger, success_counts
from tba_jax.replay.index import ReplayIndex, Rules
from tba_jax.replay.journal import Again
from tba_jax.replay.ledger import Gap, KnownGaps, Losses
from tba_jax.replay.log import GIVEN, Append, registration, remove
from tba_jax.replay.reader import LogReader
from tba_jax.replay.selection import Selection, draw_batch, drawable
from tba_jax.replay.tail import Tail
from tba_jax.roles import backpressure
from tba_jax.run import processes
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout, places
from tba_jax.storage.places import Place

# A trainer that is further behind than so many windows passes over the oldest rows. Not all of a window's rows would stay.
_CAPACITIES_BEHIND = 2


def make_index(config: Any, contract: contract_lib.Contract, *, reference_ids: Sequence[int] | None = None) -> ReplayIndex:
    """The empty index of a run. Args: reference_ids: that its rows may have, see references_of_rows; None: any."""
    rules = {field.name: config.replay[field.name] for field in dataclasses.fields(Rules)}
    return ReplayIndex(
        shape=contract.row_shape(),
        vocab_size=contract.model["vocab"],
        reference_ids=reference_ids,
        success_decay=config.replay.success_decay,
        **rules,
    )


def references_of_rows(config: Any, contract: contract_lib.Contract, run: layout.RunDir) -> tuple[int, ...] | None:
    """The reference ids that rows of a run may have: the run's; None: any, where the trainer scores all rows by it.

    Raises FileNotFoundError where the run has no reference yet, see layout.reference_id.
    """
    own = int(contract.reference_of_rows(layout.reference_id(run)), 16)
    return (own,) if config.searchers.scores_reference else None


def make_selection(config: Any, *, recent_window: int) -> Selection:
    """How a run draws its batches. Args: recent_window: see ReplayBuffer."""
    c, replay = config.learner, config.replay
    return Selection(
        queries=c.queries,
        completions=c.completions,
        recent_probability=replay.recent_probability,
        recent_window=replay.recent_window or recent_window,
        recent_fill=replay.recent_fill,
        strategy=replay.strategy,
        inverse_temperature=replay.inverse_temperature,
        max_draws_per_row=replay.max_draws_per_row,
        max_staleness=replay.max_staleness,
    )


def draw(index: ReplayIndex, selection: Selection, *, min_rows: int, seed: int, step: int) -> np.ndarray | None:
    """int64[B]: the slots of the batch of step + 1, a function of the arguments alone. None where there are not enough rows."""
    if index.arrivals < max(min_rows, 1):
        return None
    rng = np.random.Generator(np.random.Philox(key=[seed, step]))
    return draw_batch(index, selection, rng=rng, step=step)


class ReplayBuffer:
    """The rows that a trainer may draw, kept up with the log.

    From `follow` on the tail reads with the reader; other threads only ask for what it knows of writers (`LogReader.is_own`,
    `problems`).
    """

    def __init__(self, config: Any, contract: contract_lib.Contract, run: layout.RunDir, *, recent_window: int):
        """Args: recent_window: what stands for replay.recent_window where that is 0."""
        self._seed, self._min_rows = config.seed, config.replay.min_rows
        self._updates_ahead = config.searchers.max_updates_ahead
        self._selection = make_selection(config, recent_window=recent_window)
        mounts = contract_lib.mounted_logs(config.replay.mount, reward_version=contract.reward_version)
        self._has_mounts = bool(mounts)
        self._searchers, self._counts_matter = config.searchers.count, config.searchers.prompt_selection == "posterior"
        self._mounted_runs = [layout.open_run_dir(folder) for folder in config.replay.mount]
        self.reader = LogReader(run.replay, contract.row_shape(), mounts=mounts)
        self._requests = places.RequestRate([run.replay, *mounts])
        self._reference_ids = references_of_rows(config, contract, run)
        self.index = make_index(config, contract, reference_ids=self._reference_ids)
        # Rows that the window would not keep need not be read.
        most_behind = max(_CAPACITIES_BEHIND * config.replay.capacity, config.replay.min_rows)
        self._tail_settings: dict[str, Any] = dict(
            poll_seconds=places.poll_seconds((run.replay, *mounts), config.replay.poll_seconds),
            # A window of the best rewards may keep any row.
            most_behind=most_behind if config.replay.merge_keep == "newest" else 0,
            arrival_bytes=config.replay.arrival_megabytes << 20,
        )
        # Records of the integrations since the last journalled step. To do one again changes nothing.
        self._visible: list[dict[str, Any]] = []
        # The losses in the journal lines that are to be done again, and the object that does these lines again; see `expect`.
        self._losses = Losses()
        self._again = Again(self.index, self.reader, self._losses, step=0)
        # What this process could not read again.
        self._lost: list[Gap] = []
        self._tail: Tail | None = None
        self._closed_folder, self._close_seconds = run.closed, config.replay.close_seconds
        # Writer -> when its rows came last, time.monotonic().
        self._heard: dict[str, float] = {}
        self._rows_came = time.monotonic()

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, JSON. Raises OSError: see ClosedWriters.seal."""
        self.index.closed.seal(self._closed_folder)
        # A copy: the checkpoint is written while rows go on coming.
        return {"index": self.index.state(), "visible": list(self._visible)}

    def expect(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Notes what earlier resumes lost; called first. Args: lines: all journal lines after the checkpoint."""
        self._losses = Losses(lines)
        self._again = Again(self.index, self.reader, self._losses, step=0)

    def restore(self, state: Mapping[str, Any], *, step: int) -> None:
        """Goes on from `state` of the checkpoint of a step; reads the resident rows again, and leaves out what cannot be read."""
        self.reader.heads()
        known = KnownGaps(self._losses.until(step))
        self.index, self._lost = ReplayIndex.restore(
            state["index"], self.reader, closed=self._closed_folder, reference_ids=self._reference_ids, known=known
        )
        self._again = Again(self.index, self.reader, self._losses, step=step)
        self._visible = state["visible"]

    def replay(self, line: Mapping[str, Any]) -> tuple[np.ndarray, trajectory.Rows]:
        """The slots int64[B] and the rows of a journalled batch, once the heads of its line are integrated as they were then.
        Raises ValueError where a row is not resident, or the rows are not those that were drawn."""
        self._visible = []  # the first line after a checkpoint has them
        slots = self._again.do(line)
        rows = self.index.gather(slots)
        if journal.batch_hash(rows) != line["batch"]:
            raise ValueError(f"journalled step {line['step']}: the rows in the log are not those that were drawn")
        return slots, rows

    def note_losses(self, *, since: int) -> None:
        """The next journal line will tell what this resume could not read again. Args: since: the step at which it began."""
        self._lost += self._again.lost
        if self._lost:
            self._visible.append(ledger.loss(self._lost, since=since))

    def follow(self) -> None:
        """From now on the tail reads what is beyond the heads of the index; see `start` and `poll`."""
        self._tail = Tail(self.reader, {**self.index.closed.heads, **self.index.heads}, self.index.pending, **self._tail_settings)

    @property
    def tail(self) -> Tail:
        assert self._tail is not None, "the trainer has not resumed"
        return self._tail

    def integrate(self, *, step: int) -> None:
        """Adds the rows that have arrived to the index, as visible from `step` on, and merges those that are recent no more."""
        if visible := self.tail.integrate(self.index, step=step):
            self._visible += visible
            self._rows_came = time.monotonic()
            self._heard |= dict.fromkeys((writer for record in visible for writer in record["heads"]), self._rows_came)
            # The journal tells of it: a resume may have another window.
            if self.index.merge(before=(oldest := self.index.recent_since(self._selection.recent_window))):
                self._visible.append(ledger.merging(oldest))

    def close_silent(self) -> None:
        """Closes the writers that have been silent for replay.close_seconds and of which nothing is left to draw or to read.
        Called before a checkpoint, which they would make larger for ever."""
        if self._tail is None:  # steps of the journal are done again
            return
        now, index = time.monotonic(), self.index
        silent = [writer for writer in index.writers if now - self._heard.setdefault(writer, now) >= self._close_seconds]
        closable = index.closable(silent) if silent else []
        heads = {writer: index.heads[writer] for writer in closable if self.reader.head(writer) <= index.heads[writer]}
        if heads:
            index.close([*heads])
            self._visible.append(ledger.closing(heads))
            for writer in heads:
                del self._heard[writer]

    def beside_policy(self) -> dict[str, bytes]:
        """Files that go beside a snapshot: what searchers choose queries by, if they do."""
        return {success_counts.FILE: self.index.success_counts.published().to_bytes()} if self._counts_matter else {}

    def take_visible(self) -> list[dict[str, Any]]:
        """What the next journal line records; it is in no later one."""
        visible, self._visible = self._visible, []
        return visible

    def draw(self, *, step: int) -> np.ndarray | None:
        """The slots of the batch of step + 1, see `draw`."""
        return draw(self.index, self._selection, min_rows=self._min_rows, seed=self._seed, step=step)

    def demand(self, *, step: int, waits: bool) -> dict[str, Any]:
        """What searchers are told before the draw of the batch of step + 1, or where there is none. See backpressure.demand."""
        limits = dict(updates_ahead=self._updates_ahead, min_rows=self._min_rows)
        return backpressure.demand(self.index, self._selection, **limits, is_own=self.reader.is_own, step=step, waits=waits)

    def shortage(self, *, step: int) -> str:
        """What the batch of step + 1 needs, and what there is, in one part of a sentence."""
        index, choice = self.index, self._selection
        if index.arrivals < self._min_rows:
            need = f"replay.min_rows={self._min_rows} good rows, {index.arrivals} have come"
        else:
            limits = {"max_draws_per_row": choice.max_draws_per_row, "max_staleness": choice.max_staleness}
            under = ", ".join(f"replay.{name}={value}" for name, value in limits.items() if value)
            found = drawable(index, choice, step=step)
            need = f"rows of learner.queries={choice.queries} queries, {found} have some that may be drawn"
            need += f" under {under}" if under else ""
        if not index.arrivals:
            return f"{need}; none has come yet"
        seconds = time.monotonic() - self._rows_came
        return f"{need}; {len(index)} rows are resident, the last came {seconds:.0f} s ago"

    def check_not_all_refused(self) -> None:
        """Raises BadInput where a batch's worth of rows has been refused, and none accepted. Unscored rows do not count."""
        first = [(refused, row) for refused, row in self.index.rejected_first.items() if refused[1] != "reward"]
        if self.index.arrivals or not first:
            return
        counts = sum((collections.Counter(told["rejected"]) for told in self.index.ledger().values()), collections.Counter[str]())
        count = counts.total() - counts["reward"]
        if count >= self._selection.queries * self._selection.completions:
            (writer, reason), row = first[0]
            raise processes.BadInput(
                f"all {count} rows that have come are refused, the first, row {row} of writer {writer}, because it is not valid "
                f"({self._in_words(reason)}); there is nothing to train on: python -m tba_jax audit counts the reasons"
            )

    def is_exhausted(self) -> bool:
        """Whether no row can come any more: there is no writer but those of mounted runs, which have all finished."""
        if self._searchers or not self._mounted_runs:
            return False
        return not self.has_own_rows() and all(places.exists(run.finished) for run in self._mounted_runs)

    def has_own_rows(self) -> bool:
        """Whether a writer of this run has written rows."""
        return any(self.reader.is_own(writer) for writer in self.index.writers)

    def is_mounted(self, slots: np.ndarray) -> np.ndarray:
        """bool[n]: whether the rows in `slots` are of other runs."""
        # A writer that is not followed has no resident rows, so the reader knows them all.
        numbers, of_slot = np.unique(self.index.slot_writer[slots], return_inverse=True)
        mounted = [not self.reader.is_own(self.index.writers[number]) for number in numbers]
        return np.array(mounted, bool)[of_slot]

    def provenance(self, slots: np.ndarray, rewards: np.ndarray, *, step: int) -> dict[str, Any]:
        """The staleness int64[B] of the batch of `step`, in steps; the mean number of distinct rows among the K of a group; and
        with mounts, the share of mounted rows, and the mean rewards of own and of mounted rows.
        Args: slots: int64[B], the K of a query consecutive. rewards: float32[B]."""
        row_step = self.index.row_step[slots]
        groups = np.sort(slots.reshape(-1, self._selection.completions), axis=1)
        distinct = 1 + np.count_nonzero(np.diff(groups, axis=1), axis=1)
        found = {"staleness": np.where(row_step < 0, 0, step - 1 - row_step), "distinct_rows_per_group": distinct.mean()}
        if not self._has_mounts:
            return found
        mounted = self.is_mounted(slots)
        apart = {"reward_own": rewards[~mounted], "reward_mounted": rewards[mounted]}
        return found | {"mounted_share": mounted.mean()} | {name: of.mean() for name, of in apart.items() if of.size}

    def lacks_rows(self) -> bool:
        """Whether retention has removed rows of this run."""
        heads = self.reader.heads()
        return any(head > sum(map(len, self.reader.kept(each))) for each, head in heads.items() if self.reader.is_own(each))

    def sampled_here(self) -> np.ndarray:
        """int64[n]: slots of resident rows whose tokens snapshots of this run drew."""
        resident = np.flatnonzero(self.index.slot_query >= 0)
        return resident[(self.index.row_step[resident] >= 0) & ~self.is_mounted(resident)]

    def problems(self) -> list[str]:
        """Sentences about folders and rows that are left out of training."""
        rejected = [
            f"replay log of writer {writer}: row {row} is not valid ({self._in_words(reason)}), it and others like it are left "
            "out and counted"
            for (writer, reason), row in self.index.rejected_first.items()
        ]
        outside = self.index.success_counts.outside if self._counts_matter else None
        uncounted = [success_counts.told_outside(*outside)] if outside else []
        return [*self.tail.problems(), *map(str, self._lost), *rejected, *uncounted]

    def _in_words(self, reason: str) -> str:
        if reason == "tokens":
            return f"a token, padding included, is not below the model's vocabulary of {self.index.vocab_size} ids"
        if reason != "reference" or self._reference_ids is None:
            return reason
        own = contract_lib.reference_in_words(f"{self._reference_ids[0]:016x}")
        return f"its log-probs are not of {own}, which is that of this run"

    def close(self) -> None:
        """Stops the thread that reads the log."""
        if self._tail is not None:
            self._tail.close()

    def scalars(self) -> dict[str, float]:
        """Sizes for the metrics: resident rows and queries, rows seen since the run began, and those rejected or damaged."""
        totals = self.index.totals
        return {
            "buffer_rows": float(len(self.index)),
            "buffer_queries": float(np.count_nonzero(self.index.query_rows)),
            "rows_seen": float(totals["seen"]),
            "rows_rejected": float(totals["rejected"] + totals["damaged"]),
            **self._requests.scalars(),
        }


@dataclasses.dataclass(frozen=True)
class Need:
    """What a resume from a checkpoint reads of one writer: every row from `head` on, and `rows`, int64[n] ascending: those that
    are resident or pending."""

    head: int
    rows: np.ndarray

    def needs(self, append: Append) -> bool:
        return append.stop > self.head or int(np.searchsorted(self.rows, append.first)) < int(
            np.searchsorted(self.rows, append.stop)
        )


def needs(index: ReplayIndex) -> dict[str, Need]:
    """Writer -> need of a checkpoint that holds this index."""
    resident = np.flatnonzero(index.slot_query >= 0)
    writers, rows = index.slot_writer[resident], index.slot_row[resident]
    order = np.lexsort((rows, writers))
    bounds = np.searchsorted(writers[order], np.arange(len(index.writers) + 1))
    found = {}
    for number, writer in enumerate(index.writers):
        kept = rows[order[bounds[number] : bounds[number + 1]]]
        pending = [row for start, stop in index.pending.get(writer, ()) for row in range(start, stop)]
        found[writer] = Need(index.heads[writer], np.union1d(kept, np.array(pending, np.int64)))
    return found


class Retention:
    """Removes the appends that no resume from a kept checkpoint reads, in a thread."""

    def __init__(self, replay: Place, buffer: ReplayBuffer):
        self._replay, self._buffer = replay, buffer
        # Checkpointed step -> what a resume from there reads of each writer, and the writers that are closed there.
        self._needs: dict[int, tuple[dict[str, Need], dict[str, int]]] = {}
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="retention")
        self._removal: concurrent.futures.Future[None] | None = None

    def note(self, step: int) -> None:
        """Notes what a resume from a checkpoint of the buffer as it is now reads."""
        index = self._buffer.index
        self._needs[step] = needs(index), index.closed.heads.copy()

    def remove_unneeded(self, kept: Sequence[int]) -> None:
        """Starts to remove the appends that no resume from the kept checkpoints reads. Raises what the last removal raised."""
        if self._removal is not None:
            self._removal.result()
        # A checkpoint of an earlier process may need any append, until it is replaced.
        if not self._needs.keys() >= set(kept):
            return
        self._needs = {step: self._needs[step] for step in kept}
        if kept:
            closed = self._needs[kept[0]][1]
            self._removal = self._thread.submit(self._remove, [of_writers for of_writers, _ in self._needs.values()], closed)

    def _remove(self, kept: Sequence[Mapping[str, Need]], closed: Mapping[str, int]) -> None:
        """Args: kept: of each checkpoint, the oldest first. closed: writer -> its rows that were taken up, of those that are
        closed in the oldest. Appends behind them have come since."""
        reader = self._buffer.reader
        for writer in filter(reader.is_own, closed):
            if not (appends := reader.appends(writer)):
                continue
            # The file of a `given-` writer stays: by it the command append knows responses that it has appended before.
            if appends[-1].stop <= closed[writer] and not writer.startswith(GIVEN):
                places.remove(registration(self._replay, writer))
            remove(self._replay, [each for each in appends if each.stop <= closed[writer]])
        for writer in filter(reader.is_own, kept[0]):
            needs = [each[writer] for each in kept if writer in each]
            # The last append stays until the writer is closed: it tells where the log ends.
            removable = reader.appends(writer)[:-1]
            remove(self._replay, [append for append in removable if not any(need.needs(append) for need in needs)])

    def close(self) -> None:
        self._thread.shutdown()
