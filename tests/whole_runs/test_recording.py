"""What the roles of an asynchronous run record, each in a process of its own."""

from tba_jax.run import layout
from tba_jax.telemetry import metrics, status

# GONE ['events', 'timeline']
from tests.support import tiny_run

ROLES = ("trainer", "searcher-0", "evaluator")
# The trainer waits for rows of each snapshot: the searcher samples with several of them before the run is finished.
FLAGS = (
    *("--config.searchers.count=1", "--config.learner.steps=12", "--config.publish.every_steps=1"),
    *("--config.replay.max_draws_per_row=1", "--config.replay.merge_duplicates=False"),
    "--config.searchers.max_rows_per_snapshot=16",
)
WORK = {"trainer": "compile", "searcher-0": "decode", "evaluator": "evaluate"}


def test_every_role_leaves_events_a_timeline_and_a_trace(tmp_path, one_device):
    run = layout.RunDir(tmp_path / "run")
    done = tiny_run.call(tiny_run.command(run.root, *FLAGS, "--profile=3:2"), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for role in ROLES:
        told, folder = events.read(run.metrics(role)), run.metrics(role)
        assert told[0]["event"] == "start" and told[0]["pid"] and told[-1]["event"] == "end", role
        assert told[-1]["reason"] == status.read(folder).phase == "finished", role
        assert WORK[role] in {name for line in timeline.each_line(folder) for name, *_ in line["spans"]}, role
        assert all(line["time_recording"] > 0 for line in metrics.read_lines(folder)[1:]), role
        (trace,) = run.profiles(role).rglob("*.xplane.pb")
        assert trace.stat().st_size > 1000, role
    published = {event["step"] for event in events.read(run.metrics("trainer")) if event["event"] == "publish"}
    swapped = {event["step"] for event in events.read(run.metrics("searcher-0")) if event["event"] == "swap"}
    assert swapped <= published and {0, 8} <= published
    assert events.read(run.metrics("reference"))[-1]["reason"] == "finished"
