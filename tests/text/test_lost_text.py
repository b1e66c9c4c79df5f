"""Prompts that a tokenizer does not keep, and changes that are none."""

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from tba_jax.text import lost_text
from tba_jax.text.lost_text import Lost
from tba_jax.text.tokenizers import CharacterTokenizer, HuggingFaceTokenizer
from tests.support import tiny_checkpoints


@pytest.fixture
def without_slash(tmp_path):
    """A tokenizer of one id a character that knows digits, letters and the space alone."""
    return HuggingFaceTokenizer(tiny_checkpoints.write_letters(tmp_path / "letters", "0123456789abcdefghijklm "))


def test_a_character_without_a_token_is_found(without_slash):
    lost = lost_text.find(["add 1 2", "a 1/5 and 2/5", "3/4"], without_slash)
    assert lost.count == 2 and lost.text == "a 1/5 and 2/5" and lost.read == "a 15 ad 25"  # n is unknown too


def test_an_example_is_an_excerpt_that_a_terminal_may_show(without_slash):
    lost = lost_text.find(["a" * 500 + "\x1b[31m\u202e1/5" + "b" * 500], without_slash)
    assert lost.count == 1 and len(lost.text) < 90 and "\x1b" not in lost.text and "\\x1b[31m\\u202e1/5b" in lost.text
    assert lost.read == "a" * 20 + "31m15" + "b" * 35


def test_tokenizers_that_keep_all_text(tmp_path):
    prompts = ["1/5 of  it\n\nis\t“x” — ½ 漢字 <|end|> <tool> é", " "]
    byte_level = HuggingFaceTokenizer(tiny_checkpoints.write_byte_bpe(tmp_path / "bytes"))
    assert lost_text.find(prompts, byte_level) == Lost(count=0)
    assert lost_text.find(["1/5"], CharacterTokenizer("1/5")) == Lost(count=0)
    assert lost_text.find([], byte_level) == Lost(count=0)


@pytest.mark.parametrize("form", [normalizers.NFKC(), normalizers.NFD(), normalizers.Strip()])
def test_normal_forms_and_white_space_are_no_loss(form, tmp_path):
    prompts = [" 1/5 é ½ "]
    folder = tiny_checkpoints.write_byte_bpe(tmp_path / "bytes")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.normalizer = form
    backend.save(str(folder / "tokenizer.json"))
    assert lost_text.find(prompts, HuggingFaceTokenizer(folder)) == Lost(count=0)


def test_letters_that_become_others_are_a_loss(tmp_path):
    folder = tiny_checkpoints.write_byte_bpe(tmp_path / "bytes")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.normalizer = normalizers.Lowercase()
    backend.save(str(folder / "tokenizer.json"))
    assert lost_text.find(["Ann has 1/5"], HuggingFaceTokenizer(folder)) == Lost(count=1, text="Ann has 1/5", read="ann has 1/5")


def test_the_unknown_token_does_not_stand_for_a_character(tmp_path):
    folder = tiny_checkpoints.write_byte_bpe(tmp_path / "words")
    words = Tokenizer(models.WordLevel({"<|end|>": 0, "<unk>": 1, "one": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens(["<|end|>", "<unk>"])
    words.save(str(folder / "tokenizer.json"))
    assert lost_text.find(["one two"], HuggingFaceTokenizer(folder)) == Lost(count=1, text="one two", read="one")
