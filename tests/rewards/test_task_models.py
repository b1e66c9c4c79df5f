"""The models of a task: rewards and programs of loaded models, the programs made from configs alone, and what they hold.

Replies of frozen language models against a loop over whole sequences.
"""

import codecs
import concurrent.futures
import dataclasses
import functools
import json
import shutil

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from configs import base
from tba_jax import sharding
from tba_jax.programs import Measure
from tba_jax.rewards import task_models
from tba_jax.rewards.task_models import TextGenerator
from tba_jax.tasks.interface import GeneratorSettings, ModelUse
from tba_jax.tasks.red_team import RedTeam
from tba_jax.tasks.tldr import TLDR
from tests.support import lowered, random_checkpoints, spelled_checkpoints, tiny_checkpoints
from tests.support.spelled_checkpoints import BEGIN, EOS, IDS, spelled
from tests.support.summaries import ROWS, write_rows

LONG = "a b c d e f " * 40  # longer than every limit
LENGTH = 100  # of the run's prompt and response


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    made = {name: spelled_checkpoints.write(root / name, name) for name in ("llama_untied", "gpt2", "bert_embedding")}
    words = Tokenizer(models.WordLevel({"[UNK]": 0} | {letter: i for i, letter in enumerate("abcdef", 1)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(made["bert_embedding"] / "tokenizer.json"))
    made["reward"] = random_checkpoints.write(
        root / "reward", "pythia-410m", random_checkpoints.byte_tokenizer(root / "tokens"), labels=1
    )
    made["classifier"] = spelled_checkpoints.write(root / "classifier", "roberta_classifier")
    made["rows"] = write_rows(root / "rows.jsonl", ROWS)
    return {name: str(path) for name, path in made.items()}


def red_team(folders, **changes) -> RedTeam:
    settings = base.get_config().task.red_team.to_dict() | dict(
        attack_prompt="attack:",
        replies=2,
        victim_path=folders["llama_untied"],
        victim_template="do {attack}:",
        victim_prompt_length=40,
        victim_reply_length=6,
        victim_concurrency=4,
        classifier="unsafe_token",
        classifier_path=folders["gpt2"],
        classifier_label="unsafe",
        classifier_template="q {attack} a {reply}:",
        classifier_length=40,
        embedder_path=folders["bert_embedding"],
    )
    return RedTeam(**settings | changes)


def tldr(folders, **changes) -> TLDR:
    paths = dict(train_path="rows", heldout_path="rows", reward_path="reward", gold_path="reward")
    settings = {name: folders[path] for name, path in paths.items()} | dict(compute_dtype="float32", batch_rows=4)
    return TLDR(**settings | changes)


def mesh(devices: int = 1):
    return sharding.task_mesh(0, jax.devices()[:devices])


def bytes_of(tree) -> int:
    shards = [shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == jax.devices()[0])


def test_the_programs_are_those_that_loaded_models_run(folders):
    task, on = tldr(folders), mesh(2)
    found = task_models.of_task(task, on, role="evaluator", length=LENGTH)
    query, ended = task.queries("heldout")[0], np.ones(2, bool)
    longest = LONG[: LENGTH - 1 - len(query.prompt)]  # the reward model has a token for each character
    loaded = {}

    def load(use):
        loaded[use.name] = task_models.load(use, mesh=on)
        return loaded[use.name]

    with lowered.calls() as called:
        task.start(load)
        task.rewards([query] * 2, [longest, longest[1:]], ended)
        task.measures([query] * 2, [longest, longest[1:]], ended, np.zeros(2))
    assert {lowered.text(program.lower()) for program in found.alone().values()} <= called
    held = {name: Measure().size(tree) for name, tree in found.held.items()}
    assert held == {name: bytes_of(scorer.model.params) for name, scorer in loaded.items()}


def test_a_config_is_enough(folders, tmp_path):
    bare = {}
    for name in ("llama_untied", "gpt2", "reward"):
        bare[name] = str(tmp_path / name)
        (tmp_path / name).mkdir()
        shutil.copy(f"{folders[name]}/config.json", bare[name])
    of_tasks = {red_team: {"victim_path": "llama_untied", "classifier_path": "gpt2"}, tldr: {"reward_path": "reward"}}
    for make, paths in of_tasks.items():
        bare_task = make(folders, **{setting: bare[name] for setting, name in paths.items()})
        whole, found = (task_models.of_task(task, mesh(), role="searcher", length=LENGTH) for task in (make(folders), bare_task))
        sizes = [{name: Measure().size(tree) for name, tree in each.held.items()} for each in (whole, found)]
        assert sizes[0] == sizes[1] and set(found.scoring) == set(whole.scoring)


def test_models_that_cannot_be_used_are_named(folders):
    with pytest.raises(ValueError, match=r"task\.red_team\.victim_path='.*': slots=3 cannot be divided by the 2 ways"):
        task_models.of_task(red_team(folders, victim_concurrency=3), mesh(2), role="searcher", length=LENGTH)
    for name in ("reward", "gold"):
        with pytest.raises(ValueError, match=rf"{name}_path='.*' must have one label, as a reward model has; it has 3, negative"):
            task_models.check(tldr(folders, **{f"{name}_path": folders["classifier"]}), role="evaluator")
    task_models.check(tldr(folders, gold_path=folders["classifier"]), role="searcher")  # which does not load it
    with pytest.raises(ValueError, match=r"'x' of task\.x\.path='.*' is of kind 'generator': its ModelUse needs `generator`"):
        task_models.ModelUse(name="x", setting="task.x.path", path=folders["gpt2"], rows=1, kind="generator")


def test_a_linear_classifier_has_no_program_and_a_digest(folders, tmp_path):
    path, one = tmp_path / "linear.npz", np.ones(1)
    np.savez(path, terms=np.array(["zz"]), idf=one, coef=one[None], intercept=one, platt_a=-one, platt_b=0 * one)
    assert set(task_models.digests(tldr(folders))) == {"task.tldr.reward_path"}, "the gold model defines no reward"
    task = red_team(folders, classifier="linear", classifier_path=str(path))
    found = task_models.of_task(task, mesh(), role="searcher", length=LENGTH)
    assert list(found.held) == ["victim"]
    digests = functools.partial(task_models.digests, task)
    before = digests()
    path.write_bytes(path.read_bytes() + b" ")
    assert {name for name, digest in digests().items() if digest != before[name]} == {"task.red_team.classifier_path"}


P, R = 40, 8
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


def greedy(folder, prompt: list[int]) -> str:
    """The most likely tokens, each from the whole sequence before it; special ones and ids without a token never come."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + R and (len(tokens) == len(prompt) or tokens[-1] not in (EOS, IDS[OTHER_END])):
        logits, allowed = tiny_checkpoints.last_logits(folder, [tokens])[0], sorted({*range(4, len(IDS)), EOS})
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


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"template": "tell:"}, r"template='tell:' must hold \{attack\} once"),
        ({"system_prompt": "be good"}, r"template='tell: \{attack\}:' and a system prompt exclude each other"),
        ({"reply_length": 60}, r"prompt_length=40 \+ .*victim_reply_length=60 exceed the 64 positions"),
    ],
)
def test_settings_that_do_not_go_with_a_victim_are_refused(victim, changes, sentence):
    with pytest.raises(ValueError, match=rf"task\.red_team\.victim_{sentence}"):
        make(victim, load=False, **changes)
