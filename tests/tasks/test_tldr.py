"""TL;DR: queries and their truncation by hand, rewards and win rates of models that are functions, bad rows and models."""

import re

import numpy as np
import pytest

from tba_jax.experiment import composition, meshes
from tba_jax.tasks.interface import Query
from tba_jax.tasks.tldr import TLDR
from tests.support import random_checkpoints, tiny_run
from tests.support.summaries import ROWS, write_rows


class Scorer:
    """The score of a text is a hash of it; a response that did not end has another one."""

    labels = ("LABEL_0",)

    def __init__(self, factor: int):
        self.factor = factor

    def scores(self, texts, *, ended=None):
        ended = np.zeros(len(texts), bool) if ended is None else ended
        hashes = [sum(map(ord, text)) * self.factor % 101 + 0.5 * end for text, end in zip(texts, ended, strict=True)]
        return np.array(hashes, np.float32)[:, None]


MODELS = {"reward model": Scorer(7), "gold model": Scorer(13)}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> str:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)


def make(rows: str, **changes) -> TLDR:
    settings = dict(train_path=rows, heldout_path=rows, reward_path="reward", gold_path="", compute_dtype="float32", batch_rows=4)
    task = TLDR(**settings | changes)
    task.start(lambda use: MODELS[use.name])
    return task


def test_evaluators_alone_have_a_gold_model_and_without_one_nothing_is_compared(rows):
    task = make(rows)
    assert task.measures(task.queries("train")[:1], [" Cat"], np.ones(1, bool), np.zeros(1, np.float32)) == {}
    assert {use.name: (use.labels, use.ends, use.roles) for use in make(rows, gold_path="gold").models()} == {
        "reward model": (1, True, ("searcher", "evaluator")),
        "gold model": (1, True, ("evaluator",)),
    }


def test_the_win_rate_is_against_the_reference_summary(rows):
    task = make(rows, gold_path="gold")
    queries = list(task.queries("heldout")) * 2
    # The second response of the first query is its reference summary: a tie.
    responses = [f" {'very ' * i}long" for i in range(5)] + [f" {queries[0].answer}", *[f" {'no ' * i}" for i in range(1, 5)]]
    finished = np.array([True] * 8 + [False] * 2)
    gold = MODELS["gold model"]
    ours = gold.scores([q.prompt + r for q, r in zip(queries, responses, strict=True)], ended=finished)[:, 0]
    theirs = gold.scores([f"{query.prompt} {query.answer}" for query in queries], ended=[True] * 10)[:, 0]
    assert 0 < (ours > theirs).sum() < 9 and ours[5] == theirs[5], "the case is an empty one"
    for _ in range(2):  # the second time the references' scores are known
        found = task.measures(queries, responses, finished, np.zeros(10, np.float32))
        np.testing.assert_array_equal(found["win_rate_strict"], [a > b for a, b in zip(ours, theirs, strict=True)])
        half = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in zip(ours, theirs, strict=True)]
        np.testing.assert_array_equal(found["win_rate_ties_half"], half)
        np.testing.assert_array_equal(found["gold_reward"], ours)
        np.testing.assert_array_equal(found["gold_reward_of_summaries"], theirs)


POST = "One line.\nA second line.\n\nA last one."


def test_a_post_is_cut_at_a_paragraph(rows, tmp_path):
    head, tail = "SUBREDDIT: r/cats\n\nTITLE: Naps\n\nPOST: ", "\n\nTL;DR:"
    around = len(head) + len(tail)
    path = write_rows(tmp_path / "rows.jsonl", [{"subreddit": "r/cats", "title": "Naps", "post": POST, "summary": "Naps. "}])
    task = make(rows, train_path=path)
    (query,) = task.queries("train")
    assert query == Query(prompt=head + POST + tail, answer="Naps.")
    # Room for 37 characters takes both paragraphs of 24, and for 8 none is whole.
    two = "One line.\nA second line."
    kept = {len(POST) - 1: two, len(two): two, len(two) - 1: "One line.", 9: "One line.", 8: "One", 3: "One", 2: "", 0: ""}
    for room, post in kept.items():
        found = task.shortened(query, lambda prompt, room=room: len(prompt) <= around + room)
        assert found == Query(prompt=head + post + tail, answer="Naps."), room
    assert task.shortened(query, lambda prompt: len(prompt) < around) is None
    assert task.shortened(task.queries("heldout")[0], lambda prompt: True) is None, "a query of the data set stays as it is"


