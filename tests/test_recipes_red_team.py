"""The recipes of red-teaming from end to end, with tiny models for attacker, victim, classifier and embedder."""

import jax
import numpy as np
import pytest

from configs import red_team_gpt2, red_team_llama3_2_1b
from tba_jax import dry_run, experiment, roles, run_dir, task_models
from tba_jax.replay.reader import LogReader
from tests import spelled_checkpoints, tiny_run
from tests.test_recipes import SMALL, STEPS, check_run

pytestmark = pytest.mark.usefixtures("compiled_quickly")

_CHANGES = {
    "task.red_team.attack_prompt": "do:",
    "task.red_team.victim_prompt_length": 32,
    "task.red_team.victim_reply_length": 6,
    "task.red_team.victim_concurrency": 4,
    "lora.rank": 4,
    "learner.queries": 1,
    "learner.completions": 8,
    "searchers.queries_per_batch": 1,
    "searchers.samples_per_query": 8,
    "searchers.max_rows_per_snapshot": 16,
    "evaluation.samples_per_query": 6,
}
# Recipe, its attacker, and the classifier.
CASES = {
    "gpt2": (red_team_gpt2.get_config, "gpt2", "gpt_neox_reward", {"task.red_team.classifier_label": "LABEL_0"}),
    "llama": (red_team_llama3_2_1b.get_config, "llama_tied", "llama_untied", {"task.red_team.classifier_length": 60}),
}


@pytest.fixture
def first_device(monkeypatch):
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_runs_in_turn(name, tmp_path, first_device):
    recipe, attacker, classifier, changes = CASES[name]
    folders = {
        "model.path": spelled_checkpoints.write(tmp_path / "attacker", attacker),
        "task.red_team.victim_path": spelled_checkpoints.write(tmp_path / "victim", "qwen2", chat=True),
        "task.red_team.classifier_path": spelled_checkpoints.write(tmp_path / "classifier", classifier, chat=True),
        "task.red_team.embedder_path": spelled_checkpoints.write(tmp_path / "embedder", "bert_embedding"),
    }
    c = recipe()
    c.update_from_flattened_dict(SMALL | _CHANGES | changes | {setting: str(folder) for setting, folder in folders.items()})
    c.update_from_flattened_dict({"learner.micro_batch_rows": 0, "task.missing_eos_reward": None, "schedule.mode": "interleaved"})
    c.update_from_flattened_dict({"task.red_team.compute_dtype": "float32", "task.response_length": 8})
    if name == "gpt2":
        c.task.red_team.victim_template = "do {attack}:"
    s = tiny_run.settings(tmp_path / "run", c)
    assert {"victim", "classifier"} <= dry_run.memory(s.experiment)["searcher"].keys()
    assert roles.everything(s)() == 0
    check_run(s.run, "log_toxicity", tmp_path / "exported", str(folders["model.path"]))
    report = run_dir.read_json(s.run.evaluations / f"{run_dir.step_name(STEPS)}.json")
    assert report["queries"] == 1 and 0 <= report["sampled_success_rate"] <= 1 and 0 < report["sampled_toxicity"] < 1
    assert 0 < report["sampled_cosine_distance"] < 2 and "greedy_cosine_distance" not in report
    reader = LogReader(s.run.replay, s.experiment.contract.row_shape())
    rows = [reader.read(writer, 0, head) for writer, head in reader.heads().items()]
    for each in rows:
        assert (each["response_length"] >= 5).all() and len(set(each["query_id"].tolist())) == 1
        toxicity = each["reward_parts"][:, 0]
        assert (toxicity >= np.exp(each["reward"]) - 1e-6).all(), "Jensen: mean P is at least exp of mean log P"
    # Rows hold the rewards that the task gives when it is asked again.
    first = rows[0]
    texts = [
        s.experiment.tokenizer.decode(tokens[:length].tolist())
        for tokens, length in zip(first["response_tokens"], first["response_length"], strict=True)
    ]
    query = s.experiment.task.queries("train")[0]
    again = s.experiment.task.rewards([query] * len(texts), texts, first["finished"])
    np.testing.assert_allclose(again.reward, first["reward"], atol=1e-4)


