"""A run that begins from another run's policy: its weights, and what is refused."""

import shutil
from typing import Any

import numpy as np
import pytest

from tba_jax.experiment import initial_policy, jobs, training
from tba_jax.models import parameters
from tba_jax.storage import contract, layout, snapshots
from tests.support import frozen_runs, tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")


def source_run(workdir, **changes) -> jobs.Invocation:
    """Two steps, with a checkpoint of the last."""
    settings = {"schedule__mode": "interleaved", "evaluation__enabled": False, "learner__learning_rate": 0.05}
    s = tiny_run.settings(workdir, frozen_runs.config(learner__steps=2, **settings, **changes))
    assert jobs.everything(s)() == 0
    return s


@pytest.fixture
def source(finished) -> jobs.Invocation:
    """6 steps, checkpoints at 5 and 6."""
    return finished


def copy_of(source: jobs.Invocation, workdir) -> jobs.Invocation:
    """The source for a test that takes it away."""
    shutil.copytree(source.run.root, workdir)
    return tiny_run.settings(workdir, source.config)


def begin(workdir, origin: str, **changes) -> jobs.Invocation:
    """A run that has its reference policy, made from `origin`."""
    s = tiny_run.settings(workdir, frozen_runs.config(**changes), init_from=initial_policy.parse_init_from(origin))
    assert training.reference(s)() == 0
    return s


def stored(folder, specs) -> dict[str, np.ndarray]:
    """The parameters of a snapshot, by name."""
    arrays = parameters.flatten(snapshots.open_arrays(folder, specs))
    return {name: np.asarray(array.read().result()) for name, array in arrays.items()}


def reference_of(s: jobs.Invocation):
    return s.run.reference(layout.read_json(s.run.initial_reference)["id"])


def snapshot_of(s: jobs.Invocation, step: int):
    return s.run.policies / layout.step_name(step)


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)


def fill(s: jobs.Invocation) -> None:
    """Publishes step 0 and searches it, so that there are rows."""
    made, lease = training.make_trainer(s, publish_every_steps=2)
    made.close()
    lease.release()
    searcher = jobs.make_searcher(s, name="frozen", account=jobs.TimeAccount())
    searcher.refresh()
    for _ in range(4):
        searcher.search()


@pytest.mark.slow
def test_adapters_of_the_other_run_are_merged(tmp_path):
    lora = {"lora__rank": 2, "lora__alpha": 6.0, "lora__targets": ("layers.attention.query",)}
    other = source_run(tmp_path / "source", **lora)
    policy = other.experiment.policy
    base, adapters = stored(reference_of(other), policy.model_specs), stored(snapshot_of(other, 2), policy.trained_specs)
    a, b = adapters["layers.attention.query.lora_a"], adapters["layers.attention.query.lora_b"]
    weight = base["layers.attention.query.weight"].astype(np.float64)
    update = np.zeros_like(weight)
    for layer in range(weight.shape[0]):
        for rank in range(2):
            column, row = a[layer, :, rank].astype(np.float64), b[layer, rank].astype(np.float64)
            update[layer] += 6.0 / 2 * np.tensordot(column, row, axes=0)
    assert np.abs(update).max() > 1e-4
    for name, changes in {"whole": {}, "adapters": lora}.items():
        s = begin(tmp_path / name, f"{other.run.root}@2", **changes)
        got = stored(reference_of(s), policy.model_specs)
        np.testing.assert_allclose(got.pop("layers.attention.query.weight"), weight + update, atol=1e-6)
        assert_same(got, {name: array for name, array in base.items() if name != "layers.attention.query.weight"})
    fill(s)
    fresh = stored(snapshot_of(s, 0), policy.trained_specs)
    assert not fresh["layers.attention.query.lora_b"].any()


def test_the_reference_is_the_policy_of_that_step_and_the_other_run_is_needed_once(source, tmp_path):
    other = copy_of(source, tmp_path / "source")
    before = {path: path.stat().st_mtime_ns for path in other.run.root.rglob("*") if path.is_file()}
    s = begin(tmp_path / "run", f"{other.run.root}@3")
    reference, specs = reference_of(s), s.experiment.policy.model_specs
    assert_same(stored(reference, specs), stored(snapshot_of(source, 3), specs))
    assert any((a != b).any() for a, b in zip(*(stored(snapshot_of(source, n), specs).values() for n in (0, 3)), strict=True))
    assert contract.read(s.run)["init_from"] == f"{other.run.root}@3"
    assert {path: path.stat().st_mtime_ns for path in other.run.root.rglob("*") if path.is_file()} == before
    shutil.rmtree(other.run.root)
    for origin in (f"{other.run.root}@3", ""):
        assert reference_of(begin(tmp_path / "run", origin)) == reference
    with pytest.raises(ValueError, match=rf"--init_from={other.run.root}@5: .* began from the policy {other.run.root}@3"):
        begin(tmp_path / "run", f"{other.run.root}@5")


REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no step": ({}, "{source}", r"--init_from='{source}' must be RUN@STEP"),
    "ill step": ({}, "{source}@last", r"must be RUN@STEP"),
    "no folder": ({}, "@3", r"--init_from='@3' must be RUN@STEP"),
    "no run": ({}, "{source}/nothing@3", r"--init_from: {source}/nothing holds no run: there is no"),
    "missing step": ({}, "{source}@7", r"step 7 is not a snapshot of {source}; there are 0, 1, 2, 3, 4, 5, 6$"),
    "model": ({"model__width": 32}, "{source}@6", r"another model or tokenizer; model.width: 16 there, 32 here"),
    "warm start": ({"warm_start__steps": 5}, "{source}@6", r"warm_start.steps=5 exclude each other"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_begun_from_is_refused(case, source, tmp_path):
    changes, origin, sentence = REFUSALS[case]
    with pytest.raises(ValueError, match=sentence.format(source=source.run.root)):
        begin(tmp_path / "run", origin.format(source=source.run.root), **changes)
    assert not (tmp_path / "run").exists()


def test_a_run_that_began_from_another_policy_is_mounted_by_one_that_begins_so_too(source, tmp_path):
    origin, theirs = f"{source.run.root}@3", begin(tmp_path / "theirs", f"{source.run.root}@3").run.root
    mounts = frozen_runs.config(replay__mount=(str(theirs),))

    s = tiny_run.settings(tmp_path / "new", mounts)
    with pytest.raises(ValueError, match=f"it began from the policy {origin}: begin this run with --init_from={origin} too"):
        initial_policy.check_mounts(s.run, s.config, s.experiment.contract, init_from="")
    initial_policy.check_mounts(s.run, s.config, s.experiment.contract, init_from=origin)
