"""The policy of step 0: a run has one and keeps it, whoever makes it, and of another run it has the weights."""

import shutil
from typing import Any

import jax
import numpy as np
import pytest

from tba_jax.experiment import initial_policy, jobs, training
from tba_jax.models import parameters
from tba_jax.run import processes
from tba_jax.storage import contract, layout, published, snapshots
from tba_jax.storage.lease import EpochLease
from tests.support import frozen_runs, tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")


def test_the_reference_role_leaves_it_to_a_trainer_that_has_begun(tmp_path):
    s = tiny_run.settings(tmp_path / "run", tiny_run.config())
    make = training.reference(s)
    lease = EpochLease.acquire(s.run.lease)
    with pytest.raises(processes.BadInput, match=r"is held by process \d+ .*it makes the policy itself"):
        make()
    assert not s.run.initial_reference.exists()
    lease.release()
    assert make() == 0 and s.run.initial_reference.exists()


def test_an_initial_json_that_is_torn_or_not_there_yet_is_written_again(tmp_path, caplog):
    s = tiny_run.settings(tmp_path / "run", tiny_run.config())
    training.reference(s)()
    named = layout.reference_id(s.run)
    s.run.initial_reference.unlink()
    assert training.reference(s)() == 0 and layout.reference_id(s.run) == named
    assert not list(s.run.draft.parent.glob(".draft-*"))
    s.run.initial_reference.write_bytes(b'{\n "id": "12')
    shutil.copytree(s.run.reference(named), s.run.reference(16 * "a"))  # its content has another name
    training.reference(s)()
    assert layout.reference_id(s.run) == named and "it is written again" in caplog.text
    s.run.initial_reference.write_bytes(b"{}")
    shutil.rmtree(s.run.reference(named))
    with pytest.raises(ValueError, match=r"initial\.json .*holds 0 whole ones: restore it"):
        training.reference(s)()


def begin(workdir, origin: str, **changes) -> jobs.Invocation:
    init_from = initial_policy.parse_init_from(origin)
    s = tiny_run.settings(workdir, frozen_runs.config(**changes), init_from=init_from)
    assert training.reference(s)() == 0
    return s


def stored(folder, specs) -> dict[str, np.ndarray]:
    arrays = parameters.flatten(snapshots.open_arrays(folder, specs))
    return {name: np.asarray(array.read().result()) for name, array in arrays.items()}


def reference_of(s: jobs.Invocation):
    return s.run.reference(layout.reference_id(s.run))


@pytest.mark.slow
def test_adapters_of_the_other_run_are_merged(tmp_path):
    lora = {"lora__rank": 2, "lora__alpha": 6.0, "lora__targets": ("layers.attention.query",)}
    settings = {"schedule__mode": "interleaved", "evaluation__enabled": False, "learner__learning_rate": 0.05}
    other = tiny_run.settings(tmp_path / "source", frozen_runs.config(learner__steps=2, **settings, **lora))
    assert jobs.everything(other)() == 0
    policy = other.experiment.policy
    base = stored(reference_of(other), policy.model_specs)
    adapters = stored(published.kept(other.run.policies)[2], policy.trained_specs)
    a, b = (adapters[f"layers.attention.query.lora_{name}"].astype(np.float64) for name in "ab")
    weight = base["layers.attention.query.weight"].astype(np.float64)
    update = np.zeros_like(weight)
    for layer in range(weight.shape[0]):
        for rank in range(2):
            update[layer] += 6.0 / 2 * np.tensordot(a[layer, :, rank], b[layer, rank], axes=0)
    assert np.abs(update).max() > 1e-4
    s = begin(tmp_path / "adapters", f"{other.run.root}@2", **lora)
    got = stored(reference_of(s), policy.model_specs)
    np.testing.assert_allclose(got.pop("layers.attention.query.weight"), weight + update, atol=1e-6)
    del base["layers.attention.query.weight"]
    jax.tree.map(np.testing.assert_array_equal, got, base)
    with frozen_runs.trainer(s):
        fresh = stored(published.kept(s.run.policies)[0], policy.trained_specs)
    assert not fresh["layers.attention.query.lora_b"].any()


def test_the_reference_is_the_policy_of_that_step_and_the_other_run_is_needed_once(finished, tmp_path):
    shutil.copytree(finished.run.root, tmp_path / "source")
    other = layout.RunDir(tmp_path / "source")
    before = {path: path.stat().st_mtime_ns for path in other.root.rglob("*") if path.is_file()}
    s = begin(tmp_path / "run", f"{other.root}@3")
    reference, specs = reference_of(s), s.experiment.policy.model_specs
    first, third = (stored(published.kept(finished.run.policies)[step], specs) for step in (0, 3))
    jax.tree.map(np.testing.assert_array_equal, stored(reference, specs), third)
    assert any((first[name] != third[name]).any() for name in first)
    assert contract.read(s.run)["init_from"] == f"{other.root}@3"
    assert {path: path.stat().st_mtime_ns for path in other.root.rglob("*") if path.is_file()} == before
    shutil.rmtree(other.root)
    for origin in (f"{other.root}@3", ""):
        assert reference_of(begin(tmp_path / "run", origin)) == reference
    with pytest.raises(ValueError, match=rf"--init_from={other.root}@5: .* began from the policy {other.root}@3"):
        begin(tmp_path / "run", f"{other.root}@5")


REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no step": ({}, "{source}", r"--init_from='{source}' must be RUN@STEP"),
    "no run": ({}, "{source}/nothing@3", r"--init_from: {source}/nothing holds no run: there is no"),
    "missing step": ({}, "{source}@7", r"step 7 is not a snapshot of {source}; there are 0, 1, 2, 3, 4, 5, 6$"),
    "model": ({"model__width": 32}, "{source}@6", r"another model or tokenizer; model.width: 16 there, 32 here"),
    "warm start": ({"warm_start__steps": 5}, "{source}@6", r"warm_start.steps=5 exclude each other"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_begun_from_is_refused(case, finished, tmp_path):
    changes, origin, sentence = REFUSALS[case]
    with pytest.raises(ValueError, match=sentence.format(source=finished.run.root)):
        begin(tmp_path / "run", origin.format(source=finished.run.root), **changes)
    assert not (tmp_path / "run").exists()


def test_a_run_that_began_from_another_policy_is_mounted_by_one_that_begins_so_too(finished, tmp_path):
    origin, theirs = f"{finished.run.root}@3", begin(tmp_path / "theirs", f"{finished.run.root}@3").run.root
    s = tiny_run.settings(tmp_path / "new", frozen_runs.config(replay__mount=(str(theirs),)))
    with pytest.raises(ValueError, match=f"it began from the policy {origin}: begin this run with --init_from={origin} too"):
        initial_policy.check_mounts(s.run, s.config, s.experiment.contract, init_from="")
    initial_policy.check_mounts(s.run, s.config, s.experiment.contract, init_from=origin)
