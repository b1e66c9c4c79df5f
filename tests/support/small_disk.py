"""A file system of its own for a test: of a fixed size, and it can fill, become read-only or be gone while processes use it."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path


class SmallDisk:
    """A tmpfs that is mounted as long as the context lasts. missing: why it is a plain folder instead, "" where it is mounted.

    It becomes read-only, and is gone, by a mount above it: what is open stays open and can be written to, and all other
    processes find what a mount of that kind shows. A remount of the tmpfs itself is refused while files are open for writing.
    """

    def __init__(self, folder: Path, *, megabytes: int):
        """Args: folder: where it will be mounted. A folder is made beside it for a read-only view of it."""
        self.folder, self._megabytes, self.missing = folder, megabytes, ""
        self._read_only = folder.with_name("read-only")

    def __enter__(self) -> "SmallDisk":
        for folder in (self.folder, self._read_only):
            folder.mkdir(parents=True)
        if refusal := refused(self.folder, self._megabytes):
            self.missing = f"a disk that fills and goes away is a tmpfs that the test mounts, and mount refuses: {refusal}"
        return self

    def __exit__(self, *error: object) -> None:
        """Unmounts all that lies above the folder, and the disk, also under processes that still use it."""
        for folder in (self.folder, self._read_only):
            while os.path.ismount(folder):
                _call("umount", "--lazy", folder)

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """A file takes all the room that is left, to the last byte, and keeps it as long as the context lasts."""
        ballast = self.folder / "ballast"
        try:
            with ballast.open("wb", buffering=0) as file:
                for size in (2**22, 4096):
                    with contextlib.suppress(OSError):
                        while file.write(bytes(size)) == size:
                            pass
            yield
        finally:
            ballast.unlink()

    def fill_again(self) -> None:
        """Takes what has become free since, as other users of a full disk do. To be called within `full`."""
        with (self.folder / "ballast").open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)) == 4096:
                pass

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        """Whatever is opened or made is refused with EROFS."""
        _call("mount", "--bind", self.folder, self._read_only)
        _call("mount", "-o", "remount,bind,ro", self._read_only)
        with self._above("--bind", self._read_only):
            _call("umount", self._read_only)
            yield

    @contextlib.contextmanager
    def gone(self) -> Iterator[None]:
        """The mount point is an empty folder, as after an unmount; nothing may have been made in it at the end."""
        with self._above("-t", "tmpfs", "tmpfs"):
            yield
            assert not list(self.folder.iterdir()), list(self.folder.iterdir())

    @contextlib.contextmanager
    def _above(self, *source: str | Path) -> Iterator[None]:
        _call("mount", *source, self.folder)
        try:
            yield
        finally:
            _call("umount", "--lazy", self.folder)


def refused(folder: Path, megabytes: int) -> str:
    """Mounts a tmpfs. Returns why that cannot be done here, "" where it is done."""
    try:
        _call("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder)
    except FileNotFoundError:
        return "there is no mount(8)"
    except subprocess.CalledProcessError as error:
        return error.stderr.strip()
    return ""


def _call(*arguments: str | Path) -> None:
    subprocess.run(arguments, check=True, capture_output=True, text=True)
