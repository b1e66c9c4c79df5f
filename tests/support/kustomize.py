"""What `kubectl kustomize` prints for a folder, for the fields of a kustomization that this project uses; others are refused."""

import copy
from pathlib import Path
from typing import Any

import jsonpatch
import yaml

Resource = dict[str, Any]
_KNOWN = {"apiVersion", "kind", "namespace", "resources", "images", "configMapGenerator", "generatorOptions", "patches"}
# Without the kinds of other clusters' extensions, all that have no namespace.
_OF_THE_CLUSTER = {"Namespace", "PersistentVolume", "PriorityClass", "StorageClass", "ClusterRole", "ClusterRoleBinding"}


def build(folder: Path) -> list[Resource]:
    """The resources of a kustomization.

    Raises:
      ValueError: it uses what this does not model, or changes what is not there.
    """
    (there,) = load(folder / "kustomization.yaml")
    if unknown := there.keys() - _KNOWN:
        raise ValueError(f"{folder}: {sorted(unknown)} of a kustomization are not modelled")
    if there.get("generatorOptions", {}) != {"disableNameSuffixHash": True} and there.get("configMapGenerator"):
        raise ValueError(f"{folder}: the generated names would end in a hash")
    found: list[Resource] = []
    for name in there["resources"]:
        path = folder / name
        found += build(path) if path.is_dir() else load(path)
    for made in there.get("configMapGenerator", ()):
        _generate(found, made)
    for patch in there.get("patches", ()):
        found = _patched(found, patch, folder)
    for resource in found:
        if (space := there.get("namespace")) and resource["kind"] not in _OF_THE_CLUSTER:
            resource["metadata"]["namespace"] = space
        for image in there.get("images", ()):
            _name_image(resource, image)
    return found


def load(path: Path) -> list[Resource]:
    """The documents of a file. A second key of one name, which YAML forbids and PyYAML takes, is refused."""
    return [copy.deepcopy(one) for one in yaml.load_all(path.read_text(), Loader=_Strict)]  # no object is in two places


class _Strict(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        self.flatten_mapping(node)
        if doubled := {key for key in keys if keys.count(key) > 1}:
            raise yaml.constructor.ConstructorError(None, None, f"{sorted(doubled)} stand twice in a mapping", node.start_mark)
        # What is merged in stands first, so a key of the mapping itself replaces it.
        return super().construct_mapping(node, deep)


def _generate(resources: list[Resource], made: dict[str, Any]) -> None:
    data = dict(literal.split("=", 1) for literal in made["literals"])
    there = [one for one in resources if (one["kind"], one["metadata"]["name"]) == ("ConfigMap", made["name"])]
    if made.get("behavior", "create") == "merge":
        if len(there) != 1:
            raise ValueError(f"ConfigMap {made['name']} is not there to be merged with")
        there[0]["data"] |= data
    elif there:
        raise ValueError(f"ConfigMap {made['name']} is there already")
    else:
        resources.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": made["name"]}, "data": data})


def _patched(resources: list[Resource], patch: dict[str, Any], folder: Path) -> list[Resource]:
    """By a JSON patch (RFC 6902), or without the resource that `$patch: delete` names."""
    content = yaml.safe_load(patch["patch"] if "patch" in patch else (folder / patch["path"]).read_text())
    if isinstance(content, dict) and content.get("$patch") != "delete":
        raise ValueError(f"{folder}: merging patches are not modelled: how lists are merged depends on schemas")
    target = patch.get("target") or {"kind": content["kind"], "name": content["metadata"]["name"]}
    meant = [one for one in resources if (one["kind"], one["metadata"]["name"]) == (target["kind"], target["name"])]
    if len(meant) != 1:
        raise ValueError(f"{folder}: a patch is for {target}, of which there are {len(meant)}")
    if isinstance(content, dict):
        return [one for one in resources if one is not meant[0]]
    return [jsonpatch.apply_patch(one, content) if one is meant[0] else one for one in resources]


def _name_image(resource: Any, image: dict[str, str]) -> None:
    """In every container, at whatever depth."""
    if isinstance(resource, list):
        for one in resource:
            _name_image(one, image)
    elif isinstance(resource, dict):
        for container in [*resource.get("containers", ()), *resource.get("initContainers", ())]:
            if container.get("image", "").partition(":")[0] == image["name"]:
                container["image"] = f"{image.get('newName', image['name'])}:{image['newTag']}"
        for one in resource.values():
            _name_image(one, image)
