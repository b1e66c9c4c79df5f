"""The programs that real calls run, as text."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from tba_jax import sharding


def text(lowered: jax.stages.Lowered) -> str:
    """StableHLO without the shardings: an axis of size 1 is named in those of shapes and not in those of arrays."""
    return re.sub(r"sdy\.sharding = #sdy\.sharding<[^<>]*>,? ?", "", lowered.as_text())


@contextlib.contextmanager
def calls() -> Iterator[set[str]]:
    """A set that gets the `text` of each call of a function on a mesh (sharding.on_mesh)."""
    found: set[str] = set()
    call = sharding.OnMesh.__call__

    def recorded(self: sharding.OnMesh, *args: Any, **kwargs: Any) -> Any:
        found.add(text(self.lower(*args, **kwargs)))
        return call(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding.OnMesh, "__call__", recorded)
        yield found
