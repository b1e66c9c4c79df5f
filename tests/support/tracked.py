"""A run whose roles have writers with trackers."""

from pathlib import Path
from typing import Any

from tba_jax.storage import contract, layout
from tba_jax.telemetry import metrics
from tests.support import tiny_run

ID = "0123456789abcdef0123456789abcdef"


def run(workdir: Path, *, private: bool = False) -> layout.RunDir:
    """A run as far as trackers look at it."""
    workdir.mkdir(exist_ok=True)
    made = {"format": contract.FORMAT, "id": ID, "config": {}, "contract": {"private_files": private}}
    layout.write_json(workdir / "config.json", made)
    return layout.open_run_dir(workdir)


def writer(of: layout.RunDir, *sinks: str, name: str = "trainer", kind: str = "trainer", **changes: Any) -> metrics.MetricWriter:
    """The writer of a role."""
    return metrics.open_writer(tiny_run.config(metrics__sinks=sinks, **changes), of, name, role=kind)
