"""The disk that a run takes, against counts by hand and against a disk that is too small."""

import signal
import socket
import subprocess
from pathlib import Path

import pytest

from configs import base, own_task
from tba_jax.experiment import answer, composition, disk, joining
from tba_jax.models import parameters
from tba_jax.run import layout, places, processes
from tests.support import random_checkpoints, silent_mount, tiny_run

TOO_MANY = 10**13  # steps whose snapshots no disk holds


def experiment(**changes):
    return composition.build(tiny_run.config(**changes))


def listed(*, steps: int, every: int, evaluated: int, keep: int) -> int:
    """Steps that have a snapshot at the end, step by step, and one that is being written."""
    published = [step for step in range(steps + 1) if step % every == 0 or step % evaluated == 0 or step == steps]
    if not keep:
        return len(published)
    kept = [step for step in published if step % evaluated == 0 or step == steps]
    return min(len(published), len(kept) + keep + 1)


@pytest.mark.parametrize(
    "steps, every, evaluated, keep", [(12, 2, 100, 0), (12, 2, 5, 3), (7, 3, 2, 0), (6, 2, 3, 4), (40, 4, 6, 3)]
)
def test_snapshots_are_counted(steps, every, evaluated, keep):
    e = experiment(learner__steps=steps, publish__every_steps=every, evaluation__every_steps=evaluated, publish__keep=keep)
    found = disk.snapshots(e)
    assert found.count == listed(steps=steps, every=every, evaluated=evaluated, keep=keep)
    assert found.size == 4 * parameters.count(e.policy.trained_specs) and f"publish.keep={keep}" in found.what


def test_a_run_in_turn_publishes_every_step():
    assert disk.snapshots(experiment(schedule__mode="interleaved", learner__steps=9)).count == 10


def test_adapters_alone_are_published_and_kept():
    whole, adapters = experiment(publish__dtype="bfloat16"), experiment(publish__dtype="bfloat16", lora__rank=1)
    for files in (disk.snapshots, disk.checkpoints):
        assert files(adapters).size < files(whole).size
    assert disk.reference(adapters).size == disk.reference(whole).size == 2 * disk.snapshots(whole).size


def test_a_moving_reference_is_part_of_checkpoints():
    sizes = [disk.checkpoints(experiment(learner__reference__kind=kind)).size for kind in ("initial", "ema")]
    assert 3 * sizes[1] == 4 * sizes[0]


def test_every_new_run_is_refused_whose_snapshots_the_disk_does_not_hold(tmp_path):
    s = tiny_run.settings(tmp_path / "run", tiny_run.config(learner__steps=TOO_MANY))
    with pytest.raises(ValueError, match=r"would fill its disk.*GiB left on .*publish.keep=0, all.*--workdir") as told:
        joining.join(s, may_change_schedule=True)
    assert str(tmp_path / "run") in str(told.value) and not s.run.root.exists()


def test_the_disk_of_a_run_that_is_there_is_not_asked_about(tmp_path):
    joining.join(tiny_run.settings(tmp_path / "run", tiny_run.config()), may_change_schedule=True)
    longer = tiny_run.settings(tmp_path / "run", tiny_run.config(learner__steps=TOO_MANY))
    joining.join(longer, may_change_schedule=False)


def test_a_dry_run_says_what_the_disk_lacks(tmp_path):
    run = layout.RunDir(tmp_path / "run")
    lines = answer.describe(experiment(learner__steps=TOO_MANY), run).splitlines()
    (said,) = (line for line in lines if line.startswith("disk "))
    assert said.startswith("disk       does not fit: about") and "publish.keep=0, all" in said
    assert "disk       fits: about" in answer.describe(experiment(), run)


def test_checkpoints_and_snapshots_may_lie_on_two_disks(tmp_path):
    e, run = experiment(), layout.RunDir(tmp_path / "run", tmp_path / "shared")
    (demand,) = disk.demands(e, run)
    assert demand.size == disk.snapshots(e).total + disk.checkpoints(e).total + disk.reference(e).total
    if not Path("/dev/shm").is_dir() or Path("/dev/shm").stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system at /dev/shm")
    shared, local = disk.demands(e, layout.RunDir(tmp_path / "run", Path("/dev/shm/run")))
    assert shared.size == disk.snapshots(e).total + disk.reference(e).total and local.size == disk.checkpoints(e).total


