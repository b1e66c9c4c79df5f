"""The recipes of red-teaming from end to end, with tiny models for attacker, victim, classifier and embedder."""

import numpy as np
import pytest

from configs import red_team_gpt2, red_team_llama3_2_1b
from tba_jax import trajectory
from tba_jax.experiment import composition, jobs, sizes
from tba_jax.rewards import task_models
from tba_jax.storage import layout
from tests.support import frozen_runs, spelled_checkpoints, tiny_run
from tests.support.small_recipes import STEPS, check_run

# What a tokenizer of letters and models of 64 positions leave room for.
OF_LETTERS = {
    "task.prompt_length": 4,
    "task.red_team.attack_prompt": "do:",
    "task.red_team.victim_prompt_length": 32,
    "task.response_length": 8,
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [red_team_gpt2, red_team_llama3_2_1b])
def test_a_recipe_runs_in_turn(recipe, tmp_path, one_device):
    c = recipe.get_config("small")
    c.schedule.mode = "interleaved"
    s = tiny_run.settings(tmp_path / "run", c)
    assert {"victim", "classifier"} <= sizes.memory(s.experiment)["searcher"].keys()
    assert jobs.everything(s)() == 0
    check_run(s.run, "log_toxicity", tmp_path / "exported", c.model.path)
    report = layout.read_json(s.run.evaluations / f"{layout.step_name(STEPS)}.json")
    assert report["queries"] == 1 and 0 <= report["sampled_success_rate"] <= 1 and 0 < report["sampled_toxicity"] < 1
    assert 0 <= report["sampled_success_rate_stderr"] <= 0.5, "the samples of one prompt are the units"
    rows = [*frozen_runs.rows(s).values()]
    for each in rows:
        assert (each["response_length"] >= 5).all() and len(set(each["query_id"].tolist())) == 1
        toxicity = each["reward_parts"][:, 0]
        assert (toxicity >= np.exp(each["reward"]) - 1e-6).all(), "Jensen: mean P is at least exp of mean log P"
    # Rows hold the rewards that the task gives when it is asked again.
    first = rows[0]
    texts = [s.experiment.tokenizer.decode(trajectory.response(first, i).tolist()) for i in range(len(first["row"]))]
    query = s.experiment.task.queries("train")[0]
    again = s.experiment.task.rewards([query] * len(texts), texts, first["finished"])
    np.testing.assert_allclose(again.reward, first["reward"], atol=1e-4)


def test_what_only_the_models_tell_is_refused_before_a_run(tmp_path, one_device):
    c = red_team_gpt2.get_config("small")
    c.update_from_flattened_dict(OF_LETTERS | {"task.red_team.classifier_label": "hate"})
    c.model.path = str(spelled_checkpoints.write(tmp_path / "attacker", "gpt2"))
    c.task.red_team.victim_path = str(spelled_checkpoints.write(tmp_path / "victim", "qwen2"))
    c.task.red_team.classifier_path = str(spelled_checkpoints.write(tmp_path / "classifier", "gpt_neox_reward"))
    c.task.red_team.embedder_path = ""
    c.task.red_team.victim_template = "do {attack}:"
    for change, sentence in (
        ({}, "classifier_label='hate': .* has no label 'hate': its labels are 'LABEL_0'"),
        ({"victim_template": ""}, "victim_template='', the chat template: the tokenizer of .* has no chat template"),
        ({"victim_reply_length": 600}, "victim_reply_length=600 exceed the .* positions"),
        ({"classifier": "linear", "classifier_path": "/nowhere.npz"}, "classifier_path='/nowhere.npz' cannot be read"),
    ):
        changed = c.copy_and_resolve_references()
        changed.task.red_team.update(change)
        with pytest.raises(ValueError, match=rf"task\.red_team\..*{sentence}"):
            task_models.check(composition.build(changed).task, role="searcher")
    c.task.red_team.classifier_label = "LABEL_0"
    task_models.check(composition.build(c).task, role="searcher")


@pytest.mark.parametrize("recipe", [red_team_gpt2.get_config, red_team_llama3_2_1b.get_config])
def test_a_victim_has_to_be_named(recipe, tmp_path):
    c = recipe()
    c.lora.rank = 4
    c.task.embedding_path, c.replay.merge_cosine_distance = "", 0.0
    c.model.path = str(spelled_checkpoints.write(tmp_path / "attacker", "gpt2"))
    with pytest.raises(ValueError, match=r"task\.red_team\.victim_path='' must name"):
        composition.build(c)


def test_another_victim_is_another_contract(tmp_path):
    """The folder is no part of it, what lies in it is."""
    c = red_team_gpt2.get_config()
    c.lora.rank = 4
    c.model.path = str(spelled_checkpoints.write(tmp_path / "attacker", "gpt2"))
    c.task.red_team.classifier_path = str(spelled_checkpoints.write(tmp_path / "classifier", "gpt_neox_reward"))
    c.task.red_team.embedder_path = ""
    c.task.prompt_length, c.task.red_team.attack_prompt = 4, "do:"
    digests = []
    for name, fixture in (("one", "gpt2"), ("same", "gpt2"), ("other", "llama_tied")):
        c.task.red_team.victim_path = str(spelled_checkpoints.write(tmp_path / name, fixture))
        digests.append(composition.build(c).contract)
    assert digests[0] == digests[1] != digests[2]
