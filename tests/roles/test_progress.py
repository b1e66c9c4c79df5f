"""What a person sees at the end of a run."""

import numpy as np

from tba_jax.roles import progress


def test_scores_are_drawn_where_their_policies_were_trained():
    """Steps 10 and 15 were done twice: the trainer was killed after them, and went on from step 5."""
    lines = [{"step": step, "time": time} for step, time in ((5, 100.0), (10, 110.0), (15, 120.0), (10, 210.0), (15, 230.0))]
    found = progress.trained_at(lines, [0, 5, 10, 12, 15, 16])
    np.testing.assert_allclose(found, [100.0, 100.0, 210.0, 218.0, 230.0, 230.0])
