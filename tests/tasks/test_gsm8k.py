"""GSM8K: numbers written by hand in many ways, every gold answer of the real data, and bad rows."""

import json
import re
import time
from decimal import Decimal

import numpy as np
import pytest

from configs import base
from tba_jax.tasks.gsm8k import GSM8K
from tba_jax.tasks.interface import Query

PROMPT = base.get_config().task.gsm8k.prompt
LONG = "Half of 48 is <<48/2=24>>24.\nSo 1,200 + 34.5 = <<1200+34.5=1234.5>>1,234.5\n#### 1,234.5"
ROWS = [{"question": "How many?", "answer": LONG}, {"question": "And now?", "answer": "None is left.\n#### 0"}]
ROWS.append(ROWS[0])


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def task(tmp_path) -> GSM8K:
    return GSM8K(train_path=write(tmp_path / "a.jsonl", ROWS), heldout_path=write(tmp_path / "b.jsonl", ROWS[1:2]), prompt=PROMPT)


def test_prompts_and_splits(task):
    train, heldout = task.queries("train"), task.queries("heldout")
    assert train == [
        Query(prompt="[MATH TASK] Problem:\nHow many?\n\nSolution:\n", answer="1234.5"),
        Query(prompt="[MATH TASK] Problem:\nAnd now?\n\nSolution:\n", answer="0"),
    ]
    assert heldout == train[1:]


def test_a_prompt_of_ones_own_holds_the_question_once(tmp_path):
    paths = dict.fromkeys(("train_path", "heldout_path"), write(tmp_path / "a.jsonl", ROWS))
    task = GSM8K(**paths, prompt="Question: {question}\nAnswer:")
    assert [query.prompt for query in task.queries("train")] == ["Question: How many?\nAnswer:", "Question: And now?\nAnswer:"]
    assert task.worked_examples(np.random.default_rng(0), 1)[0][0].startswith("Question: ")
    for wrong in ("Question:", "{question} {question}"):
        with pytest.raises(ValueError, match=r"task\.gsm8k\.prompt=.* must hold \{question\} once"):
            GSM8K(**paths, prompt=wrong)


def test_worked_examples_are_the_human_solutions(task):
    examples = task.worked_examples(np.random.default_rng(0), 7)
    plain = "Half of 48 is 24.\nSo 1,200 + 34.5 = 1,234.5\n#### 1,234.5"
    assert set(examples) == {
        ("[MATH TASK] Problem:\nHow many?\n\nSolution:\n", plain),
        ("[MATH TASK] Problem:\nAnd now?\n\nSolution:\n", "None is left.\n#### 0"),
    }
    assert len(examples) == 7 and sum(text == plain for _, text in examples[:6]) == 4  # two whole rounds
    assert task.worked_examples(np.random.default_rng(0), 0) == []


THOUSANDS = (",", "{,}", r"\,", r"\;", r"\ ", "~", r",\!", r"{,}\!", "\u00a0", "\u2009", "\u202f")

# What the last number of a text is, by hand.
LAST: dict[str, str] = {
    "": "",
    "5": "5",
    "The answer is 72.": "72",
    "#### 72\n": "72",
    "1,234.50": "1234.5",
    "£7 or €8": "8",
    ".5": "0.5",
    "-.5": "-0.5",
    "wait...5": "5",
    "-3": "-3",
    "−3": "-3",
    "-$3": "-3",
    "$-3": "-3",
    "+3": "3",
    **{f"{sign}5": "-5" for sign in ("–", "−", "‐", "‑", "－", r"-\,", r"-\!", r"= -\;", r"\$-\,")},
    **{f"{mark}-5{mark}": "-5" for mark in ("_", "__", "*", "**")},
    "_.5_": "0.5",
    **{f"-1{s}234{s}567.50": "-1234567.5" for s in THOUSANDS},
    **{f"12{s}34": "34" for s in THOUSANDS},
    "3 000": "0",
    "48–24": "24",
    r"48\,-\,24": "24",
    "48-24": "24",
    "(2)-24": "24",
    "-0.00": "0",
    "007": "7",
    "12,34": "34",
    "3/4": "4",
    "2.5.": "2.5",
    "1e3": "1000",
    "1.5E-3": "0.0015",
    "3even": "3",
    "1e999999": "1e999999",
    "1e9999999999": "9999999999",
    "٣": "",
    "9" * 41: "9" * 41,
    "1" + "0" * 41: "1e41",
    "0." + "0" * 40 + "1": "1e-41",
}


