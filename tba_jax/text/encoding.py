"""Encodes a prompt and its response as generation would see them."""

from collections.abc import Iterator

from tba_jax.text.tokenizers import Tokenizer


def encode_pair(prompt: str, response: str, tokenizer: Tokenizer, *, begin: bool = True) -> tuple[list[int], list[int]]:
    """Token ids of a prompt, as generation starts from it, and token ids of the response, which end with the end of sequence.

    Args: begin: see Tokenizer.encode_all.

    Raises:
      ValueError: the tokenizer merges the two texts where they meet, so that no tokens after the prompt's spell the response.
    """
    prompt_ids, whole = tokenizer.encode_all([prompt, prompt + response], begin=begin)
    if whole[: len(prompt_ids)] == prompt_ids:
        return prompt_ids, [*whole[len(prompt_ids) :], tokenizer.eos_id]
    text = tokenizer.decode(whole)  # lacks the characters for which the tokenizer has no token
    for ids in _spellings(response, tokenizer):
        if tokenizer.decode([*prompt_ids, *ids]) == text:
            return prompt_ids, [*ids, tokenizer.eos_id]
    raise ValueError(
        f"the tokenizer merges {prompt[-12:]!r} and {response[:12]!r} where they meet: begin the response at another character"
    )


# Texts with which tokenizers do not merge the text that follows.
_ANCHORS = ("\n", ".")


def _spellings(response: str, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Token ids that may spell the response in the middle of a text, the likeliest first.

    Some tokenizers put a space before every text, and so before a response that is encoded alone. The space may be a token of its
    own, which can be dropped. Or it is merged into the response's first token; then the response is encoded after an anchor.
    """
    alone = tokenizer.encode(response)[len(tokenizer.encode("")) :]
    yield from (alone, alone[1:])
    for anchor in _ANCHORS:
        before, whole = tokenizer.encode(anchor), tokenizer.encode(anchor + response)
        if whole[: len(before)] == before:
            yield whole[len(before) :]
