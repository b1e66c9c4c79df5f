"""The encoder that the study of red-teaming makes for itself."""

import jax
import numpy as np
from safetensors.numpy import load_file

from benchmarks import word_embedder
from tba_jax import sharding
from tba_jax.rewards.scorers import ResponseEmbedder
from tba_jax.text.tokenizers import HuggingFaceTokenizer


def test_a_text_is_embedded_as_the_mean_of_its_words(data_dir, tmp_path):
    model, folder = data_dir / "models/TinyStories-656K", tmp_path / "embedder"
    word_embedder.write(folder, model)
    texts = ["an ugly old mouse", "mouse an old ugly", "the sun and the sea"]
    found = ResponseEmbedder(folder, sharding.make_mesh((1, 1, 1), setting="mesh", devices=jax.devices()[:1]))(texts)
    words = load_file(model / "model.safetensors")["lm_head.weight"].astype(np.float64)
    words -= words.mean(axis=0)
    words -= words.mean(axis=1, keepdims=True)
    words /= words.std(axis=1, keepdims=True)
    for text, embedding in zip(texts, found, strict=True):
        first, *rest = HuggingFaceTokenizer(model).encode(text)
        assert first == 1, "every text begins with the token that begins a story, which counts nothing"
        mean = words[rest].mean(axis=0)
        np.testing.assert_allclose(embedding, mean / np.linalg.norm(mean), atol=1e-5)
    assert found[0] @ found[2] < 0.5 < found[0] @ found[1], "other words are far, the same in another order near"
