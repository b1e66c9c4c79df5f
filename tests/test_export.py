"""Runs exported by the command: the folder holds the weights of the snapshot, and whoever loads it computes the same."""

import importlib.util
import json

import jax
import numpy as np
import pytest

from tba_jax import export, policy_store, roles, run_dir
from tba_jax import mesh as mesh_lib
from tba_jax.models import decoder, hugging_face, parameters, scoring
from tba_jax.replay.log import LogReader
from tba_jax.tokenizer import HuggingFaceTokenizer
from tests import tiny_run

LORA = {"lora__rank": 2, "lora__targets": ("layers.query", "layers.down"), "lora__alpha": 4.0}


@pytest.fixture(autouse=True)
def one_device_only(monkeypatch):
    """Roles take all devices of their process; these tests have eight, the roles of a small run one."""
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *arguments: first)


def finished_run(workdir, **changes):
    """Three interleaved steps on rewards that differ between rows; returns what roles are made from."""
    settings = {"schedule__mode": "interleaved", "evaluation__enabled": False, "task__missing_eos_reward": -1.0}
    c = tiny_run.config(learner__steps=3, **settings, **changes)
    s = tiny_run.settings(workdir, c)
    assert roles.everything(s)() == 0
    return s


def one_device():
    return mesh_lib.make_mesh((1, 1, 1), setting="test", devices=jax.devices()[:1])


def weights_of_step(s, step: int) -> parameters.Params:
    """What searchers sample from at `step`."""
    policy, run = s.experiment.policy, s.run
    snapshot = policy_store.load_step(run.policies, step, policy.trained_specs, policy.trained_shardings(one_device()))
    reference = run.reference(run_dir.read_json(run.initial_reference)["id"])
    base = policy_store.load(reference, policy.model_specs, policy.model_shardings(one_device()))
    return policy.for_sampling(snapshot, base, "full")


def logits(params, tokens, config) -> np.ndarray:
    hidden = decoder.hidden_states(params, tokens, None, config=config, remat="none")
    return np.asarray(decoder.logits_of(params, hidden[0], config=config))


@pytest.mark.parametrize("changes", [{}, {"publish__dtype": "bfloat16"}, LORA], ids=["full", "bfloat16", "lora"])
def test_an_exported_step_is_the_snapshot(tmp_path, changes):
    s = finished_run(tmp_path / "run", **changes)
    said = export.export(tmp_path / "run", tmp_path / "model", step=2, dtype="float32")
    assert said == f"step 2 of {tmp_path / 'run'} is in {tmp_path / 'model'} (llama, float32)"
    config = hugging_face.read_config(tmp_path / "model", compute_dtype="float32")
    assert config == s.experiment.policy.model
    params = hugging_face.load_params(tmp_path / "model", config, decoder.param_shardings(config, one_device()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, weights_of_step(s, 2))
    assert any(jax.tree.leaves(jax.tree.map(lambda a, b: np.any(a != b), params, weights_of_step(s, 0))))
    ours, theirs = s.experiment.tokenizer, HuggingFaceTokenizer(tmp_path / "model")
    assert theirs.encode("12+34=") == ours.encode("12+34=")
    assert (theirs.eos_id, theirs.pad_id, theirs.vocab_size) == (ours.eos_id, ours.pad_id, ours.vocab_size)
    tokens = np.array([ours.encode("12+34=")], np.int32)
    if importlib.util.find_spec("torch"):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
        assert AutoTokenizer.from_pretrained(tmp_path / "model").encode("12+34=") == tokens[0].tolist()
        with torch.no_grad():
            expected = model(torch.tensor(tokens)).logits[0].numpy()
        np.testing.assert_allclose(logits(params, tokens, config), expected, atol=1e-5)


def test_adapters_alone_are_published_and_optimised(tmp_path):
    s = finished_run(tmp_path, **LORA)
    names = {"layers.query.lora_a", "layers.query.lora_b", "layers.down.lora_a", "layers.down.lora_b"}
    assert {path.name for path in (s.run.policies / "00000003").iterdir() if path.is_dir()} == names
    held = sum(path.stat().st_size for path in s.run.policies.joinpath("00000003").rglob("*") if path.is_file())
    whole = sum(path.stat().st_size for path in s.run.references.rglob("*") if path.is_file())
    assert held < whole / 2
    checkpoint = json.loads((s.run.checkpoints / "00000003" / "state" / "_METADATA").read_text())
    stored = {key for key in checkpoint["tree_metadata"] if "params" in key or "'mu'" in key}
    assert stored and all("lora_" in key for key in stored), stored
    before, after = (weights_of_step(s, step) for step in (0, 3))
    changed = {name for name, leaf in parameters.flatten(after).items() if (leaf != parameters.flatten(before)[name]).any()}
    assert changed == {"layers.query.weight", "layers.down.weight"}


def test_the_newest_step_and_its_dtype_are_the_default(tmp_path, capsys):
    finished_run(tmp_path / "run", publish__dtype="bfloat16")
    flags = [f"--workdir={tmp_path / 'run'}", f"--output={tmp_path / 'model'}"]
    export.main(flags)
    assert "step 3 of" in capsys.readouterr().out
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(SystemExit, match="2"):
        export.main(flags)
    assert f"{tmp_path / 'model'} exists and is not an empty folder" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"--step=7 is not a snapshot of .*; there are 0, 1, 2, 3"):
        export.export(tmp_path / "run", tmp_path / "other", step=7, dtype=None)
    with pytest.raises(ValueError, match="holds no run"):
        export.export(tmp_path, tmp_path / "other", step=None, dtype=None)
    assert not (tmp_path / "other").exists()


def test_searchers_may_sample_from_int8_weights(tmp_path):
    """The rows come from a policy that is a little off, and the trainer compares them with that policy."""
    s = finished_run(tmp_path, searchers__weights="int8", learner__logprob_gap_every_steps=2)
    lines = [json.loads(line) for line in (s.run.metrics("trainer") / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["logprob_gap_max"] for line in lines if "logprob_gap_max" in line]
    assert gaps and max(gaps) < 1e-4
    reader = LogReader(s.run.replay, s.experiment.contract.row_shape())
    ((writer, head),) = reader.heads().items()
    rows = reader.read(writer, 0, head)
    first = rows["policy_step"][:, 0] == 0
    batch = [rows[name][first] for name in ("prompt_tokens", "prompt_length", "response_tokens", "response_length")]
    exact, _ = scoring.response_logprobs(
        weights_of_step(s, 0),
        *batch,
        config=s.experiment.policy.model,
        temperature=1.0,
        banned_tokens=tuple(s.experiment.contract.banned_tokens),
        logit_bytes=1 << 20,
        remat="none",
    )
    assert 1e-6 < np.abs(exact - rows["policy_logprobs"][first]).max() < 0.05
    np.testing.assert_allclose(rows["ref_logprobs"][first], exact, atol=1e-5)  # step 0 is the reference, which is never rounded
