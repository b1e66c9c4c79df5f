"""Compares two answers in LaTeX by math-verify, which parses them to SymPy. Only worker processes import this module."""

import logging
import re
from typing import TYPE_CHECKING, Any

from math_verify import LatexExtractionConfig, grader, parse, verify
from sympy import Add, Expr, Float, Number

if TYPE_CHECKING:
    from tba_jax.tasks.interface import Query

# Answers that math-verify cannot parse count as unequal. It would log each of them.
for _name in ("math_verify", "latex2sympy2_extended"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0),)
_APART = re.compile("[0-9] [0-9]")  # two numbers, of which math-verify would make one
# A numeral with its base, which math-verify drops: digits, or letters too where the base has any.
_NUMERAL = re.compile(r"(?<![0-9A-Za-z.])(?:[0-9.]+_\{[^{}]*\}|(?=[A-Z]*[0-9])[0-9A-Z]+_\{(?:1[1-9]|[23][0-9])\})")


def grade(query: "Query", response: str) -> float:
    """1.0 if `response`, an answer in LaTeX without its box, equals query.answer, else 0.0. There is no limit on its time.

    Both answers are spelled as mathematics.spelled does.
    """
    texts = [_NUMERAL.sub(_symbol, text) for text in (query.answer, response)]
    if any(_APART.search(text) for text in texts):
        return 0.0
    gold, answer = (
        # math-verify's own time limits are signals. Graders limits the time of the whole call instead. What it cannot parse it
        # would give as text, and as a part of it only.
        parse(rf"\boxed{{{text}}}", extraction_config=_EXTRACTION, fallback_mode="no_fallback", parsing_timeout=None)
        for text in texts
    )
    return float(verify(gold, answer, timeout_seconds=None))


def _symbol(numeral: re.Match[str]) -> str:
    """A symbol of its own for the numeral."""
    return f"N_{{{numeral[0].encode().hex()}}}"


_with_tolerance = grader.sympy_numeric_eq


def _numbers_equal(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
    """math-verify's comparison, without its tolerance for two exact numbers, which takes 1/2004! for 1/2006!."""
    exact = isinstance(a, Expr) and isinstance(b, Expr) and not a.has(Float) and not b.has(Float)
    if not exact or any(grader.is_atomic_or_pct_atomic(each, Number) for each in (a, b)):  # of a Number, it is exact itself
        return _with_tolerance(a, b, float_rounding, numeric_precision)
    terms = Add.make_args(grader.safe_sympy_doit(a - b).evalf(numeric_precision))
    return all(term == 0 or any(number._prec == 1 for number in term.atoms(Float)) for term in terms)


grader.sympy_numeric_eq = _numbers_equal
