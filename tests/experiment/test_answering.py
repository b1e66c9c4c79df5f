"""Storage that does not answer: a dry run ends and names it, and a role says for what it waits."""

import signal
import socket
import subprocess

import pytest

from tba_jax.experiment import answering
from tba_jax.run import processes
from tests.support import silent_mount, tiny_run


def test_after_a_place_that_does_not_answer_the_others_have_less_time(monkeypatch, tmp_path):
    limits = []

    def no_answer(place, *, report, limit):
        limits.append(limit)
        raise TimeoutError

    monkeypatch.setattr(answering.places, "check_answers", no_answer)
    with pytest.raises(ValueError, match="2 mistakes"):
        answering.check_answers([("model.path", tmp_path / "a"), ("replay.mount", tmp_path / "b")], limit=30.0)
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
    named = answering.of_config(c)
    assert [str(place) for setting, place in named if setting == "replay.mount"] == [
        "s3://bucket/a",
        str(tmp_path),
        "s3://bucket/b",
    ]
    assert "model.path" in dict(named)
    with pytest.raises(ValueError) as told:
        answering.check_answers([*named, *answering.of_init_from("s3://bucket/c@3")], limit=0.2)
    assert told.value.sentences == tuple(
        f"{setting}=s3://bucket/{name} has not answered within 0.2 s, and is not waited for any longer"
        for setting, name in (("replay.mount", "a"), ("replay.mount", "b"), ("--init_from", "c"))
    )


# The program with shorter times, so that the tests need not wait.
QUICKLY = """
import sys
from tba_jax import main
from tba_jax.commands import command_line
from tba_jax.experiment import answering
from tba_jax.storage import places
answering.DRY_RUN_SECONDS, places.REPORT_SECONDS = 0.5, 0.2
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
