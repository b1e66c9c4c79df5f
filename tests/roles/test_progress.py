"""What a person sees at the end of a run."""

from tba_jax.roles import progress


def test_a_step_that_was_done_twice_is_drawn_once():
    """Steps 10 and 15 were done twice: the trainer was killed after them, and went on from step 5."""
    lines = [{"step": step, "reward": reward} for step, reward in ((5, 0.1), (10, 0.2), (15, 0.3), (10, 0.4), (15, 0.5))]
    assert [(line["step"], line["reward"]) for line in progress.by_step(lines)] == [(5, 0.1), (10, 0.4), (15, 0.5)]
