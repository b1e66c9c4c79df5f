"""Updates that are not finite."""

import numpy as np
import pytest

from tba_jax.roles.trainer.refusals import Refusals

IDS = [("a", row) for row in range(4)]


def look(refusals: Refusals, step: int, *, finite: bool, was_passed: bool = False) -> None:
    """An update of four rows, of which one is at fault unless it is finite."""
    measurements = {"finite": np.float32(finite), "loss": np.nan, "grad_norm": 1.0}
    refusals.look_at(measurements, np.array([True, finite, True, True]), IDS, step=step, was_passed=was_passed)


def test_ten_refusals_in_a_row_stop_a_run_that_skips(tmp_path):
    refusals = Refusals(skips=True, journal=tmp_path)
    for step, finite in enumerate([False] * 9 + [True] + [False] * 9):
        look(refusals, step, finite=finite)
    with pytest.raises(FloatingPointError, match=r"step 19 .* 1 of 4 rows .*a:1"):
        look(refusals, 19, finite=False)


def test_what_was_passed_is_passed_again(tmp_path, caplog):
    refusals = Refusals(skips=False, journal=tmp_path)
    look(refusals, 1, finite=False, was_passed=True)
    assert "step 1" in caplog.text and "a:1" in caplog.text
    with pytest.raises(FloatingPointError, match=r"learner\.non_finite=skip"):
        look(refusals, 2, finite=False)
