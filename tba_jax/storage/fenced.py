"""A fenced value: a small JSON in the shared place that the holder of the highest epoch changes, and nobody whom it replaced.

In a bucket it is one object under compare-and-swap. In a folder each version is a file `<epoch>-<n>` that is created exclusively
and never changed; the highest name counts, so a holder that was replaced can create a name and yet change nothing. There are no
locks and no clocks. `probe` finds storage on which this does not hold.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tba_jax.storage import places
from tba_jax.storage.places import Bucket, Place

log = logging.getLogger(__name__)

_NAME = re.compile(r"(\d{6,})-(\d{10,})")
# The first file of an epoch stays for so many epochs: who is late by less to take the same epoch finds that it is taken.
_EPOCHS_REMEMBERED = 8
# How many versions stay: a loss of power may damage the last ones.
_WHOLE = 3
_CONTENDERS, _AGAIN_SECONDS = 4, 0.01


class StaleEpoch(RuntimeError):
    """A later trainer has taken over."""


@dataclasses.dataclass(frozen=True)
class Version:
    """One state of a fenced value. epoch: of who wrote it, 0 where there is none; n: counts its versions within the epoch.
    value: None where there is none or all files are damaged. generation: of the object in a bucket."""

    epoch: int = 0
    n: int = 0
    value: Any = None
    generation: bytes = dataclasses.field(default=b"", compare=False, repr=False)

    @property
    def number(self) -> tuple[int, int]:
        """Versions follow each other by this number."""
        return self.epoch, self.n


NOTHING = Version()


def read(place: Place, last: Version = NOTHING) -> Version:
    """The newest version: one conditional GET, or one listing of a small folder and the file if it is not `last`.

    In a folder the number of a damaged file is taken all the same; the value is that of the newest whole file.
    Raises ValueError: an object is no fenced value. OSError: the storage failed.
    """
    if isinstance(place, Bucket):
        return _read_object(place, last)
    while True:
        numbers = _numbers(place)
        if numbers and numbers[-1] == last.number:
            return last
        try:
            for number in reversed(numbers):
                try:
                    return Version(*numbers[-1], json.loads(places.read_bytes(place / _name(number))))
                except ValueError:
                    log.warning("%s is damaged; the one before it is taken, if there is one", place / _name(number))
        except FileNotFoundError:  # a newer one has come
            time.sleep(_AGAIN_SECONDS)
            continue
        return Version(*numbers[-1]) if numbers else NOTHING


def replace(place: Place, before: Version, value: Any, *, epoch: int) -> Version | None:
    """Writes the version that follows `before`. Returns None where it does not count, because another one has come meanwhile.

    Args: epoch: not below that of `before`. Raises OSError: the storage refused.
    """
    number = epoch, before.n + 1 if before.epoch == epoch else 1
    if isinstance(place, Bucket):
        content = json.dumps({"epoch": epoch, "n": number[1], "value": value}, sort_keys=True).encode()
        generation = places.swap(place, content, before.generation)
        return Version(*number, value, generation) if generation else None
    places.make_folder(place)
    if not places.create(place / _name(number), json.dumps(value, sort_keys=True).encode()):
        return None
    numbers = _numbers(place)
    if not numbers or numbers[-1] != number:
        return None
    if before.number < numbers[-2:][0] < number:  # an older epoch wrote between the look and this write: its value goes on
        with contextlib.suppress(ValueError):
            late = json.loads(places.read_bytes(place / _name(numbers[-2])))
            replace(place, Version(*number), late, epoch=epoch)
        return None
    for each in numbers[:-_WHOLE]:
        first_of_late_epoch = each[1] == 1 and each[0] > epoch - _EPOCHS_REMEMBERED
        if not first_of_late_epoch:
            places.remove(place / _name(each))
    return Version(*number, value)


def write(place: Place, value: Any, *, epoch: int) -> Version:
    """Writes a version under an epoch, whatever is there of this epoch or an older one. Raises StaleEpoch, OSError."""
    while True:
        before = read(place)
        refuse_stale(place, before, epoch)
        if (made := replace(place, before, value, epoch=epoch)) is not None:
            return made


def refuse_stale(place: Place, found: Version, epoch: int) -> None:
    """Raises StaleEpoch where a version is of a later epoch than `epoch`."""
    if found.epoch > epoch:
        raise StaleEpoch(
            f"this trainer holds epoch {epoch} of {place}, but epoch {found.epoch} has been taken: "
            "another trainer took over while this one could not renew its lease; it must stop"
        )


def _read_object(place: Bucket, last: Version) -> Version:
    content, generation = places.read_version(place, last.generation)
    if generation == last.generation != b"":
        return last
    if content is None:
        return Version(generation=generation)
    try:
        stored = json.loads(content)
        return Version(int(stored["epoch"]), int(stored["n"]), stored["value"], generation)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{place} is no fenced value of a run: {error!r}") from error


def _name(number: tuple[int, int]) -> str:
    return f"{number[0]:06d}-{number[1]:010d}"


def _numbers(place: Path) -> list[tuple[int, int]]:
    return sorted((int(match[1]), int(match[2])) for name in places.names_in(place) if (match := _NAME.fullmatch(name)))


def probe(folder: Place) -> None:
    """Raises ValueError where storage lets two writers both win: it ignores conditions, or exclusive creation. OSError: it fails.

    Args: folder: it exists; what is written there is removed again.
    """
    for _ in range(2):
        file = folder / f".probe.{uuid.uuid4().hex[:8]}"
        try:
            told = _probe_object(file) if isinstance(file, Bucket) else _probe_file(file)
        finally:
            places.remove(file)
        if told:
            raise ValueError(f"{folder} cannot hold a run: {told}, and two trainers could not be told apart; take another place")


def _probe_object(file: Bucket) -> str:
    """What the store ignores, "" where it keeps conditions."""
    _, absent = places.read_version(file, b"")
    first, again = (places.write_if(file, content, absent) for content in (b"a", b"b"))
    if not first or again:
        return "its store does not keep the condition of a write that an object is not there yet (If-None-Match)"
    second, late = (places.write_if(file, content, first) for content in (b"c", b"d"))
    if not second or late or places.read_bytes(file) != b"c":
        return "its store does not keep the condition of a write that an object is unchanged (If-Match)"
    return ""


def _probe_file(file: Path) -> str:
    start = threading.Barrier(_CONTENDERS)

    def contend(number: int) -> bool:
        start.wait()
        return places.create(file, str(number).encode())

    with concurrent.futures.ThreadPoolExecutor(_CONTENDERS) as pool:
        try:
            wins: Sequence[int] = [number for number, won in enumerate(pool.map(contend, range(_CONTENDERS))) if won]
        except OSError as error:
            if not isinstance(error, FileNotFoundError) and error.errno in places.NO_LINKS:
                return f"its file system has no hard links ({error.strerror})"
            raise
    if len(wins) != 1 or places.read_bytes(file) != str(wins[0]).encode() or places.create(file, b"late"):
        return "its file system lets several processes create one file, each as the only one"
    return ""
