"""What loads the models that tasks score with."""

from tba_jax.scorers.sequence import SequenceScorer
from tba_jax.tasks.interface import Makers

MAKERS = Makers(sequence_scorer=SequenceScorer)
