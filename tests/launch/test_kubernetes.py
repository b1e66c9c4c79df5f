"""The JobSet under launch/kubernetes, as it is and as the example changes it. tests/run/test_restart.py has the codes of pods."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonpatch
import kubernetes_validate
import pytest
import yaml

from tba_jax.run import processes
from tests.support import tiny_run

KUBERNETES = tiny_run.ROOT / "launch" / "kubernetes"


def load(path: str) -> Any:
    return json.loads(json.dumps(yaml.safe_load((KUBERNETES / path).read_text())))  # no object is in two places


def jobs(folder: str) -> dict[str, dict[str, Any]]:
    """Name -> the Job's template, with the patches that a folder and those below it make to the JobSet."""
    jobset, folders = load("base/jobset.yaml"), ("base", "example", "more_searchers")
    for each in folders[: folders.index(folder) + 1]:
        for patch in load(f"{each}/kustomization.yaml").get("patches", ()):
            if patch.get("target", {}).get("kind") == "JobSet":
                changes = yaml.safe_load(patch["patch"]) if "patch" in patch else load(f"{each}/{patch['path']}")
                jobset = jsonpatch.apply_patch(jobset, changes)
    return {job["name"]: job["template"] for job in jobset["spec"]["replicatedJobs"]}


@pytest.mark.parametrize("folder", ["base", "example", "more_searchers"])
def test_jobs_are_valid_and_the_trainer_alone_fails_the_run(folder):
    for name, job in jobs(folder).items():
        for version in ("1.29.0", "1.37.0"):  # the oldest that the manifests name, and the newest that the package knows
            whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}} | job
            kubernetes_validate.validate(whole, version, strict=True)
        spec = job["spec"]
        rules = {rule["action"]: rule.get("onExitCodes", {}).get("values") for rule in spec["podFailurePolicy"]["rules"]}
        final = {"FailJob": [processes.BAD_INPUT, processes.NOT_FINITE, processes.STORAGE_FORBIDS]} if name == "trainer" else {}
        assert rules == {"Ignore": None, **final}
        assert (spec.get("backoffLimit"), spec.get("backoffLimitPerIndex")) == ((20, None) if final else (None, 2**31 - 1))
        # Two pods of an index at once would be two processes of one number.
        assert spec["podReplacementPolicy"] == "Failed"


def test_a_container_runs_its_role_with_the_flags_of_the_run(tmp_path):
    recipe = re.search(r"--config=(\S+)", (KUBERNETES / "example/kustomization.yaml").read_text())[1]
    assert Path(tiny_run.ROOT / recipe).is_file()
    (container,) = jobs("base")["searchers"]["spec"]["template"]["spec"]["containers"]
    (tmp_path / "python").write_text('#!/bin/sh\necho "$JAX_COMPILATION_CACHE_DIR $*"\n')
    (tmp_path / "python").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "WORKDIR": "/runs/a", "RUN": "--config=x.py\n  --config.task.names=*"}
    command = [*container["command"], *container["args"]]
    said = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout
    wrapper = "-m tba_jax.run.restart --pod --workdir=/runs/a --deaths=1 python -m tba_jax.main --workdir=/runs/a"
    assert said == f"/runs/a/compilation_cache {wrapper} --config=x.py --config.task.names=* --role=searcher\n"
