"""Searchers that are faster than the trainer: how far ahead they run, who holds room, and that the trainer has its rows."""

import time

import pytest

from tba_jax.experiment import jobs
from tba_jax.replay.reader import LogReader
from tba_jax.roles.backpressure import RETELL_SECONDS, DemandWriter, Room
from tba_jax.roles.searcher.searcher import Searcher
from tba_jax.storage import layout
from tba_jax.telemetry.status import TimeAccount
from tests.support import frozen_runs
from tests.support.tiny_searcher import ROWS, Q, S, committed

LEVELS = (2, 10)
SETTINGS = dict(learner__queries=Q, learner__completions=S, learner__steps=12, learner__logprob_gap_every_steps=0)
SETTINGS |= dict(replay__max_draws_per_row=1, replay__merge_duplicates=False, replay__recent_probability=1.0)


def until(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def search_on(s: jobs.Invocation, searchers: list[Searcher]) -> None:
    """In turn, as long as any may search, and not for ever."""
    for _ in range(40):
        for made in searchers:
            made.idle()
            if made.may_search:
                made.search()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("count", [1, 2])
def test_rows_ahead_are_bounded_and_no_update_lacks_rows(quick, level, count):
    """An update takes a batch of a searcher. After the fifth another trainer resumes; after that the last searcher dies."""
    s, made = quick(**SETTINGS, searchers__max_updates_ahead=level)
    searchers = [made, *(jobs.make_searcher(s, name="other", account=TimeAccount()) for _ in range(count - 1))]
    most, reached = level * ROWS + count * ROWS, 0
    for steps in (5, 12):
        with frozen_runs.trainer(s) as trainer:
            trainer.poll()
            for each in searchers:  # the trainer may be writing snapshot 0 anew
                until(lambda each=each: each.refresh() or each.sampler.step >= 0)
            while trainer.step_number < steps:
                until(lambda told=trainer.demand.told: s.run.demand.exists() and layout.read_json(s.run.demand) == told)
                search_on(s, searchers)
                ahead = committed(s) - ROWS * trainer.step_number
                assert ahead <= most, trainer.step_number
                reached = max(reached, ahead)
                trainer.poll()
                assert trainer.step(ahead=True) is not None
                if trainer.step_number == 11 and len(searchers) == 1 and (count, level) != (2, 10):
                    ahead = committed(s) - 11 * ROWS
                    assert trainer.demand.told["share"] == level * ROWS - ahead, "one that died has no share for long"
        if steps == 5 and count == 2:
            searchers.pop()
    assert reached >= level * ROWS
    heads = LogReader(s.run.replay, s.experiment.contract.row_shape()).heads()
    assert len(heads) == count and min(heads.values()) > ROWS, "both had a share"


def test_the_newest_demand_is_written_and_written_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("tba_jax.roles.backpressure.RETELL_SECONDS", 0.05)
    file = layout.RunDir(tmp_path).demand
    writer = DemandWriter(file, seconds=0.01)
    for share in range(20):
        writer.tell({"share": share, "heads": {}})
    until(lambda: file.exists() and layout.read_json(file)["share"] == 19)
    layout.write_json(file, {"share": 0, "heads": {}})  # by a trainer that has lost its lease
    until(lambda: layout.read_json(file)["share"] == 19)
    assert RETELL_SECONDS <= 60
    writer.close()
    refused = DemandWriter(tmp_path / "missing" / "demand.json", seconds=0.01)
    refused.tell({"share": 1, "heads": {}})
    with pytest.raises(FileNotFoundError):
        for share in range(10_000):
            refused.tell({"share": share, "heads": {}})
            time.sleep(0.005)
    refused.close()


def test_a_searcher_that_was_silent_until_it_was_closed_goes_on(tmp_path):
    """The trainer names it no more; all its rows were taken up."""
    room = Room(tmp_path / "demand.json", "w")
    room.take({"share": 8, "heads": {"other": 4}})
    assert room.allows(0) and not room.allows(8)
    room.take({"share": 8, "heads": {"w": 16}})
    assert room.allows(23) and not room.allows(24)
    room.take({"share": 8, "heads": {}})
    assert room.allows(16) and not room.allows(24)
    layout.write_json(tmp_path / "demand.json", {"share": 8, "heads": []})
    room.look()
    assert room.allows(10**9), "what cannot be read limits nobody"
