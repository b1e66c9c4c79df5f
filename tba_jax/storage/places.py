"""Where a run's shared files live: a local folder, or a prefix of an object store through tensorstore.

One rule holds for both: commit, then visible. In a local folder a file is written under a temporary name, flushed to the device
and renamed. Readers ignore names that begin with a dot, and `exists` lists the folder before it says that a name is missing. A
folder is made below an existing one only (`make_folder`): while a run's folder is away, nothing begins in its place. An object
store shows an object whole or not at all and lists it at once, but it cannot rename, and its folders are prefixes.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import math
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tensorstore as ts

from tba_jax.storage import file_systems

# The errors that tensorstore raises on storage trouble; the message usually begins with the status code.
STORAGE_ERRORS = (ValueError, OSError, NotImplementedError)
SCHEMES = ("gs", "s3", "memory")
# Every poll of an object store costs money and takes tens of milliseconds.
OBJECT_STORE_POLL_SECONDS = 2.0
_REQUESTS_IN_FLIGHT = 64
REPORT_SECONDS = 10.0
# A file of a network file system that is removed while it is mapped takes the reader down with it.
_OWN_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs")

# tensorstore's spec of an array. A missing chunk must be an error and never read as zeros, so a chunk of zeros is written.
ARRAY = {"driver": "zarr3", "fill_missing_data_reads": False, "store_data_equal_to_fill_value": True}
# What tensorstore calls the counters of requests that an object store charges for.
_COUNTED = tuple(f"/tensorstore/kvstore/{driver}/{kind}" for driver in ("s3", "gcs") for kind in ("read", "write", "list"))

# What os.link says on a file system without hard links.
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

K = TypeVar("K", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A place in an object store. A place derived by `/` shares the connections (and the content of memory://).

    root: URL of the bucket. path: path of the place in the bucket, without slashes at the ends. context, store: opened for the
    bucket.
    """

    root: str
    path: str
    context: ts.Context = dataclasses.field(compare=False, repr=False)
    store: ts.KvStore = dataclasses.field(compare=False, repr=False)

    def __truediv__(self, name: str) -> "Bucket":
        return dataclasses.replace(self, path=f"{self.path}/{name}".strip("/"))

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> "Bucket":
        return dataclasses.replace(self, path=self.path.rpartition("/")[0])

    def __str__(self) -> str:
        return f"{self.root}/{self.path}".rstrip("/")

    @property
    def folder(self) -> ts.KvStore:
        """The objects below the place, by relative keys."""
        return self.store / f"{self.path}/" if self.path else self.store


Place = Path | Bucket


