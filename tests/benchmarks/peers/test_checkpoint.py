"""The checkpoint of the comparison of systems: end-of-sequence has its probability in every context."""

import jax
import numpy as np
import pytest

from benchmarks.peers import checkpoint
from tba_jax import sharding
from tba_jax.models.hugging_face import load
from tests.support import applied

V, T = 512, 24


def probabilities(folder, ends: float) -> np.ndarray:
    """float32[B, T, V] after each token of random contexts, and of contexts that hold one token alone."""
    checkpoint.write(folder, vocab=V, ends=ends)
    config = load.read_config(folder, compute_dtype="float32")
    mesh = sharding.make_mesh((1, 1, 1), setting="learner.mesh", devices=jax.devices()[:1])
    params = load.load_params(folder, config, applied.shardings(config, mesh))
    rng = np.random.default_rng(0)
    tokens = np.concatenate([rng.integers(2, V, (6, T)), np.repeat(rng.integers(2, V, (6, 1)), T, axis=1)]).astype(np.int32)
    hidden = applied.hidden_states(params, tokens, config=config).reshape(tokens.size, -1)
    return np.asarray(jax.nn.softmax(applied.logits_of(params, hidden, config=config))).reshape(*tokens.shape, V)


def test_responses_end_with_the_probability_in_every_context(tmp_path):
    found = probabilities(tmp_path, 1 / 64)[..., checkpoint.EOS]
    np.testing.assert_allclose(found, 1 / 64, rtol=0.01)


def test_the_context_matters_to_the_other_tokens(tmp_path):
    found = probabilities(tmp_path, 1 / 64)[..., 2:]
    assert found.std(axis=(0, 1)).mean() > 0.01 * found.mean()


@pytest.mark.parametrize("token", [checkpoint.EOS, checkpoint.PAD])
def test_responses_of_fixed_length_cannot_hold_a_token(tmp_path, token):
    assert probabilities(tmp_path, 0.0)[..., token].max() == 0.0
