"""A loss of power tears writes of all roles at once, and the run goes on to its end."""

import dataclasses
import os

import pytest

from tba_jax.commands import audit
from tba_jax.experiment import jobs
from tba_jax.storage import layout
from tests.support import frozen_runs, tiny_run

pytestmark = [
    pytest.mark.usefixtures("one_device_throughout"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # of orbax, whose read failed
]


def test_searcher_trainer_and_evaluator_go_on_after_a_power_cut(tmp_path):
    """The newest snapshot and checkpoint, the last journal line, the last metrics, the lease and the small files are torn."""
    changes = {"evaluation__every_steps": 2, "checkpoint__every_steps": 2, "schedule__lag": 3}
    assert frozen_runs.run(tmp_path / "run", learner__steps=4, **changes) == 0
    run = layout.RunDir(tmp_path / "run")
    layout.give_grant(run, step=4)
    torn = [
        run.checkpoints / "00000004" / "state" / "manifest.ocdbt",
        max(run.journal.glob("*.jsonl")),
        run.metrics("trainer") / "metrics.jsonl",
        run.metrics("searcher-0") / "metrics.jsonl",
        run.finished,
        run.grant,
        run.initial_reference,
    ]
    for path in torn:
        os.truncate(path, path.stat().st_size - 5)
    os.truncate(run.policies / "00000004" / "embedding.weight" / "c" / "0" / "0", 0)
    lease = max(run.journal.glob("*.lease"))
    os.truncate(lease, 0)
    os.utime(lease, (1e9, 1e9))
    c = tiny_run.config(schedule__mode="interleaved", replay__recent_probability=1.0, learner__steps=6, **changes)
    s = dataclasses.replace(tiny_run.settings(run.root, c), allow_change=("learner.steps",))
    assert jobs.everything(s)() == 0
    assert layout.read_json(run.finished)["step"] == 6 and {0, 2, 4, 6} == set(layout.steps_in(run.evaluations))
    text, balanced = audit.describe_ledger(audit.open_run(run.root))
    assert balanced and "6 journalled steps, each once" in text
