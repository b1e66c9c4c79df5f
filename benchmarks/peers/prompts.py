"""The tokenizer and the prompts of a case, equal for all systems."""

import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.peers import checkpoint
from benchmarks.peers.cases import Case
from tba_jax.tasks.mathematics import GSM8K

COUNT = 256
_GSM8K_PROMPT = "{question}\n\nSolution:\n"


def corpus(gsm8k: Path | None) -> list[str]:
    """Texts of the standard library, or GSM8K's questions in the files train.jsonl and test.jsonl of a folder."""
    if gsm8k is None:
        return [path.read_text(errors="ignore") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    task = GSM8K(train_path=str(gsm8k / "train.jsonl"), heldout_path=str(gsm8k / "test.jsonl"), prompt=_GSM8K_PROMPT)
    return [query.prompt for query in task.queries("train")]


def train(texts: Sequence[str], vocab: int) -> Tokenizer:
    """A byte-level BPE tokenizer with so many tokens. Raises ValueError: the texts do not give as many."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<pad>", "<eos>"],  # checkpoint.PAD and checkpoint.EOS
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"the texts give {tokenizer.get_vocab_size()} tokens, not {vocab}")
    assert [tokenizer.token_to_id(token) for token in ("<pad>", "<eos>")] == [checkpoint.PAD, checkpoint.EOS]
    return tokenizer


def write(folder: Path, tokenizer: Tokenizer) -> None:
    """The files that transformers' AutoTokenizer reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>", "padding_side": "left"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


def of_case(case: Case, tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    """COUNT different prompts: texts of at most case.prompt_length tokens (gsm8k), or pieces of exactly so many of the texts.

    Raises ValueError: there are not as many.
    """
    found = _whole(case, tokenizer, texts) if case.gsm8k else _pieces(case, tokenizer, texts)
    prompts = list(dict.fromkeys(prompt for prompt, _ in zip(found, range(2 * COUNT), strict=False)))[:COUNT]
    if len(prompts) < COUNT:
        raise ValueError(f"the texts give {len(prompts)} prompts of {case.prompt_length} tokens, not {COUNT}")
    return prompts


def _whole(case: Case, tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[str]:
    for i in np.random.default_rng(0).permutation(len(texts)):
        if len(tokenizer.encode(texts[i]).ids) <= case.prompt_length:
            yield texts[i]


def _pieces(case: Case, tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[str]:
    P = case.prompt_length
    for text in texts:
        ids = tokenizer.encode(text[: 100 * P]).ids
        for begin in range(0, len(ids) - P, P):
            piece = tokenizer.decode(ids[begin : begin + P])
            if tokenizer.encode(piece).ids == ids[begin : begin + P]:  # the ends of a piece may be read otherwise
                yield piece
