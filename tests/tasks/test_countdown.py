"""Countdown: the grader against Python's parser on all expressions of a few numbers, queries, the teacher, every bad input."""

import ast
import itertools
import re
import time
from fractions import Fraction

import numpy as np
import pytest

from tba_jax.experiment import composition
from tba_jax.tasks.countdown import Countdown, evaluate
from tba_jax.tasks.interface import SPLITS, Query
from tests.support import tiny_run

OPERATIONS = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
}


def countdown(**changes) -> Countdown:
    small = dict(style="characters", numbers=3, largest=9, operations="+-*/", largest_target=99)
    return Countdown(**small | dict(train_queries=300, heldout_queries=50, seed=0) | changes)


def by_python(text: str) -> Fraction | None:
    """The value of an expression of the grammar by Python's parser; None where it divides by zero."""

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp):
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        assert isinstance(node, ast.Constant)
        return Fraction(node.value)

    try:
        return value(ast.parse(text, mode="eval").body)
    except ZeroDivisionError:
        return None


def expressions(numbers: tuple[int, ...]) -> list[str]:
    """Every expression of these numbers in any order, with all parentheses written."""

    def ordered(part: tuple[int, ...]) -> list[str]:
        if len(part) == 1:
            return [str(part[0])]
        return [
            f"({left}{sign}{right})"
            for cut in range(1, len(part))
            for left, right in itertools.product(ordered(part[:cut]), ordered(part[cut:]))
            for sign in "+-*/"
        ]

    return [text for order in sorted(set(itertools.permutations(numbers))) for text in ordered(order)]


@pytest.mark.parametrize("numbers", [(3, 3), (2, 5, 5), (1, 1, 2, 4)], ids=str)
def test_every_small_expression_has_the_value_of_python(numbers):
    for text in expressions(numbers):
        # With fewer parentheses it is another expression, whose value Python knows as well.
        for written in (text, text[1:-1], text.replace("(", "").replace(")", ""), f"  {text} ".replace("+", " + ")):
            expected = by_python(written.strip())
            found = evaluate(written, most=len(numbers), largest=5)
            assert (None if found is None else found[1]) == expected, written
            assert found is None or sorted(found[0]) == sorted(numbers)


def test_random_texts_are_expressions_where_python_says_so():
    """Of the grammar's characters; Python's own grammar also has signs, powers, whole divisions, calls and tuples."""
    rng = np.random.default_rng(0)
    symbols, valid = list("123+-*/()"), 0
    for _ in range(5_000):
        text = "".join(rng.choice(symbols, rng.integers(1, 10)))
        try:
            tree = ast.parse(text, mode="eval")
        except SyntaxError:
            tree = None
        known = (ast.Expression, ast.BinOp, ast.Constant, *OPERATIONS)
        plain = tree is not None and all(isinstance(node, known) for node in ast.walk(tree))
        expected = by_python(text) if plain else None
        found = evaluate(text, most=9, largest=10**9)
        assert (None if found is None else found[1]) == expected, text
        valid += expected is not None
    assert valid > 100, "too few texts were expressions for this to say anything"


QUERY = Query(prompt="9,4,2=34:", answer="9,4,2=34")


@pytest.mark.parametrize(
    "response, finished, reward",
    [
        ("#(4*9)-2", True, 1),
        ("#((4)*(9))-((2))", True, 1),
        ("9+2=11*4=44;9*4=36-2=34#(9*4)-2", True, 1),
        ("nonsense;;=#9*4-2", True, 1),  # how it gets there is its own business
        ("#1+1#9*4-2", True, 1),
        ("#4*9-2", False, 0),
        ("4*9-2", True, 0),
        ("#4*9-2=34", True, 0),
        ("#34", True, 0),
        ("#4*9", True, 0),
        ("#2*9*4/2", True, 0),  # 2 is there once
        ("#4*9+(-2)", True, 0),
        ("#4*09-2", True, 0),
        ("#4*9-2)", True, 0),
        ("#4*9--2", True, 0),
        ("#4(9)-2", True, 0),
        ("#", True, 0),
        ("", True, 0),
    ],
)
def test_the_reward_is_for_the_target_by_each_number_once(response, finished, reward):
    scores = countdown().rewards([QUERY, QUERY], [response, "#9*4-2"], np.array([finished, True]))
    assert scores.reward.tolist() == [reward, 1] and scores.parts.tolist() == [[reward], [1]]
    assert scores.reward.dtype == scores.parts.dtype == np.float32


@pytest.mark.parametrize(
    "response, reward",
    [
        (" 4 * 9 is 36 <answer> (4 * 9) - 2 </answer>", 1),
        ("<answer>\n4*9-2\n</answer> done", 1),
        ("<answer>1</answer> no, <answer>4*9-2</answer>", 1),
        ("<answer><answer>4*9-2</answer>", 1),
        ("<answer>4*9-2", 0),
        ("4*9-2</answer>", 0),
        ("<answer>4×9-2</answer>", 0),
        ("<answer>٤*9-2</answer>", 0),  # digits of another script
    ],
)
def test_the_text_style_answers_within_tags(response, reward):
    task = countdown(style="text")
    assert task.rewards([QUERY], [response], np.array([True])).reward.tolist() == [reward]
    assert task.rewards([QUERY], [response], np.array([False])).reward.tolist() == [0]


