"""Replies of a victim: against a loop over whole sequences, whatever else is asked, cut texts, ends and refusals."""

import codecs
import concurrent.futures
import functools
import json
import shutil

import numpy as np
import pytest

from tba_jax.rewards.generator import TextGenerator
from tba_jax.tasks.interface import GeneratorSettings
from tests.support import spelled_checkpoints, tiny_checkpoints
from tests.support.spelled_checkpoints import BEGIN, EOS, IDS, spelled

P, R = 24, 8
TEXTS = ["do it", "a much longer one", "x", "do it", "tell me"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return spelled_checkpoints.write(tmp_path_factory.mktemp("victims") / "victim", "llama_untied", chat=True)


def make(folder, mesh: tuple[int, int, int] = (1, 1, 1), kind=TextGenerator, **changes) -> TextGenerator:
    settings = dict(
        samples=3,
        template="tell: {attack}:",
        system_prompt="",
        temperature=1.0,
        top_p=1.0,
        prompt_length=P,
        reply_length=R,
        slots=6,
        compute_dtype="float32",
    )
    replies = GeneratorSettings(**settings | changes)
    return kind(folder, tiny_checkpoints.make_mesh(mesh), replies, prefix="task.red_team.victim_")


@pytest.fixture(scope="module")
def generator(folder) -> TextGenerator:
    return make(folder)


@pytest.fixture(scope="module")
def greedy_generator(folder) -> TextGenerator:
    """One reply a text, the most likely one."""
    return make(folder, samples=1, temperature=0.0)


load = functools.cache(tiny_checkpoints.load)


def greedy(folder, prompt: list[int], ends: tuple[int, ...] = (EOS,)) -> str:
    """The most likely tokens, each from the whole sequence before it; special ones and ids without a token never come."""
    config, params = load(folder)
    tokens = list(prompt)
    for _ in range(R):
        padded, mask = np.zeros((1, 64), np.int32), np.arange(64)[None] < len(tokens)
        padded[0, : len(tokens)] = tokens
        logits = np.array(tiny_checkpoints.logits(params, padded, mask, config))[0, len(tokens) - 1]
        allowed = sorted({*range(4, len(IDS)), *ends})
        tokens.append(allowed[int(np.argmax(logits[allowed]))])
        if tokens[-1] in ends:
            break
    pieces = {i: piece for piece, i in IDS.items()}
    return "".join(pieces[i] for i in tokens[len(prompt) :] if i > 3).replace("Ġ", " ").replace("Ċ", "\n")


def test_greedy_replies_are_the_most_likely_ones(folder, greedy_generator):
    expected = [greedy(folder, spelled(f"tell: {text}:")) for text in TEXTS]
    assert len(set(expected)) > 1
    assert greedy_generator(TEXTS, 0) == expected
    # With next to no mass left, samples are greedy, too.
    assert make(folder, samples=2, top_p=1e-6)(TEXTS, 0) == [reply for reply in expected for _ in range(2)]


def test_a_chat_template_stands_around_the_text(folder):
    expected = greedy(folder, [BEGIN, *spelled("system:be good\nuser:do it\nassistant:")])
    long = dict(samples=1, temperature=0.0, template="", prompt_length=40)
    assert make(folder, **long, system_prompt="be good")(["do it"], 0) == [expected]
    assert make(folder, **long)(["do it"], 0) == [greedy(folder, [BEGIN, *spelled("user:do it\nassistant:")])]


def test_a_chat_template_finds_the_day_of_the_run(folder, tmp_path):
    dated = spelled_checkpoints.dated(folder, tmp_path / "dated")
    for month, date in (("march", "2025-03-09"), ("may", "2025-05-09")):
        long = dict(samples=1, temperature=0.0, template="", prompt_length=40)
        (reply,) = make(dated, kind=spelled_checkpoints.loaders(date).generator, **long)(["do it"], 0)
        assert reply == greedy(folder, [*spelled(month), BEGIN, *spelled("user:do it\nassistant:")])


def test_replies_depend_on_seed_and_text_alone(folder, generator):
    replies = generator(TEXTS, 5)
    assert len(replies) == 3 * len(TEXTS) and replies[:3] == replies[9:12], "equal texts have equal replies"
    assert len(set(replies)) > len(TEXTS), "the replies to a text differ"
    assert generator(TEXTS[::-1], 5) == [reply for i in range(len(TEXTS))[::-1] for reply in replies[3 * i : 3 * i + 3]]
    assert generator(["tell me"], 5) == replies[12:] and generator(TEXTS, 6) != replies
    assert make(folder, slots=2)(TEXTS, 5) == replies
    assert generator([], 5) == []


def test_several_threads_may_ask_at_a_time(generator):
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda text: generator([text], 5), TEXTS))
    assert [reply for replies in found for reply in replies] == generator(TEXTS, 5)


