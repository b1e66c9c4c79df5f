"""What holds of a run right now: nothing that a role wrote in an earlier life, and no rate that it does not keep any more."""

import os
import time

import pytest
from tba_jax.roles.lives import Life, State, Supervised

from tba_jax.roles import standing
from tba_jax.run import layout
from tba_jax.telemetry import status
from tests.support.role_files import make_reference, steps, write_lines


@pytest.fixture
def run(tmp_path) -> layout.RunDir:
    made = layout.RunDir(tmp_path)
    make_reference(made)
    return made


def look(run: layout.RunDir, *, steps: int = 100, is_away: bool = False, stops: bool = False, **lives: Life) -> standing.Standing:
    """Args: lives: of roles, "_" in a name stands for "-"; the others run since long ago."""
    known = {name: running() for name in ("trainer", "searcher-0", "searcher-1", "evaluator")}
    known |= {name.replace("_", "-"): life for name, life in lives.items()}
    told = Supervised(lives=known, is_away=is_away, stops=stops)
    searchers = ["searcher-0", "searcher-1"]
    return standing.Lookout(run, steps=steps, searchers=searchers, warm_start_steps=8, supervised=lambda: told)()


def running(ago: float = 1e6) -> Life:
    return Life(state=State.RUNS, began=time.time() - ago)


def test_the_time_to_come_follows_from_the_last_minute(run):
    """A thousand seconds at a tenth of the pace came before."""
    write_lines(run, "trainer", steps(1, 10, ago=100.0, seconds=100.0))
    write_lines(run, "trainer", steps(11, 70, ago=1.0, seconds=1.5))
    found = look(run)
    assert found.steps_per_second == pytest.approx(1 / 1.5, rel=0.02)
    assert found.eta_seconds == pytest.approx(30 * 1.5 - 1.0, abs=1.0)


def test_slow_steps_keep_their_pace_for_longer(run):
    """Two minutes a step: no line of the last minute, and the next one is due in a minute."""
    write_lines(run, "trainer", steps(1, 6, ago=60.0, seconds=120.0))
    found = look(run)
    assert found.steps_per_second == pytest.approx(1 / 120, rel=0.01)
    assert found.eta_seconds == pytest.approx(94 * 120 - 60, abs=1)


def test_a_time_to_come_that_has_gone_by_is_not_told(run):
    """Ten seconds a step: the last two are four seconds late, as behind a compilation."""
    write_lines(run, "trainer", steps(88, 98, ago=24.0, seconds=10.0))
    found = look(run)
    assert found.steps_per_second == pytest.approx(0.1, rel=0.01) and found.eta_seconds is None


def test_no_pace_stands_after_the_steps_have_stopped(run):
    write_lines(run, "trainer", steps(1, 20, ago=11.0, seconds=0.5, tokens_per_second=900.0, mfu=0.3))
    found = look(run)
    assert found.steps_per_second is None and found.eta_seconds is None
    assert found.rate("tokens_per_second") is None and found.rate("mfu") is None
    assert found.step == 20 and found.trainer["reward"] == 0.5, "what a step was worth remains true"
    write_lines(run, "trainer", steps(21, 24, ago=1.0, seconds=0.5, tokens_per_second=900.0, mfu=0.3))
    assert look(run).rate("mfu") == 0.3


def test_two_lines_in_a_blink_tell_no_pace(run):
    """After a start the first steps find rows that have waited for them."""
    write_lines(run, "trainer", steps(1, 3, ago=0.5, seconds=0.01))
    assert look(run).steps_per_second is None


def test_nothing_is_repeated_of_a_trainer_that_is_down(run):
    write_lines(run, "trainer", steps(1, 20, ago=1.0, seconds=0.5))
    found = look(run, trainer=Life(state=State.PAUSES, began=time.time() - 100, due_in=4.6, deaths=2))
    assert found.headline == "the trainer has ended after step 20"
    assert not found.trainer and not found.rewards and found.steps_per_second is None
    assert found.says == [("trainer", "starts again in 5 s (died 2 times)")]


