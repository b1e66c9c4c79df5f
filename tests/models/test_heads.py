"""Scores of sequences and values of states against a loop over rows and positions in NumPy. Parity with transformers:
test_models_hugging_face.py."""

import functools

import jax
import numpy as np

from tba_jax.models import parameters
from tba_jax.models.config import DecoderConfig
from tba_jax.models.layers import ScalarHead
from tests.support import applied

MODEL = DecoderConfig(
    layers=2,
    width=16,
    heads=4,
    kv_heads=2,
    head_size=4,
    ffn=24,
    vocab=12,
    max_positions=16,
    head="score",
    labels=3,
)
HEAD = parameters.define(lambda rngs: ScalarHead(MODEL.width, bias=True, std=0.0, rngs=rngs))
P, R = 5, 4
hidden_states = jax.jit(functools.partial(applied.hidden_states, config=MODEL, remat="none"))


def random_params() -> parameters.Params:
    return applied.random(applied.specs(MODEL), scale=0.3, seed=0)


def hidden_of(params: parameters.Params, tokens: list[int]) -> np.ndarray:
    """float64[T, D] of one row; what pads it comes after it, where no state looks."""
    row = np.array([tokens + [0] * (P + R - len(tokens))], np.int32)
    return np.asarray(hidden_states(params, row)[0, : len(tokens)], np.float64)


def test_scores_are_read_at_the_last_real_token():
    params, rng = random_params(), np.random.default_rng(1)
    rows = [rng.integers(1, 12, n).tolist() for n in (7, 1, 4)]
    expected = [hidden_of(params, row)[-1] @ params["score"]["weight"].astype(np.float64) for row in rows]
    score = jax.jit(functools.partial(applied.sequence_scores, config=MODEL, remat="full"))
    for filler in (0, 5):
        tokens = np.array([row + [filler] * (7 - len(row)) for row in rows], np.int32)
        np.testing.assert_allclose(score(params, tokens, np.array([7, 1, 4], np.int32)), expected, atol=1e-5)


def test_values_are_those_of_the_states_before_each_token():
    params, rng = random_params(), np.random.default_rng(2)
    prompts = [rng.integers(1, 12, n).tolist() for n in (5, 1, 3)]
    responses = rng.integers(1, 12, (3, R)).astype(np.int32)
    rows = [prompt + response + [0] * (P - len(prompt)) for prompt, response in zip(prompts, responses.tolist(), strict=True)]
    tokens, lengths = np.array(rows, np.int32), np.array([len(prompt) for prompt in prompts], np.int32)

    parts = {"policy": params, "value_head": applied.random(HEAD.specs, scale=0.3, seed=3)}

    @jax.jit
    def values(parts):
        head = parameters.module(HEAD.graphdef, parts["value_head"])
        hidden = applied.response_hidden_states(parts["policy"], tokens, lengths, R=R, config=MODEL, remat="full")
        return head(hidden)[..., 0]

    weight, bias = (parts["value_head"][name].astype(np.float64) for name in ("weight", "bias"))
    expected = np.zeros((3, R))
    for i, prompt in enumerate(prompts):
        for t in range(R):  # the state holds the prompt and the tokens before t, nothing after them
            expected[i, t] = hidden_of(params, prompt + responses[i, :t].tolist())[-1] @ weight[:, 0] + bias[0]
    np.testing.assert_allclose(values(parts), expected, atol=1e-5)
    gradient = jax.grad(lambda p: values(p).sum())(parts)
    assert (
        np.abs(gradient["policy"]["layers"]["attention"]["query"]["weight"]).max() > 0
        and np.abs(gradient["value_head"]["weight"]).max() > 0
    )
