"""The manifests under launch/kubernetes, as they are and as the example changes them, and what follows from a role's exit code.

role.sh runs with stand-ins for the roles.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tba_jax.run import processes
from tests.support import kustomize, manifests, tiny_run

KUBERNETES = tiny_run.ROOT / "launch" / "kubernetes"
FOLDERS = ("base", "example", "more_searchers")


def build(name: str) -> list[kustomize.Resource]:
    """The objects that `kubectl apply -k` creates. Those of more_searchers come with the objects of the example."""
    made = kustomize.build(KUBERNETES / name)
    return made if name != "more_searchers" else [*made, *(one for one in build("example") if one["kind"] != "JobSet")]


def jobset(name: str) -> kustomize.Resource:
    (found,) = (one for one in build(name) if one["kind"] == "JobSet")
    return found


@pytest.mark.parametrize("name", FOLDERS)
def test_manifests_are_valid(name):
    manifests.check(build(name))


def test_the_example_names_a_recipe_that_is_there():
    (settings,) = (one["data"] for one in build("example") if one["kind"] == "ConfigMap")
    assert (tiny_run.ROOT / re.search(r"--config=(\S+)", settings["RUN"])[1]).is_file()


@pytest.mark.parametrize("name", FOLDERS)
def test_the_trainer_alone_fails_the_run(name):
    user = re.search(r"^USER (\d+):(\d+)$", (tiny_run.ROOT / "launch/Dockerfile").read_text(), re.MULTILINE)
    for job, spec in manifests.jobs(jobset(name)).items():
        rules = {rule["action"]: rule.get("onExitCodes", {}).get("values") for rule in spec["podFailurePolicy"]["rules"]}
        if job == "trainer":
            assert rules == {"Ignore": None, "FailJob": [processes.BAD_INPUT, processes.NOT_FINITE, processes.STORAGE_FORBIDS]}
            assert spec["backoffLimit"] == 20
        else:
            assert rules == {"Ignore": None} and spec["backoffLimitPerIndex"] == 2**31 - 1 and "backoffLimit" not in spec
        # Two pods of an index at once would be two processes of one number.
        assert spec["podReplacementPolicy"] == "Failed"
        context = manifests.pod(spec)["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"]) == (int(user[1]), int(user[2]))


# A role that notes each of its lives, and ends them in turn by the lines of `codes`: by a code, by a code at which the
# run is done, or by a code once it is asked to stop.
PYTHON = f"""#!/usr/bin/env bash
[[ $2 != tba_jax.run.restart || -z ${{WRAPPER_CODE:-}} ]] || exit "$WRAPPER_CODE"
[[ $2 != tba_jax.run.restart ]] || exec {sys.executable} "$@"
code=$(sed -n "$(($(cat "$WORKDIR/lives" 2>/dev/null | wc -l) + 1))p" "$WORKDIR/codes")
[[ $code != *done ]] || touch "$WORKDIR/finished.json"
[[ $code != wait* ]] || trap 'exit "${{code#wait}}"' TERM
echo "$*" >> "$WORKDIR/lives"
while [[ $code == wait* ]]; do /bin/sleep 0.02; done
exit "${{code%%done}}"
"""


def start(workdir: Path, codes: list[str], *flags: str, **variables: str) -> subprocess.Popen:
    """role.sh with stand-ins for Python and for its pauses."""
    (workdir / "bin").mkdir()
    for name, text in (("python", PYTHON), ("sleep", "#!/bin/sh\nexec /bin/sleep 0.05\n")):
        (workdir / "bin" / name).write_text(text)
        (workdir / "bin" / name).chmod(0o755)
    (workdir / "codes").write_text("\n".join(codes) + "\n")
    told = {"WORKDIR": str(workdir), "RUN": "--config=x.py\n  --config.seed=1", "FINISH_SECONDS": "2"}
    environment = os.environ | told | variables | {"PATH": f"{workdir / 'bin'}:{os.environ['PATH']}"}
    return subprocess.Popen([KUBERNETES / "role.sh", *flags], env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("role", "codes", "expected"),
    [
        ("trainer", ["3", "6", "0", "130", "0done"], 0),  # storage failed, another process of it has ended, a stop
        ("trainer", ["2"], 1),  # of a run that exists: it may pass
        ("trainer", ["1", "139"], 139),  # the first death is answered in its pod
        ("searcher", ["5"], 0),  # rests
        ("evaluator", ["1done", "1"], 0),  # after the training
    ],
    ids=str,
)
def test_the_pod_ends_as_the_supervisor_would_judge(tmp_path, role, codes, expected):
    (tmp_path / "config.json").write_text("{}")
    process = start(tmp_path, codes, f"--role={role}", "--process=1")
    _, errors = process.communicate(timeout=60)
    lives = (tmp_path / "lives").read_text().splitlines()
    assert process.returncode == expected and len(lives) == len(codes), errors
    words = f"-m tba_jax.main --workdir={tmp_path} --config=x.py --config.seed=1 --role={role} --process=1"
    assert set(lives) == {words}


def test_storage_that_forbids_ends_the_pod(tmp_path):
    """After the wrapper's ten minutes; the wrapper is a stand-in here."""
    (tmp_path / "config.json").write_text("{}")
    process = start(tmp_path, ["0"], "--role=searcher", WRAPPER_CODE="7")
    process.communicate(timeout=30)
    assert process.returncode == 7


@pytest.mark.parametrize(("flags", "expected"), [(("--process=0",), 2), (("--process=1",), 1)], ids=str)
def test_bad_input_before_there_is_a_run_ends_it(tmp_path, flags, expected):
    """Process 1 may have heard of no more than the end of process 0."""
    process = start(tmp_path, ["2"], "--role=trainer", *flags)
    process.communicate(timeout=60)
    assert process.returncode == expected


@pytest.mark.parametrize("code", ["0", "3", "4"])
def test_a_pod_that_is_asked_to_stop_is_not_done(tmp_path, code):
    """Whatever its role ends with; code 4 alone would end it in the same way again."""
    (tmp_path / "config.json").write_text("{}")
    process = start(tmp_path, [f"wait{code}"], "--role=trainer")
    deadline = time.monotonic() + 30
    while not (tmp_path / "lives").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == {"3": 3, "4": 4}.get(code, 143) and "as it was asked to" in errors
    assert len((tmp_path / "lives").read_text().splitlines()) == 1
