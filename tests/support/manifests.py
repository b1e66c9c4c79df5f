"""Finds mistakes in the manifests of a run, by the schemas of Kubernetes and JobSet."""

import json
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pydantic
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

Resource = dict[str, Any]
# The oldest version that the manifests name, and the newest that the package knows.
VERSIONS = ("1.29.0", "1.37.0")
JOBSET = "jobset.x-k8s.io/v1alpha2"


def problems(resources: list[Resource]) -> list[str]:
    """A sentence for each mistake by the schemas."""
    return [sentence for resource in resources for sentence in _by_schema(resource)]


def jobs(jobset: Resource) -> dict[str, Resource]:
    """Name -> spec of the Job."""
    return {job["name"]: job["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]}


def pod(job: Resource) -> Resource:
    spec: Resource = job["template"]["spec"]
    return spec


def _by_schema(resource: Resource) -> Iterator[str]:
    called = f"{resource.get('kind')}/{resource.get('metadata', {}).get('name')}"
    if resource.get("apiVersion") == JOBSET:
        yield from (f"{called}: {problem}" for problem in _by_model(resource))
        for job in resource["spec"].get("replicatedJobs", ()):
            whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job.get("name")}, **job.get("template", {})}
            yield from _by_schema(whole)
        return
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(resource, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{called}: {'.'.join(map(str, error.path))}: {error.message} (Kubernetes {version})"
        except kubernetes_validate.SchemaNotFoundError as error:
            yield f"{called}: {error.message}"


def _by_model(jobset: Resource) -> Iterator[str]:
    try:
        model = JobsetV1alpha2JobSet.from_dict(jobset)
    except (pydantic.ValidationError, ValueError, AttributeError, TypeError) as error:
        yield " ".join(str(error).split())
        return
    assert model is not None
    # The models drop what they do not know.
    kept = dict(_leaves(json.loads(model.to_json())))
    for path, value in _leaves(jobset):
        if path not in kept:
            yield f"{path} is not known to JobSet"
        elif kept[path] != value and str(kept[path]) != str(value):  # the models read quantities as floats
            yield f"{path}={value!r} would be read as {kept[path]!r}"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not isinstance(value, dict | list) or not value:
        yield path, value
    for key, one in inside:
        yield from _leaves(one, f"{path}/{key}")
