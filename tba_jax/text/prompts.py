"""Prompts as token ids: those of queries, of a prompt with a given response, and of the templates of frozen models."""

import hashlib
import itertools
import logging
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tba_jax.outputs import visible_line
from tba_jax.tasks.interface import EncodedQuery, Query
from tba_jax.text.tokenizers import HuggingFaceTokenizer, Tokenizer

log = logging.getLogger(__name__)


class EncodedQueries(Sequence[EncodedQuery]):
    """Queries whose token ids share one array, so that hundreds of thousands of queries take little memory; a slice is a list."""

    def __init__(self, queries: Sequence[Query], ids: Sequence[Sequence[int]]):
        self._queries, self._bounds = queries, np.cumsum([0, *map(len, ids)])
        self._tokens = np.fromiter(itertools.chain.from_iterable(ids), np.int32, int(self._bounds[-1]))

    def __len__(self) -> int:
        return len(self._queries)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        i = range(len(self))[index]
        prompt = self._tokens[self._bounds[i] : self._bounds[i + 1]].tolist()
        return EncodedQuery(query=self._queries[i], prompt=tuple(prompt))


def template(tokenizer: Tokenizer, *, chat_template: bool, system_prompt: str, tools: Sequence[Any] = ()) -> dict[str, str]:
    """The contract's entry of a chat template: its text around a prompt, and a digest of its source; {} if it is not used.

    Args: tools: JSON schemas of the tools that it tells of.

    Raises ValueError if there is no chat template, or it refuses these messages or leaves the prompt out.
    """
    if not chat_template:
        if system_prompt:
            raise ValueError(f"task.system_prompt={system_prompt[:60]!r} is part of a chat template: set task.chat_template=True")
        return {}
    text, other = tokenizer.chat(["{prompt}", "{another prompt}"], system_prompt, tools=tools)
    if text == other:
        raise ValueError("task.chat_template: the tokenizer's template leaves the prompt out")
    return {"text": text, "source": hashlib.blake2b(tokenizer.chat_template.encode(), digest_size=8).hexdigest()}


def texts(
    prompts: Sequence[str], tokenizer: Tokenizer, *, chat_template: bool, system_prompt: str, tools: Sequence[Any] = ()
) -> list[str]:
    """What the policy reads of prompts: in the chat template, in which none can end its turn, or as they are."""
    return tokenizer.chat(tokenizer.escaped(prompts), system_prompt, tools=tools) if chat_template else list(prompts)


# (query, whether a prompt fits) -> the query with as much of its prompt as fits, None if no part of it does.
Shorten = Callable[[Query, Callable[[str], bool]], Query | None]


def encode(
    queries: Sequence[Query],
    tokenizer: Tokenizer,
    *,
    chat_template: bool,
    system_prompt: str,
    limit: int,
    long_prompts: str,
    split: str,
    tools: Sequence[Any] = (),
    shorten: Shorten | None = None,
) -> tuple[EncodedQueries, int]:
    """The queries whose prompts fit, and the number of queries that were left out.

    Args: chat_template, system_prompt, long_prompts: settings of task; limit: most tokens of a prompt, template included; split:
      what messages call the queries; tools: see template.

    Raises ValueError: prompts are too long and long_prompts is "refuse", no prompt fits, or one has no token.
    """
    around: dict[str, Any] = dict(chat_template=chat_template, system_prompt=system_prompt, tools=tools)
    queries, read = _distinct(queries, texts([query.prompt for query in queries], tokenizer, **around), split)
    ids = tokenizer.encode_all(read, begin=not chat_template)
    lengths = np.array([len(each) for each in ids], int)
    if not lengths.all():
        empty = queries[int((lengths == 0).argmax())]
        raise ValueError(f"the {split} prompt {empty.prompt[:60]!r} has no token: the tokenizer knows none of its characters")
    fits = lengths <= limit
    if not fits.all() and shorten is not None:

        def fit(prompt: str) -> bool:
            return len(tokenizer.encode_all(texts([prompt], tokenizer, **around), begin=not chat_template)[0]) <= limit

        shorter = [query if short else shorten(query, fit) or query for query, short in zip(queries, fits, strict=True)]
        return encode(shorter, tokenizer, limit=limit, long_prompts=long_prompts, split=split, **around)
    skipped = int(len(queries) - fits.sum())
    if skipped and (long_prompts == "refuse" or skipped == len(queries)):
        advice = "raise it" if long_prompts == "skip" else "raise it, or set task.long_prompts=skip to leave them out"
        raise ValueError(
            f"{skipped} of {len(queries)} {split} prompts are longer than task.prompt_length={limit} tokens "
            f"(longest: {lengths.max()}); {advice}"
        )
    return EncodedQueries(list(itertools.compress(queries, fits)), list(itertools.compress(ids, fits))), skipped


