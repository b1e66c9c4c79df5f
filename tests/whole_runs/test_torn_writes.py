"""A loss of power tears writes of all roles at once, and the run goes on to its end."""

import os
import shutil

import pytest

from tba_jax.commands import audit
from tba_jax.experiment import jobs
from tba_jax.storage import layout, published
from tests.support import tiny_run
from tests.support.tiny_snapshots import tear

pytestmark = [
    pytest.mark.usefixtures("one_device"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # of orbax, whose read failed
]


def test_searcher_trainer_and_evaluator_go_on_after_a_power_cut(tmp_path, finished):
    """The newest snapshot and checkpoint, the last journal line, the last metrics, the lease and the small files are torn."""
    shutil.copytree(finished.run.root, tmp_path / "run")
    run, last = layout.RunDir(tmp_path / "run"), finished.config.learner.steps
    layout.give_grant(run, step=last)
    torn = [
        run.checkpoints / layout.step_name(last) / "state" / "manifest.ocdbt",
        max(run.journal.glob("*.jsonl")),
        run.metrics("trainer") / "metrics.jsonl",
        run.metrics("searcher-0") / "metrics.jsonl",
        run.finished,
        run.grant,
        run.initial_reference,
    ]
    for path in torn:
        os.truncate(path, path.stat().st_size - 5)
    os.truncate(published.kept(run.policies)[last] / "embedding.weight" / "c" / "0" / "0", 0)
    for fenced in (run.lease, run.policies / published.POINTER):
        tear(fenced)
    s = tiny_run.settings(run.root, finished.config)
    assert jobs.everything(s)() == 0
    assert layout.read_json(run.finished)["step"] == last and layout.steps_in(run.evaluations) == [0, last]
    text, balanced = audit.describe_ledger(audit.open_run(run.root))
    assert balanced and f"{last} journalled steps, each once" in text
