"""TL;DR: queries and their truncation by hand, rewards and win rates of tiny real models, bad rows and models."""

import re

import jax
import numpy as np
import pytest

from tba_jax import sharding
from tba_jax.experiment import composition, meshes
from tba_jax.rewards import LOADERS, task_models
from tba_jax.tasks.interface import Query
from tba_jax.tasks.tldr import TLDR
from tba_jax.text.tokenizers import HuggingFaceTokenizer
from tests.support import random_checkpoints, tiny_checkpoints, tiny_run
from tests.support.summaries import ROWS, write_rows


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Rows, a reward and a gold model of other weights, a classifier of three labels, and a policy."""
    folder = tmp_path_factory.mktemp("tldr")
    tokens = random_checkpoints.byte_tokenizer(folder / "tokens")
    for seed, (name, labels) in enumerate([("reward", 1), ("gold", 1), ("classifier", 3), ("policy", 0)]):
        random_checkpoints.write(folder / name, "pythia-410m", tokens, labels=labels, seed=seed)
    write_rows(folder / "rows.jsonl", ROWS)
    return folder


def make(folders, *, gold: str = "", **changes) -> TLDR:
    settings = dict(
        train_path=str(folders / "rows.jsonl"),
        heldout_path=str(folders / "rows.jsonl"),
        reward_path=str(folders / "reward"),
        gold_path=gold and str(folders / gold),
        compute_dtype="float32",
        batch_rows=4,
    )
    return TLDR(**(settings | changes))


def one_device():
    return sharding.make_mesh((1, 1, 1), setting="test", devices=jax.devices()[:1])


WIDTH = 160  # no row is longer


def scored(folder, texts, ended) -> np.ndarray:
    """What a reward model says of texts one at a time, the end-of-sequence token appended by hand."""
    config, params = tiny_checkpoints.load(folder)
    tokenizer = HuggingFaceTokenizer(folder)
    found = []
    for text, end in zip(texts, ended, strict=True):
        row = tokenizer.encode(text) + [tokenizer.eos_id] * bool(end)
        tokens = np.array([row + [0] * (WIDTH - len(row))], np.int32)
        found.append(tiny_checkpoints.scores(params, tokens, np.arange(WIDTH)[None] < len(row), config)[0, 0])
    return np.array(found)


def test_the_reward_is_read_at_the_end_of_the_summary(folders):
    task = make(folders)
    task.start(one_device(), LOADERS)
    queries, finished = task.queries("train")[:3], np.array([True, False, True])
    responses = [" It sleeps.", " It sleeps.", " Cat"]
    found = task.rewards(queries, responses, finished)
    texts = [query.prompt + response for query, response in zip(queries, responses, strict=True)]
    expected = scored(folders / "reward", texts, finished)
    np.testing.assert_allclose(found.reward, expected, atol=1e-5)
    np.testing.assert_array_equal(found.parts[:, 0], found.reward)
    assert found.reward.dtype == np.float32 and abs(found.reward[1] - scored(folders / "reward", texts[1:2], [True])[0]) > 1e-5
    assert task.measures(queries, responses, finished, found.reward) == {}, "without a gold model nothing is compared"


def test_the_win_rate_is_against_the_reference_summary(folders):
    task = make(folders, gold="gold")
    task.start(one_device(), LOADERS)
    queries = list(task.queries("heldout")) * 2
    # The second response of the first query is its reference summary: a tie.
    responses = [f" {'very ' * i}long" for i in range(5)] + [f" {queries[0].answer}", *[f" {'no ' * i}" for i in range(1, 5)]]
    finished = np.array([True] * 8 + [False] * 2)
    ours = scored(folders / "gold", [q.prompt + r for q, r in zip(queries, responses, strict=True)], finished)
    theirs = scored(folders / "gold", [f"{query.prompt} {query.answer}" for query in queries], [True] * 10)
    won = [False if i == 5 else a > b for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    assert 0 < sum(won) < 9, "the case is an empty one"
    for _ in range(2):  # the second time the references' scores are known
        found = task.measures(queries, responses, finished, np.zeros(10, np.float32))
        others = [i for i in range(10) if i != 5]  # a tie in float32 may not be one in another pass
        for name in ("win_rate_strict", "win_rate_ties_half"):
            np.testing.assert_array_equal(found[name][others], np.array(won)[others])
        np.testing.assert_allclose(found["gold_reward"], ours, atol=1e-5)
        np.testing.assert_allclose(found["gold_reward_of_summaries"], theirs, atol=1e-5)


POST = "One line.\nA second line.\n\nA last one."


def test_a_post_is_cut_at_a_paragraph(folders, tmp_path):
    head, tail = "SUBREDDIT: r/cats\n\nTITLE: Naps\n\nPOST: ", "\n\nTL;DR:"
    around = len(head) + len(tail)
    path = write_rows(tmp_path / "rows.jsonl", [{"subreddit": "r/cats", "title": "Naps", "post": POST, "summary": "Naps. "}])
    task = make(folders, train_path=path)
    (query,) = task.queries("train")
    assert query == Query(prompt=head + POST + tail, answer="Naps.")
    kept = {
        len(POST) - 1: "One line.\nA second line.",
        len("One line.\nA second line."): "One line.\nA second line.",
        len("One line.\nA second line.") - 1: "One line.",
        len("One line."): "One line.",
        len("One line.") - 1: "One",  # no paragraph is whole
        3: "One",
        2: "",
        0: "",
    }
    for room, post in kept.items():
        found = task.shortened(query, lambda prompt, room=room: len(prompt) <= around + room)
        assert found == Query(prompt=head + post + tail, answer="Naps."), room
    assert task.shortened(query, lambda prompt: len(prompt) < around) is None
    ready = task.queries("heldout")[0]
    assert task.shortened(ready, lambda prompt: True) is None, "a query of the data set stays as it is"


def test_queries_are_the_data_sets_own_or_made(folders, tmp_path):
    rows = [
        ROWS[0],
        ROWS[0] | {"summary": "another"},
        {"title": "Naps", "post": "Long.\n" * 40, "summary": "Naps. "},
        {"title": "N" * 120, "post": "p", "summary": "x"},
    ]
    task = make(folders, train_path=write_rows(tmp_path / "rows.jsonl", rows))
    first, second, _ = task.queries("train")
    assert first == Query(prompt=ROWS[0]["query"], answer="Cat sleeps 0h."), "the first summary of a query stays"
    examples = task.worked_examples(np.random.default_rng(0), 30)
    assert {(first.prompt, " Cat sleeps 0h."), (second.prompt, " Naps.")} < set(examples) and len(examples) == 30
    # Of the byte tokenizer a token is a character: the second fits once it has lost paragraphs, the third never does.
    changes = {"task.tldr.train_path": str(tmp_path / "rows.jsonl"), "task.prompt_length": 100, "task.long_prompts": "skip"}
    c = config(folders)
    c.update_from_flattened_dict(changes | {"learner.queries": 2})
    built = composition.build(c)
    asked = [query.query.prompt for query in built.queries["train"]]
    assert asked == [first.prompt, "TITLE: Naps\n\nPOST: " + "\n".join(["Long."] * 12) + "\n\nTL;DR:"]
    assert [len(query.prompt) for query in built.queries["train"]] == [len(text) for text in asked] and built.skipped[
        "train"
    ] == 1


@pytest.mark.parametrize(
    "row, sentence",
    [
        ({"query": "TL;DR:"}, "field 'summary' is missing"),
        ({"summary": "x", "title": "Naps"}, "line 2: fields 'query' and 'post' are both missing"),
        ({"summary": 3, "query": "x"}, "field 'summary' must be a string"),
        ({"summary": " ", "query": "x"}, "line 2: field 'summary' is empty"),
    ],
)
def test_bad_rows_are_said(row, sentence, folders, tmp_path):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        make(folders, train_path=write_rows(tmp_path / "rows.jsonl", [ROWS[0], row]))


def test_bad_models_are_said(folders):
    with pytest.raises(ValueError, match=r"task\.tldr\.reward_path='' names no reward model"):
        make(folders, reward_path="")
    for name in ("reward", "gold"):
        with pytest.raises(
            ValueError, match=rf"{name}_path='.*' must have one label, as a reward model has; it has 3, LABEL_0, LABEL_1, LABEL_2"
        ):
            task_models.check(make(folders, **{f"{name}_path": str(folders / "classifier")}), role="evaluator")


def config(folders, **changes):
    paths = {
        "task.tldr.train_path": str(folders / "rows.jsonl"),
        "task.tldr.heldout_path": str(folders / "rows.jsonl"),
        "task.tldr.reward_path": str(folders / "reward"),
        "task.tldr.gold_path": str(folders / "gold"),
        "model.path": str(folders / "policy"),
    }
    sizes = {"task.prompt_length": 128, "task.response_length": 8, "learner.queries": 2, "learner.completions": 2}
    return tiny_run.config_with(
        {"task.name": "tldr"} | paths | sizes | {name.replace("__", "."): v for name, v in changes.items()}
    )


def test_a_config_with_models_that_do_not_score_is_refused(folders):
    with pytest.raises(ValueError, match=r"^task\.tldr\.reward_path='.*policy' is not a sequence classifier or reward model"):
        composition.build(config(folders, task__tldr__reward_path=str(folders / "policy")))
    built = composition.build(config(folders, task__tldr__gold_path=str(folders / "policy")))
    task_models.check(built.task, role="searcher")
    with pytest.raises(ValueError, match=r"^task\.tldr\.gold_path='.*policy' is not a sequence classifier"):
        task_models.check(built.task, role="evaluator")
    with pytest.raises(ValueError, match=r"searchers\.task_devices=1 would not be used: task\.name='arithmetic' scores without"):
        composition.build(tiny_run.config_with({"searchers.task_devices": 1}))
    with pytest.raises(ValueError, match=r"searchers\.task_devices=2 leaves the policy none of the 2 devices"):
        meshes.check(composition.build(config(folders, searchers__task_devices=2)), role="searcher", devices=2)


def test_the_contract_names_the_reward_model_by_its_weights(folders, tmp_path):
    """Where its folder lies does not matter, and the gold model defines no reward."""
    contracts = [
        composition.build(config(folders, **{f"task__tldr__{name}_path": str(folders / path)})).contract.to_json()
        for name, path in [("reward", "reward"), ("reward", "gold"), ("gold", "reward")]
    ]
    same, other, gold = contracts
    assert list(same["reward_models"]) == ["task.tldr.reward_path"] and same == gold
    assert {name for name in same if same[name] != other[name]} == {"reward_models"}
