"""What a decoder says that it has done, counted by hand."""

import dataclasses

import numpy as np

from tba_jax.models import flops, parameters
from tests.support.tiny_engine import BANNED, EOS, PARAMS, SPACE, make_engine, make_request


def test_operations_and_bytes_of_one_sample():
    """A prompt of three tokens and a sample of four: the first is drawn from the logits of the prompt, three take a step each."""
    engine = make_engine(8, 4, space=dataclasses.replace(SPACE, banned_tokens=(*BANNED, EOS)))
    engine.set_policy(PARAMS, 5)
    engine.generate([make_request([6, 6, 3], 1, limit=np.array([4]))])
    c, m = engine.config, engine.config.model
    whole = flops.forward(m, positions=6, logits=4)  # the prompt's three tokens, of which one gives logits, and three drawn ones
    assert engine.usage.flops == whole
    weights = sum(x.nbytes for name, x in parameters.flatten(PARAMS).items() if m.tied_embedding or name != "embedding.weight")
    entries = c.groups * c.buffers * c.prompt_length + 8 * (c.response_length - 1)
    caches = entries * 2 * m.layers * m.kv_heads * m.head_size * 4
    assert engine.usage.bytes == 3 * (weights + caches)