def test_lines_from_before_a_resume_are_history(run):
    write_lines(run, "trainer", steps(1, 20, ago=9.0, seconds=0.5))
    write_lines(run, "searcher-0", [{"step": 1, "ago": 9.0, "tokens_per_second": 800.0}])
    resumed = running(ago=5.0)
    found = look(run, trainer=resumed, searcher_0=resumed)
    assert found.headline == "resuming after step 20" and not found.trainer and found.steps_per_second is None
    assert found.searchers == {"searcher-0": None, "searcher-1": None}
    write_lines(run, "trainer", steps(21, 24, ago=0.5, seconds=1.0))
    found = look(run, trainer=resumed, searcher_0=resumed)
    assert found.headline == "" and found.steps_per_second == pytest.approx(1.0, rel=1e-3), "of this life's lines alone"


def test_after_the_last_step_the_evaluation_is_told_and_no_speed(run):
    write_lines(run, "trainer", steps(1, 100, ago=0.5, seconds=0.5))
    write_lines(run, "searcher-0", [{"step": 9, "ago": 1.0, "tokens_per_second": 800.0}])
    run.metrics("evaluator").mkdir(parents=True)
    status.Status(run.metrics("evaluator")).phase("evaluating step 100", done=2, total=3)
    found = look(run, trainer=Life(state=State.DONE, began=time.time() - 1e5))
    assert found.is_trained and found.steps_per_second is None and found.eta_seconds is None and not found.searchers
    assert found.says == [("evaluator", "evaluating step 100: 2 of 3")]


def test_who_waits_is_told_with_the_searchers_that_wait_too(run):
    write_lines(run, "trainer", steps(1, 20, ago=1.0, seconds=0.5))
    for role in ("searcher-0", "searcher-1"):
        run.metrics(role).mkdir(parents=True, exist_ok=True)
    status.Status(run.metrics("trainer")).waits("rows: 2 of 3 queries", seconds=42.0)
    status.Status(run.metrics("searcher-1")).waits("a snapshot newer than step 0", seconds=40.0)
    found = look(run)
    sentence = "has waited 42 s for rows: 2 of 3 queries; 1 of 2 searchers wait for a snapshot"
    assert found.says == [("trainer", sentence)] and found.steps_per_second is None
    again = look(run, trainer=Life(state=State.RUNS, began=time.time() + 0.2))
    assert again.says == [("trainer", "its process starts")], "its last life waited"


@pytest.mark.parametrize(
    "ago, says", [(8.0, "compiling the update 8 s"), (60.0, "has waited 42 s for rows: 2 of 3 queries")], ids=["after", "before"]
)
def test_what_began_after_a_wait_is_told_in_its_place(run, ago, says):
    now = time.time()
    run.metrics("trainer").mkdir(parents=True)
    times = [now - ago]
    told = status.Status(run.metrics("trainer"), clock=lambda: times[-1])
    told.phase("compiling the update")
    times.append(now)
    told.waits("rows: 2 of 3 queries", seconds=42.0)
    assert look(run).says == [("trainer", says)]


def test_roles_in_the_same_phase_share_an_entry(run):
    now = time.time()
    for role, ago in (("trainer", 41.4), ("searcher-0", 3.0), ("searcher-1", 5.0)):
        run.metrics(role).mkdir(parents=True, exist_ok=True)
        told = status.Status(run.metrics(role), clock=lambda ago=ago: now - ago)
        told.phase("compiling the update" if role == "trainer" else "compiling the decoder")
    found = look(run)
    assert found.headline == "starting"
    assert found.says == [("trainer", "compiling the update 41 s"), ("searcher-0 and 1 more", "compiling the decoder 5 s")]


