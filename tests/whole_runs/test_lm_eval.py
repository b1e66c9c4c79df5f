"""lm-eval measures what is exported: the merged folder and the adapter give the log-probs that the policy has here."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from tba_jax import sharding
from tba_jax.commands import export
from tba_jax.models import parameters
from tba_jax.models.hugging_face import load
from tba_jax.storage import contract, layout, snapshots
from tba_jax.text.tokenizers import HuggingFaceTokenizer
from tests.support import applied, random_checkpoints, tiny_checkpoints, tiny_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device_throughout")]

SUMS = [("12+34=", "46"), ("7+8=", "15"), ("40+2=", "42")]
# A task of lm-eval in files of its own: nothing is fetched.
TASK = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: perplexity, aggregation: perplexity, higher_is_better: false}}]
"""


def run_with_adapters(workdir: Path, model: Path) -> layout.RunDir:
    """A run whose snapshot of step 0 has adapters that are not zero."""
    lora = {"lora__rank": 2, "lora__targets": ("layers.*",)}
    s = tiny_run.settings(workdir, tiny_run.config(model__path=str(model), **lora))
    contract.join(s.run, s.experiment.config, s.experiment.contract)
    mesh, policy = sharding.make_mesh((1, 1, 1), setting="test", devices=jax.devices()[:1]), s.experiment.policy
    base = load.load_params(model, policy.model, applied.shardings(policy.model, mesh))
    drawn = parameters.flatten(policy.initial(base, jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(drawn))
    moved = {path: leaf + 0.1 * jax.random.normal(key, leaf.shape) for key, (path, leaf) in zip(keys, drawn.items(), strict=True)}
    info = snapshots.SnapshotInfo(step=0, epoch=0)
    snapshots.save(s.run.policies / "00000000", parameters.unflatten(moved), info, dtype="float32")
    snapshots.save(s.run.reference("f00"), base, info, dtype="float32")
    layout.write_json(s.run.initial_reference, {"id": "f00"})
    return s.run


def perplexity(folder: Path) -> float:
    """exp of −mean log-prob of the answers, as lm-eval has it, by this project's models."""
    config, tokenizer = load.read_config(folder, compute_dtype="float32"), HuggingFaceTokenizer(folder)
    mesh = sharding.make_mesh((1, 1, 1), setting="test", devices=jax.devices()[:1])
    params = load.load_params(folder, config, applied.shardings(config, mesh))
    sums = []
    for question, answer in SUMS:
        tokens = np.array([tokenizer.encode(question + answer)], np.int32)
        logits = tiny_checkpoints.logits(params, tokens, np.ones_like(tokens, bool), config)[0]
        logprobs = jax.nn.log_softmax(logits)
        first = len(tokenizer.encode(question))
        sums.append(sum(float(logprobs[i - 1, tokens[0, i]]) for i in range(first, tokens.shape[1])))
    return math.exp(-np.mean(sums))


def measured(folder: Path, model_args: str) -> float:
    """The perplexity that the command of docs/export.md tells. Args: folder: of the task, and of the results."""
    (folder / "rows.jsonl").write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in SUMS))
    (folder / "sums.yaml").write_text(TASK.format(rows=folder / "rows.jsonl"))
    options = ["--tasks", "sums", "--include_path", str(folder), "--output_path", str(folder / "results"), "--device", "cpu"]
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"{model_args},dtype=float32", *options]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = (folder / "results").rglob("results_*.json")
    found: float = json.loads(results.read_text())["results"]["sums"]["perplexity,none"]
    return found


def test_lm_eval_measures_the_exported_policy(tmp_path):
    for package in ("lm_eval", "peft", "torch"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: this test needs requirements.txt and lm_eval[hf] in one environment")
    model = random_checkpoints.write(tmp_path / "base", "qwen2.5-0.5b", random_checkpoints.byte_tokenizer(tmp_path / "tokens"))
    run = run_with_adapters(tmp_path / "run", model)
    export.export(run.root, tmp_path / "merged", step=0, dtype=None)
    export.export(run.root, tmp_path / "adapter", step=0, dtype=None, adapter=True)
    expected, before = perplexity(tmp_path / "merged"), perplexity(model)
    assert abs(math.log(expected / before)) > 0.01, "the adapters change more than the tolerance"
    for name, model_args in {
        "merged": f"pretrained={tmp_path / 'merged'}",
        "peft": f"pretrained={model},peft={tmp_path / 'adapter'}",
    }.items():
        (tmp_path / f"lm-eval-{name}").mkdir()
        assert measured(tmp_path / f"lm-eval-{name}", model_args) == pytest.approx(expected, rel=1e-4)
