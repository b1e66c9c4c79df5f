"""Traces of jax.profiler over a window of a run: --profile=START:STEPS. They lie in DIR/profiles/<role>/.

What the window means to each role: a trainer traces its steps START to START + STEPS − 1. A searcher traces STEPS batches, from
the first on that it decodes with the weights that step START begins with, or newer ones. An evaluator traces the first evaluation
of such weights.
"""

import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from tba_jax.run import places

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Window:
    """Steps of a trainer, from 1: `start`, and `steps` − 1 after it."""

    start: int
    steps: int

    @property
    def last(self) -> int:
        return self.start + self.steps - 1

    def __str__(self) -> str:
        return f"{self.start}:{self.steps}"


def parse(text: str) -> Window | None:
    """The window of --profile, None for "". Raises ValueError."""
    if not text:
        return None
    found = re.fullmatch(r"([0-9]{1,12}):([0-9]{1,12})", text)
    if found is None or not (int(found[1]) and int(found[2])):
        raise ValueError(f"--profile={text} is not START:STEPS, two numbers from 1 on, such as --profile=100:5")
    return Window(int(found[1]), int(found[2]))


def check(window: Window | None, *, steps: int) -> None:
    """Raises ValueError where a window is past the end of a run. Args: steps: learner.steps."""
    if window is not None and window.last > steps:
        asked = f"step {window.start}" if window.steps == 1 else f"steps {window.start} to {window.last}"
        raise ValueError(f"--profile={window} asks for {asked}, and learner.steps={steps} ends the run before: ask for less")


class Profiler:
    """Traces the process while it is in the window. Storage that refuses, and a profiler that does, cost the trace alone.

    Attributes: annotate: the context in which measured work is done, given its name: within a trace one that names it there.
    """

    def __init__(self, folder: Path | None, window: Window | None):
        """Args: folder: of the traces, made once there is one; None, as window=None: nothing is traced."""
        self._folder, self._window = folder or Path(), None if folder is None else window
        self._is_tracing = self._is_over = False
        self._batches = 0
        self._tell: Callable[[str], None] = lambda call: None
        self.annotate: Callable[[str], AbstractContextManager[Any]] = contextlib.nullcontext

    def starts_at(self, step: int, *, tell: Callable[[str], None] = lambda call: None) -> None:
        """The process goes on after so many steps: its own, or those of the weights that it begins with. Where they hold the
        whole window, a warning says so.

        Args: tell: is called with "begin profile" and "end profile", for the other processes of a trainer.
        """
        self._tell = tell
        if self._window is not None and self._window.last <= step:
            self._is_over = True
            log.warning(
                "--profile=%s: nothing is traced, because the run goes on from step %d; name later steps", self._window, step
            )

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Step `number` of a trainer is done inside, or the wait for its rows. `ended` tells that it is done."""
        window = self._window
        if window is None or self._is_over:
            yield
            return
        if not self._is_tracing and window.start <= number <= window.last:
            self.begin()
            if self._is_tracing:  # else nobody would tell the others to end theirs
                self._tell("begin profile")
        with jax.profiler.StepTraceAnnotation("step", step_num=number) if self._is_tracing else contextlib.nullcontext():
            yield

    def ended(self, step: int) -> None:
        """So many steps of the trainer are done."""
        if self._window is not None and step >= self._window.last:
            self.close()

    def close(self) -> None:
        """Writes the trace that was begun, if there is one."""
        if self._is_tracing:
            self._tell("end profile")
            self.end()

    @contextlib.contextmanager
    def batch(self, policy_step: int, *, most: int | None = None) -> Iterator[None]:
        """A batch is made inside, with the weights of a step or newer ones. Args: most: batches that are traced; None: STEPS."""
        window = self._window
        if window is None or self._is_over or policy_step < window.start - 1:
            yield
            return
        if not self._is_tracing:
            self.begin()
        self._batches += 1
        try:
            with jax.profiler.StepTraceAnnotation("batch", step_num=self._batches):
                yield
        finally:
            if self._batches >= (window.steps if most is None else most):
                self.end()

    def begin(self) -> None:
        """Begins a trace."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of Python: much of it, and it slows the host down
        with self._told_failures():
            places.make_folder(self._folder, below=2)
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._is_tracing, self.annotate = True, jax.profiler.TraceAnnotation

    def end(self) -> None:
        """Writes the trace that was begun; there is no other after it."""
        self._is_over = True
        if self._is_tracing:
            self._is_tracing, self.annotate = False, contextlib.nullcontext
            with self._told_failures():
                jax.profiler.stop_trace()
                log.info("a trace of the profiler is in %s", self._folder)

    @contextlib.contextmanager
    def _told_failures(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # RuntimeError: jax.profiler passes on what it met
            self._is_over = True
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            log.warning("--profile=%s: no trace in %s: %s", self._window, self._folder, first)
