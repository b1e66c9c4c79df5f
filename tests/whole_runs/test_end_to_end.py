"""One asynchronous run of real processes, which are killed, started again, end, and are audited."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tba_jax import main
from tba_jax.commands import command_line, show
from tba_jax.run import processes
from tba_jax.storage import layout, published, snapshots
from tba_jax.telemetry import metrics
from tests.support import tiny_run
from tests.support.chaos import PATIENCE_SECONDS, Chaos, check_what_is_left

STEPS = 16
# The trainer waits for fresh rows, so that processes which start beside it have the machine. It does not wait for ever: a
# searcher samples 4 queries of each snapshot, and the update until the next one takes 3, none of whose rows is merged.
SETTINGS = (
    f"--config.learner.steps={STEPS}",
    "--config.searchers.count=1",
    "--config.publish.every_steps=1",
    "--config.replay.max_draws_per_row=1",
    "--config.replay.merge_duplicates=False",
    "--config.searchers.max_rows_per_snapshot=16",
    # Rewards that differ between the rows of a query: a policy that never ends in time would get updates of zero.
    "--config.task.missing_eos_reward=-1.0",
    "--config.replay.poll_seconds=0.2",
)


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds processes through /proc, which this system lacks")
def test_an_asynchronous_run_outlives_kills(tmp_path, one_device, capsys):
    run = layout.RunDir(tmp_path / "run")
    # Without standard input, whose number a pipe to the roles would take.
    command = ["sh", "-c", 'exec "$@" <&-', "sh", *tiny_run.command(run.root, *SETTINGS)]
    with Chaos(run, command, searchers=1, output=tmp_path / "supervisor.log") as chaos:
        chaos.start()
        chaos.wait_until(lambda: chaos.journalled()[1] >= 4, "the first steps")
        writers = chaos.writers()
        assert chaos.kill("trainer") and chaos.kill("searcher-0")
        assert chaos.supervisor.wait(PATIENCE_SECONDS) == 0, chaos.said()
    assert "trainer (exit code -9)" in chaos.said() and chaos.writers() - writers
    check_what_is_left(run, STEPS, epochs=chaos.epochs)
    check_metrics(run)
    check_snapshots_can_be_derived_again(run, tmp_path / "derived")
    capsys.readouterr()
    assert command_line.execute(show, [f"--workdir={run.root}", "--order=best", "--count=2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("query:") == 2 and "reward" in shown and "policy step" in shown


def check_snapshots_can_be_derived_again(run: layout.RunDir, workdir: Path) -> None:
    """From the reference, the log and the journal alone: every published snapshot, bit for bit, through all trainers' steps."""
    shutil.copytree(run.root, workdir, ignore=shutil.ignore_patterns("checkpoints", "policy"))
    derived = layout.RunDir(workdir)
    assert command_line.execute(main, [*tiny_run.command(workdir, *SETTINGS)[3:], "--role=trainer"]) == 0
    again, steps = ([*published.kept(each.policies)] for each in (derived, run))
    assert again == list(range(STEPS + 1))
    # Live, a snapshot that waited for the disk gave way to the next.
    assert len(steps) > 6 and steps[0] == 0 and steps[-1] == STEPS
    hashes = {step: snapshots.fingerprint(published.kept(run.policies)[step]) for step in steps}
    assert len(set(hashes.values())) == len(steps), "every step changed the weights"
    for step, expected in hashes.items():
        assert snapshots.fingerprint(published.kept(derived.policies)[step]) == expected, f"step {step}"


def check_metrics(run: layout.RunDir) -> None:
    assert {0, STEPS} <= set(layout.steps_in(run.evaluations)) and (run.root / "progress.png").exists()
    lines = metrics.read_lines(run.metrics("trainer"))
    assert max(line["staleness_max"] for line in lines) > 0
    gaps = [line["logprob_gap_max"] for line in lines if "logprob_gap_max" in line]
    assert gaps and max(gaps) < 1e-3, "sampler and learner disagree on the same weights"
    searching = metrics.read_lines(run.metrics("searcher-0"))
    assert searching and all(line["tokens_per_second"] > 0 for line in searching)
    # Not in every line: the account begins with the first batch, and the second may be appended at once with it.
    assert {"time_decode", "time_reference", "time_wait_rewards"} <= set().union(*searching)


def test_a_package_that_is_not_installed_ends_a_new_run_by_one_sentence(tmp_path):
    (tmp_path / "orbax").mkdir()
    missing = 'raise ModuleNotFoundError("No module named \'orbax\'", name="orbax")'
    (tmp_path / "orbax" / "__init__.py").write_text(missing)
    seen = tiny_run.environment() | {"PYTHONPATH": str(tmp_path)}
    command = tiny_run.command(tmp_path / "run", "--config.schedule.mode=interleaved")
    done = subprocess.run(command, cwd=tiny_run.ROOT, env=seen, capture_output=True, text=True, timeout=120, check=False)
    sentences = [line for line in done.stderr.splitlines() if "orbax" in line]
    assert done.returncode == processes.BAD_INPUT and len(sentences) == 1, done.stdout + done.stderr
    assert "requirements.txt" in sentences[0] and sys.executable in sentences[0]
