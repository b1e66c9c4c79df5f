"""What follows the update of a step: decided in one place, before the update is dispatched."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Due:
    """What a trainer does around one update.

    prepare: the next batch is drawn and transferred while the devices compute. Not before a checkpoint nor before the end of the
      run: both show the replay index as it is after this step.
    publish: a snapshot follows. checkpoint: a checkpoint follows.
    compare: log-probs of sampler and learner are compared, see logprob_gap.py. settle: the comparison is awaited, so that the
      measurements of this step hold it.
    """

    prepare: bool
    publish: bool
    checkpoint: bool
    compare: bool
    settle: bool


def after(step: int, *, ahead: bool, last: bool, publish: bool, checkpoint: bool, compare_every_steps: int) -> Due:
    """What is due after the update of `step`.

    Args:
      ahead: whether the trainer works ahead, False: one step at a time. last: whether it is the last step of the run.
      publish, checkpoint: whether they are due. compare_every_steps: learner.logprob_gap_every_steps, 0: never.
    """
    return Due(
        prepare=ahead and not checkpoint and not last,
        publish=publish,
        checkpoint=checkpoint,
        compare=bool(compare_every_steps) and step % compare_every_steps == 0,
        settle=not ahead or last,
    )
