r"""GSM8K: numbers written in many ways, and every gold answer of the data. MATH: boxes, equal forms, and monsters. Bad rows."""

import json
import re
import time
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from configs import base
from tba_jax.tasks.interface import Query
from tba_jax.tasks.mathematics import GSM8K, Math, last_boxed, normalise
from tests.support.summaries import write_rows

LONG = "Half of 48 is <<48/2=24>>24.\nSo 1,200 + 34.5 = <<1200+34.5=1234.5>>1,234.5\n#### 1,234.5"
SUMS = [{"question": "How many?", "answer": LONG}, {"question": "And now?", "answer": "None is left.\n#### 0"}]
SUMS.append(SUMS[0])
ROWS = [
    {"problem": "What is half of $1$?", "answer": r"\frac{1}{2}", "subject": "Algebra"},
    {"problem": "Solve.", "solution": r"First \boxed{3}, but no: \[x = \boxed{\left\{1,\frac{1}{2}\right\}}.\]"},
]
ROWS.append(ROWS[1])
SPACES = (" ", "~", r"\ ", r"\,", r"\!", r"\;", r"\:", "\u00a0", "\u2009", "\u202f")


def gsm8k(folder, **changes) -> GSM8K:
    paths = {"train_path": write_rows(folder / "c.jsonl", SUMS), "heldout_path": write_rows(folder / "d.jsonl", SUMS[1:2])}
    return GSM8K(**paths | {"prompt": base.get_config().task.gsm8k.prompt} | changes)


def make(folder, **changes) -> Math:
    paths = {"train_path": write_rows(folder / "a.jsonl", ROWS), "heldout_path": write_rows(folder / "b.jsonl", ROWS[:1])}
    limits = dict(time_limit=30.0, retries=1, concurrency=1)
    return Math(**paths | limits | {"prompt": base.get_config().task.math.prompt} | changes)


@pytest.fixture(scope="module")
def sums(tmp_path_factory) -> GSM8K:
    return gsm8k(tmp_path_factory.mktemp("sums"))


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    made = make(tmp_path_factory.mktemp("math"))
    yield made
    made.close()


def rewards(task: Math, pairs: list[tuple[str, str]]) -> list[float]:
    scores = task.rewards([Query("", gold) for gold, _ in pairs], [text for _, text in pairs], np.ones(len(pairs), bool))
    assert scores.reward.dtype == np.float32 and scores.parts[:, 0].tolist() == scores.reward.tolist()
    return scores.reward.tolist()


def test_prompts_gold_answers_and_solutions(task, sums, tmp_path):
    begin, end = "[MATH TASK] Problem:\n", "\n\nSolution:\n"
    train = [Query(f"{begin}How many?{end}", "1234.5"), Query(f"{begin}And now?{end}", "0")]
    assert sums.queries("train") == train and sums.queries("heldout") == train[1:]
    examples = sums.worked_examples(np.random.default_rng(0), 7)
    plain = "Half of 48 is 24.\nSo 1,200 + 34.5 = 1,234.5\n#### 1,234.5"
    assert set(examples) == {(train[0].prompt, plain), (train[1].prompt, "None is left.\n#### 0")}
    assert len(examples) == 7 and sum(text == plain for _, text in examples[:6]) == 4, "two whole rounds"
    ask = "\n\nReason step by step, and put the final answer within \\boxed{}.\n\nSolution:\n"
    first = Query(f"Problem:\nWhat is half of $1$?{ask}", r"\frac{1}{2}")
    second = Query(f"Problem:\nSolve.{ask}", r"\left\{1,\frac{1}{2}\right\}")
    assert task.queries("train") == [first, second] and task.queries("heldout") == [first]
    assert task.worked_examples(np.random.default_rng(0), 3) == [(second.prompt, ROWS[1]["solution"])] * 3
    with pytest.raises(ValueError, match=r"no worked examples: no row of task.math.train_path has a field 'solution'"):
        make(tmp_path, train_path=write_rows(tmp_path / "e.jsonl", ROWS[:1])).worked_examples(np.random.default_rng(0), 1)
    own = gsm8k(tmp_path, prompt="Question: {question}")
    assert own.queries("heldout")[0].prompt == "Question: And now?"
    for wrong in ("Question:", "{question} {question}"):
        with pytest.raises(ValueError, match=r"task\.gsm8k\.prompt=.* must hold \{question\} once"):
            gsm8k(tmp_path, prompt=wrong)


def pairs(table: str) -> list[tuple[str, str]]:
    return [(first.strip(), second.strip()) for first, second in (pair.split("<>") for pair in table.split(" |"))]


