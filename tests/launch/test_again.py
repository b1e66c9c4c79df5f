"""launch/again.sh: a role whose storage fails, or that dies, is run again by itself, and its end is not that of the run."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

AGAIN = Path(__file__).parent.parent.parent / "launch" / "again.sh"
# A role that notes each of its lives, and ends by the next of the codes that it is given.
ROLE = 'echo >> "$1/lives"; shift; n=$(wc -l < "$WORKDIR/lives"); exit "${!n}"'


def again(workdir: Path, *codes: int, deaths: int = 0) -> subprocess.Popen:
    command = [str(AGAIN), "bash", "-c", ROLE, "role", str(workdir), *map(str, codes)]
    told = os.environ | {"WORKDIR": str(workdir), "FIRST_PAUSE": "0", "DEATHS": str(deaths)}
    return subprocess.Popen(command, env=told, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("codes", [(0,), (3, 3, 0), (3, 4), (2,), (5,), (7,)], ids=str)
def test_a_role_is_run_again_as_long_as_its_storage_fails(tmp_path, codes):
    (tmp_path / "config.json").write_text("{}")
    process = again(tmp_path, *codes)
    process.communicate(timeout=30)
    assert process.returncode == codes[-1] and len((tmp_path / "lives").read_text()) == len(codes)


@pytest.mark.parametrize(
    "codes", [(6, 137, 0), (1, 6, 139), (6, 2, 0), (6, 2, 2), (3, 2, 0), (1, 4), (134, 5), (1, 130), (6, 3, 6, 0)], ids=str
)
def test_a_role_that_dies_is_run_again_so_often_as_it_is_told(tmp_path, codes):
    (tmp_path / "config.json").write_text("{}")
    process = again(tmp_path, *codes, deaths=2)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == codes[-1] and len((tmp_path / "lives").read_text()) == len(codes)
    reason = "storage failed" if codes[0] == 3 else f"ended with code {codes[0]}"
    assert f"{reason}; running the role again" in errors


def test_bad_input_of_the_first_life_is_the_end(tmp_path):
    process = again(tmp_path, 2, 0, deaths=2)
    process.communicate(timeout=30)
    assert process.returncode == 2


def test_a_role_that_died_before_there_was_a_run_need_not_see_one(tmp_path):
    process = again(tmp_path, 1, 0, deaths=1)
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_a_role_is_not_run_again_before_its_run_is_there(tmp_path):
    process = again(tmp_path, 3, 0)
    time.sleep(1.0)
    assert process.poll() is None and (tmp_path / "lives").read_text() == "\n"
    (tmp_path / "config.json").write_text("{}")
    _, errors = process.communicate(timeout=70)
    assert process.returncode == 0 and "holds no run at the moment" in errors


@pytest.mark.parametrize("code", [3, 6])
def test_a_role_that_is_asked_to_stop_is_not_run_again(tmp_path, code):
    command = [str(AGAIN), "bash", "-c", f"trap 'exit {code}' TERM; echo ready; while :; do sleep 0.1; done"]
    told = os.environ | {"WORKDIR": str(tmp_path), "DEATHS": "9"}
    process = subprocess.Popen(command, env=told, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == code
    process.stdout.close()
