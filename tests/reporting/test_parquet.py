"""Rows as a Parquet file: all columns of the log, and their texts."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from tba_jax import trajectory
from tba_jax.commands import command_line, export
from tba_jax.experiment import stored_run
from tba_jax.replay.reader import LogReader
from tba_jax.reporting import parquet
from tba_jax.storage import layout
from tests.reporting.test_rows import damage
from tests.support import frozen_runs
from tests.support.tiny_log import SHAPE

pytestmark = pytest.mark.usefixtures("one_device_throughout")


@pytest.fixture(scope="module")
def run(frozen, tmp_path_factory):
    """Three batches of a searcher, and a writer whose four rows have other rewards and steps."""
    s = frozen(tmp_path_factory.mktemp("exported") / "run", batches=3)
    frozen_runs.append_changed(s, "other", reward=(..., [-2.0, 5.0, np.nan, np.inf]), policy_step=((..., 0), 7))
    return s.run


def test_the_file_is_the_log(run, tmp_path, monkeypatch):
    monkeypatch.setattr("tba_jax.reporting.rows._BLOCK_BYTES", 1)
    monkeypatch.setattr(parquet, "_GROUP_BYTES", 1)
    arguments = [f"--workdir={run.root}", f"--rows={tmp_path / 'rows.parquet'}"]
    assert command_line.execute(export, arguments) == 0
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
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
    def chosen(*flags: str) -> list[tuple[str, int]]:
        file = tmp_path / f"{len([*tmp_path.iterdir()])}.parquet"
        assert command_line.execute(export, [f"--workdir={run.root}", f"--rows={file}", *flags]) == 0
        return [(row["writer"], row["row"]) for row in pq.read_table(file).to_pylist()]

    others = [("other", i) for i in range(4)]
    assert chosen("--writer=other") == chosen("--min_step=7", "--max_step=7") == others
    assert chosen("--max_step=6") == [each for each in chosen() if each not in others]
    assert chosen("--max_reward=-1.5") == others[:1] and chosen("--min_reward=4") == [others[1], others[3]]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rows=there.parquet"], "--rows={there} exists"),
        (["--rows=f.parquet", "--min_step=3", "--max_step=2"], "--min_step=3 is above --max_step=2"),
        (["--rows=f.parquet", "--max_reward=nan"], "no row of the"),
        (["--rows=f.parquet", "--writer=nobody"], "--writer=nobody"),
        (["--rows=f.parquet", "--dtype=float32"], "--dtype does not go with --rows"),
        (["--output=f", "--min_step=3"], "--min_step does not go with --output"),
    ],
)
def test_a_mistake_is_one_sentence_and_no_file(run, tmp_path, monkeypatch, capsys, flags, words):
    (tmp_path / "there.parquet").write_text("mine")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        command_line.execute(export, [f"--workdir={run.root}", *flags])
    assert words.replace("{there}", str(tmp_path / "there.parquet")) in capsys.readouterr().err.splitlines()[-1]
    assert [each.name for each in tmp_path.iterdir()] == ["there.parquet"]


def test_damaged_rows_are_left_out_and_told(tmp_path):
    damage(tmp_path / "log", 1)
    tokenizer = type("Numbers", (), {"decode": staticmethod(str), "decode_continuation": staticmethod(lambda _, ids: str(ids))})
    reader = LogReader(tmp_path / "log", SHAPE, patience_seconds=0)
    count, told = parquet.write(tmp_path / "f", reader, tokenizer, parquet.Filter(), flag="--rows", of_run="")
    assert count == 12 and "4 damaged rows are left out" in told[0] and "rows 4 to 7" in told[0]
    assert pq.read_table(tmp_path / "f")["row"].to_pylist() == [*range(4), *range(8, 16)]
