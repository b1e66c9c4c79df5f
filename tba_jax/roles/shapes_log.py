"""The shapes that a program was called with, told once each: every one of them is compiled."""

import logging

from tba_jax.packing.row_layout import Plan

log = logging.getLogger(__name__)


class ShapesLog:
    """Logs where packed rows have a shape that they did not have before."""

    def __init__(self, program: str):
        self._program = program
        self._seen: set[int] = set()

    def knows(self, plan: Plan) -> bool:
        """Whether there was a call with rows of this shape."""
        return plan.sequences in self._seen

    def note(self, plan: Plan) -> bool:
        """A call with the rows of a plan. Returns whether their shape is new."""
        if self.knows(plan):
            return False
        self._seen.add(plan.sequences)
        log.info(
            "%s: compiled for %d sequences (%d of at most 8 shapes; %.0f %% of the tokens are of rows)",
            self._program,
            plan.sequences,
            len(self._seen),
            100 * plan.useful,
        )
        return True
