"""The search for settings that fit: on CPU devices, whose memory is what the test says."""

import time
from pathlib import Path

import jax
import pytest

from tba_jax.experiment import compiling, composition, planning
from tba_jax.run import layout
from tests.support import tiny_run

RUN = layout.RunDir(Path("nowhere"))
FOREVER, ENOUGH = float("inf"), 1 << 40
SETTINGS = dict(
    task__response_length=24,
    learner__queries=2,
    learner__logprob_gap_every_steps=0,
    searchers__queries_per_batch=1,
    model__kv_heads=2,
)
ROW = 7 + 24


@pytest.fixture(scope="module")
def experiment():
    return composition.build(tiny_run.config(**SETTINGS))


def place(limit: int, devices: int = 1) -> planning.Place:
    return planning.Place(devices=jax.devices()[:devices], topology="", name=f"{devices} CPUs", limit=limit)


def best(experiment, role: str, limit: int, *, devices: int = 1) -> planning.Planned:
    found = planning.Search(experiment, RUN, role=role, place=place(limit, devices), until=FOREVER).best()
    assert found is not None and found.fit.worst.peak <= limit
    return found


def peak(experiment, role: str, only: str = "", **settings) -> int:
    made = planning.changed(experiment, {name.replace("__", "."): value for name, value in settings.items()})
    return compiling.fit(made, RUN, role=role, devices=jax.devices()[:1], only=only).worst.peak


def of_update(experiment, rows: int) -> int:
    return peak(experiment, "trainer", "update", learner__micro_batch_tokens=rows * ROW)


def test_the_largest_micro_batch_that_fits_is_found(experiment):
    limit = of_update(experiment, 4) - 1
    assert of_update(experiment, 2) <= limit
    found = best(experiment, "trainer", limit)
    assert found.settings["learner.micro_batch_tokens"] == 2 * ROW
    assert {fit.name for fit in found.fit.fits} >= {"init", "update", "publish"}  # the last trial compiled all programs
    assert "memory of update, which would take" in found.binds and f"learner.micro_batch_tokens={4 * ROW}" in found.binds


@pytest.mark.slow
def test_a_mesh_splits_no_more_than_it_must(experiment):
    """With room for all, devices compute on their own; where one does not hold the state, each holds a part."""
    roomy = best(experiment, "trainer", ENOUGH, devices=2)
    assert [roomy.settings[f"learner.mesh.{axis}"] for axis in ("data", "fsdp", "tensor")] == [2, 1, 1]
    assert roomy.settings["learner.micro_batch_tokens"] == 8 * ROW and roomy.binds.startswith("nothing")
    tight = best(experiment, "trainer", of_update(experiment, 1) - 1, devices=2)
    assert tight.settings["learner.mesh.data"] == 1


@pytest.mark.slow
def test_smaller_budgets_are_tried_where_nothing_fits(experiment):
    lean = dict(searchers__slots=1, searchers__score_tokens=ROW, searchers__logit_megabytes=16)
    limit = peak(experiment, "searcher", **lean)
    assert limit < peak(experiment, "searcher", searchers__slots=1)
    assert best(experiment, "searcher", limit).settings["searchers.score_tokens"] == ROW
    assert "searchers.score_tokens" not in best(experiment, "searcher", ENOUGH).settings


def test_another_program_than_the_expected_one_may_decide(experiment, monkeypatch):
    monkeypatch.setitem(planning._DECIDES, "trainer", "publish")
    found = best(experiment, "trainer", of_update(experiment, 2))
    assert found.settings["learner.micro_batch_tokens"] == 2 * ROW and "memory of update" in found.binds


def test_what_was_compiled_before_is_not_compiled_again(experiment, monkeypatch):
    compiled, compile_ = [], planning.Measure._compile
    monkeypatch.setattr(planning.Measure, "_compile", lambda self, *a: (compiled.append(a[1].as_text()), compile_(self, *a))[1])
    best(experiment, "searcher", ENOUGH)
    assert compiled and len(compiled) == len(set(compiled))


def test_nothing_fits_and_the_smallest_place_that_would(experiment):
    def find(own: planning.Place, until: float = FOREVER) -> None:
        planning.find(experiment, RUN, role="trainer", place=own, until=until)

    with pytest.raises(
        planning.NothingFits, match=r"the trainer does not fit 1 CPUs of 1.00 KiB.*the least that was tried takes"
    ):
        find(place(1 << 10))
    with pytest.raises(planning.NothingFits, match=r"no mesh of 3 CPUs suits the trainer: .* 3"):
        find(place(ENOUGH, 3))
    with pytest.raises(ValueError, match=r"in time.*the least that was tried takes.*--seconds"):
        find(place(1 << 10), until=time.monotonic() - 1)


def test_without_time_one_candidate_is_tried(experiment):
    found = planning.find(experiment, RUN, role="trainer", place=place(ENOUGH, 2), until=time.monotonic() - 1)
    assert found.fit.worst.peak <= ENOUGH and found.binds.startswith(("nothing", "the time of the search"))


def test_the_smallest_place_is_the_first_that_fits(experiment):
    def said(larger: list[planning.Place]) -> str:
        return planning.smallest(experiment, RUN, role="trainer", larger=larger, until=FOREVER)

    assert said([place(ENOUGH, 3), place(ENOUGH, 2), place(ENOUGH, 4)]) == "the smallest that would do: 2 CPUs"
    assert said([place(ENOUGH, 3)]) == "nor does it fit 3 CPUs" and said([]) == "nothing larger is known"


def candidate(peaks: dict[int, int], low: int, high: int) -> planning._Candidate:
    estimates = {size: 10 + size for size in (1, 2, 4, 8, 16)}
    made = planning._Candidate(level=0, settings={}, split=(1, 1), estimates=estimates, peaks=peaks)
    made.low, made.high = low, high
    return made


def test_the_next_size_is_the_largest_that_is_expected_to_fit():
    assert candidate({}, -1, 5).next(18, 1.0) == 3 and candidate({}, -1, 5).next(18, 1.5) == 1
    assert candidate({}, -1, 5).next(18, 2.0) is None
    # The trial of 4 took twice its estimate of 14; from two trials, sizes take 20 and 2 for each of the size.
    assert candidate({4: 28}, 2, 5).next(36, 1.0) == 3
    linear = {1: 22, 4: 28}
    assert candidate(linear, 2, 5).next(52, 1.0) == 4 and candidate(linear, 2, 5).next(51, 1.0) == 3
    # One that is expected to take a little more than the limit is tried, one that would take far more is not.
    assert candidate(linear, 2, 5).next(30, 1.0) == 3 and candidate(linear, 2, 5).next(28, 1.0) is None
    assert candidate(linear, 2, 3).next(60, 1.0) is None
