"""A trainer of several processes: it computes what one process computes, and all of its processes end and resume together."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from tba_jax import main
from tba_jax.commands import audit, command_line
from tba_jax.experiment import composition
from tba_jax.models import parameters
from tba_jax.replay import journal
from tba_jax.run import processes
from tba_jax.storage import layout, published, snapshots
from tba_jax.telemetry import metrics, status
from tests.support import frozen_runs, tiny_run
from tests.support import trainer_processes as trainers

pytestmark = pytest.mark.usefixtures("one_device_throughout")
LONG = {"learner__steps": 120, "learner__warmup_steps": 1, "checkpoint__every_steps": 20, "publish__every_steps": 10}
ENDS = layout.step_name(0), layout.step_name(12)  # the first and last snapshot of tiny_run


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The workdir of a run whose log nobody writes to any more."""
    return frozen_runs.make(tmp_path_factory.mktemp("frozen") / "source").run.root


def policies(workdir: Path) -> dict[str, np.ndarray]:
    """The weights of all snapshots that are kept, by step and parameter."""
    specs, weights = composition.build(audit.open_run(workdir).config).policy.trained_specs, {}
    for step, folder in published.kept(workdir / "policy").items():
        for name, store in parameters.flatten(snapshots.open_arrays(folder, specs)).items():
            weights[f"{layout.step_name(step)}/{name}"] = store.read().result()
    return weights


def assert_same_run(workdir: Path, other: Path, *, within: float = 0.0) -> None:
    """The same batches, and the same weights in all snapshots that both have: bit for bit, or closer than `within`.

    A snapshot that waits for slow storage may give way to a newer one, but for those of the first and the last step; and a resume
    publishes where it begins, too.
    """
    lines = [[line["batch"] for line in journal.read_lineage(each / "journal")] for each in (workdir, other)]
    assert lines[0] == lines[1]
    here, there = policies(workdir), policies(other)
    both = {name.split("/")[0] for name in here} & {name.split("/")[0] for name in there}
    assert {layout.step_name(0), layout.step_name(len(lines[0]))} <= both
    of_both = [{name: each[name] for name in each if name.split("/")[0] in both} for each in (here, there)]
    assert of_both[0].keys() == of_both[1].keys()
    pairs = {name: (each, of_both[1][name]) for name, each in of_both[0].items()}
    differ = {name: float(np.abs(a - b).max()) for name, (a, b) in pairs.items() if a.tobytes() != b.tobytes()}
    assert all(each < within for each in differ.values()), differ


def updates(workdir: Path) -> np.ndarray:
    """The step, loss and norm of the gradient of each update."""
    points = metrics.read_lines(workdir / "metrics" / "trainer")
    return np.float64([[point[name] for name in ("step", "loss", "grad_norm")] for point in points])


def journalled(workdir: Path) -> int:
    """Whole lines of the journal."""
    return sum(path.read_bytes().count(b"\n") for path in (workdir / "journal").glob("epoch-*.jsonl"))


