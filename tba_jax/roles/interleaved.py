"""Search and training in turn in one process, with a fixed lag: the synchronous baseline, and staleness studies.

The same functions, replay log and weights wire as the asynchronous run; only nobody works at the same time.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from tba_jax.roles.evaluator import Evaluator, PendingSteps
from tba_jax.roles.searcher.searcher import Searcher
from tba_jax.roles.trainer.trainer import Trainer, record
from tba_jax.run import layout
from tba_jax.run.metrics import MetricWriter

log = logging.getLogger(__name__)


def run_interleaved(
    trainer: Trainer,
    searcher: Searcher,
    evaluator: Evaluator | None,
    config: Any,
    run: layout.RunDir,
    *,
    stop: Callable[[], bool],
    progress: Callable[[], None],
) -> bool:
    """One search batch, one update, until learner.steps are done.

    Fresh rows of step n come from the weights after n − 1 − lag updates.

    Returns:
      whether the run is finished.
    """
    trainer_writer, evaluator_writer = MetricWriter(run.metrics("trainer")), MetricWriter(run.metrics("evaluator"))
    searcher_writer = MetricWriter(run.metrics("searcher-0"))
    begin, first = time.monotonic(), trainer.step_number
    pending_steps = PendingSteps(run, every_steps=config.evaluation.every_steps, final_step=config.learner.steps)

    def evaluate() -> None:
        if evaluator is None:
            return
        for step in pending_steps():
            report = evaluator.evaluate(step)
            evaluator_writer.write(
                step, {name: value for name, value in report.items() if isinstance(value, float) and name != "time"}
            )

    trainer.flush_snapshot()
    evaluate()
    while trainer.step_number < config.learner.steps and not stop():
        searcher.load_step(max(0, trainer.step_number - config.schedule.lag))
        report = searcher.search()
        trainer.poll()
        measurements = trainer.step()
        if measurements is None:
            continue
        trainer.flush_snapshot()
        if trainer.step_number == first + 1:
            trainer.account.restart()
            begin = time.monotonic()
        if trainer.step_number % config.metrics.every_steps == 0 or trainer.step_number == config.learner.steps:
            record(trainer_writer, trainer, measurements, begin=begin, steps=trainer.step_number - first - 1)
            scalars = {
                "rows_per_second": report.rows / report.seconds,
                "tokens_per_second": report.tokens / report.seconds,
                "reward": report.reward,
                "policy_step": report.policy_step,
            }
            if report.value_tokens:
                scalars["value_tokens_per_second"] = report.value_tokens / report.seconds
            searcher_writer.write(trainer.step_number, scalars)
        evaluate()
        progress()
    finished = trainer.step_number >= config.learner.steps
    if finished:
        trainer.finish()
    else:
        trainer.save_checkpoint()
    trainer.close()
    searcher.close()
    for writer in (trainer_writer, evaluator_writer, searcher_writer):
        writer.close()
    return finished
