"""One asynchronous run of real processes: joined, refused by its storage, killed, moved, stopped, resumed and audited."""

import contextlib
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tba_jax import main
from tba_jax.commands import audit, command_line, show
from tba_jax.replay import journal
from tba_jax.replay.log import REGISTER
from tba_jax.run import processes as processes_lib
from tba_jax.storage import layout, snapshots
from tba_jax.telemetry import metrics
from tests.support import tiny_run
from tests.support.chaos import ENDLESS, PATIENCE_SECONDS, Chaos, check_what_is_left
from tests.support.tiny_run import processes

AWAY_SECONDS = 8.0
# The trainer waits for fresh rows, so that processes which start beside it have the machine. It does not wait for ever: a
# searcher samples 4 queries of each snapshot, and the update until the next one takes 3, none of whose rows is merged.
SETTINGS = (
    "--config.searchers.count=1",
    "--config.publish.every_steps=1",
    "--config.replay.max_draws_per_row=1",
    "--config.replay.merge_duplicates=False",
    "--config.searchers.max_rows_per_snapshot=16",
    # Rewards that differ between the rows of a query: a policy that never ends in time would get updates of zero.
    "--config.task.missing_eos_reward=-1.0",
)
SLOWLY = ("--config.evaluation.enabled=False", "--config.replay.poll_seconds=0.5", "--config.searchers.poll_seconds=0.5")


