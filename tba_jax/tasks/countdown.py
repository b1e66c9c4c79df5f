"""Countdown: combine a few numbers, each exactly once, by + - * / and parentheses into an expression that equals a target.

Numbers are drawn and combined into a running total, by operations whose result is a positive whole number; the total is the
target. The reward is 1 if the response's final expression equals the target in exact arithmetic, else 0. There are two styles:

text: the prompt is an instruction for a pretrained model, and the final expression stands in the last `<answer> </answer>`
(TinyZero, Pan et al. 2025). A target combines the numbers in any order.

characters: the prompt is `9,4,4,2=15:`, the final expression follows the last `#`, and a target combines the numbers from left to
right. The teacher of the worked examples tries all operations until the total is the target,
`9+4=13+4=17+2=19;9+4=13+4=17-2=15#9+4+4-2`, or answers with a random total, `#9+4-4-2`. A small policy imitates both, and
reinforcement learning discovers that the search pays.
"""

import ast
import dataclasses
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import numpy as np

from tba_jax.tasks.interface import Query, Scores, SplitTask

CHARACTERS = "0123456789+-*/=(),;:#"
# The teacher skips the search often for targets below _SMALL_TARGET.
_SMALL_TARGET, _SKIP_OFTEN, _SKIP_RARELY = 14, 0.9, 0.1
# If this number of draws for each distinct query found, plus 100 times as many, is not enough, the queries are taken to run out.
_DRAWS = 20
_MOST_SEARCHED = 4
_OPERATIONS = "+-*/"
_RANK = {"+": 1, "-": 1, "*": 2, "/": 2}


@dataclasses.dataclass(frozen=True)
class Total:
    """A running total: its value, the steps to it `9*4=36-2=34`, and its expression `9*4-2` with the last operation `sign`, ""
    of a single number."""

    value: int
    steps: str
    expression: str
    sign: str = ""

    def take(self, sign: str, number: int) -> "Total":
        """The total after one more operation. Raises KeyError if its result is not a positive whole number."""
        value = _results(self.value, number)[sign]
        closed = f"({self.expression})" if self.sign and _RANK[self.sign] < _RANK[sign] else self.expression
        return Total(value, f"{self.steps}{sign}{number}={value}", f"{closed}{sign}{number}", sign)


