"""Compares two answers in LaTeX by math-verify, which parses them to SymPy. Only worker processes import this module."""

import logging

from math_verify import LatexExtractionConfig, parse, verify

from tba_jax.tasks.interface import Query

# Answers that math-verify cannot parse count as unequal. It would log each of them.
for _name in ("math_verify", "latex2sympy2_extended"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0),)


def grade(query: Query, response: str) -> float:
    """1.0 if `response`, an answer in LaTeX without its box, equals query.answer, else 0.0. There is no limit on its time."""
    gold, answer = (
        # math-verify's own time limits are signals. Graders limits the time of the whole call instead.
        parse(rf"\boxed{{{text}}}", extraction_config=_EXTRACTION, parsing_timeout=None)
        for text in (query.answer, response)
    )
    return float(verify(gold, answer, timeout_seconds=None))
