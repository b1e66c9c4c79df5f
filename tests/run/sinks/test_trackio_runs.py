"""Trackio on this machine: what its own database holds."""

import json
import sqlite3

import numpy as np
import pytest

from tests.support import tracked

pytest.importorskip("trackio", reason="trackio is not installed")


@pytest.fixture
def database(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "trackio" / "tba_jax.db"


def points(database):
    with sqlite3.connect(database) as connection:
        found = connection.execute("select run_name, run_id, step, metrics from metrics order by id").fetchall()
    return [(name, identity, step, json.loads(values)) for name, identity, step, values in found]


def test_points_and_tables_are_in_its_database(tmp_path, database, capfd):
    run = tracked.run(tmp_path / "sums")
    writer = tracked.writer(run, "trackio", name="evaluator", kind="evaluator", metrics__group="a group")
    writer.write(5, {"accuracy": 0.25}, {"staleness": np.array([1, 1, 3])})
    writer.table("samples", 5, [{"query": "1+1=", "response": "2", "reward": 1.0}])
    writer.close()
    (name, _, step, values), (_, _, _, table) = points(database)
    assert (name, step, values["evaluate/accuracy"]) == ("sums-01234567-evaluator", 5, 0.25)
    assert values["evaluate/staleness"]["values"] == [2, 0, 1]
    assert table["evaluate/samples"]["_value"] == [{"query": "1+1=", "response": "2", "reward": 1.0}]
    with sqlite3.connect(database) as connection:
        (config,) = connection.execute("select config from configs").fetchone()
    assert json.loads(config)["_Group"] == "a group"
    assert capfd.readouterr() == ("", "")


def test_a_role_that_starts_again_goes_on_with_its_run(tmp_path, database):
    run = tracked.run(tmp_path / "sums")
    for steps in ((1, 2, 3), (2, 3, 4)):
        writer = tracked.writer(run, "trackio")
        for step in steps:
            writer.write(step, {"loss": step})
        writer.close()
    found = points(database)
    assert len({identity for _, identity, _, _ in found}) == 1
    assert [step for _, _, step, _ in found] == [1, 2, 3, 2, 3, 4]


def test_storage_that_refuses_is_told(tmp_path, database, caplog):
    """Trackio warns of it, where others raise."""
    database.parent.write_text("a file")
    writer = tracked.writer(tracked.run(tmp_path / "sums"), "trackio")
    writer.write(1, {"loss": 1.0})
    writer.close()
    (record,) = caplog.records
    assert record.getMessage().startswith("trackio: ") and "what to do: " in record.getMessage()
