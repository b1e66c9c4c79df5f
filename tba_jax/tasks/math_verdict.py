"""Whether two answers in LaTeX are the same, by math-verify (parsed to SymPy, compared there). Worker processes import this."""

import logging

from math_verify import LatexExtractionConfig, parse, verify

from tba_jax.tasks.interface import Query

# What it cannot read counts as unequal; it would log each such answer.
for _name in ("math_verify", "latex2sympy2_extended"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0),)


def grade(query: Query, response: str) -> float:
    """1.0 if `response`, an answer in LaTeX without its box, equals query.answer, else 0.0. Takes as long as SymPy does."""
    gold, answer = (
        # Its own limits are signals, which a call under a limit of its own does without.
        parse(rf"\boxed{{{text}}}", extraction_config=_EXTRACTION, parsing_timeout=None)
        for text in (query.answer, response)
    )
    return float(verify(gold, answer, timeout_seconds=None))
