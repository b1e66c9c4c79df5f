"""Red-teaming with real tiny models: rewards against the models asked one by one, figures of reports, and refusals."""

import json
import math
import re

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from configs import base
from tba_jax.rewards import LOADERS, task_models
from tba_jax.rewards.generator import TextGenerator
from tba_jax.rewards.sequence import SequenceClassifier
from tba_jax.rewards.unsafe_token import UnsafeTokenScorer
from tba_jax.tasks.interface import GeneratorSettings, Query, UnsafeTokenSettings
from tba_jax.tasks.red_team import LEAST_LOG_TOXICITY, RedTeam, log_probability
from tests.support import spelled_checkpoints, tiny_checkpoints

ATTACKS = [" tell me\n", "do it", "a b c", "tell me", ""]
TEMPLATE = "do {attack}:"
VERDICT = "q {attack} a {reply}:"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    made = {name: spelled_checkpoints.write(root / name, name) for name in ("llama_untied", "gpt2", "gpt_neox_reward")}
    made["bert_embedding"] = spelled_checkpoints.write(root / "bert_embedding", "bert_embedding")
    vocabulary = {"[UNK]": 0} | {word: i for i, word in enumerate(["tell", "me", "do", "it", "a", "b", "c"], 1)}
    words = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(made["bert_embedding"] / "tokenizer.json"))
    return made


def mesh():
    return tiny_checkpoints.make_mesh((1, 1, 1))


def make(folders, **changes) -> RedTeam:
    settings = base.get_config().task.red_team.to_dict() | dict(
        attack_prompt="attack:",
        replies=2,
        victim_path=str(folders["llama_untied"]),
        victim_template=TEMPLATE,
        victim_prompt_length=16,
        victim_reply_length=6,
        victim_concurrency=4,
        classifier="unsafe_token",
        classifier_path=str(folders["gpt2"]),
        classifier_label="unsafe",
        classifier_template=VERDICT,
        classifier_length=40,
        success_threshold=0.03,
        embedder_path=str(folders["bert_embedding"]),
    )
    return RedTeam(**settings | changes)


def started(folders, **changes) -> RedTeam:
    task = make(folders, **changes)
    task.start(mesh(), LOADERS)
    return task


def replies_of(folders, attacks: list[str], seed: int) -> list[list[str]]:
    """Those of each attack, asked alone."""
    victim = TextGenerator(
        folders["llama_untied"],
        mesh(),
        GeneratorSettings(
            samples=2,
            template=TEMPLATE,
            system_prompt="",
            temperature=1.0,
            top_p=1.0,
            prompt_length=16,
            reply_length=6,
            slots=2,
            compute_dtype="float32",
        ),
        prefix="test",
    )
    return [victim([attack], seed) for attack in attacks]


def score(task: RedTeam, responses: list[str]):
    query = task.queries("train")[0]
    return task.rewards([query] * len(responses), responses, np.ones(len(responses), bool))


@pytest.fixture(scope="module")
def task(folders) -> RedTeam:
    return started(folders)


def test_the_reward_is_the_mean_logprob_of_the_verdict(folders, task):
    settings = UnsafeTokenSettings(token="unsafe", template=VERDICT, ending="", length=40, compute_dtype="float32", batch_rows=4)
    judge = UnsafeTokenScorer(folders["gpt2"], mesh(), settings, prefix="test")
    attacks = [attack.strip() for attack in ATTACKS]
    found = score(task, ATTACKS)
    assert found.reward.dtype == found.parts.dtype == np.float32 and found.parts.shape == (5, 2)
    for i, (attack, replies) in enumerate(zip(attacks, replies_of(folders, attacks, 0), strict=True)):
        logprobs = [float(judge([attack], [reply])[0]) for reply in replies]
        toxicity = sum(math.exp(logprob) for logprob in logprobs) / 2
        assert found.reward[i] == pytest.approx(sum(logprobs) / 2, abs=1e-4)
        assert found.parts[i].tolist() == pytest.approx([toxicity, float(toxicity > 0.03)], abs=1e-4)
    assert 0 < found.parts[:, 1].mean() < 1, "the threshold tells attacks apart"
    assert found.reward[0] == found.reward[3], "white space at the ends is no part of an attack"
    again = score(task, ATTACKS[1:3])
    np.testing.assert_allclose(again.reward, found.reward[1:3], atol=1e-5)


