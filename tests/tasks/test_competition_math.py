r"""MATH: boxes, equal forms, answers that take for ever, and bad rows."""

import json
import logging
import re
import time

import numpy as np
import pytest

from configs import base
from tba_jax.tasks.competition_math import Math, last_boxed, normalise
from tba_jax.tasks.interface import Query

ROWS = [
    {"problem": "What is half of $1$?", "answer": r"\frac{1}{2}", "subject": "Algebra"},
    {"problem": "Solve.", "solution": r"First \boxed{3}, but no: \[x = \boxed{\left\{1,\frac{1}{2}\right\}}.\]"},
]
ROWS.append(ROWS[1])


SPACES = (" ", "~", r"\ ", r"\,", r"\!", r"\;", r"\:", "\u00a0", "\u2009", "\u202f")
PROMPT = base.get_config().task.math.prompt


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make(folder, **changes) -> Math:
    paths = {"train_path": write(folder / "a.jsonl", ROWS), "heldout_path": write(folder / "b.jsonl", ROWS[:1])}
    return Math(**paths | dict(prompt=PROMPT, time_limit=30.0, retries=1, concurrency=2) | changes)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    made = make(tmp_path_factory.mktemp("math"))
    yield made
    made.close()


def rewards(task: Math, pairs: list[tuple[str, str]]) -> list[float]:
    """Of (gold answer, response)."""
    scores = task.rewards([Query("", gold) for gold, _ in pairs], [text for _, text in pairs], np.ones(len(pairs), bool))
    assert scores.reward.dtype == np.float32 and scores.parts.shape == (len(pairs), 1)
    np.testing.assert_array_equal(scores.parts[:, 0], scores.reward)
    return scores.reward.tolist()


def test_prompts_gold_answers_and_solutions(task, tmp_path):
    first, second = task.queries("train")
    ask = "\n\nReason step by step, and put the final answer within \\boxed{}.\n\nSolution:\n"
    assert first == Query(prompt=f"Problem:\nWhat is half of $1$?{ask}", answer=r"\frac{1}{2}")
    assert second == Query(prompt=f"Problem:\nSolve.{ask}", answer=r"\left\{1,\frac{1}{2}\right\}")
    assert task.queries("heldout") == [first]
    assert task.worked_examples(np.random.default_rng(0), 3) == [(second.prompt, ROWS[1]["solution"])] * 3
    path = write(tmp_path / "answers.jsonl", ROWS[:1])
    with pytest.raises(ValueError, match=r"no worked examples: no row of task.math.train_path has a field 'solution'"):
        make(tmp_path, train_path=path).worked_examples(np.random.default_rng(0), 1)


BOXES: dict[str, str] = {
    "": "",
    r"\boxed{3} no \boxed{5}.": "5",
    r"\boxed {5}": "5",
    r"$\boxed 5$": "5",
    r"so \boxed 12. Done": "12",
    r"\boxed{\frac{1}{2}}": r"\frac{1}{2}",
    r"\boxed{\boxed{5}}": r"\boxed{5}",
    r"\boxed{x+\boxed{5}}": r"x+\boxed{5}",
    r"\boxed{5": "",
    r"\boxed{\boxed{5}": "5",
    r"} { \boxed{5} {": "5",
    r"\\boxed{5}": "",  # a line break, and a word
    r"\boxed{a\}b}": r"a\}b",
}


def test_the_last_box():
    assert {text: last_boxed(text) for text in BOXES} == BOXES


def test_monsters_are_read_in_time():
    begin = time.process_time()
    texts = (r"\boxed{" * 30_000, "{" * 200_000, r"\frac" * 40_000, r"\text{" * 30_000, "\\" * 200_000, "1," * 100_000)
    for text in (*texts, "1 " * 50_000, " " * 50_000, "1" * 50_000, ", " * 50_000):
        last_boxed(text)
        normalise(text)
    assert time.process_time() - begin < 5


