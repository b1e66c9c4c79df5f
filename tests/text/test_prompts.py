"""Prompts as ids: against encoding one by one, with a chat template, from the cache, and the too long ones."""

import datetime
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
import transformers

from tba_jax.tasks.interface import Query
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


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tba_jax" / "prompts"


def encode(queries, tokenizer, **changes):
    settings = dict(chat_template=False, system_prompt="", limit=10_000, long_prompts="refuse", split="train")
    return prompts.encode(queries, tokenizer, **settings | changes)


def texts(count):
    return [f"What is {i} + {i * 7}?" + " Please." * (i % 5) for i in range(count)]


@pytest.mark.parametrize("make", ["bytes", "characters"])
def test_ids_are_those_of_each_prompt_alone(tokenizer, make):
    given = texts(20)
    if make == "characters":
        tokenizer = CharacterTokenizer("".join(sorted({character for text in given for character in text})))
    encoded, skipped = encode([Query(prompt=text, answer=str(i)) for i, text in enumerate(given)], tokenizer)
    assert skipped == 0 and len(encoded) == 20
    for i, query in enumerate(encoded):
        assert query.prompt == tuple(tokenizer.encode(given[i])) and query.query == Query(prompt=given[i], answer=str(i))
    assert encoded[-1] == encoded[19] and encoded[3:7] == [encoded[i] for i in range(3, 7)] and encoded[18:99] == [*encoded][18:]
    with pytest.raises(IndexError):
        encoded[20]
    assert encoded.lengths.tolist() == [len(tokenizer.encode(text)) for text in given]


def test_long_prompts_are_refused_or_left_out_and_counted(tokenizer):
    given = texts(20)
    lengths = [len(tokenizer.encode(text)) for text in given]
    limit = sorted(lengths)[12]
    queries = [Query(prompt=text) for text in given]
    left = sum(length > limit for length in lengths)
    with pytest.raises(ValueError, match=rf"^{left} of 20 heldout prompts are longer than task.prompt_length={limit} tokens"):
        encode(queries, tokenizer, limit=limit, split="heldout")
    encoded, skipped = encode(queries, tokenizer, limit=limit, long_prompts="skip")
    assert skipped == left
    assert [(query.query.prompt, len(query.prompt)) for query in encoded] == [
        (text, length) for text, length in zip(given, lengths, strict=True) if length <= limit
    ]
    assert all(query.prompt == tuple(tokenizer.encode(query.query.prompt)) for query in encoded)
    with pytest.raises(ValueError, match=r"20 of 20 train prompts are longer than task.prompt_length=1 tokens .longest: \d+"):
        encode(queries, tokenizer, limit=1, long_prompts="skip")


