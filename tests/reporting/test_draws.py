"""Which steps drew which rows: what the journal says, whatever trainers came after one another, and however it is damaged."""

import json

import numpy as np
import pytest

from tba_jax.replay import journal
from tba_jax.reporting import draws as draws_lib
from tba_jax.reporting.draws import Draws

WRITERS = ("w0", "w1", "w2")


def batch(step: int, salt: int = 0) -> list[tuple[str, int]]:
    rng = np.random.default_rng([step, salt])
    return [(WRITERS[rng.integers(3)], int(rng.integers(20))) for _ in range(int(rng.integers(5)))]


def line(step: int, epoch: int, salt: int = 0) -> str:
    made = journal.journal_line(step=step, visible=[], ids=batch(step, salt), reward_version=1, key=step, rows={})
    return json.dumps(made | {"epoch": epoch}) + "\n"


def write(folder, epoch: int, steps: range, salt: int = 0) -> None:
    with open(folder / f"epoch-{epoch:06d}.jsonl", "a") as file:
        file.writelines(line(step, epoch, salt) for step in steps)


def check(found: Draws, folder) -> None:
    """That every look-up agrees with the lines that a trainer would replay."""
    ids = {each["step"]: journal.line_ids(each) for each in journal.read_lineage(folder)}
    assert found.last_step == max(ids, default=0) and len(found) == sum(map(len, ids.values()))
    assert {step: found.rows_of(step) for step in ids} == ids
    everything = [(writer, row) for writer in (*WRITERS, "nobody") for row in range(20)]
    drawn = {each: [step for step, rows in ids.items() for other in rows if other == each] for each in everything}
    assert {each: found.steps_of(*each) for each in everything} == drawn
    names = ["nobody", *WRITERS]
    counts = found.counts(
        names, np.array([names.index(writer) for writer, _ in everything]), np.array([r for _, r in everything])
    )
    assert counts.tolist() == [len(drawn[each]) for each in everything]
    writers, rows = found.all_draws()
    told = [(found.writers[number], row) for number, row in zip(writers.tolist(), rows.tolist(), strict=True)]
    assert told == [each for step in sorted(ids) for each in ids[step]]
    assert found.per_step().tolist() == [len(ids[step]) for step in sorted(ids)]


@pytest.mark.parametrize("unsorted", [0, 3, 1000])
def test_a_journal_that_grows_is_read_once(tmp_path, unsorted, monkeypatch):
    monkeypatch.setattr(draws_lib, "_UNSORTED", unsorted)
    found = Draws(tmp_path)
    assert found.advance() and found.last_step == 0 and found.steps_of("w0", 1) == [] and found.rows_of(1) == []
    for stretch in (range(1, 30), range(30, 31), range(31, 90)):
        write(tmp_path, 1, stretch)
        assert found.advance()
        check(found, tmp_path)
    assert found.problems == []


def test_steps_of_a_later_epoch_replace_those_of_an_earlier(tmp_path):
    found = Draws(tmp_path)
    write(tmp_path, 1, range(1, 20))
    found.advance()
    write(tmp_path, 2, range(12, 15), salt=1)
    found.advance()
    check(found, tmp_path)
    write(tmp_path, 1, range(20, 40))  # a trainer that does not know yet that it has lost its lease
    write(tmp_path, 2, range(15, 17), salt=1)
    write(tmp_path, 3, range(17, 25), salt=2)
    found.advance()
    check(found, tmp_path)
    fresh = Draws(tmp_path)
    fresh.advance()
    check(fresh, tmp_path)
    assert found.problems == fresh.problems == []


def test_a_line_that_is_being_written_is_read_once_it_is_whole(tmp_path):
    write(tmp_path, 1, range(1, 5))
    path = tmp_path / "epoch-000001.jsonl"
    whole = path.read_text()
    path.write_text(whole + line(5, 1)[:30])
    found = Draws(tmp_path)
    found.advance()
    assert found.last_step == 4
    path.write_text(whole + line(5, 1))
    found.advance()
    assert found.last_step == 5 and found.problems == []
    check(found, tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        "no journal\n",
        "\xff\xfe\n",
        "[]\n",
        line(9, 1),  # another step than the one that stands there
        line(10**9, 1),
        line(4, 2),
        '{"step": 4, "epoch": 1, "writers": ["w0"], "rows": [[1, 2]]}\n',
        '{"step": 4, "epoch": 1, "writers": ["w0"], "rows": [[0, -2]]}\n',
        '{"step": 4, "epoch": 1, "writers": ["w0"], "rows": [[0, 99999999999999999999]]}\n',
    ],
)
def test_a_damaged_line_is_named_and_the_others_are_read(tmp_path, damage):
    lines = [line(step, 1) for step in range(1, 9)]
    lines[3] = damage
    (tmp_path / "epoch-000001.jsonl").write_bytes("".join(lines).encode("latin-1"))
    found = Draws(tmp_path)
    found.advance()
    (told, *_) = found.problems
    assert "epoch-000001.jsonl line 4" in told
    assert found.last_step == 8 and found.rows_of(4) == []
    assert all(found.rows_of(step) == batch(step) for step in (1, 2, 3, 5, 6, 7, 8))


def test_the_last_line_may_be_damaged_by_a_crash(tmp_path):
    write(tmp_path, 1, range(1, 5))
    with open(tmp_path / "epoch-000001.jsonl", "a") as file:
        file.write("\0\0\0\n")
    found = Draws(tmp_path)
    found.advance()
    write(tmp_path, 2, range(5, 9))
    found.advance()
    assert found.problems == []
    check(found, tmp_path)


def test_draws_that_are_too_many_are_forgotten_from_the_oldest_step_on(tmp_path):
    write(tmp_path, 1, range(1, 200))
    whole, found = Draws(tmp_path), Draws(tmp_path, most_draws=60)
    whole.advance()
    found.advance()
    assert len(found) <= 60 and 1 < found.first_step < 199 and found.last_step == 199
    for step in range(found.first_step, 200):
        assert found.rows_of(step) == batch(step)
    for row in range(20):
        assert found.steps_of("w1", row) == [step for step in whole.steps_of("w1", row) if step >= found.first_step]
    assert found.rows_of(found.first_step - 1) == [] and "60 draws are kept" in found.problems[-1]


def test_a_reader_without_time_goes_on_later(tmp_path, monkeypatch):
    write(tmp_path, 1, range(1, 1000))
    found, calls = Draws(tmp_path), 1
    while not found.advance(seconds=-1.0):
        calls += 1
    assert calls == 4
    check(found, tmp_path)
