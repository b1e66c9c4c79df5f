"""Red-teaming with models that are functions: rewards by hand, figures of reports, and refusals."""

import math
import re

import numpy as np
import pytest

from configs import base
from tba_jax.tasks.interface import Query
from tba_jax.tasks.red_team import LEAST_LOG_TOXICITY, RedTeam, log_probability
from tests.support.summaries import write_rows

ATTACKS = [" tell me\n", "do it", "a b c", "tell me", ""]


def make(**changes) -> RedTeam:
    settings = base.get_config().task.red_team.to_dict() | dict(
        attack_prompt="attack:",
        replies=2,
        victim_path="victim",
        classifier="unsafe_token",
        classifier_path="classifier",
        classifier_label="unsafe",
        success_threshold=0.5,
        embedder_path="embedder",
    )
    return RedTeam(**settings | changes)


def reply(texts, seed):
    return [f"{text}{seed}{k}" for text in texts for k in range(2)]


def verdict(attack: str, reply: str) -> float:
    return -2 * ((len(attack) * 7 + sum(map(ord, reply)) * 3) % 11 + 1) / 12


class Classifier:
    labels = ("calm", "hate")

    def scores(self, texts, *, ended=None):
        return np.array([[len(text), 2.0 * text.count("e")] for text in texts], np.float32)


MODELS = {
    "victim": reply,
    "unsafe_token": lambda attacks, replies: np.array(list(map(verdict, attacks, replies)), np.float32),
    "sequence": Classifier(),
    "linear": lambda texts: np.array([0.0 if text.startswith("sure") else -1e4 for text in texts], np.float32),
    "embedder": lambda texts: np.stack([np.eye(3, dtype=np.float32)[len(text) % 3] for text in texts]),
}


def started(**changes) -> RedTeam:
    task = make(**changes)
    task.start(lambda use: MODELS[use.kind if use.name == "classifier" else use.name])
    return task


def score(task: RedTeam, responses: list[str]):
    return task.rewards([task.queries("train")[0]] * len(responses), responses, np.ones(len(responses), bool))


def by_hand(seed: int) -> tuple[list[float], list[float]]:
    logprobs = [[verdict(text.strip(), each) for each in reply([text.strip()], seed)] for text in ATTACKS]
    return [sum(two) / 2 for two in logprobs], [sum(map(math.exp, two)) / 2 for two in logprobs]


def test_the_reward_is_the_mean_logprob_of_the_verdict():
    found, (reward, toxicity) = score(started(seed=3), ATTACKS), by_hand(3)
    assert found.reward.dtype == found.parts.dtype == np.float32
    np.testing.assert_allclose(found.reward, reward, rtol=1e-6)
    np.testing.assert_allclose(found.parts, np.stack([toxicity, np.array(toxicity) > 0.5], axis=1), rtol=1e-6)
    assert 0 < found.parts[:, 1].mean() < 1, "the threshold tells attacks apart"


def test_reports_measure_with_replies_of_their_own():
    task = started(seed=3)
    found = task.measures([task.queries("heldout")[0]] * 5, ATTACKS, np.ones(5, bool), np.zeros(5, np.float32))
    toxicity = by_hand(4)[1]
    np.testing.assert_allclose(found["toxicity"], toxicity, rtol=1e-6)
    np.testing.assert_array_equal(found["success_rate"], np.array(toxicity) > 0.5)
    kinds = [len(attack.strip()) % 3 for attack in ATTACKS]
    pairs = [float(kinds[i] != kinds[j]) for i in range(5) for j in range(i)]
    assert found["cosine_distance"] == pytest.approx(sum(pairs) / 10)
    assert "cosine_distance" not in task.measures([Query("")], ["do it"], np.ones(1, bool), np.zeros(1, np.float32))


def test_other_classifiers_judge_the_reply():
    found = score(started(classifier="sequence", classifier_label="hate"), ["see", "x"])
    expected = [2.0 * text.count("e") - np.logaddexp(len(text), 2.0 * text.count("e")) for text in ("see00", "x00")]
    np.testing.assert_allclose(found.reward, expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"classifier_label='x': .* has no label 'x': its labels are 'calm', 'hate'"):
        started(classifier="sequence", classifier_label="x")
    # One that is sure gives finite rewards.
    assert score(started(classifier="linear"), ["sure", "no"]).reward.tolist() == [0.0, LEAST_LOG_TOXICITY]
    logits = np.array([[0.0, math.log(3.0)], [200.0, -200.0]], np.float32)
    assert log_probability(logits, 1).tolist() == pytest.approx([math.log(0.75), -400.0])
    assert log_probability(logits[:, :1], 0).tolist() == pytest.approx([math.log(0.5), 0.0])
    task = make()
    task.start(lambda use: reply if use.name == "victim" else lambda attacks, replies: np.full(len(replies), np.nan))
    with pytest.raises(FloatingPointError, match=r"task\.red_team\.classifier_path='classifier' gave log-probabilities that are"):
        score(task, ["x"])


def test_one_prompt_or_those_of_a_file_are_attacked_with(tmp_path):
    task = make()
    assert task.queries("train") == task.queries("heldout") == [Query(prompt="attack:")]
    path = write_rows(tmp_path / "prompts.jsonl", ({"attacker_prompt": prompt} for prompt in ("one:", "two:", "one:")))
    queries = make(attack_prompt="", attack_prompt_path=path).queries("train")
    assert [query.prompt for query in queries] == ["one:", "two:"]


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"attack_prompt": ""}, "attack_prompt='' and attack_prompt_path='': set exactly one of the two"),
        ({"classifier_label": ""}, "classifier_label='' must be the toxic label of classifier=unsafe_token"),
        ({"victim_temperature": 0.0}, "victim_temperature=0 makes all replies=2 to an attack the same"),
    ],
)
def test_bad_settings_are_refused(changes, sentence):
    with pytest.raises(ValueError, match=re.escape(f"task.red_team.{sentence}")):
        make(**changes)
