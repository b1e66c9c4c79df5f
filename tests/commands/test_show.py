"""Rows as text: which come first, what is read for them, and logs of which retention has removed segments."""

import re

import numpy as np
import pytest

from tba_jax.commands import show
from tba_jax.replay.log import LogWriter, remove
from tba_jax.replay.reader import LogReader
from tba_jax.reporting import gathering
from tba_jax.storage import layout

pytestmark = pytest.mark.usefixtures("one_device_throughout")

WRITERS, APPENDS = ("w0", "w1", "w2"), 9


@pytest.fixture(scope="module")
def run(frozen, tmp_path_factory) -> tuple[layout.RunDir, LogReader]:
    """A log that has three more writers of 9 appends of 4 rows, of which six are removed."""
    s = frozen(tmp_path_factory.mktemp("shown") / "run", batches=3)
    reader, shape = LogReader(s.run.replay, s.experiment.contract.row_shape()), s.experiment.contract.row_shape()
    rows, rng = dict(reader.read(next(iter(reader.heads())), 0, 4)), np.random.default_rng(0)
    for number, name in enumerate(WRITERS):
        log = LogWriter(s.run.replay, name, shape, info={})
        for append in range(APPENDS):
            rows["row"][:] = np.arange(4 * append, 4 * append + 4)
            rows["policy_step"][:] = 1 + append // 2 * (number + 1) + rng.integers(0, 2, (4, 1)) * (append % 2)
            rows["reward"][:] = rng.integers(0, 9, 4)
            log.append(rows)
    reader = LogReader(s.run.replay, shape)
    reader.look()
    remove(s.run.replay, [*reader.appends("w1")[:4], *reader.appends("w2")[4:6]])
    return s.run, LogReader(s.run.replay, shape)


@pytest.mark.parametrize("order", ["newest", "best", "worst"])
@pytest.mark.parametrize("count", [5, 1000])
def test_the_rows_that_are_there_are_shown_in_order(run, order, count, monkeypatch):
    """Against a sort of all rows that are there."""
    folder, reader = run
    monkeypatch.setattr(gathering, "_BLOCK_BYTES", 1)
    gone = {("w1", row) for row in range(16)} | {("w2", row) for row in range(16, 24)}
    ids = [(writer, row) for writer, head in sorted(reader.heads().items()) for row in range(head) if (writer, row) not in gone]
    rows = reader.read_ids(ids)
    first = show.rank(rows["reward"], rows["policy_step"].max(axis=1), order)[:count]
    text = show.show(folder.root, order, count)
    assert re.findall(r"^── (\S+)", text, re.MULTILINE) == [f"{ids[i][0]}:{ids[i][1]}" for i in first]
    assert text.startswith(f"{len(ids)} rows of 4 writers (24 more were removed by retention), {order} first")


def test_the_newest_rows_are_read_from_the_ends_and_the_best_step_is_named(run, monkeypatch):
    root, read, asked = run[0].root, LogReader.read, []
    monkeypatch.setattr(LogReader, "read", lambda self, *span, **more: (asked.append(span), read(self, *span, **more))[1])
    assert "best held-out" not in show.show(root, "newest", 5)
    assert [span for span in asked if span[0] in WRITERS] == [(name, 28, 36) for name in WRITERS]
    (root / "evaluations").mkdir()
    layout.write_json(root / "evaluations" / "00000000.json", {"step": 0, "greedy_reward": 0.25})
    assert show.show(root, "newest", 1).splitlines()[1] == "best held-out score of a snapshot: 0.250 at step 0"
