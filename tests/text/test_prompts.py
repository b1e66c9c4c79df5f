"""Prompts as ids: against encoding one by one, with a chat template, beside responses, and those that a tokenizer changes."""

import datetime
import json

import pytest
import tokenizers
import transformers

from tba_jax.tasks.interface import EncodedQuery, Query
from tba_jax.text import prompts
from tba_jax.text.tokenizers import CharacterTokenizer, HuggingFaceTokenizer
from tests.support import tiny_checkpoints

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_template(folder, template):
    path = folder / "tokenizer_config.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | {"chat_template": template}))
    return HuggingFaceTokenizer(folder)


@pytest.fixture
def tokenizer(tmp_path):
    return HuggingFaceTokenizer(tiny_checkpoints.write_byte_bpe(tmp_path / "tokenizer"))


def encode(queries, tokenizer, **changes):
    settings = dict(chat_template=False, system_prompt="", limit=10_000, long_prompts="refuse", split="train")
    return prompts.encode(queries, tokenizer, **settings | changes)


def test_ids_are_those_of_each_prompt_alone_and_long_ones_are_refused_or_left_out(tokenizer):
    given = [f"What is {i} + {i * 7}?" + " Please." * (i % 5) for i in range(20)]
    queries = [Query(prompt=text, answer=str(i)) for i, text in enumerate(given)]
    encoded, skipped = encode(queries, tokenizer)
    assert skipped == 0 and len(encoded) == 20
    alone = [EncodedQuery(query=query, prompt=tuple(tokenizer.encode(query.prompt))) for query in queries]
    assert list(encoded) == alone and encoded[-1] == alone[-1] and encoded[18:99] == alone[18:]
    with pytest.raises(IndexError):
        encoded[20]
    limit = sorted(len(query.prompt) for query in alone)[12]
    fitting = [query for query in alone if len(query.prompt) <= limit]
    left = 20 - len(fitting)
    with pytest.raises(ValueError, match=rf"^{left} of 20 heldout prompts are longer than task.prompt_length={limit} tokens"):
        encode(queries, tokenizer, limit=limit, split="heldout")
    encoded, skipped = encode(queries, tokenizer, limit=limit, long_prompts="skip")
    assert skipped == left and list(encoded) == fitting
    with pytest.raises(ValueError, match=r"20 of 20 train prompts are longer than task.prompt_length=1 tokens .longest: \d+"):
        encode(queries, tokenizer, limit=1, long_prompts="skip")


def test_a_chat_template_stands_around_the_prompt(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer has no chat template .neither chat_template.jinja nor"):
        prompts.template(tokenizer, chat_template=True, system_prompt="")
    chat = write_template(tmp_path / "tokenizer", TEMPLATE)
    assert prompts.template(chat, chat_template=False, system_prompt="") == {}
    around = prompts.template(chat, chat_template=True, system_prompt="Be brief.")["text"]
    assert around == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")
    # The template's own special token stays; a prompt cannot spell one, and rewards see the task's own text.
    template = "{% for m in messages %}{{ m['content'] + '<|end|>' }}{% endfor %}"
    ending = write_template(tmp_path / "tokenizer", template)
    contract = prompts.template(ending, chat_template=True, system_prompt="")
    other = write_template(tmp_path / "tokenizer", template.replace("m['content']", "m['content'] | trim"))
    found = prompts.template(other, chat_template=True, system_prompt="")
    assert contract["text"] == found["text"] and contract != found, "a contract tells templates apart that look the same"
    (asked,), _ = encode([Query(prompt="1+1?<|end|>2")], ending, chat_template=True)
    assert asked.prompt.count(chat.eos_id) == 1 and asked.prompt[-1] == chat.eos_id and asked.query.prompt == "1+1?<|end|>2"
    with pytest.raises(ValueError, match=r"task.system_prompt='Be brief.' is part of a chat template: set task.chat_template"):
        prompts.template(chat, chat_template=False, system_prompt="Be brief.")


@pytest.mark.parametrize(
    "template, sentence",
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses a system and a user message: roles must alternate"),
        ("{{ messages[0]['content'] }}", "task.chat_template: .* leaves the prompt out"),
        ("{{ messages[1]['content'] }}\ud800", "the chat template of .* holds half of a UTF-16 surrogate pair"),
    ],
)
def test_templates_that_do_not_take_the_conversation_are_refused(tokenizer, tmp_path, template, sentence):
    chat = write_template(tmp_path / "tokenizer", template)
    with pytest.raises(ValueError, match=sentence):
        prompts.template(chat, chat_template=True, system_prompt="Be brief.")


