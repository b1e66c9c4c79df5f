"""TensorBoard events of one role, in several files: of a long run the oldest files give way to the newest."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# A new file begins once the last one has this share of what a role may keep.
_SHARE = 1 / 8


class EventFiles:
    """Writes events to `folder`/events.out.tfevents.*. TensorBoard reads the files of a folder in turn, as one run."""

    def __init__(self, folder: Path, *, megabytes: float):
        """Args: megabytes: that all event files of the folder may take, of this process and of those before it."""
        self._folder, self._bytes = folder, int(megabytes * 2**20)
        self._begin()

    def _begin(self) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        # TensorBoard reads the files in the order of their names, which have the second of their begin, and then this number.
        number = 1 + max(map(_number, self._there()), default=0)
        suffix = f".{number:06d}.{os.getpid()}"
        # Written in this thread: that of a SummaryWriter dies where storage refuses, and its callers then wait for ever.
        self._writer = EventsWriter(str(self._folder / "events"), filename_suffix=suffix)
        (self._path,) = self._folder.glob(f"events.out.tfevents.*{suffix}")
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        """Leaves room for the file that has just begun."""
        sizes = {path: path.stat().st_size for path in sorted(self._there(), key=_number) if path != self._path}
        for path, size in list(sizes.items()):
            if sum(sizes.values()) <= (1 - _SHARE) * self._bytes:
                return
            path.unlink(missing_ok=True)
            sizes[path] -= size

    def _there(self) -> list[Path]:
        return [*self._folder.glob("events.out.tfevents.*")]

    def write(self, points: Sequence[Any], *, step: int, time: float) -> None:
        """Records summaries of one step. Args: time: unix seconds. Raises OSError where storage refuses."""
        from tensorboardX.proto.event_pb2 import Event

        for point in points:
            self._writer.write_event(Event(wall_time=time, step=step, summary=point))

    def flush(self) -> None:
        """Hands what was written to the file system, and begins a new file where this one is large."""
        self._writer.flush()
        if self._path.stat().st_size > _SHARE * self._bytes:
            full = self._writer
            self._begin()
            full.close()

    def close(self) -> None:
        self._writer.close()


def _number(path: Path) -> int:
    """The place of a file in the order in which they were begun, whatever the clock said."""
    number = path.name.split(".")[-2]
    return int(number) if number.isdecimal() else 0
