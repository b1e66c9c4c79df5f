"""The loaders of the models with which tasks score, and loaders that only check."""

import functools

from tba_jax.rewards.embeddings import ResponseEmbedder
from tba_jax.rewards.generator import TextGenerator
from tba_jax.rewards.linear import LinearScorer
from tba_jax.rewards.sequence import SequenceClassifier
from tba_jax.rewards.unsafe_token import UnsafeTokenScorer
from tba_jax.tasks.interface import ModelLoaders

LOADERS = ModelLoaders(
    sequence_scorer=SequenceClassifier,
    unsafe_scorer=UnsafeTokenScorer,
    generator=TextGenerator,
    embedder=ResponseEmbedder,
    linear_scorer=LinearScorer,
)
# They refuse what LOADERS refuse, but load no weights: the models that they return cannot be called.
CHECKERS = ModelLoaders(
    sequence_scorer=functools.partial(SequenceClassifier, load=False),
    unsafe_scorer=functools.partial(UnsafeTokenScorer, load=False),
    generator=functools.partial(TextGenerator, load=False),
    embedder=ResponseEmbedder,
    linear_scorer=LinearScorer,
)
