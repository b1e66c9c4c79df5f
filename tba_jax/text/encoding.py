"""A prompt and the response to it as token ids, as generation sees them."""

from collections.abc import Iterator

from tba_jax.text.tokenizers import Tokenizer


def encode_pair(prompt: str, response: str, tokenizer: Tokenizer, *, begin: bool = True) -> tuple[list[int], list[int]]:
    """Token ids of a prompt, as generation begins with it, and of what is to follow, the end of sequence last.

    Args: begin: see Tokenizer.encode_all.

    Raises:
      ValueError: no tokens after the prompt's spell the response, since the tokenizer joins the two texts where they meet.
    """
    prompt_ids, whole = tokenizer.encode_all([prompt, prompt + response], begin=begin)
    if whole[: len(prompt_ids)] == prompt_ids:
        return prompt_ids, [*whole[len(prompt_ids) :], tokenizer.eos_id]
    text = tokenizer.decode(whole)  # without what the tokenizer has no token for
    for ids in _spellings(response, tokenizer):
        if tokenizer.decode([*prompt_ids, *ids]) == text:
            return prompt_ids, [*ids, tokenizer.eos_id]
    raise ValueError(f"the tokenizer joins {prompt[-12:]!r} and {response[:12]!r}: begin the response at another place")


# Texts that a response can stand after without being joined with them.
_ANCHORS = ("\n", ".")


def _spellings(response: str, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Token ids that may spell the response inside of a text, the likeliest first.

    A tokenizer that puts a space before every text has it before a response that it is given alone, too: as a token of its own,
    which can be left out, or joined with the response, which then has to be encoded after something.
    """
    alone = tokenizer.encode(response)[len(tokenizer.encode("")) :]
    yield from (alone, alone[1:])
    for anchor in _ANCHORS:
        before, whole = tokenizer.encode(anchor), tokenizer.encode(anchor + response)
        if whole[: len(before)] == before:
            yield whole[len(before) :]
