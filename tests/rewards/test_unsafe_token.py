"""The verdict of a causal classifier: against teacher-forced scoring, in any batch and on a mesh, cut replies and refusals."""

import functools

import jax
import numpy as np
import pytest

from tba_jax.models import scoring
from tba_jax.rewards.unsafe_token import UnsafeTokenScorer
from tba_jax.tasks.interface import UnsafeTokenSettings
from tests.support import applied, spelled_checkpoints, tiny_checkpoints
from tests.support.spelled_checkpoints import BEGIN, PAD, UNSAFE, spelled

LENGTH = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return spelled_checkpoints.write(tmp_path_factory.mktemp("classifiers") / "guard", "gpt2", chat=True)


def make(folder, devices: int = 1, kind=UnsafeTokenScorer, **changes) -> UnsafeTokenScorer:
    settings = dict(
        token="unsafe",
        template="asked {attack} told {reply}:",
        ending="\n",
        length=LENGTH,
        compute_dtype="float32",
        batch_rows=4,
    )
    judging = UnsafeTokenSettings(**settings | changes)
    return kind(folder, tiny_checkpoints.make_mesh((devices, 1, 1)), judging, prefix="task.red_team.classifier_")


def expected(folder, prompts: list[list[int]]) -> np.ndarray:
    """float32[n]: log π(unsafe | prompt), by the function that scores responses."""
    config, params = tiny_checkpoints.load(folder)
    rows = [[*prompt, UNSAFE] for prompt in prompts]
    tokens = np.array([row + [PAD] * (LENGTH + 1 - len(row)) for row in rows], np.int32)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    space = scoring.ResponseSpace(temperature=1.0, banned_tokens=(), eos_id=-1)
    score = functools.partial(applied.response_logprobs, R=1, config=config, space=space, logit_bytes=1 << 20, remat="none")
    logprobs, _ = jax.jit(score)(params, tokens, lengths, np.ones(len(prompts), np.int32))
    return np.asarray(logprobs)[:, 0]


def exchanges(count: int) -> tuple[list[str], list[str]]:
    rng = np.random.default_rng(0)
    letters = "abcdeghijklmnopqrtvwxyz "
    texts = ["".join(rng.choice(list(letters), rng.integers(0, 14))) for _ in range(2 * count)]
    return texts[:count], texts[count:]


def test_an_exchange_has_the_logprob_of_its_verdict(folder):
    attacks, replies = exchanges(37)
    prompts = [spelled(f"asked {attack} told {reply}:\n") for attack, reply in zip(attacks, replies, strict=True)]
    found = make(folder)(attacks, replies)
    assert found.dtype == np.float32 and found.shape == (37,) and found.max() < 0 and found.std() > 0.01
    np.testing.assert_allclose(found, expected(folder, prompts), atol=2e-5)
    np.testing.assert_allclose(make(folder, devices=4)(attacks, replies), found, atol=2e-5)
    assert make(folder)([], []).shape == (0,)


def test_the_chat_template_holds_the_exchange(folder):
    prompt = [BEGIN, *spelled("user:do it\nassistant:no\n\n")]
    found = make(folder, template="")(["do it"], ["no"])
    np.testing.assert_allclose(found, expected(folder, [prompt]), atol=2e-5)


def test_a_chat_template_finds_the_day_of_the_run(folder, tmp_path):
    dated = spelled_checkpoints.dated(folder, tmp_path / "dated")
    for month, date in (("march", "2025-03-09"), ("may", "2025-05-09")):
        found = make(dated, kind=spelled_checkpoints.loaders(date).unsafe_scorer, template="")(["do it"], ["no"])
        prompt = [*spelled(month), BEGIN, *spelled("user:do it\nassistant:no\n\n")]
        np.testing.assert_allclose(found, expected(folder, [prompt]), atol=2e-5)


def test_a_text_may_spell_the_name_of_a_place(folder):
    """Braces are no characters of this tokenizer: what is left of them is their text."""
    found = make(folder)(["{reply}"], ["{attack}"])
    np.testing.assert_allclose(found, expected(folder, [spelled("asked reply told attack:\n")]), atol=2e-5)


def test_a_reply_that_is_too_long_loses_its_end_with_a_warning(folder, caplog):
    scorer = make(folder)
    room = LENGTH - len("asked do it told :\n")
    found = scorer(["do it", "do it"], ["x" * 99, "no"])
    assert f"1 of 2 prompts exceed task.red_team.classifier_length={LENGTH} tokens" in caplog.text
    np.testing.assert_allclose(found, scorer(["do it", "do it"], ["x" * room, "no"]), atol=1e-6)
    # An attack that leaves no room for any reply loses its own end, too.
    room = LENGTH - len("asked  told :\n")
    np.testing.assert_allclose(scorer(["a" * 60], ["no"]), scorer(["a" * room], [""]), atol=1e-6)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        (
            {"token": "unsafely"},
            r"task.red_team.classifier_label='unsafely' must be the text of one token of .* 0 tokens have",
        ),
        ({"template": "{attack}"}, r"task.red_team.classifier_template='\{attack\}' must hold \{reply\} once"),
        ({"length": 65}, r"task.red_team.classifier_length=65 exceeds the 64 positions"),
        ({"length": 14}, r"task.red_team.classifier_length=14 leaves no room for any text: .* 14 tokens"),
    ],
)
def test_settings_that_do_not_go_with_the_model_are_refused(folder, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(folder, **changes)
