"""What loads the models that tasks score with, and what only checks them."""

import functools

from tba_jax.rewards.embeddings import ResponseEmbedder
from tba_jax.rewards.generator import TextGenerator
from tba_jax.rewards.linear import LinearScorer
from tba_jax.rewards.sequence import SequenceScorer
from tba_jax.rewards.unsafe_token import UnsafeTokenScorer
from tba_jax.tasks.interface import Makers

MAKERS = Makers(
    sequence_scorer=SequenceScorer,
    unsafe_scorer=UnsafeTokenScorer,
    generator=TextGenerator,
    embedder=ResponseEmbedder,
    linear_scorer=LinearScorer,
)
# All that they refuse, they refuse without weights, but what they make cannot be asked.
CHECKS = Makers(
    sequence_scorer=functools.partial(SequenceScorer, load=False),
    unsafe_scorer=functools.partial(UnsafeTokenScorer, load=False),
    generator=functools.partial(TextGenerator, load=False),
    embedder=ResponseEmbedder,
    linear_scorer=LinearScorer,
)
