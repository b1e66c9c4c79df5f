"""References that move: what they become, where they rest, and what a run with one measures."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tba_jax import sharding as sharding_lib
from tba_jax.experiment import training
from tba_jax.learner import update
from tba_jax.learner.update import MovingReference
from tba_jax.models import parameters
from tba_jax.models.policy import Policy
from tba_jax.programs import shaped
from tba_jax.storage import snapshots
from tba_jax.storage.checkpoints import Checkpoints
from tba_jax.telemetry import metrics
from tests.support import frozen_runs
from tests.support.tiny_updates import MODEL, POLICY, limits, packed_of, random_batch, random_params, settings

pytestmark = pytest.mark.usefixtures("one_device_throughout")
DEVICES = jax.devices()  # of these tests; runs take one


def reference_on(sizes: tuple[int, int, int], **changes) -> tuple[MovingReference, jax.sharding.Mesh]:
    mesh = sharding_lib.make_mesh(sizes, setting="learner.mesh", devices=DEVICES[: np.prod(sizes)])
    reference = MovingReference(settings(limits=limits(8)), mesh, **dict(every_steps=1, decay=0.9, offload=False) | changes)
    return reference, mesh


def rescored(reference: MovingReference, mesh: jax.sharding.Mesh) -> update.Batch:
    packed, _ = packed_of(random_batch(), limits(8))
    return reference.rescore({}, *sharding_lib.put_rows(mesh, (random_batch(),)), packed)


def shifted(params, by: float):
    return jax.tree.map(lambda x: x + np.float32(by), params)


@pytest.mark.parametrize("offload, sizes", [(False, (1, 1, 1)), (True, (2, 2, 2))], ids=str)
def test_rows_are_scored_by_the_reference_of_the_step(offload, sizes):
    reference, mesh = reference_on(sizes, offload=offload)
    params = jax.device_put(random_params(), POLICY.trained_shardings(mesh))
    reference.start(params)
    reference.advance(shifted(params, 0.1), 1)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(reference.params)}
    assert (kinds == {sharding_lib.PINNED_HOST}) == offload and len(kinds) == 1
    assert jax.tree.map(lambda x: x.sharding, reference.params) == jax.tree.map(lambda x: x.sharding, reference.shapes)
    batch = rescored(reference, mesh)
    average = shifted(random_params(), 0.1 * 0.1)  # 0.9 θ + 0.1 (θ + 0.1)
    expected, _ = update.score(POLICY.for_training(average, {}), random_batch(), config=settings())
    np.testing.assert_allclose(batch.moving_ref_logprobs, expected, rtol=1e-4, atol=2e-5)
    np.testing.assert_array_equal(batch.ref_logprobs, random_batch().ref_logprobs)


def test_a_reset_reference_rests_in_the_compute_dtype_and_scores_the_same():
    policy = Policy(model=dataclasses.replace(MODEL, compute_dtype="bfloat16"))
    mesh = sharding_lib.make_mesh((2, 2, 2), setting="learner.mesh", devices=DEVICES)
    config = settings(policy=policy, limits=limits(8))
    params = shifted(jax.device_put(random_params(), policy.trained_shardings(mesh)), 0.01)
    reset = MovingReference(config, mesh, every_steps=3, decay=0.0, offload=False)
    average = MovingReference(config, mesh, every_steps=3, decay=0.5, offload=False)
    for reference, dtype in ((reset, "bfloat16"), (average, "float32")):
        reference.start(params)
        assert {x.dtype.name for x in jax.tree.leaves((reference.params, reference.shapes))} == {dtype}
    first, second = (rescored(reference, mesh).moving_ref_logprobs for reference in (reset, average))
    np.testing.assert_array_equal(first, second)
    assert np.any(first)


def test_the_average_is_that_of_the_published_policies(finished, tmp_path):
    changes = dict(learner__steps=2, learner__learning_rate=3e-3, learner__warmup_steps=0, publish__every_steps=1)
    changes |= dict(learner__reference__kind="ema", learner__reference__ema_decay=0.5)
    s = frozen_runs.offline(tmp_path, finished.run.root, **changes)
    assert training.trainer(s)() == 0
    lines = metrics.read_lines(s.run.metrics("trainer"))
    assert abs(lines[0]["kl_to_ref"]) < 1e-6 < abs(lines[-1]["kl_to_ref"])
    policy, mesh = s.experiment.policy, sharding_lib.make_mesh((1, 1, 1), setting="learner.mesh", devices=DEVICES[:1])
    shardings = policy.trained_shardings(mesh)
    shapes = shaped(parameters.shapes(policy.trained_specs), shardings)
    checkpoints = Checkpoints(s.run.checkpoints, keep=0, read_only=True)
    reference = checkpoints.restore(checkpoints.latest_step(), {"reference": shapes})[0]["reference"]
    published = [snapshots.load_step(s.run.policies, step, policy.trained_specs, shardings) for step in range(3)]
    expected = jax.tree.map(lambda a, b, c: 0.25 * a + 0.25 * b + 0.5 * c, *published)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), reference, expected)
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(reference), jax.tree.leaves(published[-1]), strict=True))
