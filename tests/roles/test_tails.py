"""The ends of files that roles write."""

import json

import pytest

from tba_jax.roles import tails


def write(path, *lines):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.parametrize(
    ("figures", "events", "step"),
    [
        ([], [], 0),
        ([{"step": 5, "time": 10.0}], [], 5),
        ([], [{"step": 4, "time": 11.0, "event": "end"}], 4),
        ([{"step": 5, "time": 10.0}], [{"step": 7, "time": 11.0, "event": "end"}], 7),
        ([{"step": 5, "time": 10.0}], [{"step": 3, "time": 9.0, "event": "end"}], 5),
        (
            [{"step": 5, "time": 10.0}],
            [{"step": 3, "time": 11.0, "event": "end"}, {"step": 2, "time": 12.0, "event": "start"}],
            5,
        ),
        ([{"step": 5, "time": 10.0}], [{"step": "x", "time": [], "event": "end"}], 5),
    ],
)
def test_the_last_step_is_that_of_the_end_where_no_figures_are_newer(tmp_path, figures, events, step):
    write(tmp_path / "metrics.jsonl", *figures)
    write(tmp_path / "events.jsonl", *events)
    assert tails.last_step(tmp_path) == step
