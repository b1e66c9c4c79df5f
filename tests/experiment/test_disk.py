"""The disk that a run takes, against counts by hand and against a disk that is too small."""

from pathlib import Path

import pytest

from tba_jax.experiment import answer, composition, disk, joining
from tba_jax.models import parameters
from tba_jax.storage import layout
from tests.support import tiny_run

TOO_MANY = 10**13  # steps whose snapshots no disk holds


def experiment(**changes):
    return composition.build(tiny_run.config(**changes))


def listed(*, steps: int, every: int, evaluated: int, keep: int) -> int:
    """Steps that have a snapshot at the end, step by step, and one that is being written."""
    published = [step for step in range(steps + 1) if step % every == 0 or step % evaluated == 0 or step == steps]
    if not keep:
        return len(published)
    kept = [step for step in published if step % evaluated == 0 or step == steps]
    return min(len(published), len(kept) + keep + 1)


@pytest.mark.parametrize(
    "steps, every, evaluated, keep", [(12, 2, 100, 0), (12, 2, 5, 3), (7, 3, 2, 0), (6, 2, 3, 4), (40, 4, 6, 3)]
)
def test_snapshots_are_counted(steps, every, evaluated, keep):
    e = experiment(learner__steps=steps, publish__every_steps=every, evaluation__every_steps=evaluated, publish__keep=keep)
    found = disk.snapshots(e)
    assert found.count == listed(steps=steps, every=every, evaluated=evaluated, keep=keep)
    assert found.size == 4 * parameters.count(e.policy.trained_specs) and f"publish.keep={keep}" in found.what


def sizes(run: layout.RunDir, **changes) -> list[int]:
    """Of the snapshots, the reference policy and the checkpoints."""
    (demand,) = disk.demands(experiment(**changes), run)
    return [files.size for files in demand.files]


def test_what_is_published_and_kept(tmp_path):
    assert disk.snapshots(experiment(schedule__mode="interleaved", learner__steps=9)).count == 10
    run = layout.RunDir(tmp_path / "run")
    whole, adapters = sizes(run, publish__dtype="bfloat16"), sizes(run, publish__dtype="bfloat16", lora__rank=1)
    assert adapters[0] < whole[0] and adapters[2] < whole[2] and adapters[1] == whole[1] == 2 * whole[0]
    assert 3 * sizes(run, learner__reference__kind="ema")[2] == 4 * sizes(run)[2]


def test_every_new_run_is_refused_whose_snapshots_the_disk_does_not_hold(tmp_path):
    s = tiny_run.settings(tmp_path / "run", tiny_run.config(learner__steps=TOO_MANY))
    with pytest.raises(ValueError, match=r"would fill its disk.*GiB left on .*publish.keep=0, all.*--workdir") as told:
        joining.join(s, may_change_schedule=True)
    assert str(tmp_path / "run") in str(told.value) and not s.run.root.exists()
    joining.join(tiny_run.settings(tmp_path / "run", tiny_run.config()), may_change_schedule=True)
    joining.join(tiny_run.settings(tmp_path / "run", s.config), may_change_schedule=False)  # a run that is there has an alarm


def test_a_dry_run_says_what_the_disk_lacks(tmp_path):
    run = layout.RunDir(tmp_path / "run")
    lines = answer.describe(experiment(learner__steps=TOO_MANY), run).splitlines()
    (said,) = (line for line in lines if line.startswith("disk "))
    assert said.startswith("disk       does not fit: about") and "publish.keep=0, all" in said
    assert "disk       fits: about" in answer.describe(experiment(), run)


def test_checkpoints_and_snapshots_may_lie_on_two_disks(tmp_path):
    e = experiment()
    (demand,) = disk.demands(e, layout.RunDir(tmp_path / "run", tmp_path / "shared"))
    assert demand.size == sum(files.total for files in demand.files) and len(demand.files) == 3
    if not Path("/dev/shm").is_dir() or Path("/dev/shm").stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system at /dev/shm")
    shared, local = disk.demands(e, layout.RunDir(tmp_path / "run", Path("/dev/shm/run")))
    assert (shared.files, local.files) == (demand.files[:2], demand.files[2:])
