"""Storage that does not answer: a dry run ends and names it, and a role says for what it waits."""

import concurrent.futures
import socket
import threading

import pytest

from tba_jax import main
from tba_jax.commands import command_line
from tba_jax.experiment import stored_run
from tba_jax.storage import places
from tests.support import tiny_run


@pytest.fixture
def silent_store(monkeypatch):
    """An S3 server that takes connections and never answers."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        yield


def test_a_store_that_does_not_answer_is_named(silent_store, tmp_path):
    mounts = ("s3://bucket/a", str(tmp_path), "s3://bucket/b", "ftp://nobody")
    named = stored_run.named_places(tiny_run.config(replay__mount=mounts, model__path="some/model"), init_from="s3://bucket/c@3")
    assert [str(place) for setting, place in named if setting == "replay.mount"] == [*mounts[:3]]
    assert "model.path" in dict(named)
    with pytest.raises(ValueError, match=r"^--init_from=s3://bucket/c has not answered within 0\.2 s, and is not waited for"):
        stored_run.check_answers(named, limit=0.2)


@pytest.fixture
def mount(tmp_path, monkeypatch):
    """A folder below which nothing answers before the event is set, as on a mount whose server is away."""
    answers, asked = threading.Event(), places._asked

    def waiting(folder):
        if not str(folder).startswith(str(tmp_path / "mount")):
            return asked(folder)
        never: concurrent.futures.Future[None] = concurrent.futures.Future()
        threading.Thread(target=lambda: (answers.wait(30), never.set_result(None)), daemon=True).start()
        return never

    monkeypatch.setattr(places, "_asked", waiting)
    monkeypatch.setattr(places, "REPORT_SECONDS", 0.05)
    monkeypatch.setattr(stored_run, "DRY_RUN_SECONDS", 0.12)
    yield tmp_path / "mount" / "run", answers
    answers.set()


@pytest.mark.parametrize(
    "setting, flag",
    [("--workdir", "--workdir={}"), ("--shared", "--shared={}"), ("replay.mount", "--config.replay.mount=('{}',)")],
)
def test_a_dry_run_ends_where_a_mount_does_not_answer(setting, flag, mount, tmp_path, capsys, caplog):
    place, _ = mount
    with pytest.raises(SystemExit, match="2"):
        command_line.execute(main, tiny_run.command(tmp_path / "run", "--dry_run", flag.format(place))[3:])
    said = capsys.readouterr().err
    assert f"{setting}={place} has not answered within 0.12 s, and is not waited for any longer" in said
    assert f"{setting}={place} has not answered for 0.1 s; still trying" in said + caplog.text


def test_a_role_waits_until_the_place_answers_and_says_so(mount, caplog):
    place, answers = mount
    waiter = threading.Thread(target=stored_run.check_answers, args=([("replay.mount", place)],))
    waiter.start()
    waiter.join(0.2)  # longer than a dry run waits
    assert waiter.is_alive() and caplog.text.count(f"replay.mount={place} has not answered for") >= 2
    answers.set()
    waiter.join(5)
    assert not waiter.is_alive()
