"""Updates that are not finite: they are left out or stop the run, as learner.non_finite says, and are told with their rows."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

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

        Args:
          measurements, row_finite: of train_step, on the devices. row_finite: bool[B]. ids: (writer, row) of the B rows.
          was_passed: whether the journal shows that the run went on after this step: then it does so again.

        Raises:
          FloatingPointError: the run does not skip such updates, or skipping leads nowhere: every row is at fault, or one
            update after the other.
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