def test_ones_own_task_keeps_few_snapshots(tmp_path):
    """All snapshots that the default config writes of a model of 1.5B parameters would take 1.5 TB in float32."""
    tokenizer = random_checkpoints.byte_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"opening": "Once upon", "words": "a"}\n' * 2 + '{"opening": "Twice", "words": "b"}\n' * 2)
    inputs = {"model.path": str(tokenizer), "model.preset": "qwen2.5-1.5b", "learner.queries": 2}
    inputs |= {f"task.custom.{split}_path": str(rows) for split in ("train", "heldout")}
    c = own_task.get_config()
    c.update_from_flattened_dict(inputs)
    e = composition.build(c, weights=False)
    assert disk.snapshots(e).total < 40e9
    c.publish.update(base.get_config().publish)
    e = composition.build(c, weights=False)
    assert disk.snapshots(e).total > 1.5e12


def test_after_a_place_that_does_not_answer_the_others_have_less_time(monkeypatch, tmp_path):
    limits = []

    def no_answer(place, *, report, limit):
        limits.append(limit)
        raise TimeoutError

    monkeypatch.setattr(disk.places, "check_answers", no_answer)
    with pytest.raises(ValueError, match="2 mistakes"):
        disk.check_answers([("model.path", tmp_path / "a"), ("replay.mount", tmp_path / "b")], limit=30.0)
    assert limits == [30.0, 2.0]


@pytest.fixture
def silent_store(monkeypatch):
    """An S3 server that takes connections and never answers."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        yield


def test_all_places_that_do_not_answer_are_named(silent_store, tmp_path):
    c = tiny_run.config(replay__mount=("s3://bucket/a", str(tmp_path), "s3://bucket/b", "ftp://nobody"), model__path="some/model")
    named = disk.of_config(c)
    assert [str(place) for setting, place in named if setting == "replay.mount"] == [
        "s3://bucket/a",
        str(tmp_path),
        "s3://bucket/b",
    ]
    assert "model.path" in dict(named)
    with pytest.raises(ValueError) as told:
        disk.check_answers([*named, *disk.of_init_from("s3://bucket/c@3")], limit=0.2)
    assert told.value.sentences == tuple(
        f"{setting}=s3://bucket/{name} has not answered within 0.2 s, and is not waited for any longer"
        for setting, name in (("replay.mount", "a"), ("replay.mount", "b"), ("--init_from", "c"))
    )


# The program with shorter times, so that the tests need not wait.
QUICKLY = """
import sys
from tba_jax import main
from tba_jax.commands import command_line
from tba_jax.experiment import storage
from tba_jax.run import places
disk.DRY_RUN_SECONDS, places.REPORT_SECONDS = 0.5, 0.2
sys.exit(command_line.execute(main, sys.argv[1:]))
"""


def start(folder, *flags: str) -> subprocess.Popen[str]:
    folder.mkdir()
    python, *_ = command = tiny_run.command(folder.parent / "run", *flags)
    program = silent_mount.command(folder, [python, "-c", QUICKLY, *command[3:]])
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(program, cwd=tiny_run.ROOT, env=tiny_run.environment(), **pipes)


@pytest.mark.parametrize(
    "flags",
    [
        {"--workdir": "--workdir={place}"},
        {"--shared": "--shared={place}"},
        {
            "--init_from": "--init_from={place}@3",
            "replay.mount": "--config.replay.mount=('{place}',)",
            "model.path": "--config.model.path={place}",
        },
    ],
    ids=["workdir", "shared", "settings"],
)
def test_a_dry_run_ends_where_a_mount_does_not_answer(flags, tmp_path):
    place = tmp_path / "mount" / "run"
    process = start(place.parent, "--dry_run", *(flag.format(place=place) for flag in flags.values()))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and not out, err
    for setting in flags:
        assert f"{setting}={place} has not answered within 0.5 s, and is not waited for any longer\n" in err
        assert f"{setting}={place} has not answered for 0.2 s; still trying" in err


def interrupted(process: subprocess.Popen[str]) -> str:
    """The rest of what a process says that is interrupted. Python drops one that comes within a finalizer."""
    for _ in range(6):
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=5)[1]
        except subprocess.TimeoutExpired as waited:
            print("interrupted again after", waited.stderr)
    process.kill()
    return process.communicate()[1]


def test_a_role_says_for_what_it_waits(tmp_path):
    place = tmp_path / "mount" / "run"
    process = start(place.parent, "--role=trainer", f"--config.replay.mount=('{place}',)")
    for seconds in ("0.2", "0.4", "0.6", "0.8"):  # longer than a dry run waits
        assert f"replay.mount={place} has not answered for {seconds} s; still trying" in process.stderr.readline()
    err = interrupted(process)
    assert process.returncode == processes.STOPPED and err.splitlines()[-1] == "stopped"


def test_what_answers_is_not_waited_for(tmp_path):
    def report(seconds: float) -> None:
        pytest.fail(f"waited for {seconds} s")

    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file", tmp_path / "nowhere"):
        places.check_answers(path, report=report)
