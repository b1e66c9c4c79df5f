"""Countdown: the grader against all expressions of a few numbers, queries, the teacher, every bad input."""

import ast
import itertools
import operator
import re
import time
from fractions import Fraction

import numpy as np
import pytest

from tba_jax.experiment import composition
from tba_jax.tasks.countdown import Countdown, evaluate
from tba_jax.tasks.interface import SPLITS, Query
from tests.support import tiny_run


def countdown(**changes) -> Countdown:
    small = dict(style="characters", numbers=3, largest=9, operations="+-*/", largest_target=99)
    return Countdown(**small | dict(train_queries=300, heldout_queries=50, seed=0) | changes)


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value_of(text: str) -> Fraction | None:
    """The exact value of an expression, as Python's own parser reads it; None where it divides by zero."""

    def of(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant):
            return Fraction(node.value)
        return OPERATORS[type(node.op)](of(node.left), of(node.right))

    try:
        return of(ast.parse(text.strip(), mode="eval").body)
    except ZeroDivisionError:
        return None


def expressions(numbers: tuple[int, ...]) -> list[str]:
    """Every expression of these numbers in any order, with all parentheses written."""

    def ordered(part: tuple[int, ...]) -> list[str]:
        if len(part) == 1:
            return [str(part[0])]
        cuts = [itertools.product(ordered(part[:cut]), "+-*/", ordered(part[cut:])) for cut in range(1, len(part))]
        return [f"({left}{sign}{right})" for left, sign, right in itertools.chain(*cuts)]

    return [each for order in sorted(set(itertools.permutations(numbers))) for each in ordered(order)]


@pytest.mark.parametrize("numbers", [(3, 3), (2, 5, 5), (1, 1, 2, 4)], ids=str)
def test_every_small_expression_has_its_value(numbers):
    for text in expressions(numbers):
        for written in (text[1:-1], f" {text}\n".replace("+", " + "), re.sub("[()]", "", text)):
            found = evaluate(written, most=len(numbers), largest=5)
            assert (None if found is None else found[1]) == value_of(written), written
            assert found is None or sorted(found[0]) == sorted(numbers)


NOTHING = "1//2 2**1 -1 +1 1--1 (1)(2) 4(1) () (1,2) 1,2 01 0 00 1_0 1.0 1e2 1j 0x1 1;2 ~1 1<2 a ٤ (1 1) )"


def test_what_is_no_expression_has_no_value():
    deep = ("(" * 500 + "1" + ")" * 500, "1+" * 600 + "1")
    for text in (*NOTHING.split(" "), *deep, "", " ", "1 2", "1\u00a0+2", "10", "1+1+1+1"):
        assert evaluate(text, most=3, largest=9) is None, text


QUERY = Query(prompt="9,4,2=34:", answer="9,4,2=34")
RIGHT = ["#(4*9)-2", "#((4)*(9))-((2))", "9+2=11*4=44;9*4=36-2=34#(9*4)-2", "nonsense;;=#9*4-2", "#1+1#9*4-2"]
WRONG = ["4*9-2", "#4*9-2=34", "#34", "#4*9", "#2*9*4/2", "#4*9+(-2)", "#4*09-2", "#4*9-2)", "#4*9--2", "#4(9)-2", "#", ""]
TAGGED = [" 4 * 9 is 36 <answer> (4 * 9) - 2 </answer>", "<answer>\n4*9-2\n</answer> done"]
TAGGED += ["<answer>1</answer> no, <answer>4*9-2</answer>", "<answer><answer>4*9-2</answer>"]
UNTAGGED = ["<answer>4*9-2", "4*9-2</answer>", "<answer>4×9-2</answer>", "<answer>٤*9-2</answer>"]  # digits of another script


@pytest.mark.parametrize("style, right, wrong", [("characters", RIGHT, WRONG), ("text", TAGGED, UNTAGGED)])
def test_the_reward_is_for_the_target_by_each_number_once(style, right, wrong):
    task, responses = countdown(style=style), [*right, *wrong]
    scores = task.rewards([QUERY] * len(responses), responses, np.ones(len(responses), bool))
    assert scores.reward.tolist() == [1] * len(right) + [0] * len(wrong) == scores.parts[:, 0].tolist()
    assert not task.rewards([QUERY] * len(right), right, np.zeros(len(right), bool)).reward.any(), "cut at the limit"


