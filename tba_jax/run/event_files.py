"""TensorBoard events of one role, in several files: of a long run the oldest files give way to the newest."""

import contextlib
import os
import socket
import struct
import time as time_lib
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
        """Begins a file. It takes over the newest one where that is not full, so that many starts do not leave many files."""
        from tensorboardX.proto.event_pb2 import Event

        before = list(self._sizes())[-1:]
        # TensorBoard reads the files in the order of their names, which have the second of their begin, and then this number.
        number = 1 + max(map(_number, before), default=0)
        second, host = f"{time_lib.time():010.0f}", socket.gethostname()
        self._path = self._folder / f"events.out.tfevents.{second}.{host}.{number:06d}.{os.getpid()}"
        # Written in this thread: that of a SummaryWriter dies where storage refuses, and its callers then wait for ever.
        self._file = open(self._path, "wb")  # noqa: SIM115 (closed by close)
        before = [path for path in before if not self._is_full(self._sizes().get(path, 0))]
        events = b"".join(map(_whole_records, before))
        self._file.write(events or _record(Event(wall_time=time_lib.time(), file_version="brain.Event:2")))
        self._sync()
        # A process before this one may still write into the file that is taken over: what it writes is gone with it.
        for path in before:
            path.unlink(missing_ok=True)
        self._remove_oldest()

    def _remove_oldest(self) -> None:
        """Leaves room for the file that has just begun."""
        sizes = {path: size for path, size in self._sizes().items() if path != self._path}
        for path, size in list(sizes.items()):
            if sum(sizes.values()) <= (1 - _SHARE) * self._bytes:
                return
            path.unlink(missing_ok=True)
            sizes[path] -= size

    def _sizes(self) -> dict[Path, int]:
        """The files that are there, oldest first, and their bytes."""
        sizes = {}
        for path in sorted(self._folder.glob("events.out.tfevents.*"), key=_number):
            with contextlib.suppress(FileNotFoundError):  # somebody removes the files
                sizes[path] = path.stat().st_size
        return sizes

    def _is_full(self, size: int) -> bool:
        return size > _SHARE * self._bytes

    def write(self, points: Sequence[Any], *, step: int, time: float) -> None:
        """Records summaries of one step. Args: time: unix seconds. Raises OSError where storage refuses."""
        from tensorboardX.proto.event_pb2 import Event

        for point in points:
            self._file.write(_record(Event(wall_time=time, step=step, summary=point)))

    def flush(self) -> None:
        """Hands what was written to the file system, and begins a new file where this one is large, or was removed.

        While the folder is away, it goes on in the file that it has. Raises OSError where storage refuses.
        """
        self._sync()
        if (self._is_full(self._file.tell()) or not self._path.exists()) and self._folder.is_dir():
            last = self._file
            self._begin()
            last.close()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._sync()
        self._file.close()


def _number(path: Path) -> int:
    """The place of a file in the order in which they were begun, whatever the clock said."""
    number = path.name.split(".")[-2]
    return int(number) if number.isdecimal() else 0


def _record(event: Any) -> bytes:
    """An event in the framing of TFRecord: its length, the checksum of the length, the event, and its checksum."""
    from tensorboardX.record_writer import masked_crc32c

    content = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    return b"".join([length, struct.pack("<I", masked_crc32c(length)), content, struct.pack("<I", masked_crc32c(content))])


def _whole_records(path: Path) -> bytes:
    """The records of a file up to the first one that a kill or a loss of power tore; TensorBoard would read no further."""
    from tensorboardX.record_writer import masked_crc32c

    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return b""
    end = 0
    while len(header := content[end : end + 12]) == 12:
        (length, checksum) = struct.unpack("<QI", header)
        after = end + 16 + length
        if checksum != masked_crc32c(header[:8]) or after > len(content):
            break
        end = after
    return content[:end]
