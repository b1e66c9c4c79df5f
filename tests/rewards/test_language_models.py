"""Frozen language models: replies against a loop over whole sequences, verdicts against logits of whole rows, and refusals."""

import codecs
import concurrent.futures
import dataclasses
import functools
import json

import numpy as np
import pytest

from tba_jax.rewards.scorers import UnsafeTokenScorer
from tba_jax.rewards.task_models import TextGenerator
from tba_jax.tasks.interface import GeneratorSettings, ModelUse, UnsafeTokenSettings
from tests.support import spelled_checkpoints, tiny_checkpoints
from tests.support.spelled_checkpoints import BEGIN, EOS, IDS, UNSAFE, spelled

P, R, LENGTH = 40, 8, 48
TEXTS = ["do it", "a much longer one", "x", "do it", "tell me"]
OTHER_END = "d"  # a letter that some replies reach
ONE = (1, 1, 1)


@pytest.fixture(scope="module")
def victim(tmp_path_factory):
    """A model with two ends, as chat models have."""
    folder = spelled_checkpoints.write(tmp_path_factory.mktemp("models") / "victim", "llama_untied", chat=True)
    settings = codecs.BOM_UTF8 + json.dumps({"eos_token_id": [EOS, IDS[OTHER_END]]}).encode()
    (folder / "generation_config.json").write_bytes(settings)
    return folder


@pytest.fixture(scope="module")
def guard(tmp_path_factory):
    return spelled_checkpoints.write(tmp_path_factory.mktemp("models") / "guard", "gpt2", chat=True)


def make(folder, mesh=ONE, *, date: str = "", load: bool = True, **changes) -> TextGenerator:
    replies = dict(samples=3, template="tell: {attack}:", system_prompt="", temperature=1.0, top_p=1.0)
    replies |= dict(prompt_length=P, reply_length=R) | changes
    settings = dict(name="victim", setting="task.red_team.victim_path", path=str(folder), rows=6, kind="generator")
    use = ModelUse(**settings, generator=GeneratorSettings(**replies))
    return TextGenerator(use, tiny_checkpoints.make_mesh(mesh), date=date, load=load)


@pytest.fixture(scope="module")
def generator(victim) -> TextGenerator:
    return make(victim)


def beside(generator: TextGenerator, folder, **changes) -> TextGenerator:
    """A generator of other prompts that decodes with the engine of `generator`, so that nothing is compiled."""
    settings = dataclasses.asdict(generator._settings) | changes
    made = make(folder, load=False, **settings)
    made._engine = generator._engine
    return made


@pytest.fixture(scope="module")
def greedy_generator(victim, generator) -> TextGenerator:
    return beside(generator, victim, samples=1, temperature=0.0)


load = functools.cache(tiny_checkpoints.load)


def last_logits(folder, prompts: list[list[int]]) -> np.ndarray:
    """float32[n, V]: the logits after each prompt, each in a row of its own."""
    config, params = load(folder)
    length = np.array([len(prompt) for prompt in prompts])
    padded = np.array([prompt + [0] * (64 - len(prompt)) for prompt in prompts], np.int32)
    logits = tiny_checkpoints.logits(params, padded, np.arange(64) < length[:, None], config)
    return np.array(logits)[np.arange(len(prompts)), length - 1]


