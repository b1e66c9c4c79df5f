"""Runs of a study that are done: with the same settings they are taken as they are, with other ones they are refused."""

import json

import pytest

from benchmarks import side_by_side
from tba_jax.run import processes


def job(root, settings, **more):
    return side_by_side.Job(root=root, name="run", recipe="configs/demo.py", settings=settings, **more)


def made_with(settings, workdir, committed):
    """The files of a run, or a warm start, that is done."""
    (workdir / committed).parent.mkdir(parents=True)
    (workdir / committed).write_text("{}")
    workdir.with_name(f"{workdir.name}.settings.json").write_text(json.dumps({"recipe": "configs/demo.py"} | settings))


def test_a_run_that_was_made_with_other_settings_is_refused(tmp_path):
    made_with({"learner.x": "1", "model.path": str(tmp_path)}, tmp_path / "run", "finished.json")
    same = {"learner.x": 1, "model.path": tmp_path}
    side_by_side.run_all([job(tmp_path, same)], at_a_time=1)
    for other in ({"learner.x": 2}, {"model.path": tmp_path / "b"}, {"seed": 3}):
        ((leaf, value),) = other.items()
        with pytest.raises(ValueError, match=rf"run was made with {leaf}=.* asks for {value}: use another --workdir"):
            side_by_side.run_all([job(tmp_path, same | other)], at_a_time=1)


def test_a_warm_start_that_was_made_otherwise_is_refused(tmp_path):
    made_with({"seed": "1"}, tmp_path / "warm", "reference/initial.json")
    side_by_side.ensure_warm_start(tmp_path, {"seed": 1}, recipe="configs/demo.py")
    with pytest.raises(ValueError, match=r"warm was made with seed=1, .* asks for its default"):
        side_by_side.ensure_warm_start(tmp_path, {}, recipe="configs/demo.py")
    with pytest.raises(ValueError, match=r"recipe=configs/demo\.py"):
        side_by_side.ensure_warm_start(tmp_path, {"seed": 1}, recipe="configs/base.py")


def test_a_rate_loses_whose_timed_run_met_numbers_that_are_not_finite(tmp_path):
    codes = {1.0: processes.STOPPED, 2.0: processes.NOT_FINITE}
    jobs = {rate: job(tmp_path / f"{rate}", {}, seconds=1.0) for rate in codes}
    for rate, code in codes.items():
        jobs[rate].root.mkdir()
        jobs[rate].stopped.write_text(f"{code}\nthe last lines")
    score = {jobs[rate].workdir: rate for rate in codes}.__getitem__
    assert side_by_side.chosen_rate(jobs.__getitem__, [*codes], at_a_time=1, score=score, evaluates=False) == 1.0
