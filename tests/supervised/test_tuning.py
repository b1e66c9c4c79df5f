"""Supervised training: objectives against unpadded rows and NumPy, and their update against one pass; the warm start against a
plain loop over its random stream; JSON lines to examples: what is kept, what is refused and by which words, and the split.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from configs import supervised as recipe
from tba_jax import sharding
from tba_jax.learner import optimizer as optimizer_lib
from tba_jax.models.config import DecoderConfig
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.supervised import tuning
from tba_jax.tasks.arithmetic import CHARACTERS, Arithmetic
from tba_jax.text.tokenizers import CharacterTokenizer
from tests.support import applied

SHAPE: dict[str, Any] = dict(layers=2, width=16, heads=4, kv_heads=2, head_size=4, ffn=24, vocab=12, max_positions=16)
MODELS = {"sft": DecoderConfig(**SHAPE), "reward": DecoderConfig(**SHAPE, head="score")}
B, P, R = 8, 5, 6
# Gradients are read off the parameters after a step of plain descent by 1.
DESCENT: optimizer_lib.Optimizers = {"policy": optax.sgd(1.0)}


def settings(kind: str, **changes: Any) -> tuning.StepConfig:
    sizes: dict[str, Any] = dict(R=R, micro_batch_rows=B, logit_bytes=1 << 20, remat="none")
    return tuning.StepConfig(objective=tuning.OBJECTIVES[kind], **sizes | changes)


def random_params(kind: str) -> Params:
    return applied.random(applied.specs(MODELS[kind]), scale=0.3, seed=1)


def random_batch(kind: str, *, filling: int = 0) -> tuning.Batch:
    rng = np.random.default_rng(1)
    shape = (B,) if kind == "sft" else (B, 2)
    prompt_length, prompts = rng.integers(1, P + 1, B).astype(np.int32), rng.integers(1, 12, (B, P + R))
    if kind == "reward":
        prompt_length, prompts = np.repeat(prompt_length[:, None], 2, axis=1), np.repeat(prompts[:, None], 2, axis=1)
    length = rng.integers(1, R + 1, shape).astype(np.int32)
    length[B - filling :] = 0
    place = np.arange(P + R)
    tokens = np.where(place < prompt_length[..., None], prompts, rng.integers(1, 12, (*shape, P + R)))
    tokens[place >= (prompt_length + length)[..., None]] = 0
    return tuning.Batch(tokens.astype(np.int32), prompt_length, length)


def hidden_of(kind: str, tokens: np.ndarray) -> jax.Array:
    return jax.jit(functools.partial(applied.hidden_states, config=MODELS[kind], remat="none"))(random_params(kind), tokens)


@functools.cache
def totals(kind: str) -> Any:
    total = functools.partial(tuning.totals, config=settings(kind))
    return jax.jit(lambda params, batch: total(state_of(kind, params), batch))


def state_of(kind: str, params: Params) -> optimizer_lib.TrainState:
    return optimizer_lib.init_state(Policy(model=MODELS[kind]), params, DESCENT)


def test_likelihood_is_the_mean_over_response_tokens():
    filling = 5
    batch, terms = random_batch("sft", filling=filling), []
    for row in range(B - filling):
        prompt_length, response_length = batch.prompt_length[row], batch.response_length[row]
        tokens = batch.tokens[row : row + 1, : prompt_length + response_length]
        hidden = np.asarray(hidden_of("sft", tokens), np.float64)[0]
        logits = hidden @ random_params("sft")["embedding"]["weight"].T
        distribution = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        terms += [-distribution[t - 1, tokens[0, t]] for t in range(prompt_length, prompt_length + response_length)]
    found = totals("sft")(random_params("sft"), batch)
    assert float(found["size"]) == len(terms) == batch.response_length.sum()
    np.testing.assert_allclose(found["loss"], np.sum(terms), rtol=1e-5)


def test_preference_reads_scores_at_the_last_tokens():
    filling = 4
    batch, scores = random_batch("reward", filling=filling), np.zeros((B - filling, 2))
    weight = random_params("reward")["score"]["weight"][:, 0]
    for row, side in np.ndindex(*scores.shape):
        tokens = batch.tokens[row, side, : batch.prompt_length[row, side] + batch.response_length[row, side]][None]
        scores[row, side] = np.asarray(hidden_of("reward", tokens))[0, -1] @ weight
    margin = scores[:, 0] - scores[:, 1]
    expected = {"loss": np.log1p(np.exp(-margin)), "pair_accuracy": margin > 0, "margin": margin}
    found = totals("reward")(random_params("reward"), batch)
    assert float(found.pop("size")) == B - filling
    assert found.keys() == expected.keys() and 0 < expected["pair_accuracy"].sum() < len(margin)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values.sum(), rtol=1e-4, err_msg=name)


def one_step(kind: str, **changes: Any) -> tuple[dict, Any]:
    step = functools.partial(tuning.train_step, optimizers=DESCENT, config=settings(kind, **changes))
    after, measurements = jax.jit(step)(state_of(kind, random_params(kind)), random_batch(kind, filling=1))
    assert int(after.step) == 1 and float(measurements["finite"]) == 1
    gradient = jax.tree.map(lambda new, old: old - np.asarray(new), after.params["policy"], random_params(kind))
    return {name: float(value) for name, value in measurements.items()}, gradient


@pytest.mark.parametrize("kind", tuning.OBJECTIVES)
def test_micro_batches_and_remat_change_nothing(kind):
    """Filling and responses of different lengths lie unevenly in the micro-batches: a mean of means would differ."""
    measured, gradient = one_step(kind)
    found, found_gradient = one_step(kind, micro_batch_rows=2, logit_bytes=4 * 4 * 12 * 2, remat="full")
    assert found.keys() == measured.keys()
    for name in measured:
        np.testing.assert_allclose(found[name], measured[name], rtol=1e-5, atol=1e-6, err_msg=name)
    size = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient))
    for a, b in zip(jax.tree.leaves(found_gradient), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * size)


def test_the_warm_start_is_a_plain_loop_over_its_random_stream():
    task = Arithmetic(digits=1, train_queries=10, heldout_queries=4, seed=0)
    tokenizer = CharacterTokenizer(CHARACTERS)
    sizes = dict(layers=1, width=16, heads=4, kv_heads=2, head_size=4, ffn=24, max_positions=24)
    model = DecoderConfig(**sizes, vocab=tokenizer.vocab_size)
    mesh = sharding.make_mesh((1, 2, 1), setting="learner.mesh", devices=jax.devices()[:2])
    lengths: dict[str, int] = dict(prompt_length=5, response_length=12)
    run = dict(seed=3, steps=4, batch_size=8, learning_rate=1e-2, warmup_steps=1, report_every_steps=3)
    settings = tuning.WarmStart(model=model, mesh=mesh, **run, **lengths)
    reports: list[tuple[int, float]] = []
    found = settings.train(task, tokenizer, report=lambda *point: reports.append(point))
    config = tuning.StepConfig(objective=tuning.likelihood, R=12, micro_batch_rows=8, logit_bytes=1 << 30, remat="none")
    schedule = optimizer_lib.linear(peak=1e-2, steps=4, warmup_steps=1)
    optimizer = optimizer_lib.adamw(schedule, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.01, clip_norm=1.0)
    params = jax.jit(functools.partial(applied.init, config=model))(jax.random.key(3))
    opt_state, rng, losses = jax.jit(optimizer.init)(params), np.random.default_rng([3, 1]), []

    @jax.jit
    def step(params: Params, opt_state: Any, examples: tuning.Batch) -> Any:
        def mean(params: Params) -> jax.Array:
            return tuning.likelihood(applied.merge(params, model), examples, config)["loss"] / examples.response_length.sum()

        loss, grads = jax.value_and_grad(mean)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for _ in range(4):
        examples = tuning.encode_examples(task.worked_examples(rng, 8), tokenizer, **lengths)
        params, opt_state, loss = step(params, opt_state, examples)
        losses.append(float(loss))
    assert [step for step, _ in reports] == [3, 4]
    np.testing.assert_allclose([loss for _, loss in reports], [np.mean(losses[:3]), losses[3]], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), jax.device_get(found), params)


TOKENIZER = CharacterTokenizer("abcdefgh:")  # encode begins with 1; 2 is the end of sequence, a is 3
LIMITS = {"prompt_length": 8, "response_length": 16, "heldout_share": 0.3}


def write(path: Path, lines: list[Any]) -> Path:
    texts = [line if isinstance(line, (bytes, str)) else json.dumps(line) for line in lines]
    path.write_bytes(b"".join((text if isinstance(text, bytes) else text.encode()) + b"\n" for text in texts))
    return path


def load(train: Path, kind: str = "sft", **changes: Any) -> tuning.Data:
    c = recipe.get_config().data
    c.update({**LIMITS, "train": str(train), **changes})
    return tuning.load(c, kind, TOKENIZER)


def words(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("abcdefgh"), 6)) for _ in range(count)]


def test_a_line_becomes_token_ids(tmp_path):
    first = {"prompt": "a:", "response": "bc", "chosen": "bb", "rejected": "", "source": 7}
    train = write(tmp_path / "train.jsonl", [b"\xef\xbb\xbf" + json.dumps(first).encode(), "", {**first, "prompt": "b:"}])
    heldout = str(write(tmp_path / "heldout.jsonl", [first]))
    data = load(train, heldout=heldout)
    assert [[ids.tolist() for ids in example] for example in data.train] == [[[1, 3, 11], [4, 5, 2]], [[1, 4, 11], [4, 5, 2]]]
    assert [[ids.tolist() for ids in example] for example in data.heldout] == [[[1, 3, 11], [4, 5, 2]]]
    pairs = load(train, "reward", heldout=heldout, chosen_field="response")
    assert [ids.tolist() for ids in pairs.train[1]] == [[1, 4, 11], [4, 5, 2], [2]]
    assert len({data.fingerprint, pairs.fingerprint, load(train, heldout=str(train)).fingerprint}) == 3
    assert load(train, heldout=heldout).fingerprint == data.fingerprint


def test_batches_are_padded_and_filled():
    ids = [tuple(np.array(part, np.int32) for part in row) for row in ([[1, 3], [4, 2], [2]], [[1, 3, 11], [2], [5, 5, 2]])]
    pairs = tuning.make_batch(ids, rows=3, prompt_length=4, response_length=3, pad_id=0)
    first = [[1, 3, 4, 2, 0, 0, 0], [1, 3, 2, 0, 0, 0, 0]]
    second = [[1, 3, 11, 2, 0, 0, 0], [1, 3, 11, 5, 5, 2, 0]]
    np.testing.assert_array_equal(pairs.tokens, [first, second, [[0] * 7] * 2])
    np.testing.assert_array_equal(pairs.prompt_length, [[2, 2], [3, 3], [1, 1]])
    np.testing.assert_array_equal(pairs.response_length, [[2, 1], [1, 3], [0, 0]])
    assert float(pairs.size) == 2
    single = tuning.make_batch([row[:2] for row in ids], rows=2, prompt_length=4, response_length=3, pad_id=0)
    np.testing.assert_array_equal(single.tokens, [first[0], second[0]])
    assert single.response_length.tolist() == [2, 1] and float(single.size) == 3


def test_the_split_by_hash_keeps_prompts_apart_and_stays(tmp_path):
    lines = [{"prompt": word, "response": "a" * count} for word in words(100, seed=1) for count in (1, 2)]

    def split(lines: list[Any]) -> tuple[set[bytes], set[bytes]]:
        data = load(write(tmp_path / "lines.jsonl", lines))
        assert len(data.train) + len(data.heldout) == len(lines)
        return {prompt.tobytes() for prompt, _ in data.train}, {prompt.tobytes() for prompt, _ in data.heldout}

    train, heldout = split(lines)
    assert not train & heldout and 0.2 < len(heldout) / len(train | heldout) < 0.4
    more_train, more_heldout = split([*({"prompt": word, "response": "b"} for word in words(50, seed=2)), *reversed(lines)])
    assert train <= more_train and heldout <= more_heldout


# Lines, kind, changed settings -> words of the sentence; {} is the file.
GOOD = {"prompt": "ab:", "chosen": "ba", "rejected": "b", "response": "ba"}
LONG, SAME = {**GOOD, "response": "a" * 20}, {**GOOD, "rejected": "ba"}
SKIP = {"unfit": "skip"}
MISSING = "data.train {} line 2: field 'chosen' is missing (it has prompt, rejected)"
UNFIT = "1 of the 2 examples of data.train {} are unfit, first line 2: "
BAD_LINES: dict[str, tuple[list[Any], str, dict[str, Any], str]] = {
    "missing": ([GOOD, {"prompt": "a", "rejected": "b"}], "reward", {}, MISSING),
    "alphabet": ([GOOD, {**GOOD, "response": "z"}], "sft", {}, "line 2: field 'response': character 'z'"),
    "long response": (
        [GOOD, LONG],
        "sft",
        {},
        f"{UNFIT}field 'response' has 21 tokens, end of sequence included, data.resp",
    ),
    "all too long": ([LONG], "sft", SKIP, "1 of the 1 examples of data.train {} are unfit, first line 1: field 'response' has"),
    "identical": ([GOOD, SAME], "reward", {}, f"{UNFIT}fields 'chosen' and 'rejected' hold the same text; data.unfit=skip"),
    "one prompt": ([GOOD] * 9, "sft", {}, "data.heldout_share=0.3 splits the examples of data.train {} into"),
    "held-out file": ([GOOD], "sft", {"heldout": "/nowhere.jsonl"}, "data.heldout /nowhere.jsonl cannot be read: No such file"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_lines_are_named(tmp_path, case):
    lines, kind, changes, sentence = BAD_LINES[case]
    train = write(tmp_path / "train.jsonl", lines)
    with pytest.raises(ValueError) as refused:
        load(train, kind, **changes)
    assert sentence.format(train) in str(refused.value)


def test_unfit_examples_may_be_left_out(tmp_path):
    train = write(tmp_path / "train.jsonl", [GOOD, {**GOOD, "chosen": "a" * 20}, SAME])
    data = load(train, "reward", heldout=str(train), **SKIP)
    assert len(data.train) == len(data.heldout) == 1 and data.skipped == 4
