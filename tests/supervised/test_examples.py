"""JSON lines to examples: what is kept, what is refused and by which words, and the split into train and held-out ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import supervised as recipe
from tba_jax.supervised import objectives, tuning
from tba_jax.text.tokenizers import CharacterTokenizer

TOKENIZER = CharacterTokenizer("abcdefgh:")  # encode begins with 1; 2 is the end of sequence, a is 3
LIMITS = {"prompt_length": 8, "response_length": 16, "heldout_share": 0.3}


def write(path: Path, lines: list[Any]) -> Path:
    texts = [line if isinstance(line, (bytes, str)) else json.dumps(line) for line in lines]
    path.write_bytes(b"".join((text if isinstance(text, bytes) else text.encode()) + b"\n" for text in texts))
    return path


def load(train: Path, kind: str = "sft", **changes: Any) -> tuning.Data:
    c = recipe.get_config().data
    c.update({**LIMITS, "train": str(train), **changes})
    return tuning.load(c, kind, TOKENIZER)


def words(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("abcdefgh"), 6)) for _ in range(count)]


def test_a_line_becomes_token_ids(tmp_path):
    first = {"prompt": "a:", "response": "bc", "chosen": "bb", "rejected": "", "source": 7}
    train = write(tmp_path / "train.jsonl", [b"\xef\xbb\xbf" + json.dumps(first).encode(), "", {**first, "prompt": "b:"}])
    heldout = str(write(tmp_path / "heldout.jsonl", [first]))
    data = load(train, heldout=heldout)
    assert [[ids.tolist() for ids in example] for example in data.train] == [[[1, 3, 11], [4, 5, 2]], [[1, 4, 11], [4, 5, 2]]]
    assert [[ids.tolist() for ids in example] for example in data.heldout] == [[[1, 3, 11], [4, 5, 2]]]
    pairs = load(train, "reward", heldout=heldout, chosen_field="response")
    assert [ids.tolist() for ids in pairs.train[1]] == [[1, 4, 11], [4, 5, 2], [2]]
    assert len({data.fingerprint, pairs.fingerprint, load(train, heldout=str(train)).fingerprint}) == 3
    assert load(train, heldout=heldout).fingerprint == data.fingerprint


def test_batches_are_padded_and_filled():
    ids = [tuple(np.array(part, np.int32) for part in row) for row in ([[1, 3], [4, 2], [2]], [[1, 3, 11], [2], [5, 5, 2]])]
    pairs = objectives.make_batch(ids, rows=3, prompt_length=4, response_length=3, pad_id=0)
    first = [[1, 3, 4, 2, 0, 0, 0], [1, 3, 2, 0, 0, 0, 0]]
    second = [[1, 3, 11, 2, 0, 0, 0], [1, 3, 11, 5, 5, 2, 0]]
    np.testing.assert_array_equal(pairs.tokens, [first, second, [[0] * 7] * 2])
    np.testing.assert_array_equal(pairs.prompt_length, [[2, 2], [3, 3], [1, 1]])
    np.testing.assert_array_equal(pairs.response_length, [[2, 1], [1, 3], [0, 0]])
    assert float(pairs.size) == 2
    single = objectives.make_batch([row[:2] for row in ids], rows=2, prompt_length=4, response_length=3, pad_id=0)
    np.testing.assert_array_equal(single.tokens, [first[0], second[0]])
    assert single.response_length.tolist() == [2, 1] and float(single.size) == 3


def test_the_split_by_hash_keeps_prompts_apart_and_stays(tmp_path):
    lines = [{"prompt": word, "response": "a" * count} for word in words(100, seed=1) for count in (1, 2)]

    def split(lines: list[Any]) -> tuple[set[bytes], set[bytes]]:
        data = load(write(tmp_path / "lines.jsonl", lines))
        assert len(data.train) + len(data.heldout) == len(lines)
        return {prompt.tobytes() for prompt, _ in data.train}, {prompt.tobytes() for prompt, _ in data.heldout}

    train, heldout = split(lines)
    assert not train & heldout and 0.2 < len(heldout) / len(train | heldout) < 0.4
    more_train, more_heldout = split([*({"prompt": word, "response": "b"} for word in words(50, seed=2)), *reversed(lines)])
    assert train <= more_train and heldout <= more_heldout


# Lines, kind, changed settings -> words of the sentence; {} is the file.
GOOD = {"prompt": "ab:", "chosen": "ba", "rejected": "b", "response": "ba"}
LONG, SAME = {**GOOD, "response": "a" * 20}, {**GOOD, "rejected": "ba"}
SKIP = {"unfit": "skip"}
MISSING = "data.train {} line 2: field 'chosen' is missing (it has prompt, rejected)"
UNFIT = "1 of the 2 examples of data.train {} are unfit, first line 2: "
BAD_LINES: dict[str, tuple[list[Any], str, dict[str, Any], str]] = {
    "missing": ([GOOD, {"prompt": "a", "rejected": "b"}], "reward", {}, MISSING),
    "alphabet": ([GOOD, {**GOOD, "response": "z"}], "sft", {}, "line 2: field 'response': character 'z'"),
    "long response": ([GOOD, LONG], "sft", {}, f"{UNFIT}field 'response' has 21 tokens, end of sequence included, data.resp"),
    "all too long": ([LONG], "sft", SKIP, "1 of the 1 examples of data.train {} are unfit, first line 1: field 'response' has"),
    "identical": ([GOOD, SAME], "reward", {}, f"{UNFIT}fields 'chosen' and 'rejected' hold the same text; data.unfit=skip"),
    "one prompt": ([GOOD] * 9, "sft", {}, "data.heldout_share=0.3 splits the examples of data.train {} into"),
    "held-out file": ([GOOD], "sft", {"heldout": "/nowhere.jsonl"}, "data.heldout /nowhere.jsonl cannot be read: No such file"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_lines_are_named(tmp_path, case):
    lines, kind, changes, sentence = BAD_LINES[case]
    train = write(tmp_path / "train.jsonl", lines)
    with pytest.raises(ValueError) as refused:
        load(train, kind, **changes)
    assert sentence.format(train) in str(refused.value)


def test_unfit_examples_may_be_left_out(tmp_path):
    train = write(tmp_path / "train.jsonl", [GOOD, {**GOOD, "chosen": "a" * 20}, SAME])
    data = load(train, "reward", heldout=str(train), **SKIP)
    assert len(data.train) == len(data.heldout) == 1 and data.skipped == 4