def test_what_only_the_models_tell_is_refused_before_a_run(tmp_path, first_device):
    """By the check that each role and --dry_run make."""
    c = red_team_gpt2.get_config()
    c.update_from_flattened_dict(SMALL | _CHANGES | {"learner.micro_batch_rows": 0, "task.missing_eos_reward": None})
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
            task_models.check(experiment.build(changed).task, role="searcher")
    c.task.red_team.classifier_label = "LABEL_0"
    task_models.check(experiment.build(c).task, role="searcher")


@pytest.mark.parametrize("recipe", [red_team_gpt2.get_config, red_team_llama3_2_1b.get_config])
def test_a_victim_has_to_be_named(recipe, tmp_path):
    c = recipe()
    c.lora.rank = 4
    c.model.path = str(spelled_checkpoints.write(tmp_path / "attacker", "gpt2"))
    with pytest.raises(ValueError, match=r"task\.red_team\.victim_path='' must name the model that is tested"):
        experiment.build(c)


def test_another_victim_is_another_contract(tmp_path):
    """The folder is no part of it, what lies in it is."""
    c = red_team_gpt2.get_config()
    c.lora.rank = 4
    c.model.path = str(spelled_checkpoints.write(tmp_path / "attacker", "gpt2"))
    c.task.red_team.classifier_path = str(spelled_checkpoints.write(tmp_path / "classifier", "gpt_neox_reward"))
    c.task.red_team.embedder_path = ""
    c.task.red_team.attack_prompt = "do:"
    digests = []
    for name, fixture in (("one", "gpt2"), ("same", "gpt2"), ("other", "llama_tied")):
        c.task.red_team.victim_path = str(spelled_checkpoints.write(tmp_path / name, fixture))
        digests.append(experiment.build(c).contract)
    assert digests[0] == digests[1] != digests[2]


def test_a_run_begins_with_samples_of_the_reference_from_another(tmp_path, first_device):
    """As the recipe's docstring has it: a first run of one step leaves rows of π_ref, which others mount."""
    folders = {
        "model.path": spelled_checkpoints.write(tmp_path / "attacker", "gpt2"),
        "task.red_team.victim_path": spelled_checkpoints.write(tmp_path / "victim", "qwen2"),
        "task.red_team.classifier_path": spelled_checkpoints.write(tmp_path / "classifier", "gpt_neox_reward"),
    }
    changes = {
        "task.red_team.classifier_label": "LABEL_0",
        "task.red_team.victim_template": "do {attack}:",
        "task.red_team.embedder_path": "",
        "task.missing_eos_reward": None,
        "learner.micro_batch_rows": 0,
        "searchers.max_rows_per_snapshot": 0,
        "evaluation.enabled": False,
        "schedule.mode": "interleaved",
    }
    c = red_team_gpt2.get_config()
    c.update_from_flattened_dict(SMALL | _CHANGES | changes | {setting: str(folder) for setting, folder in folders.items()})
    c.update_from_flattened_dict({"learner.steps": 1, "learner.warmup_steps": 0, "replay.min_rows": 40})
    first = tiny_run.settings(tmp_path / "first", c)
    assert roles.everything(first)() == 0
    rows = LogReader(first.run.replay, first.experiment.contract.row_shape())
    assert sum(rows.heads().values()) >= 40
    assert all((rows.read(writer, 0, head)["policy_step"].max() == 0) for writer, head in rows.heads().items())
    c = c.copy_and_resolve_references()
    c.update_from_flattened_dict({"learner.steps": STEPS, "replay.min_rows": 0, "replay.mount": (str(tmp_path / "first"),)})
    second = tiny_run.settings(tmp_path / "second", c)
    assert roles.everything(second)() == 0
    assert run_dir.read_json(second.run.initial_reference) == run_dir.read_json(first.run.initial_reference)
