"""Points of a role as a run of Trackio: all roles of a run are in one group, and a role that starts again goes on."""

import warnings
from typing import Any

import numpy as np

from tba_jax.run.sinks.session import Session, Tell

_ADVICE = "metrics.jsonl has every point; look at TRACKIO_DIR, or at the space or server that the environment names"


class TrackioRuns:
    """A Sink. Points go to TRACKIO_DIR on this machine, or to the space or server that the environment names."""

    def __init__(self, tell: Tell):
        self._tell = tell
        self._run: Any = None

    def begin(self, session: Session) -> None:
        import trackio

        # Trackio does not raise where it fails to write or to send: it warns.
        warnings.showwarning = lambda message, *where, **others: self._tell(f"trackio: {message}", _ADVICE)
        self._run = trackio.init(
            project=session.project,
            group=session.group,
            name=session.name,
            config=session.config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, point: dict[str, Any]) -> None:
        import trackio

        histograms = {
            name: trackio.Histogram(np_histogram=(np.array(each["counts"]), np.array(each["edges"])))
            for name, each in point["histograms"].items()
        }
        tables = {name: trackio.Table(columns=each["columns"], data=each["rows"]) for name, each in point["tables"].items()}
        self._run.log({**point["values"], **histograms, **tables}, step=point["step"])

    def end(self) -> None:
        self._run.finish()
