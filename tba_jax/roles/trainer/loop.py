"""The loop of a trainer's process: steps as long as there are rows, and says what it waits for where there are not."""

import logging
import os
import platform
import time
from collections.abc import Callable

from tba_jax.roles.trainer.recorder import Recorder
from tba_jax.roles.trainer.trainer import Trainer
from tba_jax.run import layout

log = logging.getLogger(__name__)

# A trainer that waits says so this often.
SAY_WAITING_SECONDS = 20.0


def run_trainer(trainer: Trainer, run: layout.RunDir, *, stop: Callable[[], bool]) -> bool:
    """Trains until learner.steps are done or `stop` says so. Returns whether the run is finished."""
    log.info("trainer on %s, pid %d, %d resident rows", platform.node(), os.getpid(), len(trainer.index))
    recorder = Recorder(trainer, run)
    trainer.start()
    waiting_since = time.monotonic()
    while not trainer.is_done and not stop():
        measurements = trainer.step()
        if measurements is None:
            trainer.wait(trainer.config.replay.poll_seconds)
            if time.monotonic() - waiting_since > SAY_WAITING_SECONDS:
                _say_waiting(trainer)
                waiting_since = time.monotonic()
            continue
        waiting_since = time.monotonic()
        if recorder.note(measurements):
            trainer.report_problems()
    return end(trainer, recorder)


def end(trainer: Trainer, recorder: Recorder) -> bool:
    """Marks the run finished if it is, or saves where it stands, and closes the trainer. Returns whether it is finished."""
    finished = trainer.is_done
    if finished:
        trainer.finish()
    else:
        trainer.save_checkpoint()
    recorder.close()
    trainer.close()
    return finished


def _say_waiting(trainer: Trainer) -> None:
    """Says what a step needs, and what there is."""
    log.warning(
        "waiting for rows: a step needs rows of learner.queries=%d queries, at least replay.min_rows=%d; %d are resident",
        trainer.config.learner.queries,
        trainer.config.replay.min_rows,
        len(trainer.index),
    )