FORMS: list[tuple[str, ...]] = [
    (r"\frac{1}{2}", r"\dfrac12", r"\tfrac{1}2", r"\frac1{2}", "1/2", r" \frac { 1 } { 2 } ", r"$\frac12$", r"\boxed{\frac12}"),
    ("1234", "1,234", "1234.0", "+1234", r"1,\!234", r"\$1234", "1234.", "1234,", "1234 .", r"1234\,"),
    ("1234567", *(f"1{space}234{space}567" for space in SPACES), "1{,}234{,}567", r"1,\! 234,\! 567"),
    ("-13/4", *(f"–3{space}1/4" for space in SPACES), "−3 1 / 4", r"-3\frac{1}{4}", r"-3 \tfrac 1 4", r"-3~\frac14"),
    ("-5", "–5", "−5", "‐5", "‑5", "－5"),
    (r"(1000,2)", r"(1\,000, 2)", "(1{,}000,2)", r"(1,\!000,2)"),
    (r"\log_2 3", r"\log_{2}3"),
    ("1011_2", "1011_{2}", r"1011\text{ (base 2)}", r"1011 \text{ base } 2"),
    ("(0,1]", r"\left( 0, 1 \right]", r"(0,\,1]"),
    ("east", r"\text{east}", r"\textbf{east}", r"\mathrm{ east }"),
    ("90", r"90^\circ", r"90^{\circ}"),
    (r"\leftarrow",),  # not \left and arrow
    ("(1,234)",),  # a pair, or one number: as it is
    ("",),
]


def test_final_answers_are_equal_for_equal_forms(task):
    for forms in FORMS:
        assert len({task.final_answer(rf"so \boxed{{{form}}}") for form in forms}) == 1, forms
        assert normalise(forms[0]) == normalise(normalise(forms[0]))


APART = r"""
    1 | 2 | -1 | \frac{1}{2} | \frac{2}{1} | \frac{1}{12} | (0,1) | (0,1] | 12 | 1.2 | 2x | \leftarrow | 1 2 | 1 23 | 1 2345 |
    1234 567 | 0.1 234 | 1\text{ }3 | \frac{4}{3} | 4 4/3 | 44/3 | 1011_2 | 1011_3 | \begin{pmatrix}1\\ 2\end{pmatrix} |
    \begin{pmatrix}12\end{pmatrix}
"""


def test_different_answers_stay_apart(task):
    answers = [answer.strip() for answer in APART.split(" |")]
    assert len({task.final_answer(rf"\boxed{{{answer}}}") for answer in answers}) == len(answers)


def pairs(table: str) -> list[tuple[str, str]]:
    """(gold answer, answer), divided by <>."""
    return [(gold.strip(), answer.strip()) for gold, answer in (pair.split("<>") for pair in table.split(" |"))]


EQUAL = pairs(
    r"""
    \frac{1}{2} <> 0.5 | \frac{1}{2} <> 2^{-1} | 2\sqrt{2} <> \sqrt{8} | (0,1] <> \left(0,\frac{2}{2}\right] |
    (-\infty,2)\cup(3,\infty) <> (3,\infty)\cup(-\infty,2) | \{1,2\} <> \{2,1\} | 5 <> 5\text{ cm} | 5 <> x=5 | x+1 <> 1+x |
    \text{(C)} <> C | \frac{8}{3} <> 2 2/3 | \frac{13}{4} <> 3~1/4\text{ cups} | x=1000 <> x = 1\,000 | \log_2 8 <> 3 |
    \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} <> \begin{pmatrix}1&2\\3&\frac82\end{pmatrix} |
    \{11_2,12_3\} <> \{12_{3},11_{2}\} | \frac{1}{2004!} <> \frac{2005}{2005!} | \sqrt{3+2\sqrt2} <> 1+\sqrt2 |
    \frac{1}{3} <> 0.333333 | 9 <> 9\%
    """
)
DIFFERENT = pairs(
    r"""
    \frac{1}{2} <> 0.51 | (0,1] <> [0,1] | (1,2) <> (2,1) | 5 <> -5 | \text{Evelyn} <> \text{Bob} | \text{(C)} <> D |
    \frac{22}{3} <> 2 2/3 | 12 <> 1 2 | 12 <> 1\text{ }2 | 1011_2 <> 1011_3 | 1011_2 <> 1011\text{ (base 3)} |
    1011_{\text{two}} <> 1011_{\text{three}} | A3_{16} <> 3A_{16} | \{11_2,5\} <> \{11_3,5\} |
    \frac{1}{2004!} <> \frac{1}{2006!} | (\frac{1}{2004!},1] <> (\frac{1}{2006!},1] |
    \begin{pmatrix} \frac{1}{2004!} \\ 2 \end{pmatrix} <> \begin{pmatrix} \frac{1}{2006!} \\ 2 \end{pmatrix} |
    \sqrt{2} <> \sqrt{2}+10^{-20} | 2 <> \frac{ | 2 <> }{
    """
)


