"""The prompt template of a frozen model: a text with places for its fields, or the chat template of the model's tokenizer."""

import logging
import re
from collections.abc import Sequence

from tba_jax.text.tokenizers import HuggingFaceTokenizer

log = logging.getLogger(__name__)

# The role of the first field in a chat template, and of the second.
_ROLES = ("user", "assistant")


class PromptTemplate:
    """Puts texts into a prompt template and encodes the prompts; texts of a prompt that is too long are cut.

    A text that spells special tokens is escaped, so that no text can end its turn in a conversation or begin another.
    If a prompt has no token at all, its texts are replaced by a space each.
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
          template: a text that contains each {field} once; "": the chat template, whose user message is the first field and whose
            assistant message is the second.
          fields: names of the texts. If a prompt has more than `limit` tokens, the end of its last text is cut off, and then, if
            that is not enough, the end of the text before it.
          template_setting, limit_setting: names of the two settings in messages.
          system_prompt: the system message of a chat template; ending: a text that follows the filled-in template.

        Raises:
          ValueError: the template lacks a field or contains it twice, there is no chat template, the template alone has `limit`
            tokens or more, or it has no token even with a space for every field.
        """
        if template and system_prompt:
            raise ValueError(
                f"{template_setting}={template[:60]!r} and a system prompt exclude each other: write it into the template"
            )
        for field in fields if template else ():
            if template.count(f"{{{field}}}") != 1:
                raise ValueError(f"{template_setting}={template[:60]!r} must hold {{{field}}} once, where the {field} belongs")
        self._tokenizer, self._template, self._fields = tokenizer, template, tuple(fields)
        self._system_prompt, self._ending = system_prompt, ending
        self._limit, self._limit_setting, self._warned = limit, limit_setting, False
        self._setting = f"{template_setting}='', the chat template"
        self._places = re.compile("|".join(re.escape(f"{{{field}}}") for field in fields))
        # A chat template writes the beginning of sequence itself.
        self._begin = bool(template)
        needed = len(self._encoded([("",) * len(fields)])[0])
        if needed >= limit:
            raise ValueError(f"{limit_setting}={limit} leaves no room for any text: the template alone has {needed} tokens")
        self._blank = self._encoded([(" ",) * len(fields)])[0]
        if not self._blank:
            raise ValueError(f"{template_setting}={template!r} has no token when its texts are empty: write something into it")

    def encode(self, texts: Sequence[tuple[str, ...]]) -> list[list[int]]:
        """Token ids of one prompt for each tuple of texts (one text a field). The first time that texts are cut, it logs so."""
        encoded = self._encoded(texts)
        too_long = [i for i, ids in enumerate(encoded) if len(ids) > self._limit]
        for i in too_long:
            encoded[i] = self._cut(texts[i], len(encoded[i]))
        if too_long and not self._warned:
            self._warned = True
            log.warning(
                "%d of %d prompts exceed %s=%d tokens: their texts are cut at the end (further ones are not reported)",
                *(len(too_long), len(texts), self._limit_setting, self._limit),
            )
        return [ids or self._blank for ids in encoded]

    def _encoded(self, texts: Sequence[tuple[str, ...]]) -> list[list[int]]:
        escaped = [tuple(self._tokenizer.escaped(each)) for each in texts]
        return self._tokenizer.encode_all([self._filled_in(each) for each in escaped], begin=self._begin)

    def _filled_in(self, texts: tuple[str, ...]) -> str:
        """The template with these escaped texts in the places of its fields, and the ending."""
        if self._template:
            by_place = {f"{{{field}}}": text for field, text in zip(self._fields, texts, strict=True)}
            return self._places.sub(lambda found: by_place[found[0]], self._template) + self._ending
        messages = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        messages += [{"role": role, "content": text} for role, text in zip(_ROLES, texts, strict=False)]
        return self._tokenizer.conversations([messages], setting=self._setting)[0] + self._ending

    def _cut(self, texts: tuple[str, ...], length: int) -> list[int]:
        """Token ids of a prompt of `length` tokens after cutting: the last text loses the excess tokens until the prompt fits;
        once that text is empty, the text before it does."""
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
        raise AssertionError("the constructor checked that the template without texts fits")
