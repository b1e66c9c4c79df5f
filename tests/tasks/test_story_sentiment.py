"""Stories: openings, rewards, and files that are refused."""

import json
import re

import numpy as np
import pytest

from tba_jax.tasks.interface import Query
from tba_jax.tasks.story_sentiment import StorySentiment

STORIES = ["One day a cat", "The sun was so warm", "One day a cat sat", "A boy had a red ball", "", "  Mia  ran to\nher mum"]


@pytest.fixture
def story_file(tmp_path):
    path = tmp_path / "stories.json"
    path.write_text(json.dumps(STORIES))
    return path


def test_openings_are_distinct_and_the_reward_is_the_sentiment_of_the_continuation(story_file):
    task = StorySentiment(data_path=str(story_file), opening_words=4, heldout_queries=2)
    assert [query.prompt for query in task.queries("train")] == ["One day a cat", "The sun was so"]
    assert [query.prompt for query in task.queries("heldout")] == ["A boy had a", "Mia ran to her"]
    responses = [" They were happy and loved the wonderful party!", " He was sad, hurt and afraid of the bad storm.", " the"]
    scores = task.rewards([Query("It was a terrible, horrible day.")] * 3, responses, np.array([True, False, True]))
    good, bad, neutral = scores.reward.tolist()
    assert 0.5 < good <= 1 and -1 <= bad < -0.5 and neutral == 0
    assert scores.reward.dtype == np.float32 and scores.parts.tolist() == scores.reward[:, None].tolist()
    with pytest.raises(ValueError, match=r"no worked examples: set model.path"):
        task.worked_examples(np.random.default_rng(0), 1)


@pytest.mark.parametrize(
    "content, sentence",
    [
        (None, "cannot be read: No such file or directory"),
        (b'["a", 3]', "must be a JSON list of strings"),
        (b'["a b", " a  b", "c", ""]', "has 2 distinct openings of 4 words, not more than task.story_sentiment.heldout_que"),
    ],
)
def test_bad_story_files_are_refused(tmp_path, content, sentence):
    path = tmp_path / "stories.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"task.story_sentiment.data_path={str(path)!r}") + " ?" + re.escape(sentence)):
        StorySentiment(data_path=str(path), opening_words=4, heldout_queries=2)