@pytest.mark.parametrize(
    "text",
    [
        "(" * 10**5 + "4" + ")" * 10**5,
        ")" * 10**5,
        "9" * 10**5,
        "4" + "+4" * 10**5,
        "4" + " " * 10**6 + "x",
        "4/(2-2)",
        "\0\ud800",
        "4*9-2\n" * 10**4,
    ],
    ids=lambda text: f"{text[:3]!r}, {len(text)}",
)
def test_no_response_is_too_bad_for_the_grader(text):
    begin = time.process_time()
    for style in ("characters", "text"):
        task = countdown(style=style)
        for response in (text, f"#{text}", f"<answer>{text}</answer>", "<answer>" * 10**4 + text):
            assert not task.rewards([QUERY], [response], np.array([True])).reward.any()
            assert isinstance(task.final_answer(response), str)
    assert time.process_time() - begin < 3


def test_answers_that_say_the_same_are_the_same():
    task = countdown()
    assert task.final_answer("#4*9-2") == task.final_answer("1+1#(9 * 4) - 2") == "9,4,2=34" == QUERY.answer
    assert task.final_answer("#4*9") == "9,4=36"
    assert {task.final_answer(r) for r in ("", "#", "4*9-2", "#4/0", "#4+9+2+2", "#10+4", "#x")} == {""}


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
        assert any(by_python(text) == int(target) for text in expressions(numbers)), query
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


def from_left_to_right(numbers: list[str]) -> list[tuple[int, list[str]]]:
    """Value and operations of all totals that the rule allows, the last operation changing first."""
    found = []
    for signs in itertools.product("+-", repeat=len(numbers) - 1):
        parts = [numbers[0]]
        for sign, number in zip(signs, numbers[1:], strict=True):
            parts.append(f"{parts[-1]}{sign}{number}")
        values = [by_python(part) for part in parts]
        if min(values) > 0:
            found.append((int(values[-1]), list(signs)))
    return found


def test_worked_examples_try_all_totals_or_guess_one():
    task = countdown(numbers=4, operations="+-", train_queries=100, heldout_queries=400)
    examples = task.worked_examples(np.random.default_rng(0), 4000)
    heldout = {query.answer for query in task.queries("heldout")}
    skipped: dict[bool, list[bool]] = {True: [], False: []}
    guesses: list[float] = []
    for prompt, response in examples:
        answer = prompt.removesuffix(":")
        numbers, target = answer.split("=")
        assert answer not in heldout
        possible = from_left_to_right(numbers.split(","))
        search, expression = response.split("#")
        assert re.findall(r"\d+", expression) == numbers.split(",")
        skipped[int(target) < 14].append(not search)
        if search:
            first = [value for value, _ in possible].index(int(target))
            tries = search.split(";")
            assert [value_of_steps(steps) for steps in tries] == [value for value, _ in possible[: first + 1]]
            for steps, (_, signs) in zip(tries, possible, strict=False):
                assert re.findall(r"[+-]", steps) == signs
            assert re.sub(r"=\d+", "", tries[-1]) == expression
        else:
            assert re.findall(r"[+-]", expression) in [signs for _, signs in possible]
            guesses.append((task.final_answer(response) == answer) - sum(v == int(target) for v, _ in possible) / len(possible))
        assert (task.final_answer(response) == answer) == (by_python(expression) == int(target)) >= bool(search)
    assert np.mean(skipped[True]) == pytest.approx(0.9, abs=0.03) and np.mean(skipped[False]) == pytest.approx(0.1, abs=0.03)
    assert np.mean(guesses) == pytest.approx(0, abs=0.03), "an answer at once is any of the totals"


def value_of_steps(steps: str) -> int:
    """The result of `9*4=36-2=34`, each step of which must be right."""
    first, *others = steps.split("=")
    total = by_python(first)
    for after in others:
        value = re.match(r"\d+", after)[0]
        assert total == int(value) > 0, steps
        total = by_python(after)
    return int(value)


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        ({"numbers": 1}, "task.countdown.numbers=1 must be within [2, 10]"),
        ({"numbers": 5}, "task.countdown.numbers=5 must be at most 4 with style=characters"),
        ({"operations": ""}, "task.countdown.operations='' must be some of +-*/, each once"),
        ({"largest": 0}, "task.countdown.largest=0 must be within [1, 1000000]"),
        (
            {"numbers": 2, "largest": 2, "train_queries": 10, "heldout_queries": 3},
            "task.countdown.train_queries=10 + heldout_queries=3 are more than the 4 distinct queries that 2080 draws gave: "
            "raise task.countdown.numbers=2, largest=2 or largest_target=99",
        ),
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