def place(text: str) -> Place:
    """A local path, or gs://bucket/prefix, s3://bucket/prefix, memory://name/prefix (one process only).

    s3 honours AWS_ENDPOINT_URL, AWS_REGION and AWS_DEFAULT_REGION, and the usual credentials.

    Raises ValueError: another scheme, or no bucket.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        return file_systems.path(text)
    bucket, _, path = rest.partition("/")
    if scheme not in SCHEMES or not bucket:
        accepted = ", ".join(f"{each}://bucket/prefix" for each in SCHEMES[:-1])
        raise ValueError(f"{text!r} is not a place for a run: it must be a folder, or one of {accepted}")
    spec = {"gs": {"driver": "gcs", "bucket": bucket}, "s3": _s3(bucket), "memory": {"driver": "memory"}}[scheme]
    context = ts.Context()
    return Bucket(f"{scheme}://{bucket}", path.strip("/"), context, ts.KvStore.open(spec, context=context).result())


def _s3(bucket: str) -> dict[str, Any]:
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket}
    if endpoint := os.environ.get("AWS_ENDPOINT_URL"):
        # Claims and commits depend on conditional writes, which tensorstore presumes of Amazon's own endpoints only.
        spec |= {"endpoint": endpoint, "use_conditional_write": True}
    if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or ("us-east-1" if endpoint else ""):
        spec["aws_region"] = region
    if "AWS_ACCESS_KEY_ID" in os.environ:
        spec["aws_credentials"] = {"type": "environment"}
    return spec


def check_answers(folder: Place, *, report: Callable[[float], None], limit: float = math.inf) -> None:
    """Returns once the storage has answered. Every ten seconds without an answer it calls `report` with the seconds so far.
    Raises ValueError: there is no such bucket. OSError: the store refuses. TimeoutError: `limit` seconds have passed."""
    answer, seconds = _asked(folder), 0.0
    while True:
        wait = min(REPORT_SECONDS, limit - seconds)
        try:
            answer.result(timeout=wait)
            return
        except TimeoutError:
            seconds += wait
            if seconds >= limit:
                raise
            report(seconds)
        except STORAGE_ERRORS as error:
            if "NOT_FOUND" in str(error):
                raise ValueError(f"{folder.root} does not exist: {error}") from error
            raise OSError(f"{folder}: {error}") from error


def _asked(folder: Place) -> Any:
    """A future that is done once the storage has answered. A thread asks a local path, which may be a mount that never does."""
    if isinstance(folder, Bucket):
        return (folder.folder / "reference/").list()
    answer: concurrent.futures.Future[None] = concurrent.futures.Future()

    def ask() -> None:
        with contextlib.suppress(OSError, ValueError), os.scandir(folder) as entries:
            next(entries, None)
        answer.set_result(None)

    threading.Thread(target=ask, name="asks storage", daemon=True).start()
    return answer


def absolute(text: str) -> str:
    """`text` as it is to be stored: a URL without a slash at the end, or an absolute path. Raises ValueError as `place`."""
    return str(place(text)).rstrip("/") or "/"


def poll_seconds(places: Sequence[Place], seconds: float, *, of_store: float = OBJECT_STORE_POLL_SECONDS) -> float:
    """How often to look for news at all of these places, where `seconds` is right for a local folder.
    Args: of_store: seconds between looks, at least, where one of them is in an object store."""
    return max(seconds, of_store) if any(isinstance(each, Bucket) for each in places) else seconds


def kvstore(folder: Place) -> dict[str, Any]:
    """tensorstore's spec of the keys below a place; open it with `context`."""
    if isinstance(folder, Path):
        return {"driver": "file", "path": f"{folder.absolute()}/"}
    return folder.folder.spec().to_json()


def context(folder: Place) -> ts.Context:
    """A context for files that have one writer each: they need no locks, which some file systems lack (Lustre without flock)."""
    return ts.Context({"file_io_locking": {"mode": "none"}}) if isinstance(folder, Path) else folder.context


# How tensorstore names the generation of an object that is not there.
_MISSING = b"\x02"


def open_store(folder: Place) -> ts.KvStore:
    """The keys below a place, to be read and `put`. In a local folder no key may have two writers."""
    return ts.KvStore.open(kvstore(folder), context=context(folder)).result() if isinstance(folder, Path) else folder.folder


def put(store: ts.KvStore, key: str, content: bytes) -> bool:
    """Writes a key unless it is there, durably. Returns whether this call wrote it; after a lost reply, False although it did."""
    return bool(store.write(key, content, if_equal=_MISSING).result().generation)


def reading_context(folder: Place) -> ts.Context:
    """A context for large files that nobody changes. On this machine's own disks it maps them into memory, which saves a copy."""
    if isinstance(folder, Path) and file_systems.mount(folder)[1] in _OWN_FILE_SYSTEMS:
        return ts.Context({"file_io_mode": {"mode": "memmap"}})
    return context(folder)


@contextlib.contextmanager
def _failures(where: Bucket) -> Iterator[None]:
    try:
        yield
    except STORAGE_ERRORS as error:
        raise OSError(f"{where}: {error}") from error


def failure(place: Place, sentence: str) -> OSError:
    """The error of a place that refuses, which names it to whoever looks how full it is, see file_systems.no_room."""
    return file_systems.Refusal(sentence, place) if isinstance(place, Path) else OSError(sentence)


def read_bytes(file: Place) -> bytes:
    """The content of a file. Raises FileNotFoundError if it does not exist, OSError if the storage refuses."""
    if isinstance(file, Path):
        try:
            return file.read_bytes()
        except NotADirectoryError as error:
            raise FileNotFoundError(f"{file} does not exist: it would be below a file") from error
    with _failures(file):
        found = file.store.read(file.path).result()
    if found.state != "value":
        raise FileNotFoundError(f"{file} does not exist")
    return found.value


