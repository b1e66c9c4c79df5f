"""Whether the learner can do with who drew the rows of a batch, and how."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tba_jax.objectives import OBJECTIVES
from tba_jax.replay.log import GIVEN
from tba_jax.run.processes import BadInput
from tba_jax.trajectory import Rows


def behavior_reader(learner: Any) -> str:
    """SETTING=VALUE of the setting by which the learner reads the rows' behaviour log-probs; "" if none does."""
    return f"learner.objective={learner.objective}" if OBJECTIVES[learner.objective].behavior_logprobs else ""


class BehaviorCheck:
    """Refuses rows that the settings of the run and of mounted runs did not tell of when the trainer began.

    Such are rows that were drawn before the run's objective changed, or that were appended to a mounted run since.
    """

    def __init__(self, learner: Any):
        self._reader = behavior_reader(learner)
        self._as_drawn = OBJECTIVES[learner.objective].as_drawn

    def __call__(self, rows: Rows, ids: Sequence[tuple[str, int]]) -> None:
        """Raises BadInput for the first row of a batch whose behaviour nobody knows, or that is truncated where none may be.

        Args: ids: (writer, row) of each of the rows.
        """
        if not self._reader:
            return
        if given := next((f"{writer}:{row}" for writer, row in ids if writer.startswith(GIVEN)), ""):
            raise BadInput(
                f"{self._reader} reads π_behaviour of every row, and nobody knows that of row {given}, a response of a file: "
                f"resume without it (--allow_change={self._reader.partition('=')[0]})"
            )
        truncated = (rows["top_k"] > 0) | (rows["top_p"] < 1) | (rows["min_p"] > 0)
        if self._as_drawn and truncated.any():
            at = int(np.argmax(truncated))
            how = ", ".join(f"{name}={rows[name][at]:g}" for name in ("top_k", "top_p", "min_p"))
            raise BadInput(
                f"{self._reader} needs rows that are not truncated, and row {ids[at][0]}:{ids[at][1]} was drawn with {how}: "
                "resume with another objective, such as trajectory_balance (--allow_change=learner.objective)"
            )