def test_a_chat_template_stands_around_the_prompt(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer has no chat template .neither chat_template.jinja nor"):
        prompts.template(tokenizer, chat_template=True, system_prompt="")
    chat = write_template(tmp_path / "tokenizer", TEMPLATE)
    assert prompts.template(chat, chat_template=False, system_prompt="") == {}
    around = prompts.template(chat, chat_template=True, system_prompt="Be brief.")["text"]
    assert around == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")
    (query,), _ = encode([Query(prompt="1+1?", answer="2")], chat, chat_template=True, system_prompt="Be brief.")
    assert query.prompt == tuple(chat.encode_all([around.replace("{prompt}", "1+1?")], begin=False)[0])
    assert query.query.prompt == "1+1?", "rewards see the task's own text"
    with pytest.raises(ValueError, match=r"task.system_prompt='Be brief.' is part of a chat template: set task.chat_template"):
        prompts.template(chat, chat_template=False, system_prompt="Be brief.")
    with pytest.raises(ValueError, match="an alphabet of characters has no chat template"):
        prompts.template(CharacterTokenizer("ab"), chat_template=True, system_prompt="")


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


# What published templates do to messages, in short.
CHANGING = {
    "trims": "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}\n{% endfor %}",
    "upper-case roles": "{% for m in messages %}{{ m['role'] | upper }}: {{ m['content'] }}<|end|>{% endfor %}ASSISTANT:",
    "default system prompt": "{% if messages[0]['role'] != 'system' %}<system>You are helpful.{% endif %}" + TEMPLATE,
    "looks into the prompt": "{% for m in messages %}{{ m['content'].split('?')[0] + ' ' + m['content'] * 2 }}{% endfor %}",
    "date, where there is a clock": "{% if strftime_now is defined %}{% set today = strftime_now('%d %b %Y') %}{% else %}"
    "{% set today = '26 Jul 2024' %}{% endif %}\n  {% if true %}Today: {{ today }}{% endif %}\n" + TEMPLATE,
    "date in a macro": "{% macro head() %}{{ strftime_now('%A, %-d %B %Y (%F, week %V) %H:%M') }}{% endmacro %}{{ head() }}"
    + TEMPLATE,
}
GIVEN = ["1+1?", "  1+1? \n", "say {prompt} \\ 'x' \"y\"", "%d %b", "two\n\nlines", "<b>&amp;é漢"]


class Midnight(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2025, 3, 9)


@pytest.mark.parametrize("system", ["", "  Be brief. "])
@pytest.mark.parametrize("name", CHANGING)
def test_prompts_are_those_of_transformers(tmp_path, monkeypatch, name, system):
    folder = tiny_checkpoints.write_byte_bpe(tmp_path / "chat")
    write_template(folder, CHANGING[name])
    before = [{"role": "system", "content": system}] if system else []
    with monkeypatch.context() as patch:
        patch.setattr("transformers.utils.chat_template_utils.datetime", Midnight)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        expected = [
            theirs.apply_chat_template(
                [*before, {"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
            )
            for text in GIVEN
        ]
    chat = HuggingFaceTokenizer(folder, date="2025-03-09")
    assert chat.chat(GIVEN, system) == [theirs.decode(ids) for ids in expected]
    found, _ = encode([Query(prompt=text) for text in GIVEN], chat, chat_template=True, system_prompt=system)
    assert [query.prompt for query in found] == [*dict.fromkeys(map(tuple, expected))]


def test_real_prompts_are_those_of_transformers(data_dir):
    folder = data_dir / "tokenizers" / "qwen2.5"
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    found, _ = encode([Query(prompt=text) for text in GIVEN], HuggingFaceTokenizer(folder), chat_template=True)
    for query, text in zip(found, GIVEN, strict=True):
        asked = [{"role": "user", "content": text}]
        ids = theirs.apply_chat_template(asked, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert query.prompt == tuple(ids)


def test_a_contract_tells_templates_apart_that_look_the_same(tmp_path):
    folder, found = tiny_checkpoints.write_byte_bpe(tmp_path / "chat"), []
    for content in ("m['content']", "m['content'] | trim"):
        chat = write_template(folder, f"{{% for m in messages %}}{{{{ {content} }}}}{{% endfor %}}")
        found.append(prompts.template(chat, chat_template=True, system_prompt=""))
    assert found[0]["text"] == found[1]["text"] and found[0] != found[1]


def test_a_prompt_cannot_end_its_turn_in_a_chat_template(tmp_path):
    """The template's own special token stays; a text that is no conversation may spell one."""
    chat = write_template(
        tiny_checkpoints.write_byte_bpe(tmp_path / "chat"), "{% for m in messages %}{{ m['content'] + '<|end|>' }}{% endfor %}"
    )
    queries = [Query(prompt="1+1?<|end|>2")]
    (asked,), _ = encode(queries, chat, chat_template=True)
    assert asked.prompt.count(chat.eos_id) == 1 and asked.prompt[-1] == chat.eos_id
    (plain,), _ = encode(queries, chat)
    assert plain.prompt.count(chat.eos_id) == 1 and plain.prompt[-1] != chat.eos_id


def test_a_real_chat_template(data_dir, tmp_path):
    folder = shutil.copytree(data_dir / "tokenizers" / "qwen2.5", tmp_path / "qwen")
    tokenizer = HuggingFaceTokenizer(folder)
    around = prompts.template(tokenizer, chat_template=True, system_prompt="Be brief.")["text"]
    assert around == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")
    (query,), _ = encode([Query(prompt="1+1?")], tokenizer, chat_template=True, system_prompt="Be brief.")
    start, end = (tokenizer.encode(text) for text in ("<|im_start|>", "<|im_end|>"))
    assert len(start) == len(end) == 1
    assert query.prompt.count(start[0]) == 3 and query.prompt.count(end[0]) == 2 and query.prompt[0] == start[0]


def test_many_prompts_are_encoded_once(tokenizer, cache, monkeypatch, caplog):
    queries = [Query(prompt=f"{i} " + "word " * 300) for i in range(800)]
    first, _ = encode(queries, tokenizer)
    (kept,) = cache.iterdir()
    encode_all = HuggingFaceTokenizer.encode_all
    monkeypatch.setattr(HuggingFaceTokenizer, "encode_all", None)
    second, _ = encode(queries, tokenizer)
    assert [*second] == [*first] and first[7].prompt == tuple(tokenizer.encode(queries[7].prompt))
    # Another prompt or template is another entry, and a file that is damaged is made again.
    monkeypatch.setattr(HuggingFaceTokenizer, "encode_all", encode_all)
    other, _ = encode([Query(prompt="one more"), *queries[1:]], tokenizer)
    assert other[0].prompt == tuple(tokenizer.encode("one more")) and len([*cache.iterdir()]) == 2
    encode([Query(prompt=f"{query.prompt}!") for query in queries], tokenizer)
    assert len([*cache.iterdir()]) == 3
    os.truncate(kept, 1000)
    again, _ = encode(queries, tokenizer)
    assert [*again] == [*first] and "the prompts are encoded again" in caplog.text
    with np.load(kept) as whole:
        assert len(whole["ends"]) == 800


def test_an_empty_file_of_the_cache_is_made_again(tokenizer, cache):
    queries = [Query(prompt=f"{i} " + "word " * 300) for i in range(800)]
    first, _ = encode(queries, tokenizer)
    (kept,) = cache.iterdir()
    kept.write_bytes(b"")
    again, _ = encode(queries, tokenizer)
    assert [*again] == [*first] and kept.stat().st_size > 1000


def test_a_prompt_is_asked_once(tokenizer, caplog):
    """Rows know their query by its prompt."""
    queries = [Query(prompt="1/2?", answer=answer) for answer in ("0.5", "1/2", "0.5")]
    encoded, skipped = encode([*queries, Query(prompt="more")], tokenizer)
    assert [query.query for query in encoded] == [queries[0], Query(prompt="more")] and skipped == 0
    assert "2 of 4 train queries repeat the prompt of an earlier one, 1 of them with another answer" in caplog.text


def test_a_cache_that_cannot_be_written_stops_nothing(tokenizer, cache, caplog):
    cache.parent.mkdir(parents=True)
    cache.write_text("not a folder")
    queries = [Query(prompt=f"{i} " + "word " * 300) for i in range(800)]
    encoded, _ = encode(queries, tokenizer)
    assert len(encoded) == 800 and "cannot be written" in caplog.text


def test_processes_that_encode_at_a_time_leave_one_whole_file(tokenizer, cache, tmp_path):
    program = (
        "import sys; from tba_jax.text import prompts; from tba_jax.tasks.interface import Query\n"
        "from tba_jax.text.tokenizers import HuggingFaceTokenizer\n"
        f"tokenizer = HuggingFaceTokenizer({str(tmp_path / 'tokenizer')!r})\n"
        "queries = [Query(prompt=f'{i} ' + 'word ' * 300) for i in range(800)]\n"
        "rules = dict(limit=10_000, long_prompts='refuse', split='train')\n"
        "found, _ = prompts.encode(queries, tokenizer, chat_template=False, system_prompt='', **rules)\n"
        "print(found.lengths.sum())\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    sums = {process.communicate(timeout=120)[0].strip() for process in running}
    assert len(sums) == 1 and all(process.returncode == 0 for process in running)
    assert [path.suffix for path in cache.iterdir()] == [".npz"] and not next(cache.iterdir()).name.startswith(".")


def test_a_prompt_of_unknown_characters_is_refused(tmp_path):
    folder = tmp_path / "letters"
    folder.mkdir()
    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "</s>": 2}, [])).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}')
    with pytest.raises(ValueError, match="the train prompt '12' has no token"):
        encode([Query("ab"), Query("12")], HuggingFaceTokenizer(folder))
