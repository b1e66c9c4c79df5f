"""Local folders: the paths that users name, the file systems that hold them, and paths that follow a folder which is moved."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

_DESCRIPTORS = Path("/proc/self/fd")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ADVICE = "free some, take another place, or keep less of the run (publish.keep, checkpoint.keep, replay.retention=checkpoints)"

P = TypeVar("P")  # a places.Place


class Refusal(OSError):
    """A local folder refuses what is written below it."""

    def __init__(self, sentence: str, folder: Path):
        super().__init__(sentence)
        self.folder = folder


def mount(folder: Path) -> tuple[Path, str]:
    """Where the file system that holds a local folder is mounted, and its type; (Path(), "") where /proc does not tell."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return Path(), ""
    place, found = folder.resolve(), (Path(), "")
    for line in lines:
        left, _, described = line.partition(" - ")
        point = Path(left.split()[4].replace("\\040", " "))
        if place.is_relative_to(point) and len(point.parts) >= len(found[0].parts):
            found = point, described.split()[0]
    return found


def path(text: str | Path) -> Path:
    """The absolute path that a user's text names. "~" and "~USER" are expanded, and ".." is looked up, see `without_parents`.
    Raises ValueError: this machine has no such user."""
    try:
        expanded = Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{text} names the home of a user whom this machine does not have; ./{text} is a folder") from error
    return without_parents(expanded).absolute()


def absolute(text: str, *, or_hub: bool = False) -> str:
    """A user's path as it is to be stored, see `path`. A URL stays, without a slash at the end, and so does "".

    Args: or_hub: a relative path that is not there may be a name on the hub, and stays; "./NAME" and "../NAME" are paths.
    """
    if "://" in text or not text:
        return text.rstrip("/")
    begins = text.startswith(("/", "./", "../", "~"))
    return str(path(text)) if begins or not or_hub or os.path.exists(text) else text


def without_parents(path: Path) -> Path:
    """The path without "..", which tensorstore refuses in the paths of its arrays. A path without ".." stays, links and all.

    Only what is before the last ".." is looked up: the parent of a link is not the folder above the link's target.
    """
    if ".." not in path.parts:
        return path
    after = path.parts[::-1].index("..")
    return Path(*path.parts[: len(path.parts) - after]).resolve().joinpath(*path.parts[len(path.parts) - after :])


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())


def free(folder: Path) -> int | None:
    """Bytes that are left on the file system of a folder, which need not be there yet; None where it does not tell."""
    try:
        room = os.statvfs(existing(folder))
    except OSError:
        return None
    return room.f_frsize * room.f_bavail if room.f_blocks else None


def no_room(error: BaseException, folder: Path | None) -> str:
    """A sentence about the file system that is full, and what to do; "" where `error` is about something else.

    Args: folder: where the run is, for errors that name no file; None: not known.
    """
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    full = [each for each in causes if any(os.strerror(number) in str(each) for number in _FULL)]
    if not full:
        return ""
    refusals = [each.folder for each in causes if isinstance(each, Refusal)]
    files = [Path(os.fsdecode(each.filename)) for each in full if isinstance(each, OSError) and each.filename]
    named = next(iter((*refusals, *files)), folder)
    if named is None:
        return _ADVICE
    there = existing(named)
    point, kind = mount(there)
    try:
        room = os.statvfs(there)
    except OSError:
        return f"the file system of {there}: {_ADVICE}"
    free, total = (room.f_frsize * blocks / 2**30 for blocks in (room.f_bavail, room.f_blocks))
    no_files = "" if room.f_favail or not room.f_files else " and no more files"
    where = f" ({kind} at {point})" if kind else ""
    return f"the file system of {there}{where} has {free:.2f} of {total:.2f} GiB left{no_files}: {_ADVICE}"


def hold(folder: Path, *, number: int = -1) -> Path:
    """A path of an existing folder that leads there wherever the folder is moved, and nowhere once it is removed (Linux).

    tensorstore, orbax and JAX would make a workdir anew that was moved away meanwhile. The folder stays open until `let_go`.
    Elsewhere than on Linux it is the folder's own path.

    Args: number: of the file descriptor, where the path must be the same in every process.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    if number >= 0:
        os.dup2(descriptor, number, inheritable=False)
        os.close(descriptor)
        descriptor = number
    if (path := _DESCRIPTORS / str(descriptor)).exists():
        return path
    os.close(descriptor)
    return folder.absolute()


def let_go(path: Path) -> None:
    """Closes what `hold` has opened."""
    if path.parent == _DESCRIPTORS:
        os.close(int(path.name))


@contextlib.contextmanager
def holding(folder: P) -> Iterator[P | Path]:
    """`hold` for a while; an object store needs none of it."""
    path = hold(folder) if isinstance(folder, Path) else folder
    try:
        yield path
    finally:
        if isinstance(path, Path):
            let_go(path)
