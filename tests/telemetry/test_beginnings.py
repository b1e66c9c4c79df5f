"""What a process says of itself when it begins."""

import subprocess

import jax

from tba_jax.telemetry import record


def test_the_commit_is_that_of_the_checkout(tmp_path):
    assert record.commit(tmp_path) == ""
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for arguments in (["init", "--quiet"], [*identity, "commit", "--allow-empty", "--quiet", "--message=first"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert record.commit(tmp_path) == asked.stdout.strip() != ""
    (tmp_path / "below").mkdir()
    assert record.commit(tmp_path / "below") == "", "no checkout itself"
    (tmp_path / ".git" / "HEAD").write_bytes(b"\xff\xfe\x80")
    assert record.commit(tmp_path) == ""


def test_the_beginning_names_devices_and_versions():
    told = record.beginning(jax.devices())
    assert told["code"]["version"] and told["versions"]["jax"] == jax.__version__ and told["pid"] > 0 and told["host"]
    assert told["devices"] == f"{jax.device_count()} × {jax.devices()[0].device_kind}"
