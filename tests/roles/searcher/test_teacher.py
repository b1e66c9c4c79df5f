"""A teacher as the reference: rows hold its log-probs, whatever its architecture, and what cannot be one is refused."""

import re
import shutil

import numpy as np
import pytest

from tba_jax import trajectory
from tba_jax.commands import append
from tba_jax.experiment import composition, jobs
from tba_jax.models import decoder, parameters, scoring
from tba_jax.rewards import scorers
from tba_jax.telemetry import metrics
from tests.support import frozen_runs, random_checkpoints, small_recipes, tiny_checkpoints, tiny_run
from tests.support.summaries import write_rows

pytestmark = pytest.mark.usefixtures("one_device_throughout")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A policy, and a teacher of another architecture with the same tokenizer."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = random_checkpoints.byte_tokenizer(root / "tokenizer")
    made = {"policy": ("llama-3.2-1b", 0), "teacher": ("gpt2", 1)}
    return {
        name: random_checkpoints.write(root / name, preset, tokenizer, seed=seed, p_end=random_checkpoints.P_END)
        for name, (preset, seed) in made.items()
    }


def config(folders, **changes):
    c = small_recipes.config("distill:small")
    named = {"model.path": str(folders["policy"]), "learner.reference.path": str(folders["teacher"])}
    named |= {"schedule.mode": "interleaved", "evaluation.enabled": False, "task.missing_eos_reward": None}
    c.update_from_flattened_dict(named | {name.replace("__", "."): value for name, value in changes.items()})
    return c


def by_teacher(folder, s, rows):
    """float32[B, R]: log-probs of rows under the model in a folder, in one pass."""
    model, params = tiny_checkpoints.load(folder)
    module = parameters.module(decoder.define(model).graphdef, params)
    columns = (rows[name] for name in ("tokens", "prompt_length", "response_length"))
    how = dict(R=s.experiment.contract.response_length, space=s.experiment.contract.response_space())
    return np.asarray(scoring.response_logprobs(module, *columns, **how, logit_bytes=1 << 30, remat="none")[0])


@pytest.mark.parametrize("more", [{}, {"lora__rank": 2}], ids=["whole policy", "adapters"])
def test_rows_hold_the_teachers_log_probs(folders, tmp_path, more):
    s = tiny_run.settings(tmp_path / "run", config(folders, **more))
    assert jobs.everything(s)() == 0
    (rows,) = frozen_runs.rows(s).values()
    assert set(rows["reference_id"].tolist()) == {int(scorers.digest(folders["teacher"]), 16)}
    np.testing.assert_allclose(rows["ref_logprobs"], by_teacher(folders["teacher"], s, rows), atol=1e-5)
    assert np.abs(rows["ref_logprobs"] - rows["policy_logprobs"]).max() > 0.1 and not rows["reward"].any()
    first = metrics.read_lines(s.run.metrics("trainer"))[0]
    of_step_0 = (rows["policy_logprobs"] - rows["ref_logprobs"])[:8].sum(axis=1)
    assert first["kl_to_ref"] == pytest.approx(of_step_0.mean(), abs=1e-3), "the first batch is of the first two queries"


def test_responses_of_a_file_are_scored_by_the_teacher_too(folders, tmp_path):
    s = tiny_run.settings(tmp_path / "run", config(folders))
    assert jobs.everything(s)() == 0
    prompt = s.experiment.queries["train"][0].query.prompt
    path = write_rows(tmp_path / "given.jsonl", [{"prompt": prompt, "response": text} for text in ("ab", "ba")])
    append.append(s.run.root, path, unfit="refuse")
    (given,) = (rows for writer, rows in frozen_runs.rows(s).items() if writer.startswith("given-"))
    np.testing.assert_allclose(given["ref_logprobs"], by_teacher(folders["teacher"], s, given), atol=1e-5)
    np.testing.assert_allclose(given["policy_logprobs"], by_teacher(folders["policy"], s, given), atol=1e-5)
    assert set(given["reference_id"].tolist()) == {int(scorers.digest(folders["teacher"]), 16)}
    assert trajectory.trained(given).any()


def test_what_cannot_be_a_teacher_is_refused(folders, tmp_path):
    other = random_checkpoints.write(tmp_path / "other", "gpt2", tiny_checkpoints.write_letters(tmp_path / "letters", "abc"))
    larger, short = (shutil.copytree(folders["policy"], tmp_path / name) for name in ("larger", "short"))
    tiny_checkpoints.edit_config(larger, vocab_size=260)

    def enlarge(tensors):
        for name, tensor in tensors.items():
            if tensor.shape[0] == 257:
                tensors[name] = np.concatenate([tensor, np.zeros((3, *tensor.shape[1:]), tensor.dtype)])

    tiny_checkpoints.edit_weights(larger, enlarge)
    tiny_checkpoints.edit_config(short, max_position_embeddings=40)
    refused = {
        str(other): "has another tokenizer than the policy",
        str(larger): "has a vocabulary of 260 tokens, the policy has one of 257",
        str(short): "has 40 positions, fewer than task.prompt_length + task.response_length = 88",
        str(tmp_path / "nothing"): "nothing",
        "": "learner.reference.kind=teacher needs learner.reference.path",
    }
    for path, sentence in refused.items():
        with pytest.raises(ValueError, match=re.escape(sentence)):
            composition.build(config(folders, learner__reference__path=path))
    changes = {"searchers__scores_reference": False}, {"learner__objective": "asymre"}, {"learner__reference__kind": "initial"}
    sentences = "needs searchers.scores_reference=True", "names a reference that learner.objective=asymre", "path=.* would not be"
    for change, sentence in zip(changes, sentences, strict=True):
        with pytest.raises(ValueError, match=sentence):
            composition.build(config(folders, **change), new=True)
