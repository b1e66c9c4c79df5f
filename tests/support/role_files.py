"""Metrics of roles as files, for tests of what reads them."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tba_jax.storage import layout


def write_lines(run: layout.RunDir, role: str, lines: Sequence[Mapping[str, Any]]) -> None:
    """Appends lines to a role's metrics. `ago` of a line, seconds, becomes its time."""
    run.metrics(role).mkdir(parents=True, exist_ok=True)
    with open(run.metrics(role) / "metrics.jsonl", "a") as file:
        for line in lines:
            told = {name: value for name, value in line.items() if name != "ago"}
            file.write(json.dumps({"time": time.time() - line["ago"], **told}) + "\n")


def steps(first: int, last: int, *, ago: float, seconds: float, **figures: float) -> list[dict[str, float]]:
    """A line for each step, `seconds` apart; the last was written `ago` seconds ago."""
    shown = {"reward": 0.5, "staleness_mean": 2.0, "staleness_max": 4.0, "buffer_rows": 1000.0, **figures}
    return [{"step": n, "ago": ago + (last - n) * seconds, **shown} for n in range(first, last + 1)]
