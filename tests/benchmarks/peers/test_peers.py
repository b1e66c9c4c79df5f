"""The comparison of systems: a checkpoint with a known end, the same prompts for all, seconds of steps and parts, the table."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from transformers import AutoTokenizer

from benchmarks.peers import cases, checkpoint, prompts, tba_run
from tba_jax import sharding
from tba_jax.models.hugging_face import load
from tba_jax.storage import layout
from tba_jax.text import tokenizers
from tests.support import applied, tiny_decoders

V, T, P = 400, 24, 12


def probabilities(folder, ends: float) -> np.ndarray:
    """float32[B, T, V] after each token of random contexts, and of contexts that hold one token alone."""
    checkpoint.write(folder, vocab=V, ends=ends)
    config = load.read_config(folder, compute_dtype="float32")
    mesh = sharding.make_mesh((1, 1, 1), setting="learner.mesh", devices=jax.devices()[:1])
    params = load.load_params(folder, config, applied.shardings(config, mesh))
    rng = np.random.default_rng(0)
    tokens = np.concatenate([rng.integers(2, V, (6, T)), np.repeat(rng.integers(2, V, (6, 1)), T, axis=1)]).astype(np.int32)
    return np.asarray(jax.nn.softmax(tiny_decoders.logits_of_whole(params, tokens, config)))


def test_responses_end_with_the_probability_in_every_context(tmp_path):
    found = probabilities(tmp_path / "ends", 1 / 64)
    np.testing.assert_allclose(found[..., checkpoint.EOS], 1 / 64, rtol=0.01)
    assert found[..., 2:].std(axis=(0, 1)).mean() > 0.01 * found[..., 2:].mean(), "the context matters to the others"
    fixed = probabilities(tmp_path / "fixed", 0.0)
    assert fixed[..., [checkpoint.EOS, checkpoint.PAD]].max() == 0.0


def test_prompts_have_their_length_in_every_tokenizer(tmp_path):
    texts = prompts.corpus(None)[:12]
    tokenizer = prompts.train(texts, V)
    found = prompts.of_case(cases.Case(about="", vocab=V, prompt_length=P), tokenizer, texts)
    assert len(set(found)) == prompts.COUNT
    prompts.write(tmp_path, tokenizer)
    checkpoint.write(tmp_path, vocab=V, ends=0.0)
    theirs, ours = AutoTokenizer.from_pretrained(str(tmp_path)), tokenizers.HuggingFaceTokenizer(tmp_path)
    for prompt in found[:50]:
        ids = theirs(prompt).input_ids
        assert len(ids) == P and list(ours.encode(prompt)) == ids


def write(run: layout.RunDir, role: str, *lines: dict[str, float]) -> None:
    folder = run.metrics(role)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": 0, **line}) + "\n" for line in lines))


def test_shares_of_time_become_seconds_of_each_step(tmp_path):
    """The second step takes 4 s, half of them decoding; the third 6 s, one of them decoding and two a checkpoint, which a run
    writes at its end."""
    run, times = layout.RunDir(tmp_path), (100.0, 104.0, 110.0)
    shares = [{}, {"decode": 2 / 4, "reference": 1 / 4}, {"decode": 3 / 10, "reference": 2 / 10, "checkpoint": 2 / 10}]
    told = [{f"time_{part}": share for part, share in each.items()} for each in shares]
    write(run, "trainer", *[{"time": time, **parts} for time, parts in zip(times, told, strict=True)])
    write(run, "searcher-0", *[{"time": time, "rows_per_second": 8.0, "tokens_per_second": 128.0} for time in times])
    case = dataclasses.replace(cases.CASES["fixed"], queries=1, samples=4)
    found = tba_run.record(tmp_path, case, interleaved=True, skip=1)
    assert found["seconds"] == pytest.approx([0.0, 4.0, 4.0]) and found["tokens"] == [64, 64, 64]
    assert found["parts"]["generate"] == pytest.approx([0.0, 2.0, 1.0])
    assert found["rows_per_second"] == pytest.approx(2 * 4 / 10)