@pytest.mark.parametrize(
    "row, sentence",
    [
        ({"summary": "x", "title": "Naps"}, "line 2: fields 'query' and 'post' are both missing"),
        ({"summary": " ", "query": "x"}, "line 2: field 'summary' is empty"),
    ],
)
def test_bad_rows_are_said(row, sentence, rows, tmp_path):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        make(rows, train_path=write_rows(tmp_path / "rows.jsonl", [ROWS[0], row]))
    with pytest.raises(ValueError, match=r"task\.tldr\.reward_path='' names no reward model"):
        make(rows, reward_path="")


@pytest.fixture(scope="module")
def config(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("tldr")
    tokens = random_checkpoints.byte_tokenizer(folder / "tokens")
    for name, labels in (("reward", 1), ("policy", 0)):
        random_checkpoints.write(folder / name, "pythia-410m", tokens, labels=labels)
    paths = {"model.path": folder / "policy", "task.tldr.reward_path": folder / "reward"}
    sizes = {"task.prompt_length": 100, "task.response_length": 8, "learner.queries": 2, "learner.completions": 2}
    settings = {"task.name": "tldr", "task.tldr.heldout_path": rows, **{name: str(path) for name, path in paths.items()}}

    def changed(**changes):
        return tiny_run.config_with(settings | sizes | {name.replace("__", "."): value for name, value in changes.items()})

    return changed


def test_queries_are_the_data_sets_own_or_made(config, rows, tmp_path):
    own = [
        ROWS[0],
        ROWS[0] | {"summary": "another"},
        {"title": "Naps", "post": "Long.\n" * 40, "summary": "Naps. "},
        {"title": "N" * 120, "post": "p", "summary": "x"},
    ]
    path = write_rows(tmp_path / "rows.jsonl", own)
    task = make(rows, train_path=path)
    first, second, _ = task.queries("train")
    assert first == Query(prompt=ROWS[0]["query"], answer="Cat sleeps 0h."), "the first summary of a query stays"
    examples = task.worked_examples(np.random.default_rng(0), 30)
    assert {(first.prompt, " Cat sleeps 0h."), (second.prompt, " Naps.")} < set(examples) and len(examples) == 30
    # Of the byte tokenizer a token is a character: the second fits once it has lost paragraphs, the third never does.
    built = composition.build(config(task__tldr__train_path=path, task__long_prompts="skip"))
    asked = [query.query.prompt for query in built.queries["train"]]
    assert asked == [first.prompt, "TITLE: Naps\n\nPOST: " + "\n".join(["Long."] * 12) + "\n\nTL;DR:"]
    assert [len(query.prompt) for query in built.queries["train"]] == [len(text) for text in asked]
    assert built.skipped["train"] == 1


def test_devices_that_the_task_or_the_policy_lacks_are_refused(config, rows):
    with pytest.raises(ValueError, match=r"searchers\.task_devices=1 would not be used: task\.name='arithmetic' scores without"):
        composition.build(tiny_run.config_with({"searchers.task_devices": 1}))
    built = composition.build(config(task__tldr__train_path=rows, searchers__task_devices=2))
    with pytest.raises(ValueError, match=r"searchers\.task_devices=2 leaves the policy none of the 2 devices"):
        meshes.check(built, role="searcher", devices=2)
