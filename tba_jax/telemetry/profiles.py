"""Traces of jax.profiler over a window of a run: --profile=START:STEPS. They lie in DIR/profiles/<role>/.

A trainer traces its steps START to START + STEPS − 1. A searcher traces STEPS batches, from the first on that it decodes with the
weights that step START begins with, or newer ones. An evaluator traces the first evaluation of such weights.
"""

import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from tba_jax.run import places

log = logging.getLogger(__name__)


class Window(NamedTuple):
    """Steps of a trainer, from 1: `start`, and `steps` − 1 after it."""

    start: int
    steps: int

    @property
    def last(self) -> int:
        return self.start + self.steps - 1


def parse(text: str) -> Window | None:
    """The window of --profile, None for "". Raises ValueError."""
    if not text:
        return None
    found = re.fullmatch(r"0*([1-9][0-9]{0,11}):0*([1-9][0-9]{0,11})", text)
    if found is None:
        raise ValueError(f"--profile={text} is not START:STEPS, two numbers from 1 on, such as --profile=100:5")
    return Window(int(found[1]), int(found[2]))


def check(window: Window | None, *, steps: int) -> None:
    """Raises ValueError where a window is past the end of a run. Args: steps: learner.steps."""
    if window is not None and window.last > steps:
        raise ValueError(
            f"--profile={window.start}:{window.steps} asks for steps up to {window.last}, and learner.steps={steps} ends the run "
            "before: ask for less"
        )


class Profiler:
    """Traces the process while it is in the window. Storage that refuses, and a profiler that does, cost the trace alone."""

    def __init__(self, folder: Path | None, window: Window | None):
        """Args: folder: of the traces, made once there is one; None, as window=None: nothing is traced."""
        self._folder, self._window = folder or Path(), None if folder is None else window
        self._is_tracing, self._is_first, self._batches = False, True, 0

    def step(self, number: int) -> None:
        """A trainer comes to this step, or still waits for its rows. Called again once the last step of the run is done."""
        window = self._window
        if window is not None and number > window.last:
            self._leave_behind(number - 1)
        elif window is not None and number >= window.start:
            self._begin()

    def batch(self, policy_step: int, *, most: int | None = None) -> None:
        """A batch is to be made with the weights of a step. Args: most: batches that are traced; None: the window's STEPS."""
        window, first, self._is_first = self._window, self._is_first, False
        if window is None or policy_step < window.start - 1:
            return
        if self._batches == (most or window.steps) or (first and policy_step >= window.last):
            self._leave_behind(policy_step)
            return
        self._begin()
        self._batches += 1

    def _leave_behind(self, step: int) -> None:
        if not self._is_tracing:
            log.warning("--profile: nothing is traced, because the run goes on from step %d; name later steps", step)
        self.end()

    def _begin(self) -> None:
        if self._is_tracing:
            return
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of Python: much of it, and it slows the host down
        with self._told_failures():
            places.make_folder(self._folder, below=2)
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._is_tracing = True

    def end(self) -> None:
        """Writes the trace that was begun, if there is one; there is no other after it."""
        self._window = None
        if self._is_tracing:
            self._is_tracing = False
            with self._told_failures():
                jax.profiler.stop_trace()
                log.info("a trace of the profiler is in %s", self._folder)

    @contextlib.contextmanager
    def _told_failures(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # RuntimeError: jax.profiler passes on what it met
            self._window = None
            log.warning("--profile: no trace in %s: %s", self._folder, (str(error).splitlines() or [type(error).__name__])[0])
