"""What the first event of a process says."""

import subprocess
from pathlib import Path

import jax
import pytest

from tba_jax.telemetry import beginnings


def git(*arguments: str, at: Path) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    return subprocess.run(["git", *identity, *arguments], cwd=at, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    git("init", "--quiet", "--initial-branch=main", at=folder)
    git("commit", "--allow-empty", "--quiet", "--message=first", at=folder)
    return folder


def test_the_commit_is_that_of_git(checkout, tmp_path):
    assert beginnings.commit(checkout) == git("rev-parse", "HEAD", at=checkout)
    git("pack-refs", "--all", at=checkout)
    assert beginnings.commit(checkout) == git("rev-parse", "HEAD", at=checkout)
    git("worktree", "add", "--quiet", "-b", "other", str(tmp_path / "other"), at=checkout)
    git("commit", "--allow-empty", "--quiet", "--message=second", at=tmp_path / "other")
    assert beginnings.commit(tmp_path / "other") == git("rev-parse", "HEAD", at=tmp_path / "other")
    assert beginnings.commit(tmp_path / "other") != beginnings.commit(checkout)
    git("checkout", "--quiet", "--detach", at=checkout)
    assert beginnings.commit(checkout) == git("rev-parse", "HEAD", at=checkout)


def test_a_folder_that_is_no_checkout_has_no_commit(tmp_path):
    assert beginnings.commit(tmp_path) == ""
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/none\n")
    assert beginnings.commit(tmp_path) == ""
    (tmp_path / ".git" / "HEAD").write_bytes(b"\xff\xfe\x80")
    assert beginnings.commit(tmp_path) == ""


def test_the_beginning_names_devices_and_versions():
    told = beginnings.told(jax.devices())
    assert told["code"]["version"] and told["versions"]["jax"] == jax.__version__ and told["pid"] > 0 and told["host"]
    assert told["devices"] == f"{jax.device_count()} × {jax.devices()[0].device_kind}"
