"""A sentence encoder made on the spot, where there is no trained one: the mean of a language model's word embeddings."""

import functools
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tba_jax.models import parameters
from tba_jax.models.config import EncoderConfig
from tba_jax.models.hugging_face import encoders, export
from tba_jax.text.tokenizers import HuggingFaceTokenizer


def write(folder: Path, model: Path) -> None:
    """Writes the encoder of the cosine distance, unless it is there: the mean of the model's own word embeddings, centred.

    A BERT folder whose one layer adds nothing. It tells other words, not other meanings: a stand-in for MiniLM.
    """
    if folder.exists():
        return
    # Tied: the file has the embedding under this name.
    words = load_file(model / "model.safetensors")["lm_head.weight"].astype(np.float32)
    words -= words.mean(axis=0)
    # The token that every text begins with would make all texts alike.
    words[list(HuggingFaceTokenizer(model).special_ids)] = 0.0
    vocab, width = words.shape
    sizes = dict(layers=1, width=width, heads=1, head_size=width, ffn=1, vocab=vocab, max_positions=64, token_types=1)
    shape = EncoderConfig(architecture="bert", **sizes)
    # Of normalised states each norm makes the same again.
    params = parameters.map_specs(
        lambda name, spec: (
            words if name == "embedding.weight" else np.full(spec.shape, float(name.endswith(".scale")), np.float32)
        ),
        encoders.define(shape).specs,
    )
    copy = functools.partial(export.copy_tokenizer, model)
    export.save(folder, shape, params, dtype="float32", more=[copy])
