"""Who writes replay logs, and how far each log is committed: all writers under a replay folder, and those of mounted runs."""

import collections
import concurrent.futures
import dataclasses
import heapq
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tba_jax.replay.log import QUIET_SECONDS, REGISTER, WRITER_NAME, Allowance, WatchedFolder, pause_seconds, registration
from tba_jax.replay.segment import (
    EXPIRED,
    LogSchema,
    Segment,
    expired_segments,
    last_segment,
    manifest,
    segment_name,
    segments_in,
)
from tba_jax.run import processes
from tba_jax.storage import layout, places
from tba_jax.storage.places import STORAGE_ERRORS, Place
from tba_jax.trajectory import RowShape

# Open segments beyond one of each writer that had news lately.
SPARE_SEGMENTS = 64
# Writers whose heads are read side by side, and registrations.
_HEADS_AT_ONCE = 256
_REGISTRATIONS_AT_ONCE = 32
_ACTIVE_FIRST_SECONDS = 60.0
# Between looks at what has expired. Who finds that rows are missing looks at once.
_EXPIRED_SECONDS = 10.0
# Requests to object stores a minute where no setting says another number.
REQUESTS_PER_MINUTE = 1200


@dataclasses.dataclass
class _Followed:
    """How far a writer's log has been seen. version: of the segment's manifest.
    news, due: time of the last news, and when it is to be asked again, time.monotonic().
    is_seen: whether its head has been read; the first head is no news."""

    root: Place
    folder: Place
    schema: LogSchema
    segment: int
    rows: int
    version: bytes = b""
    news: float = dataclasses.field(default_factory=time.monotonic)
    due: float = 0.0
    is_seen: bool = False

    @property
    def stop(self) -> int:
        """The row after the last that the segment can hold."""
        return (self.segment + 1) * self.schema.segment_rows

    def go_to(self, segment: int) -> None:
        self.segment, self.rows, self.version = segment, segment * self.schema.segment_rows, b""


@dataclasses.dataclass
class _Root:
    """A replay folder that is followed.

    version, expired: of its list of expired segments; unknown: why that cannot be read. is_new: whether its writers have not been
    looked for. ignored: registrations that are not followed, and why.
    """

    place: Place
    register: WatchedFolder
    version: bytes = b""
    expired: dict[str, frozenset[int]] = dataclasses.field(default_factory=dict)
    followed: set[str] = dataclasses.field(default_factory=set)
    unknown: str = ""
    is_new: bool = True
    ignored: dict[str, str] = dataclasses.field(default_factory=dict)