def test_the_last_number(task):
    assert {text: task.final_answer(text) for text in LAST} == LAST


def test_numbers_against_decimals(task):
    rng = np.random.default_rng(0)
    values = [
        Decimal(int(n)).scaleb(-int(s)) for n, s in zip(rng.integers(-(10**6), 10**6, 300), rng.integers(0, 7, 300), strict=True)
    ]
    values += [Decimal(i) / 100 for i in range(-12, 12)]
    for a in values:
        for text in (f"{a:f}", f"{a:,f}", f"so {a:+f}.", f"{a:f}{'' if a == a.to_integral() and '.' not in f'{a:f}' else '00'}"):
            assert Decimal(task.final_answer(text)) == a, text
    answers = {task.final_answer(f"{a:f}") for a in values}
    assert len(answers) == len(set(values))  # equal texts for equal numbers alone


def test_monsters_are_read_in_time(task):
    begin = time.process_time()
    for text in ("1" * 20_000, "1,111" + ",111" * 2500 + "1", "-" * 20_000 + "1", "1e" * 10_000 + "5", "-" + r"\," * 10_000):
        task.final_answer(text)
    assert time.process_time() - begin < 10


@pytest.mark.parametrize(
    "row, sentence",
    [
        ({"question": "q", "answer": "no mark 5"}, "the answer must end in #### and a number, not in 'no mark 5'"),
        ({"question": "q", "answer": "#### 1 2"}, "the answer must end in #### and a number, not in '#### 1 2'"),
        ({"question": "q"}, "field 'answer' is missing (it has question)"),
    ],
)
def test_bad_rows_are_refused(tmp_path, row, sentence):
    good, bad = write(tmp_path / "good.jsonl", ROWS), write(tmp_path / "bad.jsonl", [*ROWS, row])
    for paths in ({"train_path": bad, "heldout_path": good}, {"train_path": good, "heldout_path": bad}):
        setting = next(name for name, path in paths.items() if path == bad)
        with pytest.raises(ValueError, match="^" + re.escape(f"task.gsm8k.{setting}={bad!r} line 4: {sentence}")):
            GSM8K(**paths, prompt=PROMPT)


def test_all_of_the_real_gold_answers(data_dir):
    """Each gold text scores 1 as a response, 0 with the number changed by 1, and 1 however the number is written."""
    folder = data_dir / "gsm8k"
    task = GSM8K(train_path=str(folder / "train.jsonl"), heldout_path=str(folder / "test.jsonl"), prompt=PROMPT)
    assert (len(task.queries("train")), len(task.queries("heldout"))) == (7473, 1319)
    for split, name in (("train", "train.jsonl"), ("heldout", "test.jsonl")):
        answers = [json.loads(line)["answer"] for line in (folder / name).read_text().splitlines()]
        queries = task.queries(split)
        texts = [answer.split("#### ")[0] for answer in answers]
        golds = [Decimal(answer.split("#### ")[1].replace(",", "")) for answer in answers]
        done = np.ones(len(queries), bool)

        def share(responses, queries=queries, done=done) -> float:
            return task.rewards(queries, responses, done).reward.mean()

        assert share(answers) == 1
        for change in (-1, 1):
            assert share([f"{text[-40:]}#### {gold + change}" for text, gold in zip(texts, golds, strict=True)]) == 0
        for form in ("{:f}", "{:,f}.", "${:,f}", "{:.2f}", "{:,.2f}", "the answer is {:.0f}%.", "{:+.1f} eggs"):
            assert share([text[-40:] + form.format(gold) for text, gold in zip(texts, golds, strict=True)]) == 1, form
        for space in ("{,}", r"\,", "\u202f"):
            assert share([f"{text[-40:]}{gold:,}".replace(",", space) for text, gold in zip(texts, golds, strict=True)]) == 1, (
                space
            )
    assert not any("<<" in text for _, text in task.worked_examples(np.random.default_rng(0), 7473))