def _results(value: int, number: int) -> dict[str, int]:
    """Operation -> result, for the operations whose result is a positive whole number."""
    results = {"+": value + number, "*": value * number}
    results |= {"-": value - number} if value > number else {}
    return results | ({"/": value // number} if value % number == 0 else {})


class Countdown(SplitTask):
    """Queries are distinct problems of `numbers` numbers from 1 to `largest`, with targets from 1 to `largest_target`.

    A prompt lists its numbers in descending order. The two splits share no problem.
    """

    alphabet = CHARACTERS

    def __init__(
        self,
        *,
        style: str,
        numbers: int,
        largest: int,
        operations: str,
        largest_target: int,
        train_queries: int,
        heldout_queries: int,
        seed: int,
    ):
        """Args: operations: the operations that make targets; responses may use all four.

        Raises ValueError if settings do not go together, or too few distinct queries are found."""
        if style == "characters" and numbers > _MOST_SEARCHED:
            raise ValueError(f"task.countdown.numbers={numbers} must be at most {_MOST_SEARCHED} with style=characters")
        if not operations or len(set(operations)) < len(operations) or not set(operations) <= set(_OPERATIONS):
            raise ValueError(f"task.countdown.operations={operations!r} must be some of {_OPERATIONS}, each once")
        self._style, self._numbers, self._operations = style, numbers, operations
        self._largest, self._largest_target = largest, largest_target
        luck, draws = _uniform(np.random.default_rng([seed, 0])), 0
        problems: dict[tuple[tuple[int, ...], int], None] = {}  # (numbers, target)
        while len(problems) < train_queries + heldout_queries:
            if draws == _DRAWS * (100 + len(problems)):
                raise ValueError(
                    f"task.countdown.train_queries={train_queries} + heldout_queries={heldout_queries} are more than the "
                    f"{len(problems)} distinct queries that {draws} draws gave: raise task.countdown.numbers={numbers}, "
                    f"largest={largest} or largest_target={largest_target}"
                )
            draws += 1
            drawn, total = self._draw(luck)
            if total is not None:
                problems[drawn, total.value] = None
        chosen = list(problems)
        self._heldout = frozenset(chosen[:heldout_queries])
        queries = [Query(self._prompt(numbers, target), f"{_text(numbers)}={target}") for numbers, target in chosen]
        self._splits = {"heldout": queries[:heldout_queries], "train": queries[heldout_queries:]}

    def _draw(self, luck: Iterator[float]) -> tuple[tuple[int, ...], Total | None]:
        """Numbers in descending order, and a random total of them; None instead of a total that is too large."""
        numbers = tuple(sorted((1 + int(next(luck) * self._largest) for _ in range(self._numbers)), reverse=True))
        if self._style == "text":
            total = add_up(numbers, luck, operations=self._operations)
            return numbers, total if total is not None and total.value <= self._largest_target else None
        possible = self._totals(numbers)
        return numbers, possible[int(next(luck) * len(possible))] if possible else None

    def _totals(self, numbers: Sequence[int]) -> list[Total]:
        """All totals of the numbers from left to right up to largest_target; the last operation changes first."""
        found = [Total(numbers[0], str(numbers[0]), str(numbers[0]))]
        for number in numbers[1:]:
            signs = [(total, sign) for total in found for sign in self._operations if sign in _results(total.value, number)]
            found = [total.take(sign, number) for total, sign in signs]
        return [total for total in found if total.value <= self._largest_target]

    def _prompt(self, numbers: Sequence[int], target: int) -> str:
        if self._style == "characters":
            return f"{_text(numbers)}={target}:"
        return _INSTRUCTION.format(numbers=_text(numbers, ", "), target=target)

    def rewards(self, queries: Sequence[Query], responses: Sequence[str], finished: np.ndarray) -> Scores:
        """1 if the final expression has the query's numbers and target, and the response ended by itself; else 0."""
        correct = [
            bool(done) and self.final_answer(response) == query.answer
            for query, response, done in zip(queries, responses, finished, strict=True)
        ]
        return Scores.of_one(np.array(correct))

    def final_answer(self, response: str) -> str:
        """The numbers of the response's final expression in descending order, and its value: `9,4,2=34`; "" if there is none."""
        evaluated = evaluate(_final_expression(response, self._style), most=self._numbers, largest=self._largest)
        return "" if evaluated is None else f"{_text(sorted(evaluated[0], reverse=True))}={evaluated[1]}"

    def worked_examples(self, rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
        """Fresh problems outside of the held-out split, answered by the teacher above. Raises ValueError if style=text."""
        if self._style == "text":
            raise ValueError(
                "task countdown has no worked examples with task.countdown.style=text: set model.path to a pretrained model and "
                "warm_start.steps=0"
            )
        examples, luck = list[tuple[str, str]](), _uniform(rng)
        while len(examples) < count:
            numbers, solution = self._draw(luck)
            if solution is not None and (numbers, solution.value) not in self._heldout:
                response = search(self._totals(numbers), solution.value, luck)
                examples.append((self._prompt(numbers, solution.value), response))
        return examples


# A paraphrase of the prompt of the public experiments.
_INSTRUCTION = (
    "Make an expression that equals {target} out of the numbers {numbers}. Use every number exactly once, and only the "
    "operations +, -, *, / and parentheses. First think step by step. Then write the expression alone, without an equals sign, "
    "within <answer> and </answer>, like this: <answer>(1 + 2) * 3</answer>.\n\nThinking:"
)


def _text(numbers: Sequence[int], separator: str = ",") -> str:
    return separator.join(map(str, numbers))


def _uniform(rng: np.random.Generator) -> Iterator[float]:
    """Random numbers from [0, 1). They are drawn in blocks, since a NumPy call for each would take most of the time."""
    while True:
        yield from rng.random(4096).tolist()


def add_up(numbers: Sequence[int], luck: Iterator[float], *, operations: str) -> Total | None:
    """A total of all numbers in random order, by random operations; None if at some number none has a positive whole result.

    Args: numbers: in descending order, in which the first operation takes its two. luck: uniform on [0, 1).
    """
    rest = list(numbers)
    order = [rest.pop(int(next(luck) * len(rest))) for _ in numbers]
    order[:2] = sorted(order[:2], reverse=True)
    total = Total(order[0], str(order[0]), str(order[0]))
    for number in order[1:]:
        signs = [sign for sign in _results(total.value, number) if sign in operations]
        if not signs:
            return None
        total = total.take(signs[int(next(luck) * len(signs))], number)
    return total


def search(possible: Sequence[Total], target: int, luck: Iterator[float]) -> str:
    """The teacher's response: totals with `;` between them up to the first that is the target, then `#` and its expression; or
    `#` and the expression of a random total, without a search."""
    if next(luck) < (_SKIP_OFTEN if target < _SMALL_TARGET else _SKIP_RARELY):
        return f"#{possible[int(next(luck) * len(possible))].expression}"
    tried = [total.value for total in possible].index(target) + 1
    return f"{';'.join(total.steps for total in possible[:tried])}#{possible[tried - 1].expression}"


def _final_expression(response: str, style: str) -> str:
    """The text of the final expression; "" if the response has none."""
    if style == "characters":
        return response.rpartition("#")[2] if "#" in response else ""
    before, closed, _ = response.rpartition("</answer>")
    return before.rpartition("<answer>")[2] if closed and "<answer>" in before else ""


_LONGEST, _PARENTHESES = 1000, 50
_SPACE, _PLAIN, _NUMBER = re.compile(r"\s+", re.ASCII), re.compile(r"[-+*/() 0-9]+"), re.compile("[0-9]+")
_SIGNS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(text: str, *, most: int, largest: int) -> tuple[list[int], Fraction] | None:
    """The numbers of an expression in their order, and its exact value; None if the text is no expression, divides by zero, or
    has more than `most` numbers or one above `largest`.

    The grammar: whole numbers without leading zeros or signs, binary + - * / with the usual precedence, and at most 50 pairs of
    parentheses, in at most 1,000 characters. Python parses it; nothing is executed.
    """
    numbers: list[int] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
            return _SIGNS[type(node.op)](value(node.left), value(node.right))
        if not isinstance(node, ast.Constant) or not isinstance(node.value, int) or not 0 < node.value <= largest:
            raise ValueError
        numbers.append(node.value)
        return Fraction(node.value)

    plain = _SPACE.sub(" ", text[:_LONGEST].rstrip()).strip(" ")
    deep = plain.count("(") > _PARENTHESES or len(_NUMBER.findall(plain)) > most  # before the parser, which is recursive
    if len(text) > _LONGEST or deep or not _PLAIN.fullmatch(plain):
        return None
    try:
        total = value(ast.parse(plain, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None
    return numbers, total
