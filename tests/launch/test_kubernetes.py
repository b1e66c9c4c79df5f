"""The manifests under launch/kubernetes: valid as they are and as the example changes them."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tba_jax.run import processes
from tests.support import kustomize, manifests

ROOT = Path(__file__).parent.parent.parent
KUBERNETES = ROOT / "launch" / "kubernetes"
FOLDERS = ("base", "example", "more_searchers")
RUN_ITSELF = ("base", "example")


def build(name: str) -> list[kustomize.Resource]:
    """The objects that `kubectl apply -k` creates. Those of more_searchers come with the objects of the base."""
    made = kustomize.build(KUBERNETES / name)
    return made if name in RUN_ITSELF else [*made, *(one for one in build("example") if one["kind"] != "JobSet")]


def jobset(name: str) -> kustomize.Resource:
    (found,) = (one for one in build(name) if one["kind"] == "JobSet")
    return found


@pytest.mark.parametrize("name", FOLDERS)
def test_manifests_are_valid(name):
    assert not manifests.problems(build(name))


@pytest.mark.parametrize("name", FOLDERS)
def test_kubectl_reads_the_kustomizations_in_the_same_way(name):
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed: only tests/support/kustomize.py has read the kustomizations")
    # It speaks to no cluster.
    environment = os.environ | {"KUBECONFIG": os.devnull}
    command = ["kubectl", "kustomize", str(KUBERNETES / name)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    theirs, ours = list(yaml.safe_load_all(done.stdout)), kustomize.build(KUBERNETES / name)
    for made in (theirs, ours):
        made.sort(key=lambda one: one["kind"])
    assert theirs == ours


def test_the_example_changes_what_differs_between_clusters():
    specs = manifests.jobs(jobset("example"))
    assert specs["trainer"]["completions"] == 2 and specs["searchers"]["completions"] == 16
    for name, gpus in (("trainer", 8), ("searchers", 1), ("evaluator", 1)):
        (container,) = manifests.pod(specs[name])["containers"]
        assert container["image"].endswith("/tba_jax:cuda13") and container["resources"]["limits"]["nvidia.com/gpu"] == gpus
        assert "cloud.google.com/gke-accelerator" in manifests.pod(specs[name])["nodeSelector"]
    assert manifests.pod(specs["searchers"])["tolerations"] and "tolerations" not in manifests.pod(specs["trainer"])
    (settings,) = (one["data"] for one in build("example") if one["kind"] == "ConfigMap")
    assert (ROOT / re.search(r"--config=(\S+)", settings["RUN"])[1]).is_file()


@pytest.mark.parametrize("name", FOLDERS)
def test_the_trainer_alone_fails_the_run(name):
    for job, spec in manifests.jobs(jobset(name)).items():
        rules = {rule["action"]: rule.get("onExitCodes", {}).get("values") for rule in spec["podFailurePolicy"]["rules"]}
        if job == "trainer":
            assert rules == {"Ignore": None, "FailJob": [processes.BAD_INPUT, processes.NOT_FINITE, processes.STORAGE_FORBIDS]}
            assert spec["backoffLimit"] == 20
        else:
            assert rules == {"Ignore": None} and spec["backoffLimitPerIndex"] == 2**31 - 1 and "backoffLimit" not in spec
        # Two pods of an index at once would be two processes of one number.
        assert spec["podReplacementPolicy"] == "Failed"
        assert manifests.pod(spec)["securityContext"]["runAsNonRoot"] is True


# A role that notes each of its lives, and ends them in turn by the lines of `codes`: by a code, by a code at which the
# run is done, or by a code once it is asked to stop.
PYTHON = f"""#!/usr/bin/env bash
[[ $2 != tba_jax.run.restart || -z ${{WRAPPER_CODE:-}} ]] || exit "$WRAPPER_CODE"
[[ $2 != tba_jax.run.restart ]] || exec {sys.executable} "$@"
echo "$*" >> "$WORKDIR/lives"
code=$(sed -n "$(wc -l < "$WORKDIR/lives")p" "$WORKDIR/codes")
[[ $code != *done ]] || touch "$WORKDIR/finished.json"
[[ $code != wait* ]] || {{ trap 'exit "${{code#wait}}"' TERM; while :; do sleep 0.1; done; }}
exit "${{code%%done}}"
"""


def test_storage_that_forbids_ends_the_pod(tmp_path):
    """After the wrapper's ten minutes, which are a long life: the wrapper is a stand-in here, and every life counts as long."""
    (tmp_path / "config.json").write_text("{}")
    process = start(tmp_path, ["0"], "--role=searcher", HEALTHY_SECONDS="0", WRAPPER_CODE="7")
    assert process.wait(30) == 7
    process.communicate()


