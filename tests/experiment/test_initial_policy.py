"""The policy of step 0: a run has one, whoever makes it, and keeps it."""

import shutil
import threading

import jax
import pytest

from tba_jax.experiment import initial_policy, meshes, training
from tba_jax.run import processes
from tba_jax.storage import contract, layout, places, snapshots
from tba_jax.storage.lease import EpochLease
from tests.support import tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")


@pytest.mark.parametrize(
    "seeds, elsewhere", [((0, 1), False), ((0, 0), True)], ids=["other weights", "the same weights in an object store"]
)
def test_two_that_make_it_at_once_end_with_one(tmp_path, monkeypatch, seeds, elsewhere):
    """Both have made their weights before either says which ones count. The slower one's are removed."""
    shared = places.place(f"memory://at-once-{seeds[1]}/run") if elsewhere else None
    run, meet = layout.RunDir(tmp_path / "run", shared), threading.Barrier(2)
    made = [tiny_run.settings(run.root, tiny_run.config(seed=seed)) for seed in seeds]
    contract.join(run, made[0].config, made[0].experiment.contract)
    fingerprint = snapshots.fingerprint

    def both_have_come(folder):
        meet.wait(30)
        return fingerprint(folder)

    monkeypatch.setattr(snapshots, "fingerprint", both_have_come)
    found, failed = [], []

    def make(s):
        try:
            experiment = meshes.of_trainer(s.experiment, jax.devices())
            found.append(initial_policy.ensure(experiment, run, report=lambda *_: None))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=make, args=(s,)) for s in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and found == [layout.reference_id(run)] * 2
    assert places.names_in(run.references) == sorted([found[0], "initial.json"])
    assert fingerprint(run.reference(found[0])) == found[0]
    assert not list(run.draft.parent.glob(".draft-*"))


def test_the_reference_role_leaves_it_to_a_trainer_that_has_begun(tmp_path):
    s = tiny_run.settings(tmp_path / "run", tiny_run.config())
    make = training.reference(s)
    lease = EpochLease.acquire(s.run.journal)
    with pytest.raises(processes.BadInput, match=r"is held by process \d+ .*it makes the policy itself"):
        make()
    assert not s.run.initial_reference.exists()
    lease.release()
    assert make() == 0 and s.run.initial_reference.exists()
    assert training.reference(s)() == 0


@pytest.mark.parametrize("content", [b'{\n "id": "12', b"{}"], ids=["cut", "no id"])
def test_a_torn_initial_json_is_written_again(tmp_path, caplog, content):
    """The one whole policy is what it named."""
    s = tiny_run.settings(tmp_path / "run", tiny_run.config())
    training.reference(s)()
    named = layout.reference_id(s.run)
    s.run.initial_reference.write_bytes(content)
    shutil.copytree(s.run.reference(named), s.run.reference(16 * "a"))  # its content has another name
    training.reference(s)()
    assert layout.reference_id(s.run) == named and "it is written again" in caplog.text

    s.run.initial_reference.write_bytes(content)
    shutil.rmtree(s.run.reference(named))
    with pytest.raises(ValueError, match=r"initial\.json .*holds 0 whole ones: restore it"):
        training.reference(s)()