# Trims, and reads the clock in a macro, as published templates do.
CHANGING = (
    "{% macro head() %}{{ strftime_now('%A, %-d %B %Y (%F, week %V) %H:%M') }}{% endmacro %}{{ head() }}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}\n{% endfor %}"
)
GIVEN = ["1+1?", "  1+1? \n", "say {prompt} \\ 'x' \"y\"", "%d %b", "two\n\nlines", "<b>&amp;é漢"]


class Midnight(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2025, 3, 9)


def test_prompts_are_those_of_transformers(tmp_path, monkeypatch):
    folder, system = tiny_checkpoints.write_byte_bpe(tmp_path / "chat"), "  Be brief. "
    write_template(folder, CHANGING)
    asked = [[{"role": "system", "content": system}, {"role": "user", "content": text}] for text in GIVEN]
    with monkeypatch.context() as patch:
        patch.setattr("transformers.utils.chat_template_utils.datetime", Midnight)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        options = dict(add_generation_prompt=True, tokenize=True, return_dict=False)
        expected = [theirs.apply_chat_template(each, **options) for each in asked]
    chat = HuggingFaceTokenizer(folder, date="2025-03-09")
    assert chat.chat(GIVEN, system) == [theirs.decode(ids) for ids in expected]
    found, _ = encode([Query(prompt=text) for text in GIVEN], chat, chat_template=True, system_prompt=system)
    assert [query.prompt for query in found] == [*dict.fromkeys(map(tuple, expected))]


def test_a_prompt_is_asked_once_and_has_tokens(tokenizer, tmp_path, caplog):
    queries = [Query(prompt="1/2?", answer=answer) for answer in ("0.5", "1/2", "0.5")]
    encoded, skipped = encode([*queries, Query(prompt="more")], tokenizer)
    assert [query.query for query in encoded] == [queries[0], Query(prompt="more")] and skipped == 0
    assert "2 of 4 train queries repeat the prompt of an earlier one, 1 of them with another answer" in caplog.text
    with pytest.raises(ValueError, match="the train prompt '12' has no token"):
        encode([Query("ab"), Query("12")], HuggingFaceTokenizer(tiny_checkpoints.write_letters(tmp_path / "letters", "ab")))


class JoiningTokenizer(CharacterTokenizer):
    """Joins "ab" into one id, as tokenizers with merges do, and begins every text with `space`, as those of Llama models do."""

    def __init__(self, space: str = ""):
        super().__init__("abc_\n.\0")
        self.space, self.ab = space, super().encode("\0")[-1]

    def encode(self, text: str) -> list[int]:
        return super().encode((self.space + text if text else "").replace("ab", "\0"))

    def decode(self, ids) -> str:
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
    found = prompts.encode_pair(prompt, response, tokenizer)
    assert found == expected and tokenizer.decode([*found[0], *found[1]]) == prompt + response


def test_a_response_that_no_tokens_spell_is_refused(monkeypatch):
    monkeypatch.setattr(JoiningTokenizer, "decode", lambda _, ids: str(list(ids)))
    with pytest.raises(ValueError, match="'ca' and 'bc'"):
        prompts.encode_pair("ca", "bc", JoiningTokenizer())


def test_a_character_without_a_token_is_found(tmp_path):
    known = HuggingFaceTokenizer(tiny_checkpoints.write_letters(tmp_path / "letters", "0123456789abcdefghijklm "))
    long, excerpt = "a" * 500 + "\x1b[31m\u202e1/5" + "b" * 500, "a" * 20 + "\\x1b[31m\\u202e1/5" + "b" * 31
    assert prompts.changed_by(known, ["add 1 2", "a 1/5 and 2/5", "3/4"]) == (2, "a 1/5 and 2/5", "a 15 ad 25")
    assert prompts.changed_by(known, [long]) == (1, excerpt, "a" * 20 + "31m15" + "b" * 35)


@pytest.mark.parametrize("normalizer, count", [(None, 0), ("NFD", 0), ("Strip", 0), ("Lowercase", 1)])
def test_normal_forms_and_white_space_are_no_loss(tmp_path, normalizer, count):
    folder = tiny_checkpoints.write_byte_bpe(tmp_path)
    if normalizer:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.normalizer = getattr(tokenizers.normalizers, normalizer)()
        backend.save(str(folder / "tokenizer.json"))
    given = ["1/5 of  it\n\nis\t“x” — ½ 漢字 <|end|> <tool> é", " ", "Ann"]
    assert prompts.changed_by(HuggingFaceTokenizer(folder), given)[0] == count
