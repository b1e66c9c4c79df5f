"""What stands around the texts that a frozen model is asked about: a template of one's own, or its tokenizer's chat template."""

import re
from collections.abc import Sequence

from tba_jax.text.tokenizers import HuggingFaceTokenizer

# Who speaks in a chat template: the first text, then the second.
_TURNS = ("user", "assistant")


class PromptTemplate:
    """Puts texts into a template and encodes them; one text gives way where all are longer than the model takes.

    A text that spells a special token is given a space there: it cannot end its turn in a conversation, or begin another. Where
    the whole has no token, the texts are a space each.
    """

    def __init__(
        self,
        tokenizer: HuggingFaceTokenizer,
        template: str,
        *,
        fields: Sequence[str],
        limit: int,
        template_setting: str,
        limit_setting: str,
        system_prompt: str = "",
        ending: str = "",
    ):
        """
        Args:
          template: a text that holds each {field} once; "": the chat template, in which the first field is the user's message and
            the second the assistant's.
          fields: names of the texts. The last one is cut, at its end, where the whole is longer than `limit` tokens, and then the
            one before it.
          template_setting, limit_setting: what messages call the two.
          system_prompt: a message before, in a chat template; ending: a text after all.

        Raises:
          ValueError: the template lacks a field or holds it twice, there is no chat template, what stands around the texts is
            longer than the limit by itself, or not even spaces in it are a token.
        """
        if template and system_prompt:
            raise ValueError(
                f"{template_setting}={template[:60]!r} and a system prompt exclude each other: write it into the text"
            )
        for field in fields if template else ():
            if template.count(f"{{{field}}}") != 1:
                raise ValueError(f"{template_setting}={template[:60]!r} must hold {{{field}}} once: there the {field} stands")
        self._tokenizer, self._template, self._fields = tokenizer, template, tuple(fields)
        self._system_prompt, self._ending, self._limit = system_prompt, ending, limit
        self._setting = f"{template_setting}='', the chat template"
        self._places = re.compile("|".join(re.escape(f"{{{field}}}") for field in fields))
        # A chat template writes the beginning of sequence itself.
        self._begin = bool(template)
        needed = len(self._encoded([("",) * len(fields)])[0])
        if needed >= limit:
            raise ValueError(f"{limit_setting}={limit} leaves no room for any text: what stands around it has {needed} tokens")
        self._blank = self._encoded([(" ",) * len(fields)])[0]
        if not self._blank:
            raise ValueError(f"{template_setting}={template!r} gives no token where a text has none: write something into it")

    def encode(self, texts: Sequence[tuple[str, ...]]) -> tuple[list[list[int]], int]:
        """The ids of each tuple of texts (one of each field) in its surroundings, and how many of them had to be cut."""
        encoded, cut = self._encoded(texts), 0
        for i, ids in enumerate(encoded):
            if len(ids) > self._limit:
                encoded[i], cut = self._cut(texts[i], len(ids)), cut + 1
        return [ids or self._blank for ids in encoded], cut

    def _encoded(self, texts: Sequence[tuple[str, ...]]) -> list[list[int]]:
        return self._tokenizer.encode_all([self._around(each) for each in texts], begin=self._begin)

    def _around(self, texts: tuple[str, ...]) -> str:
        texts = tuple(self._tokenizer.defused(text) for text in texts)
        if self._template:
            by_place = {f"{{{field}}}": text for field, text in zip(self._fields, texts, strict=True)}
            return self._places.sub(lambda found: by_place[found[0]], self._template) + self._ending
        messages = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        messages += [{"role": role, "content": text} for role, text in zip(_TURNS, texts, strict=False)]
        return self._tokenizer.conversation(messages, setting=self._setting) + self._ending

    def _cut(self, texts: tuple[str, ...], length: int) -> list[int]:
        """The ids with less of the last text, by as many tokens as there are too many, until they fit; then of the one before."""
        kept_texts = list(texts)
        for i in reversed(range(len(texts))):
            own = self._tokenizer.encode_all([texts[i]], begin=False)[0]
            kept = len(own)
            while kept:
                kept = max(0, kept - (length - self._limit))
                kept_texts[i] = self._tokenizer.decode(own[:kept])
                ids = self._encoded([tuple(kept_texts)])[0]
                if len(ids) <= self._limit:
                    return ids
                length = len(ids)
        raise AssertionError("without any text there is room")
