"""What stands between turns: the template's own tokens, none of the policy's encoded again; and how a template calls tools."""

import json

import pytest

from tba_jax.tasks.tools import ToolFormat
from tba_jax.text.tokenizers import CharacterTokenizer, HuggingFaceTokenizer
from tba_jax.text.turns import Between
from tests.support import tiny_checkpoints

TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "", "parameters": {"type": "object"}}}]
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }};{% endfor %}{% endif %}"
    "{% for m in messages %}({{ m.role }}){{ m.content }}{% for c in m.tool_calls or [] %}"
    "[CALL]{{ {'function': c.function.name, 'parameters': c.function.arguments} | tojson }}[/CALL]{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}(assistant){% endif %}"
)


def tokenizer_with(tmp_path, template: str) -> HuggingFaceTokenizer:
    folder = tiny_checkpoints.write_byte_bpe(tmp_path)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return HuggingFaceTokenizer(folder)


def test_only_what_follows_a_turn_is_encoded(tmp_path):
    tokenizer = tokenizer_with(tmp_path, TEMPLATE)
    between = Between(tokenizer, chat_template=True)
    said = [{"role": "tool", "content": "é <|end|> {turn}"}]
    ended = between.encode(said, after=tokenizer.eos_id)
    assert tokenizer.decode(ended) == "\n(tool)é < |end|> {turn}\n(assistant)", "no content ends a turn"
    assert ended.count(tokenizer.eos_id) == 1, "the template's own, after the content"
    assert between.encode(said, after=5) == [tokenizer.eos_id, *ended], "a turn that a stop string has ended"


@pytest.mark.parametrize("after", ["drawn end", "stop string"])
def test_a_conversation_reads_as_the_template_writes_it(data_dir, after):
    tokenizer = HuggingFaceTokenizer(data_dir / "tokenizers" / "qwen2.5")
    between, turn = Between(tokenizer, chat_template=True), "It is 3 ."
    asked = [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": turn},
        {"role": "user", "content": " and 漢 3+4?"},
    ]
    whole, prompt = (tokenizer.conversations([each], setting="test")[0] for each in (asked, asked[:1]))
    drawn = tokenizer.encode_all([turn], begin=False)[0] + [tokenizer.eos_id] * (after == "drawn end")
    said = between.encode(asked[2:], after=drawn[-1])
    begun = tokenizer.encode_all([prompt], begin=False)[0]
    assert [*begun, *drawn, *said] == tokenizer.encode_all([whole], begin=False)[0]


def test_tokens_that_would_encode_otherwise_stay(data_dir):
    """The policy may draw a text in other tokens than those in which its tokenizer encodes it."""
    tokenizer = HuggingFaceTokenizer(data_dir / "tokenizers" / "qwen2.5")
    drawn = [token for letter in "hello" for token in tokenizer.encode_all([letter], begin=False)[0]]
    assert tokenizer.decode(drawn) == "hello" and tokenizer.encode_all(["hello"], begin=False)[0] != drawn
    said = Between(tokenizer, chat_template=False).encode([{"role": "user", "content": " world"}], after=drawn[-1])
    assert said == tokenizer.encode_all([" world"], begin=False)[0] and tokenizer.decode([*drawn, *said]) == "hello world"


def test_texts_without_a_template_follow_one_another():
    between = Between(CharacterTokenizer("abc\n"), chat_template=False)
    assert between.encode([{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}], after=2) == [3, 4, 5]
    assert between.encode([], after=2) == []


def test_a_template_shows_how_it_calls_tools(tmp_path):
    found = Between(tokenizer_with(tmp_path, TEMPLATE), chat_template=True).tool_format(TOOLS)
    assert found == ToolFormat(before="[CALL]", name="function", arguments="parameters")
    text = 'I look. [CALL]{"function": "look_up", "parameters": {"x": [1]}}[/CALL] and [CALL] {"function": "f", "parameters": {}}'
    assert found.calls(text) == [("look_up", {"x": [1]}), ("f", {})] and found.calls("3") == []
    for wrong in (
        '[CALL]{"function": 3, "parameters": {}}',
        "[CALL]nothing",
        '[CALL]{"function": "f"',
        "[CALL][]",
        "[CALL]" + "[" * 10**5,
    ):
        with pytest.raises(ValueError, match="the call of a tool"):
            found.calls(wrong)


def test_a_real_template_calls_tools(data_dir):
    tokenizer = HuggingFaceTokenizer(data_dir / "tokenizers" / "qwen2.5")
    found = Between(tokenizer, chat_template=True).tool_format(TOOLS)
    assert found == ToolFormat(before="<tool_call>", name="name", arguments="arguments")
    text = '<tool_call>\n{"name": "look_up", "arguments": {"x": "<b>"}}\n</tool_call>'
    assert found.calls(tokenizer.decode(tokenizer.encode_all([text], begin=False)[0])) == [("look_up", {"x": "<b>"})]


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (TEMPLATE.replace("tool.function.name", "''"), "chat template does not tell of tools, such as look_up"),
        (TEMPLATE.replace("| tojson", "| length"), "writes no JSON object where a tool is called"),
        ("{{ messages[-1].content }}{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}", "writes no JSON object"),
        ("{% if tools %}{{ raise_exception('no tools here') }}{% endif %}", "refuses a user and a assistant and a user message"),
    ],
)
def test_templates_without_tools_are_refused(tmp_path, template, sentence):
    with pytest.raises(ValueError, match=sentence):
        Between(tokenizer_with(tmp_path, template), chat_template=True).tool_format(TOOLS)


def test_a_template_without_earlier_turns_is_refused(tmp_path):
    between = Between(tokenizer_with(tmp_path, "{{ messages[-1].content }}<|end|>"), chat_template=True)
    with pytest.raises(ValueError, match="the chat template leaves earlier turns out"):
        between.encode([{"role": "user", "content": "x"}], after=3)
