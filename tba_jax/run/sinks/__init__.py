"""Trackers that show the metrics of a run: each in a file, and in a process of its own (feed.py, __main__.py)."""

from collections.abc import Callable

from tba_jax.run.sinks.session import Sink, Tell
from tba_jax.run.sinks.trackio_runs import TrackioRuns
from tba_jax.run.sinks.wandb_runs import WandbRuns

# The name of a package, and what hands points to it.
TRACKERS: dict[str, Callable[[Tell], Sink]] = {"wandb": WandbRuns, "trackio": TrackioRuns}
# The values of metrics.sinks. TensorBoard's files are written by run/event_files.py.
NAMES = ("tensorboard", *TRACKERS)