def exists(file: Place) -> bool:
    """Whether there is a file (of a local place: or a folder)."""
    if isinstance(file, Path):
        # A network file system remembers for a while that a name was not there; a listing is up to date.
        return file.exists() or file.name in names_in(file.parent)
    with _failures(file):
        return file.store.read(file.path).result().state == "value"


def make_folder(folder: Place, *, below: int = 1) -> None:
    """Makes a local folder, unless it exists. Where the folder above its last `below` names is missing, it makes nothing.
    Raises FileNotFoundError: that folder is missing. OSError: the storage refuses."""
    if not isinstance(folder, Path):
        return
    for level in reversed(range(below)):
        (folder, *folder.parents)[level].mkdir(exist_ok=True)


def write_bytes(file: Place, content: bytes) -> None:
    """Writes a file atomically and durably. A local file needs its folder, see `make_folder`.
    Raises OSError: the place cannot be written or is full; the old content, if any, is untouched."""
    if isinstance(file, Path):
        with _temporary(file, content) as temporary:
            os.replace(temporary, file)
        sync_folder(file.parent)
        return
    with _failures(file):
        file.store.write(file.path, content).result()


def create(file: Place, content: bytes) -> bool:
    """`write_bytes` unless the file exists. Returns whether this call made the file; of several calls at once, one does.

    If the reply to a request is lost and the request is sent again, an object store refuses the second one. The content then
    tells who won, so callers that may compete must each write a content of their own.
    """
    if isinstance(file, Path):
        with _temporary(file, content) as temporary:
            try:
                os.link(temporary, file)
            except FileExistsError:
                if temporary.stat().st_nlink == 1:  # else it is our own: a network file system was asked twice
                    return False
        sync_folder(file.parent)
        return True
    with _failures(file):
        found = file.store.read(file.path).result()
        if found.state == "value":
            return False
        if file.store.write(file.path, content, if_equal=found.stamp.generation).result().generation:
            return True
        found = file.store.read(file.path).result()
        if found.state != "value":  # a bucket that is not there answers as a lost race does
            raise OSError("the store refuses to create it, although it is not there: is there such a bucket?")
        return found.value == content


def read_version(file: Bucket, last: bytes) -> tuple[bytes | None, bytes]:
    """The content and the generation of an object; None where it does not exist, or its generation is still `last`."""
    with _failures(file):
        found = file.store.read(file.path, if_not_equal=last or None).result()
    return (found.value if found.state == "value" else None), (last if found.state == "unspecified" else found.stamp.generation)


def write_if(file: Bucket, content: bytes, generation: bytes) -> bytes:
    """Writes an object whose generation is still this one, see `read_version`. Returns the new one, b"" where it is not."""
    with _failures(file):
        return file.store.write(file.path, content, if_equal=generation).result().generation or b""


def swap(file: Bucket, content: bytes, generation: bytes) -> bytes:
    """`write_if`; where the reply to a request was lost and the request sent again, the content tells that the write was done."""
    if made := write_if(file, content, generation):
        return made
    found, now = read_version(file, b"")
    return now if found == content else b""


