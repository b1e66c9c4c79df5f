"""Token ids of a prompt and of the response after it, with tokenizers that join texts where they meet."""

from typing import Any

import pytest

from tba_jax.text.encoding import encode_pair
from tba_jax.text.tokenizers import CharacterTokenizer


class JoiningTokenizer(CharacterTokenizer):
    """Joins "ab" into one id, as tokenizers with merges do, and begins every text with `space`, as those of Llama models do."""

    def __init__(self, space: str = ""):
        super().__init__("abc_\n.\0")
        self.space, self.ab = space, super().encode("\0")[-1]

    def encode(self, text: str) -> list[int]:
        return super().encode((self.space + text if text else "").replace("ab", "\0"))

    def decode(self, ids: Any) -> str:
        return super().decode(ids).replace("\0", "ab").removeprefix(self.space)


A, B_, C, SPACE = 3, 4, 5, 6


@pytest.mark.parametrize(
    "space, prompt, response, expected",
    [
        ("", "cab", "c", ([1, C, 9], [C, 2])),
        ("", "ca", "bc", ([1, C, A], [B_, C, 2])),  # the texts meet inside of what is one id
        ("_", "ca", "bc", ([1, SPACE, C, A], [B_, C, 2])),  # and the response alone would begin with a space
        ("a", "ca", "bc", ([1, A, C, A], [B_, C, 2])),  # which is joined with the response, too
    ],
)
def test_a_response_continues_the_prompt_as_it_is_encoded_alone(space, prompt, response, expected):
    tokenizer = JoiningTokenizer(space)
    found = encode_pair(prompt, response, tokenizer)
    assert found == expected and tokenizer.decode([*found[0], *found[1]]) == prompt + response


def test_a_response_that_no_tokens_spell_is_refused(monkeypatch):
    monkeypatch.setattr(JoiningTokenizer, "decode", lambda _, ids: str(list(ids)))
    with pytest.raises(ValueError, match="'ca' and 'bc'"):
        encode_pair("ca", "bc", JoiningTokenizer())