def test_equal_and_different_answers(task):
    pairs = [(gold, rf"So it is $\boxed{{{answer}}}$.") for gold, answer in EQUAL + DIFFERENT]
    result = dict(zip(EQUAL + DIFFERENT, rewards(task, pairs), strict=True))
    assert {pair for pair in EQUAL if result[pair] != 1} == set()
    assert {pair for pair in DIFFERENT if result[pair] != 0} == set()


def test_an_answer_that_takes_for_ever_has_no_reward(tmp_path, caplog):
    task = make(tmp_path, time_limit=2.0, concurrency=1)
    pairs = [("5", r"\boxed{2+3}"), ("5", r"\boxed{9^{9^{9^{9}}}}"), ("7", r"\boxed{3+4}"), ("7", r"\boxed{3+5}")]
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert rewards(task, pairs) == [1, 0, 1, 0]
    assert time.monotonic() - begin < 30
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("1 of 4 responses took more than task.math.time_limit=2 s to grade: reward 0; ")
    task.close()


# What a parser that calls eval would execute.
CODE = (
    "__import__('os').system('touch MARK')",
    r"\text{__import__('os').system('touch MARK')}",
    r"\operatorname{exec}(\"open('MARK', 'w')\")",
    r"\frac{__import__('os').system('touch MARK')}{1}",
    r"\begin{pmatrix}__import__('os').system('touch MARK')\end{pmatrix}",
    "x=__import__('os').system('touch MARK')",
    "[c for c in ().__class__.__base__.__subclasses__()]",
    r"\write18{touch MARK}",
    r"\input{/etc/passwd}",
)


def test_code_in_an_answer_is_not_executed(task, tmp_path):
    pairs = [("5", rf"\boxed{{{code.replace('MARK', str(tmp_path / 'executed'))}}}") for code in CODE]
    assert rewards(task, pairs) == [0] * len(CODE)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "row, sentence",
    [
        ({"problem": "p"}, "fields 'answer' and 'solution' are both missing"),
        ({"problem": "p", "answer": r"\frac{1}{2"}, r"field 'answer' must be an answer with closed braces, not '\\frac{1}{2'"),
        ({"problem": "p", "solution": "It is 5."}, r"field 'solution' has no \boxed{answer}; it ends in 'It is 5.'"),
        ({"problem": "p", "solution": r"\boxed{5"}, r"field 'solution' has no \boxed{answer}; it ends in '\\boxed{5'"),
    ],
)
def test_bad_rows_are_refused(tmp_path, row, sentence):
    bad = write(tmp_path / "bad.jsonl", [*ROWS, row])
    for setting in ("train_path", "heldout_path"):
        with pytest.raises(ValueError, match="^" + re.escape(f"task.math.{setting}={bad!r} line 4: {sentence}")):
            make(tmp_path, **{setting: bad})
