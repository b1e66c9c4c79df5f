"""What commands give out: files and folders that --output names, and text that others wrote, made safe to print.

An output is checked before any work is done, and written under another name until it is whole. A link stays a link: its target
is written. A folder that is there already, such as a mount point or the current folder, stays the same folder: the files move
into it from a folder inside of it. In texts a terminal obeys control characters, and bidirectional ones reorder a line.
"""

import contextlib
import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TRIAL_BYTES = 1 << 16
# C0 but tab and newline, DEL, C1; marks, embeddings, overrides and isolates of bidirectional text; the separators of lines and
# paragraphs; lone surrogates, which no encoding can write. An ANSI sequence begins with ESC, or with a character of C1.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def check_folder(output: Path, *, outside: Sequence[object] = ()) -> None:
    """Raises ValueError where a folder cannot be written. It may be there, if it is empty; its parents need not be there.

    Args: outside: folders of the run, in which its processes sweep; what is no Path is ignored.
    """
    with _refusals(output):
        place = _place(output, outside)
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise ValueError(f"--output={output} exists and is not an empty folder; name another one")
        _try(place, next(each for each in (place, *place.parents) if each.exists()))


def check_file(output: Path, *, outside: Sequence[object] = (), flag: str = "--output", may_exist: bool = True) -> None:
    """Raises ValueError where a file cannot be written, or replaced where it may exist, in a folder that is there.

    Args: flag: that names the file.
    """
    with _refusals(output, flag):
        place = _place(output, outside, flag)
        if place.exists() and not place.is_file():
            raise ValueError(f"{flag}={output} is a folder, a device or a pipe: name a file")
        if place.exists() and not may_exist:
            raise ValueError(f"{flag}={output} exists; name another file")
        if not place.parent.is_dir():
            raise ValueError(f"{flag}={output} cannot be written: there is no folder {place.parent}")
        _try(place, place.parent)


@contextlib.contextmanager
def folder(output: Path) -> Iterator[Path]:
    """Yields a new folder. Its files are in `output`, made with its parents, at the end; after an error inside it is removed.

    Raises:
      ValueError: as `check_folder`; or the disk is full, or the files could not move: then they stay, and the error says where.
    """
    check_folder(output)
    place = _place(output)
    is_there = place.is_dir()
    whole = _temporary(place, place if is_there else place.parent)
    whole.mkdir(parents=True)
    try:
        yield whole
    except BaseException as error:
        shutil.rmtree(whole, ignore_errors=True)
        # Where a copy fails, Python may name the file that was read; and a library may raise an error of its own.
        if full := next((number for number in _FULL if os.strerror(number) in str(error)), 0):
            raise _unwritten(output, full) from OSError(full, os.strerror(full), str(place))
        raise
    try:
        for each in (*whole.rglob("*"), whole):
            _sync(each)
        if not is_there:
            os.replace(whole, place)
            _sync(place.parent)
            return
        if list(place.iterdir()) != [whole]:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(place))
        for each in sorted(whole.iterdir()):
            os.replace(each, place / each.name)
        whole.rmdir()
        _sync(place)
    except OSError as error:
        raise ValueError(f"{_unwritten(output, error.errno)}; what is finished stays in {whole}") from error


def write(output: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Writes or replaces a file, see `file`."""
    with file(output, mode=mode) as opened:
        opened.write(content)


@contextlib.contextmanager
def file(output: Path, *, mode: int = 0o666, flag: str = "--output") -> Iterator[BinaryIO]:
    """Yields a new file, which takes the place of `output` at the end: its readers never see a part of it.

    Args: mode: of the file, less the umask. flag: that names the file.

    Raises ValueError: the file cannot be written; what was there is untouched. After any error inside the new file is removed.
    """
    place = _place(output, flag=flag)
    temporary = _temporary(place, place.parent)
    try:
        with open(temporary, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as opened:
            yield opened
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(temporary, place)
    except BaseException as error:
        with contextlib.suppress(OSError):  # a file system that is read-only says so of a file that is not there, too
            temporary.unlink()
        # A failure to read what is written here has no number, or another file.
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary), str(place)):
            raise _unwritten(output, error.errno, flag) from OSError(error.errno, error.strerror, str(place))
        raise


def _place(output: Path, outside: Sequence[object] = (), flag: str = "--output") -> Path:
    """The place behind all links. Raises ValueError where it is in one of the folders, or links lead in a circle."""
    try:
        place = output.resolve()
    except RuntimeError as error:
        raise ValueError(f"{flag}={output} cannot be written: its links lead in a circle") from error
    for each in outside:
        if isinstance(each, Path) and place.is_relative_to(each.resolve()):
            raise ValueError(f"{flag}={output} is in the run's folder {each}, which its processes sweep; name another place")
    return place


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(place: Path, parent: Path) -> Path:
    return parent / f".{place.name}.{uuid.uuid4().hex[:8]}"


def _try(place: Path, parent: Path) -> None:
    """Writes a file and removes it: root's permissions, quotas and mounts show in no other way what they allow."""
    trial = _temporary(place, parent)
    try:
        with trial.open("xb") as file:
            file.write(bytes(_TRIAL_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        with contextlib.suppress(OSError):  # as above
            trial.unlink()


@contextlib.contextmanager
def _refusals(output: Path, flag: str = "--output") -> Iterator[None]:
    """Makes what the file system refuses a mistake of the user, or a failure of storage where its cause is a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno in _FORBIDDEN:
            where = error.filename if os.path.isdir(error.filename) else os.path.dirname(error.filename)
            raise ValueError(f"{flag}={output} cannot be written: {where} is no writable folder") from None
        raise _unwritten(output, error.errno, flag) from OSError(error.errno, error.strerror, str(output))


def _unwritten(output: Path, number: int | None, flag: str = "--output") -> ValueError:
    return ValueError(f"{flag}={output} cannot be written: {os.strerror(number or errno.EIO)}")


def visible(text: str) -> str:
    """The text with an escape such as \\x1b or \\u202e for each control or bidirectional character, but tabs and newlines."""
    return _HIDDEN.sub(lambda found: _escape(found[0]), text)


def visible_line(text: str) -> str:
    """The text with tabs and newlines escaped too: for names, which could otherwise pass for further lines."""
    return visible(text).replace("\t", _escape("\t")).replace("\n", _escape("\n"))


def visible_json(document: str) -> str:
    """A JSON document with the same characters as escapes of JSON: whoever parses it finds the same values."""
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def _escape(character: str) -> str:
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
