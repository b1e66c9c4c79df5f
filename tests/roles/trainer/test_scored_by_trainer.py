"""Rows that no searcher has scored by the reference train as others do: the trainer scores them in each update."""

import jax
import numpy as np
import pytest

from tba_jax.roles.searcher import stream
from tests.support import frozen_runs

pytestmark = pytest.mark.usefixtures("one_device_throughout")


@pytest.mark.parametrize("more", [{}, {"lora__rank": 2}], ids=["whole policy", "adapters"])
def test_the_updates_are_those_of_scored_rows(tmp_path, monkeypatch, more):
    monkeypatch.setattr(stream, "writer_number", lambda _: 7)
    runs, rows, told = {}, {}, {}
    for scores in (True, False):
        s = runs[scores] = frozen_runs.make(tmp_path / str(scores), 4, searchers__scores_reference=scores, **more)
        (rows[scores],) = frozen_runs.rows(s).values()
        with frozen_runs.trainer(s, polls=True) as trainer:
            told[scores] = [trainer.step() for _ in range(4)]
            runs[scores] = s, jax.device_get(trainer.state)
    np.testing.assert_array_equal(rows[True]["tokens"], rows[False]["tokens"])
    assert rows[True]["ref_logprobs"].any() and not rows[False]["ref_logprobs"].any() and not rows[False]["reference_id"].any()
    for scored, unscored in zip(told[True], told[False], strict=True):
        for name in ("loss", "grad_norm", "kl_to_ref"):
            np.testing.assert_allclose(unscored[name], scored[name], rtol=1e-4, atol=1e-6, err_msg=name)
    weights = [jax.tree.leaves(state.params) for _, state in runs.values()]
    for scored, unscored in zip(*weights, strict=True):
        np.testing.assert_allclose(unscored, scored, atol=1e-6)
    frozen_runs.assert_resumes_as(*runs[False])