def wait_for_steps(workdir: Path, steps: int, started: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + trainers.PATIENCE_SECONDS
    while journalled(workdir) < steps:
        ended = [process.poll() for process in started]
        assert ended == [None] * len(started), [process.communicate()[0] for process in started if process.poll() is not None]
        assert time.monotonic() < deadline, f"{journalled(workdir)} of {steps} steps are journalled"
        time.sleep(0.02)


def kill_one(workdir: Path, flags: list[str], *, killed: int, at: int) -> float:
    """Kills one process once `at` steps are journalled. Returns the seconds until the last of the others has ended."""
    started = trainers.start(workdir, *flags, processes=2)
    with trainers.ended_at_last(started):
        wait_for_steps(workdir, at, started)
        started[killed].kill()
        begin = time.monotonic()
        for process in started:
            process.wait(trainers.PATIENCE_SECONDS)
        seconds = time.monotonic() - begin
    for number, process in enumerate(started):
        text = process.communicate()[0]
        if number != killed and process.returncode == processes.PEER_LOST:
            assert "has ended" in text and "started again together" in text
        # JAX ends a process by SIGABRT where it sees the end of another one before we do.
        assert number == killed or process.returncode in (processes.PEER_LOST, -signal.SIGABRT), text
    return seconds


def run_alone(workdir: Path, flags: list[str]) -> None:
    """What one process with the devices of two computes. It is this process."""
    with pytest.MonkeyPatch.context() as patch:
        first = jax.local_devices()[:2]
        patch.setattr(jax, "devices", lambda *_: first)
        assert command_line.execute(main, [*tiny_run.command(workdir, *flags)[3:], "--role=trainer"]) == 0


def test_two_processes_that_are_asked_to_stop_are_resumed_by_one_as_if_it_had_been_alone(tmp_path, source):
    """A signal to any process ends all after a step, with a checkpoint; one process of as many devices goes on, bit for bit. Both
    write their shards of deltas."""
    published_as = dict(publish__every_steps=1, publish__dtype="bfloat16", publish__full_every=6, learner__mesh__fsdp=2)
    flags = trainers.offline_flags(source, **published_as, learner__steps=24, learner__logprob_gap_every_steps=0)
    started = trainers.start(tmp_path / "two", *flags, "--config.replay.poll_seconds=0.05", processes=2)
    with trainers.ended_at_last(started):
        wait_for_steps(tmp_path / "two", 2, started)
        started[1].send_signal(signal.SIGTERM)
        ended = trainers.wait(started)
    assert [each.code for each in ended] == [processes.STOPPED] * 2, [each.text for each in ended]
    assert all(f"process {number} of 2" in each.text for number, each in enumerate(ended))
    assert any(snapshots.base_of(folder.name) for folder in published.kept(tmp_path / "two" / "policy").values())
    newest = layout.steps_in(tmp_path / "two" / "checkpoints")[-1]
    assert newest == len(journal.read_lineage(tmp_path / "two" / "journal")) < 24
    for name in ("two", "one"):
        run_alone(tmp_path / name, flags)
    assert_resumed_as(tmp_path / "two", tmp_path / "one", steps=24)


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed_ten_times_compute_what_one_process_computes(tmp_path, source):
    """The other ends with it each time, and both resume bit for bit."""
    flags = trainers.offline_flags(source, learner__steps=48, checkpoint__every_steps=6, learner__logprob_gap_every_steps=0)
    seconds = []
    for kill in range(10):
        at = journalled(tmp_path / "two") + 1 + kill % 4
        seconds.append(kill_one(tmp_path / "two", flags, killed=kill % 2, at=at))
    (tmp_path / "seconds").write_text(str(seconds))
    assert max(seconds) < 15.0, f"JAX ends the other within trainer.heartbeat_seconds=10: {seconds}"
    trainers.run(tmp_path / "two", *flags, processes=2)
    run_alone(tmp_path / "one", flags)
    assert_resumed_as(tmp_path / "two", tmp_path / "one", steps=48)


def assert_resumed_as(workdir: Path, whole: Path, *, steps: int) -> None:
    """A run that was interrupted is one that was not, with every step and row once."""
    assert_same_run(workdir, whole)
    assert_ledger_balances(workdir, steps=steps)


def assert_ledger_balances(workdir: Path, *, steps: int) -> None:
    finished = layout.read_json(workdir / "finished.json")
    assert finished["balanced"] and finished["step"] == steps
    assert [line["step"] for line in journal.read_lineage(workdir / "journal")] == list(range(1, steps + 1))
    assert all(account.balances for account in audit.accounts(audit.open_run(workdir)).values())


@pytest.mark.slow
def test_two_processes_go_on_with_what_one_began(tmp_path, source):
    flags = trainers.offline_flags(source, learner__steps=30, checkpoint__every_steps=8)
    started = trainers.start(tmp_path / "killed", *flags, processes=1, devices=2)
    with trainers.ended_at_last(started):
        wait_for_steps(tmp_path / "killed", 11, started)
    trainers.wait(started)
    trainers.run(tmp_path / "killed", *flags, processes=2)
    trainers.run(tmp_path / "whole", *flags, processes=1, devices=2)
    assert_resumed_as(tmp_path / "killed", tmp_path / "whole", steps=30)


@pytest.mark.slow
@pytest.mark.parametrize("silent", [0, 1])
def test_a_silent_process_is_waited_for_until_the_heartbeat_and_then_all_end_and_resume(tmp_path, source, silent):
    flags = trainers.offline_flags(source, **LONG, trainer__heartbeat_seconds=4.0)
    started = trainers.start(tmp_path / "run", *flags, processes=2)
    with trainers.ended_at_last(started):
        wait_for_steps(tmp_path / "run", 3, started)
        started[silent].send_signal(signal.SIGSTOP)
        time.sleep(2.0)
        started[silent].send_signal(signal.SIGCONT)
        wait_for_steps(tmp_path / "run", journalled(tmp_path / "run") + 3, started)
        started[silent].send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        started[1 - silent].wait(trainers.PATIENCE_SECONDS)
        seconds = time.monotonic() - begin
        started[silent].send_signal(signal.SIGCONT)
        ended = trainers.wait(started)
    assert [each.code for each in ended] == [-signal.SIGABRT] * 2, [each.text for each in ended]
    assert "JAX distributed service" in ended[1 - silent].text, ended[1 - silent].text
    assert 1.0 < seconds < 20.0, f"JAX ended it after {seconds:.1f} s"
    trainers.run(tmp_path / "run", *flags, processes=2)
    assert_ledger_balances(tmp_path / "run", steps=LONG["learner__steps"])


SLOW_DISK = """
import sys, time
def wait(event, arguments):
    if event in ("open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.mkdir") and WORKDIR in str(arguments[0]):
        time.sleep(SECONDS)
if "--process=1" in sys.orig_argv:
    sys.addaudithook(wait)
"""


@pytest.mark.slow
def test_a_slow_disk_of_one_process_slows_all_and_ends_none(tmp_path, source, monkeypatch):
    """Each of its operations on a file of the run takes 75 ms."""
    flags = trainers.offline_flags(source, learner__logprob_gap_every_steps=0, trainer__heartbeat_seconds=4.0)
    code = SLOW_DISK.replace("WORKDIR", repr(str(tmp_path / "slow"))).replace("SECONDS", "0.075")
    (tmp_path / "sitecustomize.py").write_text(code)
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        trainers.run(tmp_path / "slow", *flags, processes=2)
    run_alone(tmp_path / "one", flags)
    assert_resumed_as(tmp_path / "slow", tmp_path / "one", steps=12)
    slow, alone = (metrics.read_lines(tmp_path / name / "metrics" / "trainer") for name in ("slow", "one"))
    seconds = [points[-1]["time"] - points[0]["time"] for points in (slow, alone)]
    assert seconds[0] > 11 * 0.075, f"{seconds[0]:.2f} s, alone {seconds[1]:.2f} s"


@pytest.mark.slow
def test_a_supervised_trainer_of_two_processes_is_started_again_as_a_whole(tmp_path):
    workdir = tmp_path / "run"
    flags = ["--config.trainer.processes=2", "--config.searchers.count=1", "--config.learner.steps=40", "--profile=38:2"]
    supervisor = tiny_run.start(tiny_run.command(workdir, *flags, "--config.learner.mesh.fsdp=2"))
    with trainers.ended_at_last([supervisor]):
        wait_for_steps(workdir, 4, [supervisor])
        lines = {pid: line for pid, line in tiny_run.processes(workdir).items() if "--role=trainer" in line}
        (follower,) = [pid for pid, line in lines.items() if "--process=1" in line]
        assert len(lines) == 2
        os.kill(follower, signal.SIGKILL)
        text = supervisor.communicate(timeout=trainers.PATIENCE_SECONDS)[0]
    assert supervisor.returncode == 0, text
    assert "trainer (exit code -9)" in text and "starting it again" in text
    assert_ledger_balances(workdir, steps=40)
    points = metrics.read_lines(workdir / "metrics" / "trainer")
    gaps = [point["logprob_gap_max"] for point in points if "logprob_gap_max" in point]
    assert gaps and max(gaps) < 1e-3, "both processes score the rows that are compared"
    assert "process 1 of 2" in (workdir / "logs" / "trainer-process-1.log").read_text()
    for name in ("trainer", "trainer-process-1"):
        folder = workdir / "metrics" / name
        assert status.read(folder).phase == "finished", name
        assert len(list((workdir / "profiles" / name).rglob("*.xplane.pb"))) == 1, name


RESET = {"kind": "reset", "reset_steps": 4, "offload": True}
VARIANTS = {
    "adapters": {"lora__rank": 2, "lora__targets": "('layers.attention.*',)"},
    "log Z": {"learner__objective": "learned_log_z"},
    "micro-batches": {"learner__micro_batch_tokens": 26},
    "reference in host memory": {f"learner__reference__{name}": value for name, value in RESET.items()},
    "moving average": {"learner__reference__kind": "ema", "learner__reference__ema_decay": 0.5},
    "tensor": {"learner__mesh__tensor": 2, "model__kv_heads": 2},
    "fsdp, every step published": {"learner__mesh__fsdp": 2, "publish__every_steps": 1, "publish__dtype": "bfloat16"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_what_one_process_can_do_two_can(tmp_path, name):
    settings = VARIANTS[name]
    of_source = {key: value for key, value in settings.items() if key.startswith(("model", "lora"))}
    of_source = {key: ("layers.attention.*",) if key.endswith("targets") else value for key, value in of_source.items()}
    source = frozen_runs.make(tmp_path / "source", **of_source).run.root
    flags = trainers.offline_flags(source, **settings)
    trainers.run(tmp_path / "one", *flags, processes=1, devices=2)
    trainers.run(tmp_path / "two", *flags, processes=2)
    assert_same_run(tmp_path / "two", tmp_path / "one")
    np.testing.assert_array_equal(updates(tmp_path / "one"), updates(tmp_path / "two"))


@pytest.mark.slow
def test_four_devices_compute_the_same_in_one_process_in_two_and_in_four(tmp_path, source):
    flags = trainers.offline_flags(source, learner__mesh__fsdp=2)
    runs = {count: tmp_path / str(count) for count in (1, 2, 4)}
    for count, workdir in runs.items():
        trainers.run(workdir, *flags, processes=count, devices=4 // count)
    alone, weights = updates(runs[1]), policies(runs[1])
    first, last = (np.concatenate([weights[name].ravel() for name in weights if name.startswith(step)]) for step in ENDS)
    assert len(alone) == 12 and (alone[:, 2] > 1e-3).all() and np.abs(last - first).max() > 1e-3, "the run learns"
    for count in (2, 4):
        np.testing.assert_allclose(updates(runs[count]), alone, rtol=1e-5, atol=1e-5)
        assert_same_run(runs[count], runs[1], within=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["weights of a checkpoint", "a warm start", "another run"])
def test_two_processes_make_the_policy_that_one_makes(tmp_path, source, kind):
    changes: list[str] = ["--config.learner.mesh.fsdp=2"]
    if kind == "weights of a checkpoint":
        changes += [f"--config.model.path={tiny_run.ROOT / 'configs' / 'small_data' / 'llama'}"]
        changes += ["--config.task.prompt_length=24"]
    if kind == "a warm start":
        changes += ["--config.warm_start.steps=3", "--config.warm_start.batch_size=4", "--config.task.response_length=24"]
    if kind == "another run":
        trainers.run(tmp_path / "other", *trainers.offline_flags(source), *changes, processes=1, devices=2)
        changes += [f"--init_from={tmp_path / 'other'}@12"]
    made = []
    for count in (1, 2):
        started = trainers.start(tmp_path / str(count), *changes, processes=count, devices=2 // count, role="reference")
        for each in trainers.wait(started):
            assert each.code == 0, each.text
        made.append(layout.read_json(tmp_path / str(count) / "reference" / "initial.json"))
    assert made[0] == made[1], "the id is a hash of the weights"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["settings", "workdir", "processes"])
def test_processes_that_do_not_belong_together_end_by_one_sentence(tmp_path, source, kind):
    flags, port = trainers.offline_flags(source), trainers.free_port()
    started = []
    for process in range(2):
        workdir = tmp_path / ("run" if kind == "settings" else f"run-{process}")
        count = 3 if kind == "processes" and process == 1 else 2
        own = [f"--coordinator=127.0.0.1:{port}", f"--processes={count}", f"--process={process}"]
        own += ["--config.learner.steps=77"] * (kind == "settings" and process == 1)
        started.append(tiny_run.start(tiny_run.command(workdir, "--role=trainer", *own, *flags), devices=1))
    ended = trainers.wait(started)
    told = {
        "settings": "error: process 1 .* has other settings than process 0 .*config.learner.steps: 77 there, 12 here",
        "processes": "error: process 1 .* has other settings than process 0 .*--processes: 3 there, 2 here",
        "workdir": "error: process 1 .* does not see in --workdir=.*run-1 what process 0 .* has written into --workdir=.*run-0",
    }[kind]
    assert [each.code for each in ended] == [processes.BAD_INPUT] * 2, [each.text for each in ended]
    assert all(re.search(told, each.text) for each in ended), [each.text for each in ended]


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [["0/2", "1/2", "1/2"], ["0/2", "0/2"], ["0/3", "1/2"], ["0/2"], ["1/2"]], ids=" ".join)
def test_processes_that_do_not_meet_end_after_connect_seconds(tmp_path, source, numbers):
    """Two of one number, one that does not come, or a coordinator that does not answer: JAX ends all, and the wrapper says so."""
    flags = trainers.offline_flags(source, trainer__connect_seconds=5.0, trainer__heartbeat_seconds=4.0)
    port = trainers.free_port()
    started, begin = [], time.monotonic()
    for process, count in (each.split("/") for each in numbers):
        own = [f"--coordinator=127.0.0.1:{port}", f"--processes={count}", f"--process={process}"]
        command = tiny_run.command(tmp_path / "run", "--role=trainer", *own, *flags)
        started.append(tiny_run.start([*command[:2], "tba_jax.run.restart", f"--workdir={tmp_path / 'run'}", *command]))
    ended = trainers.wait(started)
    seconds = time.monotonic() - begin
    assert [each.code for each in ended] == [processes.PEER_LOST] * len(numbers), [each.text for each in ended]
    assert all("of this trainer was ended by JAX because" in each.text for each in ended), [each.text for each in ended]
    assert seconds < 60.0, f"ended after {seconds:.1f} s"
