"""Rows that an objective cannot learn from, and that no setting told of when the trainer began."""

from typing import Any

import pytest

from tba_jax.run import processes
from tests.support import frozen_runs, tiny_run

pytestmark = pytest.mark.usefixtures("one_device_throughout")


def steps(s, count, **changes):
    """Trains with another objective, from where the run stands. Returns the step at which it ends."""
    changed = tiny_run.settings(s.run.root, frozen_runs.config(**changes))
    with frozen_runs.trainer(changed) as trainer:
        trainer.poll()
        for _ in range(count):
            assert trainer.step(ahead=True) is not None
        return trainer.step_number


@pytest.mark.parametrize("name, value", [("top_p", 0.5), ("top_k", 3), ("min_p", 0.25), ("temperature", 2.0)])
def test_a_truncated_row_is_refused_where_it_is_drawn(frozen, tmp_path, name, value):
    as_drawn: dict[str, Any] = {"replay__merge_duplicates": False, "replay__recent_fill": "wait"}
    s = frozen(tmp_path / "run", **as_drawn)
    frozen_runs.append_changed(s, "later-1", **{name: (slice(None), value)})
    if name == "temperature":
        assert steps(s, 12, learner__objective="a_star_po", **as_drawn) == 12
        return
    with pytest.raises(processes.BadInput, match=rf"a_star_po needs .* row later-1:[0-3] was drawn with .*{name}={value}"):
        steps(s, 12, learner__objective="a_star_po", **as_drawn)
    assert steps(s, 12, learner__objective="trajectory_balance", **as_drawn) >= 12, "nothing is lost"


@pytest.mark.parametrize(
    "changes, reader",
    [
        ({"learner__objective": "grpo"}, r"learner\.objective=grpo"),
        ({}, ""),
    ],
)
def test_a_row_of_a_file_is_refused_where_its_behaviour_is_read(frozen, tmp_path, changes, reader):
    """It may come after the trainer has begun, by a mounted run."""
    s = frozen(tmp_path / "run")
    frozen_runs.append_changed(s, "given-0123456789abcdef")
    if not reader:
        assert steps(s, 12) == 12
        return
    with pytest.raises(
        processes.BadInput, match=rf"{reader} reads π_behaviour .* row given-0123456789abcdef:[0-3], a response of"
    ):
        steps(s, 12, **changes)