def start(workdir: Path, codes: list[str], *flags: str, **variables: str) -> subprocess.Popen:
    """role.sh with a stand-in for Python."""
    (workdir / "bin").mkdir()
    (workdir / "bin" / "python").write_text(PYTHON)
    (workdir / "bin" / "python").chmod(0o755)
    (workdir / "codes").write_text("\n".join(codes) + "\n")
    told = {"WORKDIR": str(workdir), "RUN": "--config=x.py\n  --config.seed=1", "FIRST_PAUSE": "0", "FINISH_SECONDS": "1"}
    environment = os.environ | told | variables | {"PATH": f"{workdir / 'bin'}:{os.environ['PATH']}"}
    return subprocess.Popen([KUBERNETES / "role.sh", *flags], env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("role", "codes", "expected"),
    [
        ("trainer", ["0done"], 0),
        ("trainer", ["3", "0done"], 0),  # storage failed
        ("trainer", ["6", "6", "0done"], 0),  # another process of it has ended
        ("trainer", ["0", "130", "0done"], 0),  # another process of it was asked to stop
        ("trainer", ["4"], 4),
        ("trainer", ["6", "4"], 4),
        ("trainer", ["2"], 1),  # of a run that exists: it may pass
        ("trainer", ["1"], 1),
        ("trainer", ["139"], 139),
        ("searcher", ["5"], 0),  # rests
        ("searcher", ["4"], 4),  # no rule of its Job names a code
        ("searcher", ["3", "1"], 1),
        ("evaluator", ["5"], 5),
        ("evaluator", ["1done", "1", "0"], 0),  # after the training
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


@pytest.mark.parametrize(("flags", "expected"), [((), 2), (("--process=0",), 2), (("--process=1",), 1)], ids=str)
def test_bad_input_before_there_is_a_run_ends_it(tmp_path, flags, expected):
    """Process 1 may have heard of no more than the end of process 0."""
    process = start(tmp_path, ["2"], "--role=trainer", *flags)
    process.communicate(timeout=60)
    assert process.returncode == expected


@pytest.mark.parametrize("code", ["1", "2", "139"])
def test_a_role_that_has_lived_for_long_is_run_again_in_its_pod(tmp_path, code):
    """As the supervisor counts deaths: those after ten minutes of life do not use up the restarts."""
    process = start(tmp_path, [code, "0done"], "--role=trainer", HEALTHY_SECONDS="0")
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_an_evaluator_that_dies_again_and_again_holds_no_finished_run(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    process = start(tmp_path, ["1done", "1", "1"], "--role=evaluator", MAX_RESTARTS="1")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "died 2 times" in errors


@pytest.mark.parametrize("code", ["0", "130", "3", "2", "4"])
def test_a_pod_that_is_asked_to_stop_is_not_done(tmp_path, code):
    """Whatever its role ends with; code 4 alone would end it in the same way again."""
    (tmp_path / "config.json").write_text("{}")
    process = start(tmp_path, [f"wait{code}"], "--role=trainer")
    deadline = time.monotonic() + 30
    while not (tmp_path / "lives").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)  # until the stand-in has set its trap
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == {"3": 3, "4": 4}.get(code, 143) and "asked to stop" in errors
    assert len((tmp_path / "lives").read_text().splitlines()) == 1


def test_a_pod_is_asked_to_stop_between_two_lives(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    process = start(tmp_path, ["6", "0done"], "--role=trainer", FIRST_PAUSE="60")
    assert "running it again" in process.stderr.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143 and len((tmp_path / "lives").read_text().splitlines()) == 1
