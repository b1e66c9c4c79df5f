"""The objects of a run's manifests, and mistakes in them by the schemas of Kubernetes."""

from typing import Any

import kubernetes_validate

Resource = dict[str, Any]
# The oldest version that the manifests name, and the newest that the package knows.
VERSIONS = ("1.29.0", "1.37.0")


def jobs(jobset: Resource) -> dict[str, Resource]:
    """Name -> spec of the Job."""
    return {job["name"]: job["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]}


def pod(job: Resource) -> Resource:
    spec: Resource = job["template"]["spec"]
    return spec


def check(resources: list[Resource]) -> None:
    """Raises kubernetes_validate.ValidationError for a mistake. Of a JobSet its Jobs are checked."""
    for resource in resources:
        named = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}}
        inside = [named | job["template"] for job in resource.get("spec", {}).get("replicatedJobs", ())]
        for one in inside or [resource]:
            for version in VERSIONS:
                kubernetes_validate.validate(one, version, strict=True)
