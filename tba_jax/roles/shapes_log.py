"""The shapes that a program was called with, told once each: every one of them is compiled."""

import logging

from tba_jax.packing import Plan

log = logging.getLogger(__name__)


class ShapesLog:
    """Logs where packed rows have a shape that they did not have before."""

    def __init__(self, program: str):
        self._program = program
        self._seen: set[tuple[int, bool]] = set()

    def note(self, plan: Plan) -> bool:
        """A call with the rows of a plan. Returns whether their shape is new."""
        shape = plan.sequences, plan.one_row
        if shape in self._seen:
            return False
        self._seen.add(shape)
        each = "of one row" if plan.one_row else "of several rows"
        log.info(
            "%s: compiled for %d sequences %s (%d of at most 8 shapes; %.0f %% of the tokens are of rows)",
            self._program,
            plan.sequences,
            each,
            len(self._seen),
            100 * plan.useful,
        )
        return True
