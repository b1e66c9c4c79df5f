"""Rows that no searcher has scored by the reference train as others do: the trainer scores them in each update."""

import jax
import numpy as np
import pytest

from tba_jax import sharding
from tba_jax.experiment import training
from tba_jax.replay.log import LogWriter
from tba_jax.replay.reader import LogReader
from tba_jax.roles.sampler import ReferencePolicy, Scoring
from tba_jax.roles.searcher import stream
from tba_jax.storage import layout
from tests.support import frozen_runs, tiny_run

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


def test_rows_of_another_policy_train_as_if_its_own_reference_had_scored_them(tmp_path, frozen):
    """A mounted run of a deeper model, whose rows hold log-probs of that; and the same rows, scored by this run's reference."""
    source = frozen(tmp_path / "source", 4, model__layers=2, seed=5)
    (rows,) = frozen_runs.rows(source).values()
    mounts = frozen_runs.offline(tmp_path / "mounts", source.run.root, searchers__scores_reference=False)
    scored = tiny_run.settings(tmp_path / "scored", frozen_runs.config())
    for s in (mounts, scored):
        training.reference(s)()
    how = Scoring(
        contract=scored.experiment.contract,
        policy=scored.experiment.policy,
        mesh=sharding.make_mesh((1, 1, 1), setting="test"),
        logit_megabytes=16,
        score_tokens=0,
    )
    reference = ReferencePolicy(how, scored.run)
    assert reference.id == layout.reference_id(mounts.run) != layout.reference_id(source.run)
    columns = rows | {
        "ref_logprobs": reference.logprobs(rows),
        "reference_id": np.full(len(rows["row"]), int(reference.id, 16), np.uint64),
    }
    assert np.abs(columns["ref_logprobs"] - rows["ref_logprobs"]).max() > 0.1
    (writer,) = LogReader(source.run.replay, source.experiment.contract.row_shape()).heads()
    log = LogWriter(scored.run.replay, writer, scored.experiment.contract.row_shape(), info={})
    log.append(columns)
    told = {}
    for name, s in (("mounts", mounts), ("scored", scored)):
        with frozen_runs.trainer(s, polls=True) as trainer:
            told[name] = [trainer.step() for _ in range(4)]
    for mounted, own in zip(told["mounts"], told["scored"], strict=True):
        for figure in ("loss", "grad_norm", "kl_to_ref", "log_z"):
            np.testing.assert_allclose(mounted[figure], own[figure], rtol=1e-5, atol=1e-6, err_msg=figure)
    with frozen_runs.trainer(mounts) as trainer:
        placed = trainer.program.place({name: column[: trainer.program.rows] for name, column in rows.items()})
        found = np.asarray(trainer.program._rescored(placed).moving_ref_logprobs)
    np.testing.assert_allclose(found, columns["ref_logprobs"][: len(found)], atol=1e-5)