@contextlib.contextmanager
def _temporary(file: Path, content: bytes) -> Iterator[Path]:
    """A flushed file beside `file`, gone afterwards unless it was renamed."""
    temporary = file.parent / f".{file.name}.{uuid.uuid4().hex[:8]}"
    try:
        with open(temporary, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes renames in a local folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _keys(folder: Bucket, begin: str = "") -> list[str]:
    with _failures(folder):
        return [key.decode() for key in folder.folder.list(ts.KvStore.KeyRange(begin)).result()]


def names_in(folder: Place, *, after: str = "") -> list[str]:
    """Names of files and folders directly inside a folder, sorted; an empty list if there is no such folder.

    Args: after: return only names that sort after the folder of this name and its content. An object store lists only these, so
    the cost of a poll grows with the news alone.
    """
    begin = f"{after}0" if after else ""  # "0" follows "/"
    if isinstance(folder, Bucket):
        return sorted({key.partition("/")[0] for key in _keys(folder, begin)})
    try:
        return sorted(name for name in os.listdir(folder) if name >= begin)
    except (FileNotFoundError, NotADirectoryError):
        return []


def folders_with(folder: Place, marker: str) -> list[str]:
    """Names of the folders directly inside that hold a file `marker`, sorted."""
    if isinstance(folder, Bucket):
        found = (key.rpartition("/") for key in _keys(folder))
        return sorted(parent for parent, _, name in found if name == marker and "/" not in parent)
    return [name for name in names_in(folder) if exists(folder / name / marker)]


def files_in(folder: Place) -> list[str]:
    """Paths, relative to the folder, of all files in it and in its folders, sorted by their parts."""
    if isinstance(folder, Bucket):
        return sorted(_keys(folder), key=lambda key: key.split("/"))
    return [path.relative_to(folder).as_posix() for path in sorted(p for p in folder.rglob("*") if p.is_file())]


def remove(file: Place) -> None:
    """Removes a file, if there is one."""
    if isinstance(file, Path):
        file.unlink(missing_ok=True)
        return
    with _failures(file):
        file.store.write(file.path, None).result()


def remove_tree(folder: Place) -> bool:
    """Removes a folder and its content, if it exists. Returns whether the folder is gone.
    Raises OSError: an object store refuses."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
        return not exists(folder)
    with _failures(folder):
        folder.folder.delete_range(ts.KvStore.KeyRange()).result()
    return True


def copy_tree(source: Place, target: Place, *, last: str) -> None:
    """Copies a folder to a place where there is none. The file `last`, which makes it visible, is copied at the end."""
    make_folder(target)
    for name in sorted(files_in(source), key=lambda name: name == last):
        make_folder((target / name).parent, below=1 + name.count("/"))
        write_bytes(target / name, read_bytes(source / name))


def changed(files: Mapping[K, tuple[Place, bytes]]) -> dict[K, bytes | OSError | None]:
    """Which of many small files have changed; requests to an object store are sent together.

    Args: files: key -> (file, its version at the last look, b"" if there was no look or no file). Returns key -> the file's
    version now, None if the file has gone, or the storage's error. Unchanged files are left out.
    """
    found: dict[K, bytes | OSError | None] = {}
    waiting = list(files.items())
    for begin in range(0, len(waiting), _REQUESTS_IN_FLIGHT):
        part = waiting[begin : begin + _REQUESTS_IN_FLIGHT]
        reads = {
            key: file.store.read(file.path, if_not_equal=version or None)
            for key, (file, version) in part
            if isinstance(file, Bucket)
        }
        for key, (file, version) in part:
            try:
                now = file.read_bytes() if isinstance(file, Path) else _version(reads[key].result(), version)
            except FileNotFoundError:
                now = b""
            except STORAGE_ERRORS as error:
                found[key] = OSError(f"{file}: {error}")
                continue
            if now != version:
                found[key] = now or None
    return found


def _version(read: ts.KvStore.ReadResult, version: bytes) -> bytes:
    states = {"value": read.stamp.generation, "missing": b"", "unspecified": version}
    return states[read.state]


def sent() -> int:
    """Requests of this process so far, as tensorstore counts them; a listing counts as one, whatever its length."""
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/")
    return sum(int(each["values"][0]["value"]) for each in found if each["name"] in _COUNTED)


class RequestRate:
    """The rate of requests between two calls of `scalars`."""

    def __init__(self, used: Sequence[Place]):
        """Args: used: places of the role; where none of them is in an object store, there is no rate."""
        self._counts = any(isinstance(each, Bucket) for each in used)
        self._at, self._sent = time.monotonic(), sent() if self._counts else 0

    def scalars(self) -> dict[str, float]:
        """storage_requests_per_minute since the last call; {} where there is no rate."""
        if not self._counts:
            return {}
        now, count = time.monotonic(), sent()
        rate = 60 * (count - self._sent) / max(now - self._at, 1e-9)
        self._at, self._sent = now, count
        return {"storage_requests_per_minute": rate}