THOUSANDS = (",", "{,}", r"\,", r"\;", r"\ ", "~", r",\!", r"{,}\!", "\u00a0", "\u2009", "\u202f")
# What the last number of a text is, by hand.
LAST = dict(
    pairs(
        r"""
    <> | 5 <> 5 | The answer is 72. <> 72 | #### 72 <> 72 | 1,234.50 <> 1234.5 | £7 or €8 <> 8 | .5 <> 0.5 | -.5 <> -0.5 |
    wait...5 <> 5 | -3 <> -3 | −3 <> -3 | -$3 <> -3 | $-3 <> -3 | +3 <> 3 | –5 <> -5 | −5 <> -5 | ‐5 <> -5 | ‑5 <> -5 |
    －5 <> -5 | -\,5 <> -5 | -\!5 <> -5 | = -\;5 <> -5 | \$-\,5 <> -5 | _-5_ <> -5 | __-5__ <> -5 | *-5* <> -5 |
    **-5** <> -5 | _.5_ <> 0.5 | 3 000 <> 0 | 48–24 <> 24 | 48\,-\,24 <> 24 |
    48-24 <> 24 | (2)-24 <> 24 | -0.00 <> 0 | 007 <> 7 | 12,34 <> 34 | 3/4 <> 4 |
    2.5. <> 2.5 | 1e3 <> 1000 | 1.5E-3 <> 0.0015 | 3even <> 3 | 1e999999 <> 1e999999 | 1e9999999999 <> 9999999999 | ٣ <>
    """
    )
)
LAST |= {f"-1{s}234{s}567.50": "-1234567.5" for s in THOUSANDS} | {f"12{s}34": "34" for s in THOUSANDS}
LAST |= {"9" * 41: "9" * 41, "1" + "0" * 41: "1e41", "0." + "0" * 40 + "1": "1e-41"}


def test_the_last_number(sums):
    assert {text: sums.final_answer(text) for text in LAST} == LAST


def test_all_of_the_real_gold_answers(data_dir):
    paths = [str(data_dir / "gsm8k" / name) for name in ("train.jsonl", "test.jsonl")]
    task = GSM8K(train_path=paths[0], heldout_path=paths[1], prompt="{question}")
    rows = [json.loads(line) for line in Path(paths[1]).read_text().splitlines()]
    queries, texts = task.queries("heldout"), [row["answer"].split("#### ")[0][-40:] for row in rows]
    golds = [Decimal(row["answer"].split("#### ")[1].replace(",", "")) for row in rows]
    assert (len(task.queries("train")), len(queries)) == (7473, 1319)

    def share(form) -> float:
        responses = [text + form(gold) for text, gold in zip(texts, golds, strict=True)]
        return task.rewards(queries, responses, np.ones(len(queries), bool)).reward.mean()

    assert share(lambda gold: f"#### {gold - 1}") == share(lambda gold: f"#### {gold + 1}") == 0
    for form in ("#### {}", "{:,f}.", "${:,f}", "{:,.2f}", "the answer is {:.0f}%.", "{:+.1f} eggs"):
        assert share(form.format) == 1, form
    for space in ("{,}", r"\,", "\u202f"):
        assert share(lambda gold, space=space: f"{gold:,}".replace(",", space)) == 1, space
    assert not any("<<" in text for _, text in task.worked_examples(np.random.default_rng(0), 7473))


BOXES = dict(
    pairs(
        r"""
    <> | \boxed{3} no \boxed{5}. <> 5 | \boxed {5} <> 5 | $\boxed 5$ <> 5 | so \boxed 12. Done <> 12 |
    \boxed{\boxed{5}} <> \boxed{5} |
    \boxed{\frac{1}{2}} <> \frac{1}{2} | \boxed{x+\boxed{5}} <> x+\boxed{5} | \boxed{5 <> | \boxed{\boxed{5} <> 5 |
    } { \boxed{5} { <> 5 | \\boxed{5} <> | \boxed{a\}b} <> a\}b
    """  # \\ is a line break, and what follows a word
    )
)


def test_the_last_box():
    assert {text: last_boxed(text) for text in BOXES} == BOXES


def test_monsters_are_read_in_time(sums):
    begin = time.process_time()
    texts = (r"\boxed{" * 30_000, "{" * 200_000, r"\frac" * 40_000, r"\text{" * 30_000, "\\" * 200_000, "1," * 100_000)
    for text in (*texts, "1 " * 50_000, " " * 50_000, "1" * 50_000, ", " * 50_000):
        last_boxed(text)
        normalise(text)
    for text in ("1" * 20_000, "1,111" + ",111" * 2500 + "1", "-" * 20_000 + "1", "1e" * 10_000 + "5", "-" + r"\," * 10_000):
        sums.final_answer(text)
    assert time.process_time() - begin < 10


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
    task = make(tmp_path, time_limit=1.0)
    assert rewards(task, [("5", r"\boxed{2+3}"), ("5", r"\boxed{9^{9^{9^{9}}}}")]) == [1, 0]
    (message,) = caplog.messages
    assert message.startswith("1 of 2 responses took more than task.math.time_limit=1 s to grade: reward 0; ")
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
        ({"question": "q", "answer": "no mark 5"}, "the answer must end in #### and a number, not in 'no mark 5'"),
        ({"question": "q"}, "field 'answer' is missing (it has question)"),
    ],
)
def test_bad_rows_are_refused(tmp_path, row, sentence):
    section, of, good = ("math", make, ROWS) if "problem" in row else ("gsm8k", gsm8k, SUMS)
    bad = write_rows(tmp_path / "bad.jsonl", [*good, row])
    for setting in ("train_path", "heldout_path"):
        with pytest.raises(ValueError, match="^" + re.escape(f"task.{section}.{setting}={bad!r} line 4: {sentence}")):
            of(tmp_path, **{setting: bad})
