"""Tokenizer and prompts of the comparison of systems: every system reads the prompts as the same tokens."""

import pytest
from transformers import AutoTokenizer

from benchmarks.peers import checkpoint, prompts
from benchmarks.peers.cases import Case
from tba_jax.text import tokenizers

VOCAB, P = 400, 12


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return prompts.corpus(None)[:12]


@pytest.fixture(scope="module")
def tokenizer(texts):
    return prompts.train(texts, VOCAB)


def case(**fields) -> Case:
    return Case(about="", vocab=VOCAB, prompt_length=P, **fields)


def test_prompts_have_their_length_in_every_tokenizer(tmp_path, texts, tokenizer):
    found = prompts.of_case(case(), tokenizer, texts)
    assert len(set(found)) == prompts.COUNT
    prompts.write(tmp_path, tokenizer)
    checkpoint.write(tmp_path, vocab=VOCAB, ends=0.0)
    theirs, ours = AutoTokenizer.from_pretrained(str(tmp_path)), tokenizers.HuggingFaceTokenizer(tmp_path)
    assert (theirs.pad_token_id, theirs.eos_token_id) == (ours.pad_id, ours.eos_id) == (checkpoint.PAD, checkpoint.EOS)
    for prompt in found[:50]:
        ids = theirs(prompt).input_ids
        assert len(ids) == P
        assert list(ours.encode(prompt)) == ids


def test_whole_texts_are_those_that_fit(tokenizer):
    texts = [f"{i} {'x y ' * (i % 9)}" for i in range(1000)]
    found = prompts.of_case(case(gsm8k=True), tokenizer, texts)
    assert set(found) <= set(texts)
    assert max(len(tokenizer.encode(prompt).ids) for prompt in found) <= P
    assert len({len(tokenizer.encode(prompt).ids) for prompt in found}) > 1


def test_texts_that_are_too_few_are_refused(tokenizer):
    with pytest.raises(ValueError, match=f"1 prompts of {P} tokens"):
        prompts.of_case(case(gsm8k=True), tokenizer, ["one"])
    with pytest.raises(ValueError, match="100000"):
        prompts.train(["one"], 100_000)