def test_no_response_is_too_bad_for_the_grader():
    begin = time.process_time()
    texts = ["(" * 10**5 + "4" + ")" * 10**5, ")" * 10**5, "9" * 10**5, "4" + "+4" * 10**5, "4" + " " * 10**6 + "x"]
    for style, text in itertools.product(("characters", "text"), [*texts, "4/(2-2)", "\0\ud800", "4*9-2\n" * 10**4, "9" * 900]):
        task = countdown(style=style)
        for response in (text, f"#{text}", f"<answer>{text}</answer>", "<answer>" * 10**4 + text):
            assert not task.rewards([QUERY], [response], np.array([True])).reward.any()
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("style", ["characters", "text"])
def test_queries_are_distinct_solvable_and_in_one_split(style):
    task = countdown(style=style)
    train, heldout = ({query.answer for query in task.queries(split)} for split in SPLITS)
    assert (len(train), len(heldout)) == (300, 50) and not train & heldout
    for query in task.queries("heldout"):
        left, target = query.answer.split("=")
        numbers = tuple(int(number) for number in left.split(","))
        assert 9 >= numbers[0] >= numbers[1] >= numbers[2] >= 1 and 1 <= int(target) <= 99
        assert int(target) in map(value_of, expressions(numbers)), query
        numbers_asked = f"equals {target} out of the numbers {', '.join(map(str, numbers))}. "
        assert query.prompt == f"{query.answer}:" if style == "characters" else numbers_asked in query.prompt
    assert countdown(style=style).queries("train") == task.queries("train") != countdown(style=style, seed=1).queries("train")


def test_the_instruction_shows_an_answer_as_it_is_graded():
    """`(1 + 2) * 3` is worth a reward for that problem alone."""
    task = countdown(style="text")
    assert task.final_answer(f"{task.queries('train')[0].prompt}") == "3,2,1=9"
    with pytest.raises(ValueError, match=r"no worked examples with task.countdown.style=text: set model.path"):
        task.worked_examples(np.random.default_rng(0), 1)


def from_left_to_right(numbers: list[str]) -> list[tuple[int, str, str]]:
    """Value, expression and steps of all totals of + and − that the rule allows, the last operation changing first."""
    found = [(int(numbers[0]), numbers[0], numbers[0])]
    for number in numbers[1:]:
        taken = [(value + (1 if sign == "+" else -1) * int(number), sign, *texts) for value, *texts in found for sign in "+-"]
        found = [(v, f"{text}{sign}{number}", f"{steps}{sign}{number}={v}") for v, sign, text, steps in taken if v > 0]
    return found


def test_worked_examples_try_all_totals_or_guess_one():
    task = countdown(numbers=4, operations="+-", train_queries=100, heldout_queries=400)
    heldout = {query.answer for query in task.queries("heldout")}
    skipped: dict[bool, list[bool]] = {True: [], False: []}
    guesses: list[float] = []
    for prompt, response in task.worked_examples(np.random.default_rng(0), 3000):
        numbers, target = prompt.removesuffix(":").split("=")
        assert prompt.removesuffix(":") not in heldout
        possible = from_left_to_right(numbers.split(","))
        right = [value == int(target) for value, _, _ in possible]
        search, expression = response.split("#")
        skipped[int(target) < 14].append(not search)
        if search:
            tried = possible[: right.index(True) + 1]
            assert search == ";".join(steps for _, _, steps in tried) and expression == tried[-1][1]
        else:
            guesses.append(right[[text for _, text, _ in possible].index(expression)] - sum(right) / len(possible))
    assert np.mean(skipped[True]) == pytest.approx(0.9, abs=0.04) and np.mean(skipped[False]) == pytest.approx(0.1, abs=0.04)
    assert np.mean(guesses) == pytest.approx(0, abs=0.04), "an answer at once is any of the totals"


FEW = {"numbers": 2, "largest": 2, "train_queries": 10, "heldout_queries": 3}


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        ({"numbers": 5}, "task.countdown.numbers=5 must be at most 4 with style=characters"),
        ({"operations": ""}, "task.countdown.operations='' must be some of +-*/, each once"),
        (FEW, "train_queries=10 + heldout_queries=3 are more than the 4 distinct queries that 2080 draws gave: raise"),
        ({"style": "text"}, "task.countdown.style=text needs a pretrained model: set model.path to its folder"),
    ],
    ids=str,
)
def test_settings_without_enough_queries_are_refused(overrides, sentence):
    settings = {f"task.countdown.{name}": value for name, value in overrides.items()}
    with pytest.raises(ValueError, match=re.escape(sentence)):
        composition.build(tiny_run.config_with({"task.name": "countdown", **settings}))
