"""The journal that the benchmark of long journals writes."""

from benchmarks import journal
from tba_jax.replay.journal import line_ids, read_lineage


def test_it_is_one_that_trainers_could_have_written(tmp_path):
    size = journal.write(tmp_path, steps=1000, rows=64, epochs=3)
    lines = [*read_lineage(tmp_path)]
    assert [line["step"] for line in lines] == list(range(1, 1001)) and read_lineage(tmp_path).epochs == [1, 2, 3]
    assert all(len(line_ids(line)) == 64 and max(row for _, row in line["rows"]) < 16 * line["step"] for line in lines)
    assert 900 < size / 1000 < 1300
    seconds, peak, count = journal.read(tmp_path, after=990)
    assert count == 10 and seconds > 0 and 0 <= peak < 50
