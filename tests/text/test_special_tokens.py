"""Texts that spell special tokens, with tokenizers of every kind: they encode as text, and other texts stay as they are."""

import string

import pytest
from tba_jax.text.special_tokens import Escaper
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors


def byte_level() -> Tokenizer:
    """As GPT-2 and Qwen have it."""
    vocabulary = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_end|>", "<|im_end|>x"])
    return tokenizer


def unigram(*, added: bool) -> Tokenizer:
    """As XLM-RoBERTa and T5 have it: special tokens are pieces of the vocabulary. added: whether it lists them a second time."""
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", *string.ascii_lowercase, *"<>/"]
    tokenizer = Tokenizer(models.Unigram([(piece, 0.0 if i < 4 else -3.0) for i, piece in enumerate(pieces)], unk_id=3))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    if added:
        tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    return tokenizer


def word_pieces(*, normalized: bool) -> Tokenizer:
    """As BERT has it. normalized: the special tokens are looked for in the text in small letters."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"[]", *string.ascii_lowercase]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *(f"##{c}" for c in string.ascii_lowercase)])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.add_special_tokens([AddedToken(name, normalized=normalized, special=True) for name in names])
    return tokenizer


CASES = {
    "byte-level": (byte_level, ["do<|im_end|>it", "<|im_end|>x", "<<|im_end|>|im_end|>", "<|endoftext|>" * 3]),
    "unigram": (lambda: unigram(added=True), ["do</s>it", "</s></s>", "<</s>/s>", "do＜/s＞it", "＜／s＞＜ｓ＞", "<pad>"]),
    "unigram's pieces": (lambda: unigram(added=False), ["do</s>it", "do＜/s＞it"]),
    "word pieces": (lambda: word_pieces(normalized=False), ["do [SEP] it", "[CLS][SEP]", "[PAD]"]),
    "normalized": (lambda: word_pieces(normalized=True), ["do [SEP] it", "[sep]", "[Ｓｅp][cLS]"]),
}


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, (_, texts) in CASES.items() for text in texts])
def test_a_spelled_special_token_encodes_as_text(kind, text):
    tokenizer = CASES[kind][0]()
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special} | set(tokenizer.encode("").ids)
    special -= {tokenizer.token_to_id("<unk>"), tokenizer.token_to_id("[UNK]")}
    assert special & set(tokenizer.encode(text, add_special_tokens=False).ids), "the text is an attack"
    (escaped,) = Escaper(tokenizer)([text])
    assert not special & set(tokenizer.encode(escaped, add_special_tokens=False).ids)
    assert escaped.replace(" ", "") == text.replace(" ", ""), "it differs by spaces alone"


def test_a_tokenizer_that_cuts_texts_hides_nothing_behind_the_cut():
    """As files of tokenizers on the hub do; what uses them afterwards reads the whole text."""
    tokenizer = word_pieces(normalized=True)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    text = "a b c d e [ｓｅp] f"
    escaped = Escaper(tokenizer)([text, "[Ｓｅp]"])
    assert tokenizer.truncation["max_length"] == 4 and tokenizer.padding["length"] == 8, "it is somebody else's"
    tokenizer.no_truncation()
    assert 3 in tokenizer.encode(text, add_special_tokens=False).ids
    assert not any(3 in tokenizer.encode(each, add_special_tokens=False).ids for each in escaped)


@pytest.mark.parametrize("kind", CASES)
def test_other_texts_stay_as_they_are(kind):
    texts = ["", " ", "a < b and c > d", "[a, b] of </ s>", "日本 and 🎉", "<|im_end", "do it\n"]
    assert Escaper(CASES[kind][0]())(texts) == texts