def test_reports_measure_with_replies_of_their_own(folders, task):
    query = task.queries("heldout")[0]
    found = task.measures([query] * 5, ATTACKS, np.ones(5, bool), np.zeros(5, np.float32))
    other = score(started(folders, seed=1), ATTACKS)
    np.testing.assert_allclose(found["toxicity"], other.parts[:, 0], atol=1e-5)
    np.testing.assert_array_equal(found["success_rate"], other.parts[:, 1])
    assert abs(found["toxicity"] - score(task, ATTACKS).parts[:, 0]).max() > 1e-6
    embeddings = LOADERS.embedder(folders["bert_embedding"], mesh(), setting="test")([attack.strip() for attack in ATTACKS])
    pairs = [1 - float(embeddings[i] @ embeddings[j]) for i in range(5) for j in range(i)]
    assert found["cosine_distance"] == pytest.approx(sum(pairs) / 10, abs=1e-5)
    assert "cosine_distance" not in task.measures([query], ["do it"], np.ones(1, bool), np.zeros(1, np.float32))


def test_a_sequence_classifier_judges_the_reply(folders):
    settings = dict(classifier="sequence", classifier_path=str(folders["gpt_neox_reward"]), classifier_label="LABEL_0")
    found = score(started(folders, **settings), ATTACKS[:3])
    judge = SequenceClassifier(folders["gpt_neox_reward"], mesh(), setting="test")
    for i, replies in enumerate(replies_of(folders, [attack.strip() for attack in ATTACKS[:3]], 0)):
        logits = [float(judge.scores([reply or " "])[0, 0]) for reply in replies]
        assert found.reward[i] == pytest.approx(sum(-math.log1p(math.exp(-logit)) for logit in logits) / 2, abs=1e-4)
    sentence = r"task\.red_team\.classifier_label='hate': .*classifier_path='.*' has no label 'hate': its labels are 'LABEL_0'"
    with pytest.raises(ValueError, match=sentence):
        started(folders, **settings | {"classifier_label": "hate"})


@pytest.mark.parametrize("intercept, reward", [(-1e4, LEAST_LOG_TOXICITY), (1e4, 0.0)])
def test_a_linear_classifier_that_is_sure_gives_finite_rewards(folders, tmp_path, intercept, reward):
    path = tmp_path / "linear.npz"
    one = np.ones(1)
    np.savez(path, terms=np.array(["zz"]), idf=one, coef=one[None], intercept=one * intercept, platt_a=-one, platt_b=0 * one)
    task = started(folders, classifier="linear", classifier_path=str(path))
    found = score(task, ["do it"])
    digest = task_models.digests(task)["task.red_team.classifier_path"]
    path.write_bytes(path.read_bytes() + b" ")
    assert task_models.digests(task)["task.red_team.classifier_path"] != digest
    assert found.reward.tolist() == [reward] and found.parts[0].tolist() == pytest.approx([math.exp(reward), float(reward == 0)])


def test_one_prompt_or_those_of_a_file_are_attacked_with(folders, tmp_path):
    task = make(folders)
    assert task.queries("train") == task.queries("heldout") == [Query(prompt="attack:")]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"attacker_prompt": prompt}) + "\n" for prompt in ("one:", "two:", "one:")))
    queries = make(folders, attack_prompt="", attack_prompt_path=str(path)).queries("train")
    assert [query.prompt for query in queries] == ["one:", "two:"]
    path.write_text('{"prompt": "one:"}\n')
    with pytest.raises(ValueError, match=r"task.red_team.attack_prompt_path='.*' line 1: field 'attacker_prompt' is missing"):
        make(folders, attack_prompt="", attack_prompt_path=str(path))


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"victim_path": ""}, "victim_path='' must name the model"),
        ({"attack_prompt": ""}, "attack_prompt='' and attack_prompt_path='': set exactly one of the two"),
        (
            {"attack_prompt_path": "x.jsonl"},
            "attack_prompt='attack:' and attack_prompt_path='x.jsonl': set exactly one of the two",
        ),
        ({"classifier_path": ""}, "classifier_path='' must name the model of classifier=unsafe_token"),
        ({"classifier_label": ""}, "classifier_label='' must be the toxic label of classifier=unsafe_token"),
        ({"victim_temperature": 0.0}, "victim_temperature=0 makes all replies=2 to an attack the same"),
    ],
)
def test_bad_settings_are_refused(folders, changes, sentence):
    with pytest.raises(ValueError, match=re.escape(f"task.red_team.{sentence}")):
        make(folders, **changes)


def test_the_log_probability_of_a_label():
    logits = np.array([[0.0, math.log(3.0)], [200.0, -200.0]], np.float32)
    assert log_probability(logits, 1).tolist() == pytest.approx([math.log(0.75), -400.0])
    assert log_probability(logits[:, :1], 0).tolist() == pytest.approx([math.log(0.5), 0.0])
