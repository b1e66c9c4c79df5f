"""Token ids of what stands between two turns of the policy: messages of an environment, and the chat template's own tokens.

The policy's own tokens are never decoded and encoded again: they stay as they were drawn, and only what follows them is encoded.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tba_jax.tasks.tools import PROBE, ToolFormat, format_of
from tba_jax.text.tokenizers import Tokenizer

# A turn of the policy in the conversation whose text tells what the template writes after one.
_TURN = "{turn}"
_SETTING = "task.chat_template=True"
# Texts after which others are encoded, besides the end of sequence: some tokenizers put a space before every text that begins.
_ANCHORS = ("\n", ".")


class Between:
    """What follows a turn. Args: chat_template: whether messages stand in the tokenizer's chat template; else their texts follow
    one another as they are."""

    def __init__(self, tokenizer: Tokenizer, *, chat_template: bool):
        self._tokenizer, self._chat_template = tokenizer, chat_template

    def encode(self, messages: Sequence[Mapping[str, str]], *, after: int) -> list[int]:
        """Token ids of messages up to where the policy's next turn begins.

        Args: after: the last token of the turn before. Where that is the end of sequence, the template's own is left out.

        Raises ValueError: the chat template refuses such messages.
        """
        contents = self._tokenizer.escaped([message["content"] for message in messages])
        if not self._chat_template:
            return self._encoded("".join(contents))
        answers = [{**message, "content": content} for message, content in zip(messages, contents, strict=True)]
        asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}, *answers]
        (text,) = self._tokenizer.conversations([asked], setting=_SETTING)
        _, found, rest = text.partition(_TURN)
        if not found:
            raise ValueError(f"{_SETTING}: the chat template leaves earlier turns out, so there can be no second one")
        return self._encoded(rest.removeprefix(self._tokenizer.eos_text) if after == self._tokenizer.eos_id else rest)

    def tool_format(self, tools: Sequence[Any]) -> ToolFormat:
        """How the chat template writes calls of tools. Args: tools: JSON schemas. Raises ValueError: it knows no tools."""
        call = {"type": "function", "function": PROBE}
        asked = {"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN, "tool_calls": [call]}
        without, called = (
            self._tokenizer.conversations([[*asked, {"role": "user", "content": "?"}]], setting=_SETTING, tools=given)[0]
            for given in ((), tools)
        )
        names = [tool["function"]["name"] for tool in tools]
        if missing := next((name for name in names if name not in called or name in without), None):
            raise ValueError(f"{_SETTING}: the tokenizer's chat template does not tell of tools, such as {missing}")
        found = format_of(called.partition(_TURN)[2])
        if self._tokenizer.escaped([found.before]) != [found.before]:
            raise ValueError(
                f"{_SETTING}: calls of tools begin with the special token {found.before}, which no response may hold"
            )
        return found

    def _encoded(self, text: str) -> list[int]:
        if not text:
            return []
        for anchor in filter(None, (self._tokenizer.eos_text, *_ANCHORS)):
            try:
                before, whole = self._tokenizer.encode_all([anchor, anchor + text], begin=False)
            except ValueError:  # an alphabet without the anchor
                continue
            if whole[: len(before)] == before:
                return whole[len(before) :]
        return self._tokenizer.encode_all([text], begin=False)[0]