@pytest.mark.skipif(
    not (Path("/proc/self/cmdline").exists() and hasattr(resource, "prlimit")),
    reason="finds processes through /proc and limits them by prlimit, which this system lacks",
)
@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["kills", "everything"])
def test_an_asynchronous_run_outlives_what_happens_to_it(tmp_path, one_device, capsys, everything):
    run = layout.RunDir(tmp_path / "run")
    arguments, steps = tiny_run.command(run.root, *SETTINGS), 24
    pace = SLOWLY if everything else (f"--config.learner.steps={steps}", "--config.replay.poll_seconds=0.2")
    chaos = Chaos(run, [*arguments, *pace], searchers=1, output=tmp_path / "supervisor.log")
    with chaos:
        chaos.start(*[ENDLESS] * everything)
        chaos.wait_until(lambda: chaos.journalled()[1] >= 4, "the first steps")
        if everything:
            with pytest.raises(SystemExit, match="2"):
                command_line.execute(main, [*arguments[3:], ENDLESS, "--role=trainer"])
            assert "is held by process" in capsys.readouterr().err
            check_a_searcher_that_joins(chaos, [*arguments, "--role=searcher", "--name=joined"])
            epoch, writers = chaos.journalled()[0], chaos.writers()
            chaos.make_folders_refuse()
            chaos.fill_disk("searcher-0")
            wait_for_all(chaos, epoch, writers, "steps of roles that were started again")
        epoch, writers = chaos.journalled()[0], chaos.writers()
        with chaos.away(tmp_path / "away") if everything else contextlib.nullcontext():
            for name in ("trainer", "searcher-0"):
                assert chaos.kill(name)
            chaos.wait(AWAY_SECONDS if everything else 0.0, "the workdir to be away for long enough")
        wait_for_all(chaos, epoch, writers, "steps after the kills")
        if everything:
            chaos.stop()
            assert "this resumes the run: " in chaos.said() and not processes(run.root)
            steps = journal.last_step(run.journal) + 24
            check_that_the_same_command_goes_on(run, arguments, steps)
        else:
            assert chaos.supervisor.wait(PATIENCE_SECONDS) == 0, chaos.said()
    check_what_is_left(run, steps, epochs=chaos.epochs)
    check_metrics(run, steps)
    check_snapshots_can_be_derived_again(run, tmp_path / "derived", (*SETTINGS, f"--config.learner.steps={steps}"))
    capsys.readouterr()
    assert command_line.execute(show, [f"--workdir={run.root}", "--order=best", "--count=2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("query:") == 2 and "reward" in shown and "policy step" in shown


def check_that_the_same_command_goes_on(run: layout.RunDir, arguments: list[str], steps: int) -> None:
    """To an end. It may bound the logs as it likes."""
    log = run.log("trainer")
    log.write_text(log.read_text() + "x" * (3 << 20))
    flags = (
        f"--config.learner.steps={steps}",
        "--allow_change=learner.steps",
        "--config.logs.megabytes=1",
        "--config.logs.keep=1",
    )
    # Without standard input, whose number a pipe to the roles would take.
    done = tiny_run.call(["sh", "-c", 'exec "$@" <&-', "sh", *arguments, *flags], timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert processes_lib.older(log, 1).stat().st_size == 2 << 20 and "resumed at step" in log.read_text()
    told = r"base: accuracy -?\d\.\d\d -> -?\d\.\d\d in \d+ s from step \d+ on, mean staleness \d+\.\d steps, results in "
    assert re.fullmatch(told + str(run.root), done.stdout.strip().splitlines()[-1])


def wait_for_all(chaos: Chaos, epoch: int, writers: set[str], what: str) -> None:
    """Waits for steps of a later trainer than that of `epoch`, and for another searcher than `writers`."""
    chaos.wait_until(lambda: chaos.journalled()[0] > epoch and chaos.journalled()[1] > 2 and chaos.writers() - writers, what)


def check_a_searcher_that_joins(chaos: Chaos, arguments: list[str]) -> None:
    """It has two devices and another schedule: its rows are trained on, and when it is asked to stop it leaves whole appends."""
    run = chaos.run
    process = tiny_run.start([*arguments, "--config.searchers.mesh.data=2", "--config.learner.steps=77"], devices=2)

    def joined() -> list[str]:
        return [writer for writer in chaos.writers() if writer.startswith("joined")]

    try:
        chaos.wait_until(lambda: process.poll() is not None or joined(), "a log of the searcher that joins")
        assert process.poll() is None, process.communicate()[0]
        (writer,) = joined()
        chaos.wait_until(
            lambda: any(writer in line["writers"] for line in journal.read_lineage(run.journal)), "a draw of its rows"
        )
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert f"takes the schedule of the run in {run.root}" in output and "learner.steps: 1000000 there, 77 here" in output
    assert layout.read_json(run.replay / REGISTER / f"{writer}.json")["info"]["devices"] == "2"
    opened = audit.open_run(run.root)
    head = opened.reader.heads()[writer]
    rows = opened.reader.read(writer, 0, head)
    assert rows["row"].tolist() == list(range(head)) and (rows["response_length"] > 0).all() and head % 16 == 0
    assert rows["policy_step"][0, 0] > 0, "it begins with the newest snapshot"
    step = next(line["step"] for line in opened.lines if writer in line["writers"])
    text, same = audit.rebuild_batch(opened, step)
    assert same and f"{writer}:" in text


def check_snapshots_can_be_derived_again(run: layout.RunDir, workdir: Path, flags: tuple[str, ...]) -> None:
    """From the reference, the log and the journal alone: every published snapshot, bit for bit, through all trainers' steps."""
    shutil.copytree(run.root, workdir)
    derived = layout.RunDir(workdir)
    for folder in (derived.checkpoints, derived.policies):
        shutil.rmtree(folder)
    assert command_line.execute(main, [*tiny_run.command(workdir, *flags)[3:], "--role=trainer"]) == 0
    last = layout.read_json(run.finished)["step"]
    again, steps = (snapshots.committed_steps(each.policies) for each in (derived, run))
    assert again == list(range(last + 1))
    # Live, a snapshot that waited for the disk gave way to the next.
    assert len(steps) > 10 and steps[0] == 0 and steps[-1] == last
    hashes = {step: snapshots.fingerprint(run.policies / layout.step_name(step)) for step in steps}
    assert len(set(hashes.values())) == len(steps), "every step changed the weights"
    for step, expected in hashes.items():
        assert snapshots.fingerprint(derived.policies / layout.step_name(step)) == expected, f"step {step}"


def check_metrics(run: layout.RunDir, steps: int) -> None:
    assert {0, steps} <= set(layout.steps_in(run.evaluations)) and (run.root / "progress.png").exists()
    lines = metrics.read_lines(run.metrics("trainer"))
    wanted = {"loss", "reward", "kl_to_ref", "entropy", "log_z", "grad_norm", "staleness_mean", "staleness_max"}
    wanted |= {"staleness_histogram", "draws_per_row", "buffer_rows", "steps_per_second", "time_update"}
    assert wanted <= set(lines[-1]) and max(line["staleness_max"] for line in lines) > 0
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
    assert done.returncode == processes_lib.BAD_INPUT and len(sentences) == 1, done.stdout + done.stderr
    assert "requirements.txt" in sentences[0] and sys.executable in sentences[0]
