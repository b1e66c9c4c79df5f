"""What stands around the texts that a frozen model is asked about: a template of one's own, or its tokenizer's chat template."""

import re
from collections.abc import Sequence

from tba_jax.tokenizer import HuggingFaceTokenizer

# Who speaks in a chat template: the first text, then the second.
_TURNS = ("user", "assistant")


class Surroundings:
    """Puts texts into a template and encodes them; one text gives way where all are longer than the model takes.

    Special tokens that a text spells out are these tokens, as in the tokenizers of transformers.
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
          fields: names of the texts. The last one is cut, at its end, where the whole is longer than `limit` tokens.
          template_setting, limit_setting: what messages call the two.
          system_prompt: a message before, in a chat template; ending: a text after all.

        Raises:
          ValueError: the template lacks a field or holds it twice, there is no chat template, or what stands around the texts is
            longer than the limit by itself.
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

    def encode(self, texts: Sequence[tuple[str, ...]]) -> tuple[list[list[int]], int]:
        """The ids of each tuple of texts (one of each field) in its surroundings, and how many of them had to be cut."""
        encoded, cut = self._encoded(texts), 0
        for i, ids in enumerate(encoded):
            if len(ids) > self._limit:
                encoded[i], cut = self._cut(texts[i], len(ids)), cut + 1
        return encoded, cut

    def _encoded(self, texts: Sequence[tuple[str, ...]]) -> list[list[int]]:
        return self._tokenizer.encode_all([self._around(each) for each in texts], begin=self._begin)

    def _around(self, texts: tuple[str, ...]) -> str:
        if self._template:
            by_place = {f"{{{field}}}": text for field, text in zip(self._fields, texts, strict=True)}
            return self._places.sub(lambda found: by_place[found[0]], self._template) + self._ending
        messages = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        messages += [{"role": role, "content": text} for role, text in zip(_TURNS, texts, strict=False)]
        return self._tokenizer.conversation(messages, setting=self._setting) + self._ending

    def _cut(self, texts: tuple[str, ...], length: int) -> list[int]:
        """The ids with less of the last text: by as many tokens as there are too many, until they fit."""
        own = self._tokenizer.encode_all([texts[-1]], begin=False)[0]
        kept = len(own)
        while True:
            kept = max(0, kept - (length - self._limit))
            ids = self._encoded([(*texts[:-1], self._tokenizer.decode(own[:kept]))])[0]
            if len(ids) <= self._limit:
                return ids
            if not kept:
                raise ValueError(
                    f"{len(ids)} tokens stand before the {self._fields[-1]}, which are {self._limit} with it at most: "
                    f"{texts[0][:60]!r}"
                )
            length = len(ids)