class Writers:
    """Follows all logs under a replay folder, and under those of other runs that are mounted.

    Not thread-safe, but for `is_own`, `segment_rows` and `problems`.

    Attributes:
      shape: the schema rows must have.
      problems: name of a writer or entry -> why it is not followed, or why its head cannot be read. One sentence each;
        an entry that later becomes readable is removed.
    """

    def __init__(
        self, root: Place, shape: RowShape, *, mounts: Sequence[Place] = (), requests_per_minute: float = REQUESTS_PER_MINUTE
    ):
        """Args: root: `RunDir.replay`. mounts: replay folders of other runs, which are only read. requests_per_minute: the most
        requests to object stores by which `news` looks for news."""
        self.shape = shape
        self.problems: dict[str, str] = {}
        self._allowance = Allowance(requests_per_minute)
        self._roots = {each: _Root(each, WatchedFolder(each / REGISTER, self._allowance)) for each in (root, *mounts)}
        self._own = root
        # Registrations that are not logs of these rows -> the reason.
        self._refused: dict[Place, str] = {}
        self._followed: dict[str, _Followed] = {}
        # (time, writer): when each is to be asked by `news`, a heap. Only the entry at the time `due` of a writer counts.
        self._due: list[tuple[float, str]] = []
        # Writers whose head has moved since `news` told of them.
        self._moved: set[str] = set()
        # Writer -> why its head cannot be read.
        self._head_errors: dict[str, Exception] = {}
        self._active, self._asked_expired = 0, 0.0
        self._segments: collections.OrderedDict[tuple[str, int], Segment] = collections.OrderedDict()

    def heads(self) -> dict[str, int]:
        """Committed rows of every followed writer; asks all of them."""
        self._update(self._followed.keys(), always=True)
        return {name: followed.rows for name, followed in self._followed.items()}

    def news(self, *, spare_quiet: bool = False) -> dict[str, int]:
        """Committed rows of the writers that have more of them than when this was asked last, by name.

        Args: spare_quiet: asks writers at a falling rate while they have no news (most have ended; pause_seconds), object
          stores within requests_per_minute, and so sees some news late.
        """
        self._update(self._take_due() if spare_quiet else self._followed.keys(), always=not spare_quiet)
        moved, self._moved = sorted(self._moved), set()
        return {name: self._followed[name].rows for name in moved}

    def _update(self, asking: Iterable[str], *, always: bool) -> None:
        asking, now = list(asking), time.monotonic()
        if always or now - self._asked_expired > _EXPIRED_SECONDS:
            self._refresh_expired()
        for root in self._roots.values():
            asking += self._discover(root, always=always)
        self._active = sum(now - self._followed[writer].news < QUIET_SECONDS for writer in asking)
        for begin in range(0, len(asking), _HEADS_AT_ONCE):
            self._advance_all(asking[begin : begin + _HEADS_AT_ONCE])
        # As a whole: another thread may be reading them.
        unknown = {str(root.place / EXPIRED): root.unknown for root in self._roots.values() if root.unknown}
        ignored = [unknown, *(root.ignored for root in self._roots.values())]
        stays = {writer: f"it stays at row {self._followed[writer].rows}: {each}" for writer, each in self._head_errors.items()}
        heads = {writer: f"the head of writer {writer} cannot be read, {told}" for writer, told in stays.items()}
        self.problems = {name: told for each in ignored for name, told in each.items()} | heads

    def _take_due(self) -> list[str]:
        """The writers that are to be asked now, those that have waited longest first; each is scheduled again."""
        now, taken = time.monotonic(), []
        # The other half is for what has expired and for the registers.
        left = (self._allowance.left() + 1) // 2
        while self._due and self._due[0][0] <= now:
            at, writer = self._due[0]
            is_current = at == self._followed[writer].due
            if is_current and isinstance(self._followed[writer].folder, places.Bucket):
                if left < 1:
                    break
                left -= 1
                self._allowance.spend(1)
            heapq.heappop(self._due)
            taken += [writer] * is_current
        for writer in taken:
            self._schedule(writer, pause_seconds(now - self._followed[writer].news))
        return taken

    def _schedule(self, writer: str, pause: float) -> None:
        """Has a writer asked after a pause; one without a pause comes before those that are not overdue by a minute."""
        followed = self._followed[writer]
        followed.due = time.monotonic() + (pause or -_ACTIVE_FIRST_SECONDS)
        heapq.heappush(self._due, (followed.due, writer))

    def folder(self, writer: str) -> Place:
        """Where the log of a followed writer lies."""
        return self._followed[writer].folder

    def info(self, writer: str) -> dict[str, Any]:
        """What the process that writes a followed log says of itself."""
        return layout.read_json(self._registration(writer))["info"]

    def _registration(self, writer: str) -> Place:
        return registration(self._followed[writer].root, writer)

    def schema(self, writer: str) -> LogSchema:
        """The schema of a followed writer's log."""
        return self._followed[writer].schema

    def segment_rows(self, writer: str) -> int | None:
        """Rows in a segment of a writer's log; None where it is not followed right now (`problems` may say why)."""
        return self.schema(writer).segment_rows if writer in self._followed else None

    def kept(self, writer: str) -> list[range]:
        """Committed rows of a followed writer that retention has left, ascending; no two ranges touch."""
        size, head = self._followed[writer].schema.segment_rows, self._followed[writer].rows
        gone = sorted(self._gone(writer))
        starts, stops = [0, *((segment + 1) * size for segment in gone)], [*(segment * size for segment in gone), head]
        return [kept for kept in (range(start, min(stop, head)) for start, stop in zip(starts, stops, strict=True)) if kept]

    def is_own(self, writer: str) -> bool:
        """Whether a followed writer's rows are of this run; policy_step counts the steps of the run that a row is of."""
        return self._followed[writer].root == self._own

    def _refresh_expired(self) -> None:
        self._asked_expired = time.monotonic()
        watched = {place: (place / EXPIRED, root.version) for place, root in self._roots.items()}
        self._allowance.spend(sum(isinstance(place, places.Bucket) for place in watched))
        for place, version in places.changed(watched).items():
            if isinstance(version, bytes):
                self._take_expired(self._roots[place], version)

    def _take_expired(self, root: _Root, version: bytes) -> None:
        try:
            root.expired, root.unknown = expired_segments(root.place), ""
        except ValueError as error:
            if root.place == self._own:
                raise  # its trainer has mended it before it reads
            root.unknown = f"what has been removed of {root.place} is not known, and such rows count as damaged: {error}"
        root.version = version

    def _gone(self, writer: str) -> frozenset[int]:
        """Segments of a writer that retention has removed."""
        return self._roots[self._followed[writer].root].expired.get(writer, frozenset())

    def _discover(self, root: _Root, *, always: bool) -> list[str]:
        """Follows the writers that are new under a root. Returns them; notes which registrations are not followed, and why."""
        if (names := root.register.names(always=always)) is None:
            return []
        new = sorted({name for name in names if not name.startswith(".")} - root.followed)
        with concurrent.futures.ThreadPoolExecutor(_REGISTRATIONS_AT_ONCE) as pool:
            # Many at the start of a role alone; a thread costs more than a local file.
            opened = list((map if len(new) < _REGISTRATIONS_AT_ONCE else pool.map)(lambda name: self._open(root, name), new))
        # The writers that are there at the start are opened at once: two requests for each, beside the limit.
        self._allowance.spend(2 * len(new) if isinstance(root.place, places.Bucket) and not root.is_new else 0)
        root.ignored, begun = {}, []
        for name, found in zip(new, opened, strict=True):
            writer = name.removesuffix(".json")
            if isinstance(found, _Followed) and writer not in self._followed:
                quiet = _quiet_seconds(found) if root.is_new else 0.0  # most writers that are there at the start have ended
                found.news = time.monotonic() - quiet
                self._followed[writer] = found
                self._schedule(writer, pause_seconds(quiet))
                root.followed.add(name)
                if found.rows:
                    self._moved.add(writer)
                begun.append(writer)
            elif isinstance(found, _Followed):
                there = self._followed[writer].folder
                root.ignored[writer] = (
                    f"{root.place / REGISTER / name} is ignored: the rows of a writer of this name are read from {there}"
                )
            else:
                root.ignored[writer] = str(found)
                if isinstance(found, OSError):
                    root.register.list_again()
        root.is_new = False
        return begun

    def _open(self, root: _Root, name: str) -> _Followed | Exception:
        """The log of a registration, or why it is not followed. An OSError may pass."""
        file, writer = root.place / REGISTER / name, name.removesuffix(".json")
        if file in self._refused:
            return ValueError(self._refused[file])
        try:
            if not name.endswith(".json") or not WRITER_NAME.fullmatch(writer):
                raise ValueError("it is not the registration of a writer")
            schema = LogSchema.from_json(layout.read_json(file)["schema"])
            if difference := schema.difference(self.shape):
                raise ValueError(f"its rows have another schema: {difference}")
            first = max(root.expired.get(writer, ()), default=-1) + 1
            last = last_segment(root.place / writer, first)
        except OSError as error:  # storage may recover
            return OSError(f"{file} is ignored: {error}")
        except (ValueError, TypeError, KeyError) as error:
            self._refused[file] = f"{file} is ignored: {error}"
            return ValueError(self._refused[file])
        # A writer opens a segment once the one before is full, so the last segment tells all.
        folder, rows = root.place / writer, last * schema.segment_rows
        return _Followed(root.place, folder, schema, segment=last, rows=rows)

    def _advance_all(self, asking: Sequence[str]) -> None:
        """Brings these writers up to date; all that have news are asked at once."""
        while asking:
            versions = places.changed(self._manifests(asking))
            reads: dict[str, tuple[bytes, Segment, Any]] = {}
            full = []
            for writer in asking:
                version = versions.get(writer)
                if isinstance(version, OSError):
                    full += [writer] * self._note_head_error(writer, version)
                elif version is not None:
                    followed = self._followed[writer]
                    if followed.rows == followed.stop:
                        followed.go_to(followed.segment + 1)
                    segment = self._segment(writer, followed.segment)
                    reads[writer] = version, segment, segment.start_head()
                elif writer not in versions:  # no news, or the next segment is not there yet
                    self._head_errors.pop(writer, None)
            asking = full + [writer for writer, read in reads.items() if self._finish_head(writer, *read)]

    def _note_head_error(self, writer: str, error: Exception) -> bool:
        """Notes why a head cannot be read. Returns whether the rows of the segment count as committed all the same."""
        followed = self._followed[writer]
        is_damage = not processes.is_storage_failure(OSError(str(error)))
        if is_damage and followed.rows < followed.stop and self._has_next(followed):
            followed.rows = followed.stop
            self._moved.add(writer)
            return True
        self._head_errors[writer] = error
        return False

    def _has_next(self, followed: _Followed) -> bool:
        """Whether the segment after the one that is followed is there: then all rows of this one were committed."""
        if isinstance(followed.folder, Path):
            return followed.segment + 1 in segments_in(followed.folder)
        return places.exists(manifest(followed.folder, followed.segment + 1))

    def _manifests(self, writers: Sequence[str]) -> dict[str, tuple[Place, bytes]]:
        """The file of each writer whose change means news, and its version as it was seen last."""
        found = {}
        for writer in writers:
            followed = self._followed[writer]
            if followed.segment < (first := max(self._gone(writer), default=-1) + 1):
                followed.go_to(first)
            if followed.rows < followed.stop:
                found[writer] = manifest(followed.folder, followed.segment), followed.version
            elif isinstance(followed.folder, places.Bucket) or followed.segment + 1 in segments_in(followed.folder):
                found[writer] = manifest(followed.folder, followed.segment + 1), b""
        return found

    def _finish_head(self, writer: str, version: bytes, segment: Segment, read: Any) -> bool:
        """Takes up a segment's head. Returns whether the segment is full, so that the next may be there."""
        followed = self._followed[writer]
        try:
            head = segment.finish_head(read)
            if head is not None and not followed.rows <= head["rows"] <= followed.stop:
                raise ValueError(f"DATA_LOSS: segment {segment_name(followed.segment)} says {head['rows']} rows")
        except STORAGE_ERRORS as error:
            return self._note_head_error(writer, error)
        self._head_errors.pop(writer, None)
        followed.version = version
        if followed.is_seen:
            followed.news = time.monotonic()
            if followed.due > followed.news:
                self._schedule(writer, 0.0)
        followed.is_seen = True
        if head is not None and head["rows"] > followed.rows:
            followed.rows = head["rows"]
            self._moved.add(writer)
        return followed.rows == followed.stop

    def _segment(self, writer: str, number: int) -> Segment:
        key = (writer, number)
        if key not in self._segments:
            followed = self._followed[writer]
            self._segments[key] = Segment(followed.folder / segment_name(number), followed.schema)
            while len(self._segments) > self._active + SPARE_SEGMENTS:
                self._segments.popitem(last=False)
        self._segments.move_to_end(key)
        return self._segments[key]


def _quiet_seconds(followed: _Followed) -> float:
    """Since when a writer has been quiet that is followed from now on: by the time of its last commit, where storage tells it."""
    if isinstance(followed.folder, places.Bucket):
        return QUIET_SECONDS
    try:
        changed = (followed.folder / segment_name(followed.segment)).stat().st_mtime
    except OSError:
        return 0.0
    return max(time.time() - changed, 0.0)
