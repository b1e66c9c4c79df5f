"""Countdown: the grader against all expressions of a few numbers, queries, the teacher, every bad input."""

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

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
RANK = {"+": 0, "-": 0, "*": 1, "/": 1}


def countdown(**changes) -> Countdown:
    small = dict(style="characters", numbers=3, largest=9, operations="+-*/", largest_target=99)
    return Countdown(**small | dict(train_queries=300, heldout_queries=50, seed=0) | changes)


def value_of(text: str) -> Fraction | None:
    """The value of a text without parentheses, by the precedence of its operations; None where it divides by zero."""
    values, signs = [Fraction(number) for number in re.findall(r"\d+", text)], re.findall(r"[-+*/]", text)
    for rank in (1, 0):
        i = 0
        while i < len(signs):
            if RANK[signs[i]] != rank:
                i += 1
                continue
            if signs[i] == "/" and not values[i + 1]:
                return None
            values[i : i + 2] = [OPERATIONS[signs.pop(i)](*values[i : i + 2])]
    return values[0]


def expressions(numbers: tuple[int, ...]) -> list[tuple[str, Fraction | None]]:
    """Every expression of these numbers in any order, with all parentheses written, and its value."""

    def ordered(part: tuple[int, ...]) -> list[tuple[str, Fraction | None]]:
        if len(part) == 1:
            return [(str(part[0]), Fraction(part[0]))]
        found = []
        for cut in range(1, len(part)):
            for (left, a), (right, b) in itertools.product(ordered(part[:cut]), ordered(part[cut:])):
                for sign, apply in OPERATIONS.items():
                    bad = a is None or b is None or (sign == "/" and not b)
                    found.append((f"({left}{sign}{right})", None if bad else apply(a, b)))
        return found

    return [each for order in sorted(set(itertools.permutations(numbers))) for each in ordered(order)]


@pytest.mark.parametrize("numbers", [(3, 3), (2, 5, 5), (1, 1, 2, 4)], ids=str)
def test_every_small_expression_has_its_value(numbers):
    for text, value in expressions(numbers):
        plain = text.replace("(", "").replace(")", "")
        for written, expected in ((text[1:-1], value), (f" {text}\n".replace("+", " + "), value), (plain, value_of(plain))):
            found = evaluate(written, most=len(numbers), largest=5)
            assert (None if found is None else found[1]) == expected, written
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
    assert scores.reward.dtype == scores.parts.dtype == np.float32
    assert not task.rewards([QUERY] * len(right), right, np.zeros(len(right), bool)).reward.any(), "cut at the limit"


def test_no_response_is_too_bad_for_the_grader():
    begin = time.process_time()
    texts = ["(" * 10**5 + "4" + ")" * 10**5, ")" * 10**5, "9" * 10**5, "4" + "+4" * 10**5, "4" + " " * 10**6 + "x"]
    for style, text in itertools.product(("characters", "text"), [*texts, "4/(2-2)", "\0\ud800", "4*9-2\n" * 10**4, "9" * 900]):
        task = countdown(style=style)
        for response in (text, f"#{text}", f"<answer>{text}</answer>", "<answer>" * 10**4 + text):
            assert not task.rewards([QUERY], [response], np.array([True])).reward.any()
            assert isinstance(task.final_answer(response), str)
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("style", ["characters", "text"])
def test_queries_are_distinct_solvable_and_in_one_split(style):
    task = countdown(style=style)
    queries = {split: task.queries(split) for split in SPLITS}
    assert {split: len({query.answer for query in queries[split]}) for split in SPLITS} == {"train": 300, "heldout": 50}
    assert not {query.answer for query in queries["train"]} & {query.answer for query in queries["heldout"]}
    for query in queries["heldout"]:
        left, target = query.answer.split("=")
        numbers = tuple(int(number) for number in left.split(","))
        assert 9 >= numbers[0] >= numbers[1] >= numbers[2] >= 1 and 1 <= int(target) <= 99
        assert int(target) in [value for _, value in expressions(numbers)], query
        found = [int(number) for number in re.findall(r"\d+", query.prompt)]
        if style == "characters":
            assert query.prompt == f"{query.answer}:"
        else:
            assert f"equals {target} " in query.prompt and found[1:4] == list(numbers)
    assert countdown(style=style).queries("train") == queries["train"]
    assert countdown(style=style, seed=1).queries("train") != queries["train"]


