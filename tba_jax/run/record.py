"""What a role records of itself beside its metrics: status, timeline and events, all in its folder of metrics."""

import contextlib
import threading
import weakref
from pathlib import Path

from tba_jax.run import places
from tba_jax.run.cost import Cost
from tba_jax.run.events import Events
from tba_jax.run.profiles import Profiler, Window
from tba_jax.run.status import Status
from tba_jax.run.timeline import Timeline

FLUSH_SECONDS = 1.0


class Record:
    """The record of one process. Storage that refuses ends nobody, and a thread writes what may come late.

    Attributes:
      status, timeline, events, profiler: see there. cost: what all of them, and the metrics, cost the process.
      step: of the trainer, where this process is; its role sets it.
      until_close: contexts that are left when the record is closed.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        timeline_megabytes: float = 0.0,
        traces: Path | None = None,
        profile: Window | None = None,
    ):
        """
        Args:
          folder: of the role's metrics; None: nothing is recorded. timeline_megabytes: see Timeline.
          traces: folder of the traces of jax.profiler; profile: what they are of, see Profiler.
        """
        self.folder, self.cost, self.step = folder, Cost(), 0
        self.until_close = contextlib.ExitStack()
        self.profiler = Profiler(traces, profile)
        if folder is not None:
            with contextlib.suppress(OSError):
                places.make_folder(folder, below=2)
        self.status = Status(folder, cost=self.cost)
        self.timeline = Timeline(folder, megabytes=timeline_megabytes, cost=self.cost)
        self.events = Events(folder, cost=self.cost)
        self._stopping = threading.Event()
        if folder is not None:
            # A daemon thread: the end of the process does not wait for storage that hangs.
            arguments = weakref.ref(self), self._stopping
            threading.Thread(target=_flush_now_and_then, args=arguments, name="record", daemon=True).start()

    def flush(self) -> None:
        """Writes what may come late."""
        self.timeline.flush()
        self.status.flush()

    def close(self, reason: str) -> None:
        """Writes what is left, and that the process ends. Args: reason: such as "finished"."""
        if self.folder is None or self._stopping.is_set():
            return
        self._stopping.set()
        self.profiler.end()  # without a word to the other processes of a trainer, which may be gone: each closes its own record
        self.until_close.close()
        self.timeline.flush()
        self.events.tell("end", step=self.step, reason=reason)
        self.status.waits("", seconds=0.0)
        self.status.phase(reason)


def _flush_now_and_then(reference: "weakref.ref[Record]", stopping: threading.Event) -> None:
    """Args: reference: weak, so that the thread ends with a record that nobody closes."""
    while not stopping.wait(FLUSH_SECONDS):
        record = reference()
        if record is None:
            return
        record.flush()
        del record
