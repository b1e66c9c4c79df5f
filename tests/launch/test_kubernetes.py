"""The kustomization under launch/kubernetes, as kubectl builds it. tests/run/test_restart.py has the codes of pods."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tba_jax.run import processes
from tests.support import tiny_run

KUBERNETES = tiny_run.ROOT / "launch" / "kubernetes"
COMPONENTS = sorted(path.name for path in (KUBERNETES / "components").iterdir())
NAMES = ["tba", "tba-searchers", "tba-evaluator"]
WORKLOADS = dict.fromkeys(NAMES, ("batch/v1", "Job")) | {"tba": ("jobset.x-k8s.io/v1alpha2", "JobSet")}


def build(folder: Path) -> list[dict[str, Any]]:
    if not (kubectl := shutil.which("kubectl")):
        pytest.skip("kubectl, which has kustomize, is not installed")
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def overlay(tmp_path: Path, **more: Any) -> list[dict[str, Any]]:
    """The base with components or patches."""
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes", dirs_exist_ok=True)
    (tmp_path / "own").mkdir(exist_ok=True)
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": ["../kubernetes/base"]}
    (tmp_path / "own" / "kustomization.yaml").write_text(yaml.safe_dump(head | more))
    return build(tmp_path / "own")


def jobs(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Name of a workload -> the spec of its Job."""
    by_name = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] in ("Job", "JobSet")}
    assert sorted(by_name) == sorted(NAMES)
    return by_name | {"tba": by_name["tba"]["replicatedJobs"][0]["template"]["spec"]}


def by_name(listed: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in listed}


def components(*names: str) -> list[str]:
    return [f"../kubernetes/components/{name}" for name in names]


@pytest.mark.parametrize("folder", ["base", "example", *COMPONENTS])
def test_workloads_are_valid_and_the_trainer_alone_fails_the_run(tmp_path, folder):
    is_component = folder in COMPONENTS
    built = overlay(tmp_path, components=components(folder)) if is_component else build(KUBERNETES / folder)
    objects = [each for each in built if each["kind"] != "JobSet"]
    objects += [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "tba"}, "spec": jobs(built)["tba"]}]
    for each in objects:
        for version in ("1.29.0", "1.37.0"):  # the oldest that the manifests name, and the newest that the package knows
            kubernetes_validate.validate(each, version, strict=True)
    for name, spec in jobs(built).items():
        final = [processes.BAD_INPUT, processes.NOT_FINITE, processes.STORAGE_FORBIDS]
        others = [processes.PEER_LOST, processes.STOPPED, 143]  # the end of another process, and a request
        rules = [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in spec["podFailurePolicy"]["rules"]]
        assert rules == [("Ignore", None)] + ([("FailJob", final), ("Ignore", others)] if name == "tba" else [])
        assert (spec.get("backoffLimit"), spec.get("backoffLimitPerIndex")) == ((0, None) if name == "tba" else (None, 2**31 - 1))
        # Two pods of an index at once would be two processes of one number.
        assert spec["podReplacementPolicy"] == "Failed" and spec["completions"] == spec["parallelism"]
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        assert (
            container["securityContext"]["readOnlyRootFilesystem"]
            and "ALL" in container["securityContext"]["capabilities"]["drop"]
        )
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted == {"runs": "/runs", "tmp": "/tmp", "shm": "/dev/shm"} and mounted.keys() == {
            v["name"] for v in pod["volumes"]
        }
        if name == "tba":
            assert {"name": "TRAINER_HOSTS", "value": str(spec["completions"])} in container["env"]


@pytest.mark.parametrize("name", NAMES)
def test_a_patch_of_one_workload_leaves_the_others(tmp_path, name):
    """They share anchors of one list, and lists are merged by name."""
    before = jobs(build(KUBERNETES / "base"))
    (version, kind), volume, variable = WORKLOADS[name], {"name": "more", "emptyDir": {}}, {"name": "MORE", "value": "1"}
    pod = {
        "volumes": [volume],
        "containers": [{"name": "role", "env": [variable], "resources": {"limits": {"nvidia.com/gpu": 7}}}],
    }
    spec: dict[str, Any] = {"template": {"spec": pod}}
    if kind == "JobSet":
        spec = {"replicatedJobs": [{"name": "trainer", "template": {"spec": spec}}]}
    patch = yaml.safe_dump({"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec})
    after = jobs(overlay(tmp_path, patches=[{"patch": patch}]))
    assert {each for each in NAMES if after[each] != before[each]} == {name}
    pods = [each[name]["template"]["spec"] for each in (before, after)]
    (was,), (container,) = (pod["containers"] for pod in pods)
    assert by_name(pods[1]["volumes"]) == by_name([*pods[0]["volumes"], volume])
    assert by_name(container["env"]) == by_name([*was["env"], variable])
    assert container["resources"]["limits"] == was["resources"]["limits"] | {"nvidia.com/gpu": 7}


def test_components_are_for_the_trainer_or_for_those_that_join(tmp_path):
    built = jobs(overlay(tmp_path, components=components(*COMPONENTS)))
    for name, spec in built.items():
        pod, joins = spec["template"]["spec"], name != "tba"
        assert pod["serviceAccountName"] == ("tba-searchers" if joins else "tba-trainer")
        assert pod["priorityClassName"] == ("low" if joins else "high")
        assert pod.get("hostNetwork", False) != joins and ("rdma/ib" in pod["containers"][0]["resources"]["limits"]) != joins
        (runs,) = [volume for volume in pod["volumes"] if volume["name"] == "runs"]
        assert ("emptyDir" in runs) == joins and ("persistentVolumeClaim" in runs) != joins


def test_a_container_runs_its_role_with_the_flags_of_the_run(tmp_path):
    recipe = re.search(r"--config=(\S+)", (KUBERNETES / "example/kustomization.yaml").read_text())[1]
    assert Path(tiny_run.ROOT / recipe).is_file()
    (container,) = jobs(build(KUBERNETES / "base"))["tba-searchers"]["template"]["spec"]["containers"]
    (tmp_path / "python").write_text('#!/bin/sh\necho "$*"\n')
    (tmp_path / "python").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.defpath}", "WORKDIR": "/runs/a", "RUN": "--config=x.py\n  --config.task.names=*"}
    for shared in ("", "gs://b/a"):
        command = [*container["command"], *container["args"]]
        environment = variables | ({"SHARED": shared} if shared else {})
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        words = [
            "-m tba_jax.run.restart --pod --workdir=/runs/a python -m tba_jax.main --workdir=/runs/a",
            *[f"--shared={shared}"] * bool(shared),
        ]
        assert said == " ".join([*words, "--config=x.py --config.task.names=* --role=searcher\n"])