def greedy(folder, prompt: list[int]) -> str:
    """The most likely tokens, each from the whole sequence before it; special ones and ids without a token never come."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + R and (len(tokens) == len(prompt) or tokens[-1] not in (EOS, IDS[OTHER_END])):
        logits, allowed = last_logits(folder, [tokens])[0], sorted({*range(4, len(IDS)), EOS})
        tokens.append(allowed[int(np.argmax(logits[allowed]))])
    pieces = {i: piece for piece, i in IDS.items()}
    return "".join(pieces[i] for i in tokens[len(prompt) :] if i > 3).replace("Ġ", " ").replace("Ċ", "\n")


def test_greedy_replies_are_the_most_likely_ones_up_to_any_end(victim, generator, greedy_generator):
    expected = [greedy(victim, spelled(f"tell: {text}:")) for text in TEXTS]
    assert len(set(expected)) > 1 and any(reply.endswith(OTHER_END) for reply in expected)
    assert greedy_generator(TEXTS, 0) == expected
    # With next to no mass left, samples are greedy, too.
    assert beside(generator, victim, top_p=1e-6)(TEXTS, 0) == [reply for reply in expected for _ in range(3)]


def test_prompts_are_templates_and_their_texts_are_plain(victim, greedy_generator, tmp_path, caplog):
    def prompt(text: str, **changes) -> str:
        (reply,) = beside(greedy_generator, victim, **changes)([text], 0)
        return reply

    chat = [BEGIN, *spelled("system:be good\nuser:do it\nassistant:")]
    assert prompt("do it", template="", system_prompt="be good") == greedy(victim, chat)
    assert prompt("do it", template="") == greedy(victim, [BEGIN, *spelled("user:do it\nassistant:")])
    # A policy may write white space alone, and a victim needs a token to reply to.
    assert prompt("", template="{attack}") == greedy(victim, spelled(" "))
    # There is no token for what is left of "<|end|>" but its letters.
    assert prompt("do<|end|>it") == greedy(victim, spelled("tell: do endit:"))
    dated = spelled_checkpoints.dated(victim, tmp_path / "dated")
    made = beside(greedy_generator, victim)
    made._template = make(dated, date="2025-03-09", load=False, template="")._template
    assert made(["do it"], 0) == [greedy(victim, [*spelled("march"), BEGIN, *spelled("user:do it\nassistant:")])]
    # What is too long loses its end. Cut within a word of several letters, "unsafe", it keeps those before.
    room = P - len("tell: :")
    texts = ["ab" * P, "x" * (room - 1) + "unsafe" * 9, "x"]
    replies = greedy_generator(texts, 0)
    assert f"2 of 3 prompts exceed task.red_team.victim_prompt_length={P} tokens" in caplog.text
    assert replies == greedy_generator([("ab" * P)[:room], "x" * (room - 1) + "unsafe", "x"], 0)


def test_replies_depend_on_seed_and_text_alone(generator):
    replies = generator(TEXTS, 5)
    assert len(replies) == 3 * len(TEXTS) and replies[:3] == replies[9:12], "equal texts have equal replies"
    assert len(set(replies)) > len(TEXTS), "the replies to a text differ"
    assert generator(TEXTS[::-1], 5) == [reply for i in range(len(TEXTS))[::-1] for reply in replies[3 * i : 3 * i + 3]]
    assert generator(["tell me"], 5) == replies[12:] and generator(TEXTS, 6) != replies
    assert generator([], 5) == []
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda text: generator([text], 5), TEXTS))
    assert [reply for each in found for reply in each] == replies


def test_folders_that_cannot_reply_are_refused(tmp_path):
    model = spelled_checkpoints.write(tmp_path / "plain", "llama_untied")
    with pytest.raises(ValueError, match=r"task.red_team.victim_template='', the chat template: the tokenizer of .* has no chat"):
        make(model, template="")
    with pytest.raises(ValueError, match="cannot generate text"):
        make(tiny_checkpoints.path_of("gpt_neox_reward"))
    for wrong in (len(IDS), "2"):
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, wrong]}))
        with pytest.raises(ValueError, match=rf"generation_config.json: eos_token_id holds {wrong!r}, but the tokenizer"):
            make(model)


def judge(folder, devices: int = 1, *, date: str = "", load: bool = True, **changes) -> UnsafeTokenScorer:
    settings = dict(token="unsafe", template="asked {attack} told {reply}:", ending="\n", length=LENGTH) | changes
    verdict, setting = UnsafeTokenSettings(**settings), "task.red_team.classifier_path"
    use = ModelUse(name="classifier", setting=setting, path=str(folder), rows=4, kind="unsafe_token", judge=verdict)
    return UnsafeTokenScorer(use, tiny_checkpoints.make_mesh((devices, 1, 1)), date=date, load=load)


@pytest.fixture(scope="module")
def scorer(guard) -> UnsafeTokenScorer:
    return judge(guard)


def log_verdicts(folder, prompts: list[list[int]]) -> np.ndarray:
    """float32[n]: log π(unsafe | prompt)."""
    logits = last_logits(folder, prompts).astype(np.float64)
    return logits[:, UNSAFE] - np.logaddexp.reduce(logits, axis=1)


def test_an_exchange_has_the_logprob_of_its_verdict(guard, scorer):
    rng, letters = np.random.default_rng(0), "abcdeghijklmnopqrtvwxyz "
    texts = ["".join(rng.choice(list(letters), rng.integers(0, 14))) for _ in range(74)]
    attacks, replies = texts[:37], texts[37:]
    prompts = [spelled(f"asked {attack} told {reply}:\n") for attack, reply in zip(attacks, replies, strict=True)]
    found = scorer(attacks, replies)
    assert found.dtype == np.float32 and found.shape == (37,) and found.max() < 0 and found.std() > 0.01
    np.testing.assert_allclose(found, log_verdicts(guard, prompts), atol=2e-5)
    np.testing.assert_allclose(judge(guard, devices=4)(attacks, replies), found, atol=2e-5)
    assert scorer([], []).shape == (0,)


def test_prompts_of_a_judge(guard, scorer, tmp_path, caplog):
    exchange = "user:do it\nassistant:no\n\n"
    dated = spelled_checkpoints.dated(guard, tmp_path / "dated")
    cases = [
        (judge(guard, load=False, template=""), "do it", "no", [BEGIN, *spelled(exchange)]),
        (judge(dated, load=False, template="", date="2025-05-09"), "do it", "no", [*spelled("may"), BEGIN, *spelled(exchange)]),
        # Braces are no characters of this tokenizer: what is left of them is their text.
        (judge(guard, load=False), "{reply}", "{attack}", spelled("asked reply told attack:\n")),
    ]
    for made, attack, reply, prompt in cases:
        made.model = scorer.model
        np.testing.assert_allclose(made([attack], [reply]), log_verdicts(guard, [prompt]), atol=2e-5)
    room = LENGTH - len("asked do it told :\n")
    found = scorer(["do it", "do it"], ["x" * 99, "no"])
    assert f"1 of 2 prompts exceed task.red_team.classifier_length={LENGTH} tokens" in caplog.text
    np.testing.assert_allclose(found, scorer(["do it", "do it"], ["x" * room, "no"]), atol=1e-6)
    # An attack that leaves no room for any reply loses its own end, too.
    room = LENGTH - len("asked  told :\n")
    np.testing.assert_allclose(scorer(["a" * 60], ["no"]), scorer(["a" * room], [""]), atol=1e-6)


@pytest.mark.parametrize(
    "of, changes, sentence",
    [
        ("victim", {"template": "tell:"}, r"victim_template='tell:' must hold \{attack\} once"),
        ("victim", {"system_prompt": "be good"}, r"victim_template='tell: \{attack\}:' and a system prompt exclude each other"),
        ("victim", {"reply_length": 60}, r"victim_prompt_length=40 \+ .*victim_reply_length=60 exceed the 64 positions"),
        ("guard", {"token": "unsafely"}, r"classifier_label='unsafely' must be the text of one token of .* 0 tokens have"),
        ("guard", {"template": "{attack}"}, r"classifier_template='\{attack\}' must hold \{reply\} once"),
        ("guard", {"length": 14}, r"classifier_length=14 leaves no room for any text: .* 14 tokens"),
    ],
)
def test_settings_that_do_not_go_with_a_model_are_refused(request, of, changes, sentence):
    with pytest.raises(ValueError, match=rf"task\.red_team\.{sentence}"):
        (make if of == "victim" else judge)(request.getfixturevalue(of), load=False, **changes)
