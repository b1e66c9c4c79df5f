"""A loss of power tears writes: each file of a run in turn loses its last bytes, or all of them, and the run is resumed.

It goes on to the end that it would have had, wherever it still has what it needs; else one sentence names the file or the writer.
"""

import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tba_jax.commands import audit
from tba_jax.experiment import jobs, training
from tba_jax.replay import expiry
from tba_jax.run import processes
from tba_jax.storage import grants, layout, snapshots
from tests.support import frozen_runs, tiny_run

pytestmark = [
    pytest.mark.usefixtures("one_device_throughout"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # of orbax, whose read failed
]

SETTINGS = {"checkpoint__every_steps": 3, "learner__steps": 9, "publish__every_steps": 2}
# A file of each kind. The newest checkpoint is that of step 6, the newest snapshot that of step 8.
KINDS = [
    "checkpoints/00000006/host/metadata",
    "checkpoints/00000006/state/_METADATA",
    "checkpoints/00000006/state/manifest.ocdbt",
    "checkpoints/00000006/state/d/*",
    "policy/00000008/commit.json",
    "policy/00000008/embedding.weight/zarr.json",
    "policy/00000008/embedding.weight/c/0/0",
    "journal/*.jsonl",
    "journal/*.lease",
    "replay/frozen-*/000001/manifest.ocdbt",
    "replay/writers/frozen-*.json",
    "replay/expired.json",
    "reference/initial.json",
    "metrics/trainer/metrics.jsonl",
    "metrics/trainer/status.json",
    "grant.json",
    "finished.json",
    "config.json",
]
# What nothing can stand in for: (file, whether all of it is lost) -> what the sentence says beside its name.
NEEDED = {
    ("config.json", False): "nothing else holds the settings of the run: restore the file from a copy",
    ("config.json", True): "nothing else holds the settings of the run: restore the file from a copy",
    ("journal/epoch-000003.jsonl", True): "storage has lost lines of the journal",
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory, one_device_throughout) -> jobs.Invocation:
    """A run whose trainer was killed after step 8 of 9, and whose last power cut may have hit any of its files."""
    s = frozen_runs.make(tmp_path_factory.mktemp("killed") / "run", **SETTINGS)
    frozen_runs.train(s, until=8, abandon=True)
    grants.give(s.run, step=8)
    layout.write_json(s.run.finished, {"step": 8})
    layout.write_json(s.run.replay / expiry.EXPIRED, {"expired": {}, "removing": {}})
    s.run.metrics("trainer").mkdir(exist_ok=True)
    (s.run.metrics("trainer") / "metrics.jsonl").write_text('{"step": 7}\n{"step": 8}\n')
    return s


@pytest.fixture(scope="module")
def undisturbed(killed, tmp_path_factory) -> str:
    """The policy of the last step where nothing is torn."""
    return resumed(copied(killed, tmp_path_factory.mktemp("undisturbed") / "run"))


def copied(s: jobs.Invocation, workdir: Path) -> jobs.Invocation:
    shutil.copytree(s.run.root, workdir)
    return tiny_run.settings(workdir, s.config)


def resumed(s: jobs.Invocation) -> str:
    """The trainer's whole job. Returns what its last policy is."""
    assert training.trainer(s)() == 0
    assert layout.read_json(s.run.finished)["step"] == 9 and layout.read_json(s.run.finished)["balanced"]
    return snapshots.fingerprint(s.run.policies / "00000009")


def check_torn(killed: jobs.Invocation, folder: Path, file: Path, *, emptied: bool, expected: str) -> None:
    s = copied(killed, folder)
    torn = s.run.root / file
    os.truncate(torn, 0 if emptied else max(torn.stat().st_size - 7, 0))
    if torn.suffix == ".lease":  # of a power cut a while ago; else a trainer waits for a holder that may be alive
        os.utime(torn, (1e9, 1e9))
    told = NEEDED.get((str(file), emptied))
    try:
        end = resumed(s)
    except ValueError as error:
        assert not processes.is_storage_failure(error)
        if file.parts[0] == "replay":  # rows that the window holds: their writer is named
            (writer,) = [name.removesuffix(".json") for name in file.parts if name.startswith("frozen-")]
            assert f"writer {writer}" in str(error)
        else:
            assert (
                told is not None and told in str(error) and str(torn if torn.suffix == ".json" else s.run.journal) in str(error)
            )
    else:
        # Rows that are lost are left out, and later batches are others.
        assert told is None and (end == expected or file.parts[0] == "replay"), file
    shutil.rmtree(folder)


# The others take their time in the slow tests.
BY_DEFAULT = [
    ("replay/frozen-*/000001/manifest.ocdbt", False),
    ("config.json", True),
]
CASES = [(kind, emptied) for kind in KINDS for emptied in (False, True)]


@pytest.mark.parametrize(
    "kind, emptied", [pytest.param(*case, marks=[] if case in BY_DEFAULT else [pytest.mark.slow]) for case in CASES]
)
def test_a_torn_file_ends_no_run_that_has_what_it_needs(killed, undisturbed, tmp_path, kind, emptied):
    files = [path for path in killed.run.root.glob(kind) if path.stat().st_size]
    torn = max(files, key=lambda path: path.stat().st_mtime_ns).relative_to(killed.run.root)
    check_torn(killed, tmp_path / "run", torn, emptied=emptied, expected=undisturbed)


def every_file(root: Path) -> Iterator[Path]:
    """Those that a resume may read: older checkpoints and snapshots are like the newest ones."""
    for path in sorted(root.rglob("*")):
        if (
            path.is_file()
            and not {"00000003", "00000002", "00000004", "00000006"}.isdisjoint(path.parts)
            and "policy" in path.parts
        ):
            continue
        if path.is_file() and path.stat().st_size and "events" not in path.name:
            yield path.relative_to(root)


@pytest.mark.slow
@pytest.mark.parametrize("emptied", [False, True], ids=["cut", "emptied"])
def test_every_file_of_a_run_in_turn(killed, undisturbed, tmp_path, emptied):
    files = list(every_file(killed.run.root))
    assert len(files) > 60 and {file.parts[0] for file in files} >= {"checkpoints", "policy", "journal", "replay", "reference"}
    for file in files:
        if file.parts[0] == "reference" and file.name != "initial.json":
            continue  # the policy of step 0 is written durably, once, before anything depends on it
        check_torn(killed, tmp_path / "run", file, emptied=emptied, expected=undisturbed)


@pytest.mark.parametrize("lag", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_searcher_trainer_and_evaluator_go_on_after_a_power_cut(tmp_path, lag):
    """All at once: the newest snapshot and checkpoint, the last journal line, the last metrics, the lease and the small files."""
    changes = {"evaluation__every_steps": 2, "checkpoint__every_steps": 2, "schedule__lag": lag}
    assert frozen_runs.run(tmp_path / "run", learner__steps=6, **changes) == 0
    run = layout.RunDir(tmp_path / "run")
    grants.give(run, step=6)
    torn = [
        run.checkpoints / "00000006" / "state" / "manifest.ocdbt",
        max(run.journal.glob("*.jsonl")),
        run.metrics("trainer") / "metrics.jsonl",
        run.metrics("searcher-0") / "metrics.jsonl",
        run.finished,
        run.grant,
        run.initial_reference,
    ]
    for path in torn:
        os.truncate(path, path.stat().st_size - 5)
    os.truncate(run.policies / "00000006" / "embedding.weight" / "c" / "0" / "0", 0)
    lease = max(run.journal.glob("*.lease"))
    os.truncate(lease, 0)
    os.utime(lease, (1e9, 1e9))
    c = tiny_run.config(schedule__mode="interleaved", replay__recent_probability=1.0, learner__steps=8, **changes)
    s = dataclasses.replace(tiny_run.settings(run.root, c), allow_change=("learner.steps",))
    assert jobs.everything(s)() == 0
    assert layout.read_json(run.finished)["step"] == 8 and {0, 2, 4, 6, 8} == set(layout.steps_in(run.evaluations))
    text, balanced = audit.describe_ledger(audit.open_run(run.root))
    assert balanced and "8 journalled steps, each once" in text
