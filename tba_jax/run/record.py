"""What a role records of itself beside its metrics: status, timeline and events, all in its folder of metrics."""

import contextlib
import threading
from pathlib import Path

from tba_jax.run import places
from tba_jax.run.cost import Cost
from tba_jax.run.events import Events
from tba_jax.run.status import Status
from tba_jax.run.timeline import Timeline

FLUSH_SECONDS = 1.0


class Record:
    """The record of one process. Storage that refuses, or hangs, holds nobody up: a thread writes what may come late.

    Attributes:
      status, timeline, events: see there. cost: what all of them, and the metrics, cost the process.
      step: of the trainer, where this process is; its role sets it.
      until_close: contexts that are left when the record is closed.
    """

    def __init__(self, folder: Path | None = None, *, timeline_megabytes: float = 0.0):
        """Args: folder: of the role's metrics; None: nothing is recorded. timeline_megabytes: see Timeline."""
        self.folder, self.cost, self.step = folder, Cost(), 0
        self.until_close = contextlib.ExitStack()
        if folder is not None:
            with contextlib.suppress(OSError):
                places.make_folder(folder, below=2)
        self.status = Status(folder, cost=self.cost)
        self.timeline = Timeline(folder, megabytes=timeline_megabytes, cost=self.cost)
        self.events = Events(folder, cost=self.cost)
        self._stopping = threading.Event()
        # A daemon thread: the end of the process does not wait for storage that hangs.
        self._thread = threading.Thread(target=self._flush, name="record", daemon=True)
        if folder is not None:
            self._thread.start()

    def _flush(self) -> None:
        while not self._stopping.wait(FLUSH_SECONDS):
            self.timeline.flush()
            self.status.flush()

    def close(self, reason: str) -> None:
        """Writes what is left, and that the process ends. Args: reason: such as "finished"."""
        if self.folder is None or self._stopping.is_set():
            return
        self._stopping.set()
        self.until_close.close()
        self.timeline.flush()
        self.events.tell("end", step=self.step, reason=reason)
        self.status.waits("", seconds=0.0)
        self.status.phase(reason)
