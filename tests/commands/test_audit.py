"""The account of rows, the batch of a step and a row made again, on runs that were interrupted, damaged and shortened."""

import json
import shutil

import numpy as np
import pytest

from tba_jax.commands import audit, command_line
from tba_jax.replay.index import ReplayIndex
from tba_jax.replay.journal import RowsLost
from tba_jax.replay.log import LogWriter
from tba_jax.storage import layout
from tests.support import frozen_runs, tiny_snapshots
from tests.support.tiny_log import objects

pytestmark = pytest.mark.usefixtures("one_device_throughout")


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished.run.root, tmp_path / "run")
    return tmp_path / "run"


def test_every_row_is_accounted_for(finished):
    run = audit.open_run(finished.run.root)
    ((writer, rows),) = frozen_runs.rows(finished).items()
    account = audit.accounts(run)[writer]
    told = layout.read_json(finished.run.finished)["ledger"][writer]
    assert account.committed == len(rows["row"]) == 96 and account.unseen == account.damaged == 0
    assert (account.resident, account.evicted, account.rejected) == (told["resident"], told["evicted"], told["rejected"])
    assert account.resident == 40 and account.evicted["capacity"] > 0 and account.balances
    drawn = {tuple(row) for line in run.lines for row in line["rows"]}
    assert audit.trained_rows(run) == {writer: len(drawn)}
    text, balanced = audit.describe_ledger(run)
    assert balanced and "the ledger balances" in text and "6 journalled steps, each once, by trainer epoch 1" in text


def test_the_batch_of_a_step_is_rebuilt_and_checked(finished, copied):
    text, same = audit.rebuild_batch(audit.open_run(copied), 4)
    assert same and text.endswith("step 4 (epoch 1): 12 rows; the hash of the batch is the one journalled")
    ((writer, rows),) = frozen_runs.rows(finished).items()
    line = [*audit.open_run(copied).lines][3]
    for number, row in line["rows"]:
        assert f"{line['writers'][number]}:{row:<8} query {int(rows['query_id'][row]):016x}" in text
    journal = max((copied / "journal").glob("*.jsonl"))
    lines = [json.loads(content) for content in journal.read_text().splitlines()]
    lines[3]["rows"][0][1] = (lines[3]["rows"][0][1] + 1) % 16
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text, same = audit.rebuild_batch(audit.open_run(copied), 4)
    assert not same and "IS NOT THE ONE JOURNALLED" in text
    assert command_line.execute(audit, [f"--workdir={copied}", "--step=4"]) == 1
    with pytest.raises(ValueError, match="--step=7 is not a journalled step"):
        audit.rebuild_batch(audit.open_run(copied), 7)
    for path in objects(copied / "replay", writer):
        path.unlink()
    with pytest.raises(ValueError, match=r"the batch of step 4 cannot be rebuilt: replay log of writer .*: its log is not there"):
        audit.rebuild_batch(audit.open_run(copied), 4)
    shutil.rmtree(copied / "journal")
    with pytest.raises(ValueError, match=r"journal has lost lines: it ends at step 0, and there is a checkpoint of step 6"):
        audit.open_run(copied)


def test_rows_are_generated_again_bit_for_bit(finished, copied):
    ((writer, rows),) = frozen_runs.rows(finished).items()
    run = audit.open_run(copied)
    truncated, plain = int((rows["top_p"] < 1).argmax()), int((rows["top_p"] == 1).argmax())
    for row in (truncated, plain):
        text, same = audit.regenerate(run, f"{writer}:{row}")
        assert same and f"{writer}:{row} is identical: {rows['response_length'][row]} tokens" in text
    changed = {name: column[:4].copy() for name, column in rows.items()}
    begin = changed["prompt_length"][0]
    changed["tokens"][0, begin] = (changed["tokens"][0, begin] + 1) % 17
    long = int((rows["response_length"][:4] > 1).argmax())
    changed["policy_step"][long, 1] += 1
    shape = finished.experiment.contract.row_shape()
    log = LogWriter(copied / "replay", "forged-1", shape, info={})
    log.append(changed | {"row": np.arange(4)})
    run = audit.open_run(copied)
    if long != 0:
        text, same = audit.regenerate(run, "forged-1:0")
        assert not same and "forged-1:0 differs from token 0 on" in text
    with pytest.raises(ValueError, match=rf"forged-1:{long} cannot be generated again: its weights were swapped midway"):
        audit.regenerate(run, f"forged-1:{long}")
    step = int(rows["policy_step"][plain].max())
    tiny_snapshots.withdraw(copied / "policy", step)
    with pytest.raises(ValueError, match=f"the snapshot of its policy step {step} has been removed"):
        audit.regenerate(run, f"{writer}:{plain}")
    for name, sentence in (("nobody:0", f"no writer 'nobody'; it has forged-1, {writer}"), ("12", "must be WRITER:ROW")):
        with pytest.raises(ValueError, match=sentence):
            audit.regenerate(run, name)


def test_a_run_whose_trainer_prunes_meanwhile_is_read_again(copied, monkeypatch):
    run, read, removed = audit.open_run(copied), audit._read_index, iter(range(99))

    def pruned(run: audit.Run) -> ReplayIndex:
        index = read(run)
        if (count := next(removed)) < times:
            monkeypatch.setattr(audit, "_removed", lambda run: ({"another": count}, []))
        if count == 0:
            raise RowsLost("a row was pruned meanwhile")
        return index

    monkeypatch.setattr(audit, "_read_index", pruned)
    times = 2
    assert all(account.balances for account in audit.accounts(run).values()) and next(removed) == 3
    removed, times = iter(range(99)), 99
    with pytest.raises(ValueError, match="removed rows 5 times while they were read"):
        audit.accounts(run)


def test_rows_that_were_trained_on_and_are_lost_are_accounted_for_as_damaged(copied):
    """The account then begins with the newest checkpoint, which has counted all rows before it."""
    run = audit.open_run(copied)
    whole = audit.accounts(run)
    line = next(iter(run.lines))
    writer, row = line["writers"][line["rows"][0][0]], line["rows"][0][1]
    (append,) = run.reader.appends(writer, row, row + 1)
    (copied / "replay" / append.key).unlink()
    found = audit.accounts(audit.open_run(copied))
    assert all(account.balances for account in found.values())
    assert found[writer].damaged == whole[writer].resident - found[writer].resident
    (copied / "checkpoints").rename(copied / "away")
    with pytest.raises(ValueError, match=f"drew row {writer}:{row}, which cannot be read any more"):
        audit.accounts(audit.open_run(copied))
