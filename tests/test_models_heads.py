"""Scores of sequences and values of states against a loop over rows and positions in NumPy. Parity with transformers:
test_models_hugging_face.py."""

import functools

import jax
import numpy as np

from tba_jax.models import decoder, heads, parameters, scoring

MODEL = decoder.DecoderConfig(
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
    value_head=True,
)
P, R = 5, 4


def random_params() -> parameters.Params:
    rng = np.random.default_rng(0)
    return parameters.map_specs(
        lambda _, spec: (spec.init_mean + 0.3 * rng.standard_normal(spec.shape)).astype(np.float32), decoder.param_specs(MODEL)
    )


def hidden_of(params: parameters.Params, tokens: list[int]) -> np.ndarray:
    """float64[T, D] of one row without padding."""
    row = np.array([tokens], np.int32)
    return np.asarray(decoder.hidden_states(params, row, None, config=MODEL, remat="none")[0], np.float64)


def test_scores_are_read_at_the_last_real_token():
    params, rng = random_params(), np.random.default_rng(1)
    rows = [rng.integers(1, 12, n).tolist() for n in (7, 1, 4)]
    expected = [hidden_of(params, row)[-1] @ params["score"]["weight"].astype(np.float64) for row in rows]
    score = jax.jit(functools.partial(heads.sequence_scores, config=MODEL, remat="full"))
    for side in ("left", "right"):
        tokens, mask = np.zeros((3, 7), np.int32), np.zeros((3, 7), bool)
        for i, row in enumerate(rows):
            place = slice(7 - len(row), 7) if side == "left" else slice(0, len(row))
            tokens[i, place], mask[i, place] = row, True
        np.testing.assert_allclose(score(params, tokens, mask), expected, atol=1e-5)


def test_values_are_those_of_the_states_before_each_token():
    params, rng = random_params(), np.random.default_rng(2)
    prompts = [rng.integers(1, 12, n).tolist() for n in (5, 1, 3)]
    responses = rng.integers(1, 12, (3, R)).astype(np.int32)
    padded = np.array([[0] * (P - len(prompt)) + prompt for prompt in prompts], np.int32)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)

    @jax.jit
    def values(params):
        hidden = scoring.response_hidden_states(params, padded, lengths, responses, config=MODEL, remat="full")
        return heads.state_values(params, hidden)

    weight, bias = (params["value_head"][name].astype(np.float64) for name in ("weight", "bias"))
    expected = np.zeros((3, R))
    for i, prompt in enumerate(prompts):
        for t in range(R):  # the state holds the prompt and the tokens before t, nothing after them
            expected[i, t] = hidden_of(params, prompt + responses[i, :t].tolist())[-1] @ weight[:, 0] + bias[0]
    np.testing.assert_allclose(values(params), expected, atol=1e-5)
    gradient = jax.grad(lambda p: values(p).sum())(params)
    assert np.abs(gradient["layers"]["query"]["weight"]).max() > 0 and np.abs(gradient["value_head"]["weight"]).max() > 0