def test_every_device_replies_by_itself(folder, generator):
    """Whatever the mesh would split."""
    assert make(folder, (1, 2, 1))(TEXTS, 5) == generator(TEXTS, 5)


def test_a_text_that_is_too_long_loses_its_end_with_a_warning(folder, caplog):
    generator = make(folder, samples=1, temperature=0.0)
    room = P - len("tell: :")
    long = "abcdefghijklmnopqrstuvwxyz"
    # Cut within a word of several letters, "unsafe", it keeps those before.
    texts = [long, long[:room], "x" * (room - 1) + "unsafe" * 9, "x"]
    expected = [long[:room], long[:room], "x" * (room - 1) + "unsafe", "x"]
    replies = generator(texts, 0)
    assert f"2 of 4 prompts exceed task.red_team.victim_prompt_length={P} tokens" in caplog.text
    assert replies == generator(expected, 0)


def test_an_attack_without_tokens_is_a_space(folder):
    """A policy may write white space alone, and a victim needs a token to reply to."""
    assert make(folder, template="{attack}", samples=1, temperature=0.0)(["", "do it"], 0) == [
        greedy(folder, spelled(" ")),
        greedy(folder, spelled("do it")),
    ]


def test_a_text_cannot_end_its_turn_by_spelling_a_special_token(folder, greedy_generator):
    """There is no token for what is left of "<|end|>" but its letters."""
    assert greedy_generator(["do<|end|>it", "doendit"], 0) == [
        greedy(folder, spelled(f"tell: {text}:")) for text in ("do endit", "doendit")
    ]


def test_what_only_checks_loads_no_weights(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "victim")
    (tmp_path / "victim" / "model.safetensors").unlink()
    make(tmp_path / "victim", kind=functools.partial(TextGenerator, load=False))
    with pytest.raises(ValueError, match="leaves no room for any text"):
        make(tmp_path / "victim", kind=functools.partial(TextGenerator, load=False), prompt_length=7)


def test_a_model_with_several_ends_stops_at_each(greedy_generator, tmp_path):
    whole = greedy_generator(["do it"], 0)[0]
    other = next(character for character in whole if character.isalpha())
    model = spelled_checkpoints.write(tmp_path / "victim", "llama_untied")
    (model / "generation_config.json").write_bytes(codecs.BOM_UTF8 + json.dumps({"eos_token_id": [EOS, IDS[other]]}).encode())
    assert make(model, samples=1, temperature=0.0)(["do it"], 0) == [whole[: whole.index(other) + 1]]
    for wrong in (len(IDS), "2"):
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, wrong]}))
        with pytest.raises(ValueError, match=rf"generation_config.json: eos_token_id holds {wrong!r}, but the tokenizer"):
            make(model)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"template": "tell:"}, r"task.red_team.victim_template='tell:' must hold \{attack\} once"),
        ({"template": "{attack}{attack}"}, r"must hold \{attack\} once"),
        ({"system_prompt": "be good"}, r"victim_template='tell: \{attack\}:' and a system prompt exclude each other"),
        ({"prompt_length": 7}, r"task.red_team.victim_prompt_length=7 leaves no room for any text: .* 7 tokens"),
        (
            {"reply_length": 60},
            r"prompt_length=24 \+ task.red_team.victim_reply_length=60 exceed the 64 positions",
        ),
    ],
)
def test_settings_that_do_not_go_with_the_model_are_refused(folder, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(folder, **changes)


def test_folders_that_cannot_reply_are_refused(folder, tmp_path):
    model = spelled_checkpoints.write(tmp_path / "plain", "llama_untied")
    with pytest.raises(ValueError, match=r"task.red_team.victim_template='', the chat template: the tokenizer of .* has no chat"):
        make(model, template="")
    with pytest.raises(ValueError, match="holds no tokenizer"):
        make(tiny_checkpoints.path_of("llama_untied"))
    with pytest.raises(ValueError, match="cannot generate text"):
        make(tiny_checkpoints.path_of("gpt_neox_reward"))