def _distinct(queries: Sequence[Query], read: Sequence[str], split: str) -> tuple[Sequence[Query], Sequence[str]]:
    """The first query of each text that the policy reads, and these texts, by which rows name their query."""
    first: dict[str, Query] = {}
    for query, text in zip(queries, read, strict=True):
        first.setdefault(text, query)
    if len(first) == len(queries):
        return queries, read
    others = sum(first[text].answer != query.answer for query, text in zip(queries, read, strict=True))
    log.warning(
        "%d of %d %s queries repeat the prompt of an earlier one, %d of them with another answer, and are left out",
        *(len(queries) - len(first), len(queries), split, others),
    )
    return list(first.values()), list(first)


def encode_pair(prompt: str, response: str, tokenizer: Tokenizer, *, begin: bool = True) -> tuple[list[int], list[int]]:
    """Token ids of a prompt, as generation starts from it, and token ids of the response, which end with the end of sequence.

    Raises ValueError if the tokenizer merges the two texts where they meet, so that no tokens after the prompt's spell it.
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
    """Token ids that may spell the response in the middle of a text: some tokenizers put a space before every text."""
    alone = tokenizer.encode(response)[len(tokenizer.encode("")) :]
    yield from (alone, alone[1:])
    for anchor in _ANCHORS:
        before, whole = tokenizer.encode(anchor), tokenizer.encode(anchor + response)
        if whole[: len(before)] == before:
            yield whole[len(before) :]


def changed_by(tokenizer: Tokenizer, prompts: Sequence[str]) -> tuple[int, str, str]:
    """How many prompts the tokenizer changes: without a token for a character it drops it, and "1/5" becomes "15". White space
    and Unicode's compatible forms (NFKC) do not count. Then the changed part of the first, and what the policy reads instead."""
    given = tokenizer.escaped(prompts)
    pairs = zip(given, (tokenizer.decode(ids) for ids in tokenizer.encode_all(given, begin=False)), strict=True)
    words = [tuple(unicodedata.normalize("NFKC", text).split() for text in pair) for pair in pairs]
    changed = [(" ".join(text), " ".join(read)) for text, read in words if "".join(text) != "".join(read)]
    if not changed:
        return 0, "", ""
    same = [one == other for one, other in zip(*changed[0], strict=False)]
    begin = max(0, [*same, False].index(False) - 20)
    text, read = (visible_line(each[begin : begin + 60]) for each in changed[0])
    return len(changed), text, read


# The role of the first field in a chat template, and of the second.
_ROLES = ("user", "assistant")


class PromptTemplate:
    """Puts texts into a prompt template and encodes the prompts; texts of a prompt that is too long are cut.

    A text that spells special tokens is escaped, so that no text can end its turn in a conversation or begin another. In a prompt
    without a token, spaces replace the texts.
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
        """Raises ValueError: the template lacks a field or contains it twice, there is no chat template, or the template alone
        has no token or more than `limit`.

        Args:
          template: a text that contains each {field} once; "": the chat template, whose user message is the first field and whose
            assistant message is the second. system_prompt: its system message. ending: follows the filled-in template.
          limit: most tokens of a prompt; the end of its last text is cut off where it has more, then that of the text before it.
        """
        if template and system_prompt:
            told = f"{template_setting}={template[:60]!r} and a system prompt exclude each other"
            raise ValueError(f"{told}: write it into the template")
        for field in fields if template else ():
            if template.count(f"{{{field}}}") != 1:
                raise ValueError(f"{template_setting}={template[:60]!r} must hold {{{field}}} once, where the {field} belongs")
        self._tokenizer, self._template, self._fields = tokenizer, template, tuple(fields)
        self._system_prompt, self._ending = system_prompt, ending
        self._limit, self._limit_setting, self._warned = limit, limit_setting, False
        self._setting = f"{template_setting}='', the chat template"
        self._places = re.compile("|".join(re.escape(f"{{{field}}}") for field in fields))
        self._begin = bool(template)  # a chat template writes the beginning of sequence itself
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
            told = "%d of %d prompts exceed %s=%d tokens: their texts are cut at the end (further ones are not reported)"
            log.warning(told, len(too_long), len(texts), self._limit_setting, self._limit)
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
        """Token ids of a prompt of `length` tokens whose texts lose the excess, the last text first."""
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
