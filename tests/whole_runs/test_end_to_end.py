"""One asynchronous run with real processes: killed in every way, resumed by the same command, and audited at the end."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tba_jax.replay import journal
from tba_jax.replay.log import REGISTER
from tba_jax.run import layout, metrics, snapshots
from tests.support import tiny_run
from tests.support.tiny_run import processes

PATIENCE_SECONDS = 120


def pid_of(workdir: Path, name: str) -> int:
    (pid,) = [pid for pid, line in processes(workdir).items() if f"--name={name}" in line]
    return pid


def wait_until(condition, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_SECONDS} s for {what}"
        time.sleep(0.05)


def trained(workdir: Path) -> int:
    lines = metrics.read_lines(workdir / "metrics" / "trainer")
    return lines[-1]["step"] if lines else 0


def writers(workdir: Path) -> set[str]:
    return {path.stem for path in (workdir / "replay" / REGISTER).glob("[!.]*.json")}


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds processes through /proc, which this system lacks")
def test_asynchronous_run_survives_kills(tmp_path):
    workdir = tmp_path / "run"
    # Rewards that differ between the rows of a query: a policy that never ends in time would get updates of zero.
    differing = "--config.task.missing_eos_reward=-1.0"
    arguments = tiny_run.command(workdir, differing, "--config.learner.steps=1000000")

    # A killed searcher and a killed trainer come back by themselves; a second trainer is refused meanwhile.
    supervisor = tiny_run.start(arguments)
    wait_until(lambda: trained(workdir) >= 10, "the first steps")
    refused = tiny_run.call([*arguments, "--role=trainer"])
    assert refused.returncode == 2 and "is held by the trainer process" in refused.stderr
    searcher, trainer = pid_of(workdir, "searcher-0"), pid_of(workdir, "trainer")
    os.kill(searcher, signal.SIGKILL)
    os.kill(trainer, signal.SIGKILL)
    killed_at, earlier = trained(workdir), writers(workdir)
    wait_until(lambda: trained(workdir) > killed_at + 10, "steps after the kills")
    assert pid_of(workdir, "trainer") != trainer

    wait_until(lambda: writers(workdir) > earlier, "a log of a new searcher: a writer id is never used again")

    # Ctrl-C stops it and leaves no process.
    supervisor.send_signal(signal.SIGINT)
    output, _ = supervisor.communicate(timeout=60)
    assert supervisor.returncode == 130, output
    assert "this resumes the run: " in output
    assert not processes(workdir)

    # The same command goes on, to an end.
    steps = journal.read_lineage(layout.RunDir(workdir).journal)[-1]["step"] // 2 * 2 + 40
    fewer = f"--config.learner.steps={steps}"
    done = tiny_run.call([*arguments, fewer, "--allow_change=learner.steps"], timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not processes(workdir)
    last = done.stdout.strip().splitlines()[-1]
    assert re.fullmatch(
        rf"base: accuracy -?\d\.\d\d -> -?\d\.\d\d in \d+ s, mean staleness \d+\.\d steps, results in {workdir}", last
    )

    check_what_is_left(layout.RunDir(workdir), steps)
    audited = subprocess.run(
        [arguments[0], "-m", "tba_jax", "audit", f"--workdir={workdir}"],
        cwd=tiny_run.ROOT,
        env=tiny_run.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert audited.returncode == 0 and "the ledger balances" in audited.stdout, audited.stdout + audited.stderr
    check_snapshots_can_be_derived_again(layout.RunDir(workdir), tmp_path / "derived", (differing, fewer))
    shown = subprocess.run(
        [arguments[0], "-m", "tba_jax", "show", f"--workdir={workdir}", "--order=best", "--count=2"],
        cwd=tiny_run.ROOT,
        env=tiny_run.environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown.count("query:") == 2 and "reward" in shown and "policy step" in shown


def check_snapshots_can_be_derived_again(run: layout.RunDir, workdir: Path, flags: tuple[str, ...]) -> None:
    """From the reference, the log and the journal alone: every published snapshot, bit for bit, through three trainers' steps."""
    shutil.copytree(run.root, workdir)
    derived = layout.RunDir(workdir)
    for folder in (derived.checkpoints, derived.policies):
        shutil.rmtree(folder)
    done = tiny_run.call([*tiny_run.command(workdir, *flags), "--role=trainer"], timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    last = layout.read_json(run.finished)["step"]
    # Where a trainer goes on, after a kill or from a step at which a setting was changed, it publishes too.
    again, steps = ([n for n in snapshots.committed_steps(r.policies) if n % 2 == 0] for r in (derived, run))
    assert again == list(range(0, last + 1, 2))
    # Live, a snapshot that waited for the disk gave way to the next.
    assert len(steps) > 20 and steps[0] == 0 and steps[-1] == last
    hashes = {step: snapshots.fingerprint(run.policies / layout.step_name(step)) for step in steps}
    assert len(set(hashes.values())) == len(steps), "every step changed the weights"
    for step, expected in hashes.items():
        assert snapshots.fingerprint(derived.policies / layout.step_name(step)) == expected, f"step {step}"


def check_what_is_left(run: layout.RunDir, steps: int) -> None:
    lineage = journal.read_lineage(run.journal)
    assert [line["step"] for line in lineage] == list(range(1, steps + 1)), "every step journalled once on the lineage"
    assert len({line["epoch"] for line in lineage}) >= 3, "the kills made new epochs"
    finished = layout.read_json(run.finished)
    for writer, entry in finished["ledger"].items():
        accounted = entry["resident"] + sum(entry["evicted"].values()) + sum(entry["rejected"].values())
        assert entry["seen"] == accounted, writer
    assert finished["step"] == steps and finished["rows_rejected"] == 0
    assert {0, steps} <= set(layout.steps_in(run.evaluations))
    assert (run.root / "progress.png").exists()
    lines = metrics.read_lines(run.metrics("trainer"))
    wanted = {"loss", "reward", "kl_to_ref", "entropy", "log_z", "grad_norm", "staleness_mean", "staleness_max"}
    wanted |= {"staleness_histogram", "draws_per_row", "buffer_rows", "steps_per_second", "time_update"}
    assert wanted <= set(lines[-1])
    assert max(line["staleness_max"] for line in lines) > 0
    gaps = [line["logprob_gap_max"] for line in lines if "logprob_gap_max" in line]
    assert gaps and max(gaps) < 1e-3, "sampler and learner disagree on the same weights"
    searching = [line for i in range(2) for line in metrics.read_lines(run.metrics(f"searcher-{i}"))]
    assert searching and all(line["tokens_per_second"] > 0 for line in searching)
    # Not in every line: the account begins with the first batch, and the second may be appended at once with it.
    assert {"time_decode", "time_reference", "time_wait_rewards"} <= set().union(*searching)
