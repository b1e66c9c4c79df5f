"""What `kubectl kustomize` prints for a folder, for the fields of a kustomization that this project uses."""

import copy
from pathlib import Path
from typing import Any

import jsonpatch
import yaml

Resource = dict[str, Any]
_KNOWN = {"apiVersion", "kind", "namespace", "resources", "images", "configMapGenerator", "generatorOptions", "patches"}


def build(folder: Path) -> list[Resource]:
    """The resources of a kustomization. Raises ValueError where it uses what this does not model."""
    (there,) = load(folder / "kustomization.yaml")
    if unknown := there.keys() - _KNOWN:
        raise ValueError(f"{folder}: {sorted(unknown)} of a kustomization are not modelled")
    found: list[Resource] = []
    for name in there["resources"]:
        path = folder / name
        found += build(path) if path.is_dir() else load(path)
    for made in there.get("configMapGenerator", ()):
        _generate(found, made)
    for patch in there.get("patches", ()):
        found = _patched(found, patch, folder)
    for resource in found:
        if space := there.get("namespace"):
            resource["metadata"]["namespace"] = space
        for image in there.get("images", ()):
            _name_image(resource, image)
    return found


def load(path: Path) -> list[Resource]:
    """The documents of a file."""
    return [copy.deepcopy(one) for one in yaml.safe_load_all(path.read_text())]  # no object is in two places


def _generate(resources: list[Resource], made: dict[str, Any]) -> None:
    data = dict(literal.split("=", 1) for literal in made["literals"])
    if made.get("behavior") == "merge":
        (there,) = (one for one in resources if (one["kind"], one["metadata"]["name"]) == ("ConfigMap", made["name"]))
        there["data"] |= data
    else:
        resources.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": made["name"]}, "data": data})


def _patched(resources: list[Resource], patch: dict[str, Any], folder: Path) -> list[Resource]:
    """By a JSON patch (RFC 6902), or without the resource that `$patch: delete` names."""
    content = yaml.safe_load(patch["patch"] if "patch" in patch else (folder / patch["path"]).read_text())
    target = patch.get("target") or {"kind": content["kind"], "name": content["metadata"]["name"]}
    (meant,) = (one for one in resources if (one["kind"], one["metadata"]["name"]) == (target["kind"], target["name"]))
    if isinstance(content, dict):
        assert content["$patch"] == "delete"
        return [one for one in resources if one is not meant]
    return [jsonpatch.apply_patch(one, content) if one is meant else one for one in resources]


def _name_image(resource: Any, image: dict[str, str]) -> None:
    """In every container, at whatever depth."""
    inside = resource if isinstance(resource, list) else resource.values() if isinstance(resource, dict) else ()
    if isinstance(resource, dict):
        for container in resource.get("containers", ()):
            if container["image"] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    for one in inside:
        _name_image(one, image)
