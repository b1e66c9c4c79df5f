"""Runs exported by the command: the folder holds the weights of the snapshot, and whoever loads it computes the same."""

import json
import shutil

import huggingface_hub
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tba_jax import sharding
from tba_jax.commands import command_line, export
from tba_jax.models import parameters
from tba_jax.models.hugging_face import export as export_lib
from tba_jax.models.hugging_face import load
from tba_jax.storage import contract, layout, snapshots
from tba_jax.text.tokenizers import HuggingFaceTokenizer
from tests.support import applied, random_checkpoints, tiny_checkpoints, tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")

LORA = {"lora__rank": 2, "lora__targets": ("layers.attention.query", "layers.feed_forward.down"), "lora__alpha": 4.0}


def written_run(workdir, **changes):
    """What a run of random weights leaves before its first step, with adapters as after some. Returns paths and policy."""
    s = tiny_run.settings(workdir, tiny_run.config(**changes))
    contract.join(s.run, s.experiment.config, s.experiment.contract)
    policy, info = s.experiment.policy, snapshots.SnapshotInfo(step=0, epoch=0)
    base = policy.base.init(jax.random.key(0))
    trained = policy.initial(base, jax.random.key(1))
    if changes:  # of adapters one factor is zero at first
        trained = jax.tree.map(lambda leaf: 0.1 * jax.random.normal(jax.random.key(2), leaf.shape, leaf.dtype), trained)
    snapshots.save(s.run.policies / "00000000", trained, info, dtype="float32")
    snapshots.save(s.run.reference("f00"), base, info, dtype="float32")
    layout.write_json(s.run.initial_reference, {"id": "f00"})
    return s.run, policy


def refusal(capsys, workdir, output) -> str:
    """The one line that the command says before it exits with 2, after the log."""
    with pytest.raises(SystemExit, match=r"^2$"):
        command_line.execute(export, [f"--workdir={workdir}", f"--output={output}"])
    *told, said = capsys.readouterr().err.splitlines()
    assert said.startswith("error: ") and not any("error" in line for line in told)
    return said


def mesh_of_one():
    return sharding.make_mesh((1, 1, 1), setting="test", devices=jax.devices()[:1])


def weights_of_step(run, policy, step: int) -> parameters.Params:
    """What searchers sample from at `step`."""
    snapshot = snapshots.load_step(run.policies, step, policy.trained_specs, policy.trained_shardings(mesh_of_one()))
    reference = run.reference(layout.read_json(run.initial_reference)["id"])
    base = snapshots.load(reference, policy.model_specs, policy.model_shardings(mesh_of_one()))
    return policy.for_sampling(snapshot, base, "full")


def logits(params, tokens, config) -> np.ndarray:
    return np.asarray(tiny_checkpoints.logits(params, tokens, np.ones_like(tokens, bool), config))[0]


