"""Rows as a Parquet file: all columns of the log, their texts, and only the rows that were asked for."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from tba_jax import trajectory
from tba_jax.commands import command_line, export
from tba_jax.experiment import stored_run
from tba_jax.replay.reader import LogReader
from tba_jax.reporting import parquet
from tba_jax.run import processes
from tba_jax.storage import layout
from tests.reporting.test_rows import damage
from tests.support import frozen_runs
from tests.support.tiny_log import SHAPE

pytestmark = pytest.mark.usefixtures("one_device_throughout")


@pytest.fixture(scope="module")
def run(frozen, tmp_path_factory):
    """Six batches of a searcher, and a writer whose four rows have other rewards and steps."""
    s = frozen(tmp_path_factory.mktemp("exported") / "run")
    frozen_runs.append_changed(s, "other", reward=(..., [-2.0, 5.0, np.nan, np.inf]), policy_step=((..., 0), 7))
    return s.run


def written(run, output, *flags: str) -> list[dict]:
    assert command_line.execute(export, [f"--workdir={run.root}", f"--rows={output}", *flags]) == 0
    return pq.read_table(output).to_pylist()


def test_the_file_is_the_log(run, tmp_path, monkeypatch):
    monkeypatch.setattr("tba_jax.reporting.rows._BLOCK_BYTES", 1)
    monkeypatch.setattr(parquet, "_GROUP_BYTES", 1)
    rows = written(run, tmp_path / "rows.parquet")
    stored = stored_run.read(run, called="the test")
    reader = LogReader(run.replay, stored.contract.row_shape())
    ids = [(row["writer"], row["row"]) for row in rows]
    assert ids == [(writer, row) for writer, head in sorted(reader.heads().items()) for row in range(head)]
    log = reader.read_ids(ids)
    for i, row in enumerate(rows):
        P, R = int(log["prompt_length"][i]), int(log["response_length"][i])
        prompt, response = log["tokens"][i, :P].tolist(), trajectory.response(log, i).tolist()
        assert row.pop("query") == stored.tokenizer.decode(prompt)
        assert row.pop("response") == stored.tokenizer.decode_continuation(prompt, response)
        assert row.pop("newest_step") == max(log["policy_step"][i]) and row.pop("oldest_step") == min(log["policy_step"][i, :R])
        assert [*row.pop("reward_parts").items()] == [*zip(reader.shape.reward_parts, log["reward_parts"][i], strict=True)]
        del row["writer"]
        assert row.keys() == log.keys() - {"reward_parts"}
        for name, value in row.items():
            used = {"tokens": P + R, "key": 2}.get(name, R)
            np.testing.assert_array_equal(value, log[name][i][:used] if isinstance(value, list) else log[name][i], err_msg=name)
    file = pq.ParquetFile(tmp_path / "rows.parquet")
    assert file.num_row_groups == len(ids) // 16 + 1 and file.schema_arrow.field("query_id").type == "uint64"
    assert file.schema_arrow.metadata[b"tba_jax.run"].decode() == layout.read_json(run.config)["id"]


def test_only_the_rows_that_match_are_written(run, tmp_path):
    everything = written(run, tmp_path / "all.parquet")

    def chosen(*flags: str) -> list[tuple[str, int]]:
        return [(row["writer"], row["row"]) for row in written(run, tmp_path / f"{len([*tmp_path.iterdir()])}.parquet", *flags)]

    def ids(rule) -> list[tuple[str, int]]:
        return [(row["writer"], row["row"]) for row in everything if rule(row)]

    assert chosen("--writer=other") == ids(lambda row: row["writer"] == "other")
    assert chosen("--min_step=7", "--max_step=7") == ids(lambda row: row["newest_step"] == 7) == [("other", i) for i in range(4)]
    assert chosen("--max_step=6") == ids(lambda row: row["newest_step"] <= 6)
    assert chosen("--max_reward=-1.5") == [("other", 0)] and chosen("--min_reward=4") == [("other", 1), ("other", 3)]


def test_damaged_rows_are_left_out_and_told(tmp_path):
    damage(tmp_path / "log", 1)
    tokenizer = type("Numbers", (), {"decode": staticmethod(str), "decode_continuation": staticmethod(lambda _, ids: str(ids))})
    reader = LogReader(tmp_path / "log", SHAPE, patience_seconds=0)
    count, told = parquet.write(tmp_path / "f", reader, tokenizer, parquet.Filter(), flag="--rows", of_run="")
    assert count == 12 and "4 damaged rows are left out" in told[0] and "rows 4 to 7" in told[0]
    assert pq.read_table(tmp_path / "f")["row"].to_pylist() == [*range(4), *range(8, 16)]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--output=FOLDER, or rows by --rows=FILE"),
        (["--rows=there.parquet"], "--rows={there} exists"),
        (["--rows=run/f.parquet"], "is in the run's folder"),
        (["--rows=f.parquet", "--min_step=3", "--max_step=2"], "--min_step=3 is above --max_step=2"),
        (["--rows=f.parquet", "--max_reward=nan"], "no row of the"),
        (["--rows=f.parquet", "--writer=nobody"], "--writer=nobody"),
        (["--rows=f.parquet", "--dtype=float32"], "--dtype does not go with --rows"),
        (["--output=f", "--min_step=3"], "--min_step does not go with --output"),
    ],
)
def test_a_mistake_is_one_sentence_and_no_file(run, tmp_path, monkeypatch, capsys, flags, words):
    (tmp_path / "there.parquet").write_text("mine")
    (tmp_path / "run").symlink_to(run.root)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        command_line.execute(export, [f"--workdir={run.root}", *flags])
    *_, said = capsys.readouterr().err.splitlines()
    assert ended.value.code == processes.BAD_INPUT and said.startswith("error: ")
    assert words.replace("{there}", str(tmp_path / "there.parquet")) in said
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run", "there.parquet"]
