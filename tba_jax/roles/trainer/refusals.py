"""What a trainer refuses: an update that is not finite, with its rows; and rows that its objective cannot learn from."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tba_jax.objectives import OBJECTIVES
from tba_jax.replay.log import GIVEN
from tba_jax.run.processes import BadInput
from tba_jax.trajectory import Rows

log = logging.getLogger(__name__)

# Updates that learner.non_finite=skip leaves out one after the other before the run stops.
_MOST_IN_A_ROW = 10


class Refusals:
    """Looks at each update. The update itself has left the state as it was where it is not finite (see train_step)."""

    def __init__(self, *, skips: bool, journal: Path):
        """Args: skips: whether learner.non_finite=skip; journal: the folder that messages name."""
        self._skips, self._journal = skips, journal
        self._in_a_row = 0

    def look_at(
        self,
        measurements: Mapping[str, Any],
        row_finite: jax.Array,
        ids: Sequence[tuple[str, int]],
        *,
        step: int,
        was_passed: bool,
    ) -> None:
        """Does nothing where the update of `step` is finite; else says which rows are to blame.

        Args: measurements, row_finite: of train_step, on the devices. ids: (writer, row) of the B rows. was_passed: whether the
          journal shows that the run went on after this step: then it does so again.

        Raises FloatingPointError where such updates are not skipped, every row is at fault, or it is one after the other.
        """
        if measurements["finite"]:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        measurements, row_finite = jax.device_get((measurements, row_finite))
        rows = [f"{writer}:{row}" for (writer, row), ok in zip(ids, row_finite, strict=True) if not ok]
        sentence = self._sentence(measurements, rows, step=step, of=len(ids))
        all_rows = len(rows) == len(ids)
        if was_passed or (self._skips and not all_rows and self._in_a_row < _MOST_IN_A_ROW):
            log.warning("%s; the update is left out (learner.non_finite=skip)", sentence)
            return
        if not self._skips:
            advice = "--config.learner.non_finite=skip --allow_change=learner.non_finite would leave such updates out"
            raise FloatingPointError(f"{sentence}; {advice}")
        reason = "all rows are at fault" if all_rows else f"it is step {self._in_a_row} of such in a row"
        raise FloatingPointError(
            f"{sentence}; {reason}, so the run stops in spite of learner.non_finite=skip: another run may begin from an "
            "earlier snapshot (--init_from=RUN@STEP)"
        )

    def _sentence(self, measurements: Mapping[str, Any], rows: Sequence[str], *, step: int, of: int) -> str:
        listed = ", ".join(rows[:8]) + (" …" if len(rows) > 8 else "")
        blamed = f"{len(rows)} of {of} rows are not, {listed}" if rows else "its rows are, its gradient or new weights are not"
        return (
            f"step {step} is not finite (loss {measurements['loss']}, gradient norm {measurements['grad_norm']}): {blamed}; "
            f"its batch is the line of that step in {self._journal}"
        )


def behavior_reader(learner: Any) -> str:
    """SETTING=VALUE of the setting by which the learner reads the rows' behaviour log-probs; "" if none does."""
    return f"learner.objective={learner.objective}" if OBJECTIVES[learner.objective].behavior_logprobs else ""


class BehaviorCheck:
    """Refuses rows that no setting told of when the trainer began: of before a change of the objective, or of mounted runs."""

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