def test_a_supervised_role_tells_why_it_is_not_there(run):
    refused = Life(state=State.PAUSES, due_in=8.0, refusals=3)
    found = look(run, searcher_0=Life(state=State.RESTS), searcher_1=refused, evaluator=Life(state=State.BEFORE))
    assert found.says == [
        ("searcher-0", "has ended and is not started again"),
        ("searcher-1", "starts again in 8 s (its storage refused 3 times)"),
    ]


def test_processes_that_have_said_nothing_yet_start(run):
    now = time.time()
    found = look(run, trainer=running(4.4), searcher_0=running(3.0), searcher_1=Life(state=State.BEFORE))
    assert found.headline == "starting" and found.says == [("trainer and 1 more", "its process starts 4 s")]
    run.metrics("trainer").mkdir(parents=True)
    status.Status(run.metrics("trainer"), clock=lambda: now)
    assert look(run, trainer=running(4.4)).says == []


def test_what_a_role_said_at_its_end_is_not_what_it_does(run):
    """The reference policy is made by a process of its own before the others."""
    for role in ("reference", "elsewhere-1"):
        run.metrics(role).mkdir(parents=True)
        status.Status(run.metrics(role)).phase("finished")
    assert look(run).says == []


def test_searchers_of_other_machines_are_seen_while_they_write(run):
    write_lines(run, "trainer", steps(1, 20, ago=1.0, seconds=0.5))
    write_lines(run, "elsewhere-12-ab", [{"step": 1, "ago": 4.0, "tokens_per_second": 700.0}])
    write_lines(run, "long-gone", [{"step": 1, "ago": 4000.0, "tokens_per_second": 700.0}])
    old = time.time() - 4000.0
    for path in (run.metrics("long-gone") / "metrics.jsonl", run.metrics("long-gone")):
        os.utime(path, (old, old))
    write_lines(run, "trainer-process-1", [{"step": 1, "ago": 4.0, "tokens_per_second": 1.0}])
    found = look(run)
    assert found.searchers == {"searcher-0": None, "searcher-1": None, "elsewhere-12-ab": 700.0} and found.joined == 1


def test_held_out_scores_stand_in_the_order_of_steps(run):
    """A resumed run evaluated step 10 again, after step 20."""
    scores = ((0, 0.1), (20, 0.4), (10, 0.3))
    write_lines(run, "evaluator", [{"step": step, "ago": 3.0, "greedy_reward": score} for step, score in scores])
    assert look(run).evaluations == [(0, 0.1), (10, 0.3), (20, 0.4)]


def test_the_best_step_is_that_of_the_newest_line_that_names_one(run):
    """It may be older than the lines that are looked at, and lines of other versions may lack it."""
    assert look(run).best is None
    told = {"best_step": 10.0, "best_greedy_reward": 0.9}
    write_lines(run, "evaluator", [{"step": 900, "ago": 4.0, "greedy_reward": 0.5, **told}])
    write_lines(run, "evaluator", [{"step": 1000, "ago": 3.0, "greedy_reward": 0.25}])
    assert look(run).best == (10, 0.9) and look(run).evaluations[-1] == (1000, 0.25)


def test_a_warm_start_counts_its_steps(tmp_path):
    run = layout.RunDir(tmp_path)
    write_lines(run, "reference", [{"step": 5, "ago": 1.0, "loss": 0.25}])
    status.Status(run.metrics("reference")).phase("warm start", done=6, total=8)
    found = look(run, reference=running())
    assert found.headline == "warm start 5/8  loss 0.250" and found.says == [], "once"
    assert look(run, reference=running(ago=0.5)).headline == "preparing the reference policy", "that loss is an earlier start's"


def test_a_run_that_is_away_or_stops_says_so_alone(run):
    write_lines(run, "trainer", steps(1, 20, ago=1.0, seconds=0.5))
    away = look(run, is_away=True)
    assert away.headline == f"workdir {run.root} does not hold the run; it goes on once that is back" and not away.trainer
    assert look(run, stops=True).headline == "stopping"
