"""Supervised objectives against unpadded rows and NumPy, and their update against one pass."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

from tba_jax.learner import optimizer as state_lib
from tba_jax.models.config import DecoderConfig
from tba_jax.models.parameters import Params
from tba_jax.models.policy import Policy
from tba_jax.supervised import objectives
from tests.support import applied

SHAPE: dict[str, Any] = dict(layers=2, width=16, heads=4, kv_heads=2, head_size=4, ffn=24, vocab=12, max_positions=16)
MODELS = {"sft": DecoderConfig(**SHAPE), "reward": DecoderConfig(**SHAPE, head="score")}
B, P, R = 8, 5, 6
# Gradients are read off the parameters after a step of plain descent by 1.
DESCENT: state_lib.Optimizers = {"policy": optax.sgd(1.0)}


def settings(kind: str, **changes: Any) -> objectives.StepConfig:
    sizes: dict[str, Any] = dict(R=R, micro_batch_rows=B, logit_bytes=1 << 20, remat="none")
    return objectives.StepConfig(objective=objectives.OBJECTIVES[kind], **sizes | changes)


def random_params(kind: str) -> Params:
    return applied.random(applied.specs(MODELS[kind]), scale=0.3, seed=1)


def random_batch(kind: str, *, filling: int = 0) -> objectives.Batch:
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
    return objectives.Batch(tokens.astype(np.int32), prompt_length, length)


def hidden_of(kind: str, tokens: np.ndarray) -> jax.Array:
    return jax.jit(functools.partial(applied.hidden_states, config=MODELS[kind], remat="none"))(random_params(kind), tokens)


@functools.cache
def totals(kind: str) -> Any:
    total = functools.partial(objectives.totals, config=settings(kind))
    return jax.jit(lambda params, batch: total(state_of(kind, params), batch))


def state_of(kind: str, params: Params) -> state_lib.TrainState:
    return state_lib.init_state(Policy(model=MODELS[kind]), params, DESCENT)


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
    step = functools.partial(objectives.train_step, optimizers=DESCENT, config=settings(kind, **changes))
    after, measurements = jax.jit(step)(state_of(kind, random_params(kind)), random_batch(kind, filling=1))
    assert int(after.step) == 1 and float(measurements["finite"]) == 1
    gradient = jax.tree.map(lambda new, old: old - np.asarray(new), after.params["policy"], random_params(kind))
    return {name: float(value) for name, value in measurements.items()}, gradient


@pytest.mark.parametrize("kind", objectives.OBJECTIVES)
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
