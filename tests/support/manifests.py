"""Finds mistakes in the manifests of a run: by the schemas of Kubernetes and JobSet, and by rules that no schema holds."""

import json
import re
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pydantic
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

Resource = dict[str, Any]
# The oldest version that the manifests name, and the newest that the package knows.
VERSIONS = ("1.29.0", "1.37.0")
JOBSET = "jobset.x-k8s.io/v1alpha2"
# By the JobSet controller's admission; the models take any text.
_OPERATORS = {"All", "Any"}
_ACTIONS = {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"}
_POD_ACTIONS = {"Ignore", "FailJob", "FailIndex", "Count"}


def problems(resources: list[Resource]) -> list[str]:
    """A sentence for each mistake; those of schemas first, alone where there are any."""
    found = [sentence for resource in resources for sentence in _by_schema(resource)]
    return found or [sentence for resource in resources if resource["kind"] == "JobSet" for sentence in _of_jobset(resource)] + [
        *_of_references(resources)
    ]


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


def _of_jobset(jobset: Resource) -> Iterator[str]:
    spec, all_jobs = jobset["spec"], jobs(jobset)
    success, failure = spec.get("successPolicy", {}), spec.get("failurePolicy", {})
    if success.get("operator") not in _OPERATORS:
        yield f"successPolicy.operator={success.get('operator')} is none of {sorted(_OPERATORS)}"
    for name in success.get("targetReplicatedJobs", ()):
        if name not in all_jobs:
            yield f"successPolicy names {name}, of which there is no job"
    for rule in failure.get("rules", ()):
        if rule["action"] not in _ACTIONS:
            yield f"failurePolicy has the action {rule['action']}, which JobSet v0.6 does not know"
    if failure.get("maxRestarts") != 0:
        yield f"failurePolicy.maxRestarts={failure.get('maxRestarts')} would start all jobs again that one job ends"
    for name, job in all_jobs.items():
        yield from (f"{name}: {problem}" for problem in _of_job(job))
    if "trainer" in all_jobs:
        yield from (f"trainer: {problem}" for problem in _of_trainer(jobset, all_jobs["trainer"]))


def _of_job(job: Resource) -> Iterator[str]:
    rules = job["podFailurePolicy"]["rules"]
    names = [container["name"] for container in pod(job)["containers"]]
    if not any(rule["action"] == "Ignore" and rule.get("onPodConditions") for rule in rules[:1]):
        yield "its first rule does not ignore evictions"
    for rule in rules:
        if rule["action"] not in _POD_ACTIONS:
            yield f"podFailurePolicy has the action {rule['action']}, which is none of {sorted(_POD_ACTIONS)}"
        if (named := rule.get("onExitCodes", {}).get("containerName", names[0])) not in names:
            yield f"podFailurePolicy names the container {named}, which is not there"
    if pod(job).get("restartPolicy") != "Never":
        yield f"restartPolicy={pod(job).get('restartPolicy')} goes with no podFailurePolicy"
    if "backoffLimitPerIndex" in job and job.get("completionMode") != "Indexed":
        yield "backoffLimitPerIndex needs completionMode=Indexed"
    if job["completions"] != job["parallelism"]:
        yield f"completions={job['completions']} and parallelism={job['parallelism']} must be equal: all pods run at once"
    for container in pod(job)["containers"]:
        limits, requests = container["resources"]["limits"], container["resources"]["requests"]
        if requests.get("memory") != limits.get("memory"):
            yield f"memory: {requests.get('memory')} requested and {limits.get('memory')} allowed must be equal"


def _of_trainer(jobset: Resource, job: Resource) -> Iterator[str]:
    """The processes must find each other."""
    network, name = jobset["spec"].get("network", {}), "$(JOBSET)"
    flags = dict(flag.split("=", 1) for flag in pod(job)["containers"][0]["args"])
    host, _, port = flags.get("--coordinator", "").partition(":")
    if host != f"{name}-trainer-0-0.{network.get('subdomain', name)}" or not port.isdigit():
        yield f"--coordinator={flags.get('--coordinator')} is not the name and a port of its first pod"
    for setting in ("enableDNSHostnames", "publishNotReadyAddresses"):
        if network.get(setting) is not True:
            yield f"network.{setting}={network.get(setting)}: pods would have no names before they are ready"
    if flags.get("--processes") != "$(TRAINER_HOSTS)" or flags.get("--process") != "$(JOB_COMPLETION_INDEX)":
        yield f"--processes={flags.get('--processes')} and --process={flags.get('--process')} are not those of its pods"
    if job.get("completionMode") != "Indexed":
        yield f"completionMode={job.get('completionMode')}: its pods would have no index"


def _of_references(resources: list[Resource]) -> Iterator[str]:
    """Names must be those of what is there: claims, ConfigMaps, volumes and variables."""
    named = {(one["kind"], one["metadata"]["name"]): one for one in resources}
    for resource in resources:
        for name, job in jobs(resource).items() if resource["kind"] == "JobSet" else ():
            volumes = {volume["name"] for volume in pod(job).get("volumes", ())}
            for volume in pod(job).get("volumes", ()):
                claim = volume.get("persistentVolumeClaim", {}).get("claimName")
                if claim and ("PersistentVolumeClaim", claim) not in named:
                    yield f"{name}: there is no claim {claim}"
            for container in pod(job)["containers"]:
                missing = [mount["name"] for mount in container["volumeMounts"] if mount["name"] not in volumes]
                yield from (f"{name}: there is no volume {volume}" for volume in missing)
                yield from (f"{name}: {problem}" for problem in _of_variables(container, job, named))


def _of_variables(container: Resource, job: Resource, named: dict[tuple[str, str], Resource]) -> Iterator[str]:
    known = {one["name"]: str(one.get("value", "")) for one in container.get("env", ())} | {"JOB_COMPLETION_INDEX": ""}
    for source in container.get("envFrom", ()):
        reference = source["configMapRef"]["name"]
        if ("ConfigMap", reference) not in named:
            yield f"there is no ConfigMap {reference}"
            continue
        known |= named["ConfigMap", reference]["data"]
    for argument in [*container["command"], *container["args"]]:
        used = re.findall(r"\$\((\w+)\)", argument)
        yield from (f"{argument}: there is no variable {name}" for name in used if name not in known)
    # role.sh needs both; another number of pods than of processes waits for ever.
    yield from (f"the variable {name} is empty" for name in ("WORKDIR", "RUN") if not known.get(name))
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    if not any(known.get("WORKDIR", "").startswith(f"{mount}/") for mount in mounts):
        yield f"WORKDIR={known.get('WORKDIR')} lies on none of the volumes {mounts}"
    if "--role=trainer" in container["args"] and known.get("TRAINER_HOSTS") != str(job["completions"]):
        yield f"TRAINER_HOSTS={known.get('TRAINER_HOSTS')} and completions={job['completions']} must be the same number"