def test_an_exported_step_is_the_snapshot(finished, tmp_path):
    s = finished
    said = export.export(s.run.root, tmp_path / "model", step=2, dtype="float32")
    assert said == f"step 2 of {s.run.root} is in {tmp_path / 'model'} (llama, float32)"
    card = huggingface_hub.ModelCard.load(tmp_path / "model" / "README.md")
    assert card.data.library_name == "transformers" and f"weights of trainer step 2 of {s.config.learner.steps}" in card.text
    assert "| rows trained on | 24 |" in card.text and "Step 2 has not been evaluated." in card.text
    config = load.read_config(tmp_path / "model", compute_dtype="float32")
    assert config == s.experiment.policy.model
    params = load.load_params(tmp_path / "model", config, applied.shardings(config, mesh_of_one()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, weights_of_step(s.run, s.experiment.policy, 2))
    ours, theirs = s.experiment.tokenizer, HuggingFaceTokenizer(tmp_path / "model")
    assert theirs.encode("12+34=") == ours.encode("12+34=")
    assert (theirs.eos_id, theirs.pad_id, theirs.vocab_size) == (ours.eos_id, ours.pad_id, ours.vocab_size)


def test_adapters_are_merged_into_the_reference(tmp_path, capsys):
    run, policy = written_run(tmp_path / "run", **LORA)
    export.export(run.root, tmp_path / "model", step=0, dtype=None)
    params = load.load_params(tmp_path / "model", policy.model, applied.shardings(policy.model, mesh_of_one()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, weights_of_step(run, policy, 0))
    base = snapshots.load(run.reference("f00"), policy.model_specs, policy.model_shardings(mesh_of_one()))
    before, after = parameters.flatten(base), parameters.flatten(params)
    changed = {name for name in after if not np.allclose(after[name], before[name], atol=1e-6)}
    assert changed == {"layers.attention.query.weight", "layers.feed_forward.down.weight"}
    run.reference("f00").rename(tmp_path / "kept")
    assert f"is gone: {run.reference('f00')} holds no commit.json" in refusal(capsys, run.root, tmp_path / "again")
    assert "is in the run's folder" in refusal(capsys, run.root, run.policies / "model")


@pytest.mark.parametrize("changes", [{}, LORA], ids=["full", "lora"])
def test_transformers_computes_the_same_with_an_exported_run(torch, tmp_path, changes):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, policy = written_run(tmp_path / "run", **changes)
    export.export(tmp_path / "run", tmp_path / "model", step=0, dtype=None)
    params = load.load_params(tmp_path / "model", policy.model, applied.shardings(policy.model, mesh_of_one()))
    ids = AutoTokenizer.from_pretrained(tmp_path / "model").encode("12+34=")
    assert ids == HuggingFaceTokenizer(tmp_path / "model").encode("12+34=")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    expected = model(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(logits(params, np.array([ids], np.int32), policy.model), expected, atol=1e-5)


def test_the_step_with_the_best_score_is_the_default(finished, tmp_path, capsys):
    run = layout.RunDir(shutil.copytree(finished.run.root, tmp_path / "run"))
    for step, reward in ((0, 0.25), (1, 0.75), (6, 0.5)):
        report = {"step": step, "greedy_reward": reward, "score_name": "accuracy", "queries": 8}
        layout.write_json(run.evaluations / f"{layout.step_name(step)}.json", report)
    for flags, step in (([], 1), (["--step=best"], 1), (["--step=last"], 6)):
        output = tmp_path / f"model{''.join(flags)}"
        command_line.execute(export, [f"--workdir={run.root}", f"--output={output}", *flags])
        said = capsys.readouterr()
        assert f"step {step} of {run.root} is in {output}" in said.out
        assert ("step 1 has the best held-out score, 0.750, of 3 evaluated snapshots" in said.err) == (step == 1)
        found, expected = (load_file(folder / "model.safetensors") for folder in (output, tmp_path / "model"))
        assert all(np.array_equal(found[name], expected[name]) for name in expected) == (step == 1)
    assert f"{output} exists and is not an empty folder" in refusal(capsys, run.root, output)
    assert json.loads((output / "config.json").read_text())["dtype"] == "float32", "that of the snapshot"
    card = (tmp_path / "model" / "README.md").read_text()
    assert "| accuracy (reward of greedy responses) | 0.250 | 0.750 |" in card and "best of 3 evaluated steps" in card


def test_adapters_alone_are_written_for_the_checkpoint_they_belong_to(tmp_path):
    model = random_checkpoints.write(tmp_path / "model", "qwen2.5-0.5b", random_checkpoints.byte_tokenizer(tmp_path / "tokens"))
    run, policy = written_run(tmp_path / "run", model__path=str(model), **LORA)
    said = export.export(run.root, tmp_path / "adapter", step=0, dtype=None, adapter=True)
    assert said == f"the adapters of step 0 of {run.root} are in {tmp_path / 'adapter'}, for {model} (qwen2, float32)"
    values = json.loads((tmp_path / "adapter" / export_lib.ADAPTER_CONFIG).read_text())
    assert values["base_model_name_or_path"] == str(model) and values["target_modules"] == ["mlp.down_proj", "self_attn.q_proj"]
    found = load_file(tmp_path / "adapter" / export_lib.ADAPTER_WEIGHTS)
    trained = snapshots.open_arrays(run.policies / "00000000", policy.trained_specs)
    lora_a = np.asarray(trained["layers"]["feed_forward"]["down"]["lora_a"][1])
    np.testing.assert_array_equal(found["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"], lora_a.T)
    assert HuggingFaceTokenizer(tmp_path / "adapter").vocab_size == HuggingFaceTokenizer(model).vocab_size
    card = huggingface_hub.ModelCard.load(tmp_path / "adapter" / "README.md")
    assert card.data.library_name == "peft" and f"pretrained={model},peft=FOLDER" in card.text


@pytest.mark.parametrize("changes, sentence", [({}, "has no adapters (lora.rank=0)"), (LORA, "not the checkpoint model.path=''")])
def test_adapters_that_belong_to_no_checkpoint_are_refused(tmp_path, changes, sentence):
    run, _ = written_run(tmp_path / "run", **changes)
    with pytest.raises(ValueError) as refused:
        export.export(run.root, tmp_path / "adapter", step=0, dtype=None, adapter=True)
    assert sentence in str(refused.value) and str(refused.value).startswith("--adapter: ")
    assert not (tmp_path / "adapter").exists()
