"""The problems that the study of word problems makes: their solutions, their splits, and what a seed decides."""

import random
import re

import pytest

from benchmarks import word_problem_data

NAMES = word_problem_data.SHE + word_problem_data.HE
STEP = re.compile(r"(\d+)([-+*/])(\d+)=<<\1\2\3=(\d+)>>\4 [a-z]+")


@pytest.fixture(scope="module")
def splits() -> dict[str, list[dict[str, str]]]:
    """A problem of every template of seed 0."""
    rng = random.Random(0)
    return {name: [word_problem_data.problem(each, rng) for each in of] for name, of in word_problem_data.split(0).items()}


def test_a_solution_computes_its_answer_from_the_numbers_of_its_question(splits):
    for row in [*splits["train"], *splits["heldout"]]:
        *lines, last = row["answer"].split("\n")
        known = set(re.findall(r"\d+", row["question"]))
        assert 2 <= len(lines) <= 4, row
        for line in lines:
            left, operation, right, result = STEP.fullmatch(line).groups()
            assert {left, right} <= known, row
            a, b = int(left), int(right)
            assert int(result) == {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[operation] > 0, row
            known.add(result)
        assert last == f"#### {result}", row


def skeleton(question: str) -> str:
    """A question without what differs between problems of a template."""
    named = re.sub("|".join(NAMES), "X", re.sub("|".join(word_problem_data.THINGS), "things", question))
    return re.sub(r"\b[Ss]?[Hh]e\b", "he", re.sub(r"\d+", "1", named))


def test_no_heldout_problem_has_the_text_of_a_training_problem_but_for_names_and_numbers(splits):
    train, heldout = ({skeleton(row["question"]) for row in splits[name]} for name in ("train", "heldout"))
    assert len(train) == word_problem_data.TEMPLATES["train"] and len(heldout) == word_problem_data.TEMPLATES["heldout"]
    assert not train & heldout


def test_a_seed_decides_all_problems(splits):
    def made(seed: int) -> list[dict[str, str]]:
        return word_problem_data.problems(word_problem_data.split(seed)["heldout"], 300, random.Random(seed))

    assert made(0) == made(0) != made(1)


def test_a_template_that_no_numbers_fit_is_named(monkeypatch):
    monkeypatch.setattr(word_problem_data, "LARGEST", 3)
    monkeypatch.setattr(word_problem_data, "TRIES", 10)
    template = (word_problem_data.OPENINGS[1], word_problem_data.QUESTIONS[0])
    with pytest.raises(ValueError, match=r"boxes of \{b\}.*LARGEST=3"):
        word_problem_data.problem(template, random.Random(0))