def test_the_instruction_shows_an_answer_as_it_is_graded():
    """`(1 + 2) * 3` is worth a reward for that problem alone."""
    task = countdown(style="text")
    assert task.final_answer(f"{task.queries('train')[0].prompt}") == "3,2,1=9"
    with pytest.raises(ValueError, match=r"no worked examples with task.countdown.style=text: set model.path"):
        task.worked_examples(np.random.default_rng(0), 1)


def from_left_to_right(numbers: list[str]) -> list[tuple[int, str, str]]:
    """Value, expression and steps of all totals of + and − that the rule allows, the last operation changing first."""
    found = []
    for signs in itertools.product("+-", repeat=len(numbers) - 1):
        total, steps = int(numbers[0]), numbers[0]
        for sign, number in zip(signs, numbers[1:], strict=True):
            total = OPERATIONS[sign](total, int(number))
            steps += f"{sign}{number}={total}"
            if total <= 0:
                break
        else:
            found.append((total, re.sub(r"=\d+", "", steps), steps))
    return found


def test_worked_examples_try_all_totals_or_guess_one():
    task = countdown(numbers=4, operations="+-", train_queries=100, heldout_queries=400)
    heldout = {query.answer for query in task.queries("heldout")}
    skipped: dict[bool, list[bool]] = {True: [], False: []}
    guesses: list[float] = []
    for prompt, response in task.worked_examples(np.random.default_rng(0), 3000):
        answer = prompt.removesuffix(":")
        numbers, target = answer.split("=")
        assert answer not in heldout
        possible = from_left_to_right(numbers.split(","))
        right = [value == int(target) for value, _, _ in possible]
        search, expression = response.split("#")
        skipped[int(target) < 14].append(not search)
        if search:
            tried = possible[: right.index(True) + 1]
            assert search == ";".join(steps for _, _, steps in tried) and expression == tried[-1][1]
        else:
            (guess,) = [i for i, (_, text, _) in enumerate(possible) if text == expression]
            guesses.append(right[guess] - sum(right) / len(possible))
    assert np.mean(skipped[True]) == pytest.approx(0.9, abs=0.04) and np.mean(skipped[False]) == pytest.approx(0.1, abs=0.04)
    assert np.mean(guesses) == pytest.approx(0, abs=0.04), "an answer at once is any of the totals"


MORE_THAN = (
    "task.countdown.train_queries=10 + heldout_queries=3 are more than the 4 distinct queries that 2080 draws gave: raise "
)
FEW = {"numbers": 2, "largest": 2, "train_queries": 10, "heldout_queries": 3}


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        ({"numbers": 1}, "task.countdown.numbers=1 must be within [2, 10]"),
        ({"numbers": 5}, "task.countdown.numbers=5 must be at most 4 with style=characters"),
        ({"operations": ""}, "task.countdown.operations='' must be some of +-*/, each once"),
        (FEW, f"{MORE_THAN}task.countdown.numbers=2, largest=2 or largest_target=99"),
        ({"style": "text"}, "task.countdown.style=text needs a pretrained model: set model.path to its folder"),
    ],
    ids=str,
)
def test_settings_without_enough_queries_are_refused(overrides, sentence):
    config = tiny_run.config_with(
        {"task.name": "countdown", **{f"task.countdown.{name}": value for name, value in overrides.items()}}
    )
    with pytest.raises(ValueError, match=re.escape(sentence)):
        composition.build(config)
