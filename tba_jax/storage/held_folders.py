"""Local folders that are reached by an open descriptor: for libraries that make missing folders by themselves.

tensorstore, orbax and JAX would make a workdir anew that was moved away meanwhile, and the run could not be moved back.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tba_jax.storage.places import Place

_DESCRIPTORS = Path("/proc/self/fd")


def hold(folder: Path, *, number: int = -1) -> Path:
    """A path of an existing folder that leads there wherever the folder is moved, and nowhere once it is removed (Linux).

    The folder stays open as long as this process lives, or until `let_go`. Elsewhere it is the folder's own path.

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
def holding(folder: Place) -> Iterator[Place]:
    """`hold` for a while; an object store needs none of it."""
    path = hold(folder) if isinstance(folder, Path) else folder
    try:
        yield path
    finally:
        if isinstance(path, Path):
            let_go(path)
