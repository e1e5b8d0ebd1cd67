"""The objects of a cluster as a Helm chart: image, counts and resources become values. Pure."""

from __future__ import annotations

import copy
import json
from pathlib import Path

from asyncfabric_services.launch.kubernetes.objects import cluster_objects
from asyncfabric_services.launch.kubernetes.pods import Fields
from asyncfabric_services.launch.kubernetes.yaml_text import Template, yaml_text
from asyncfabric_services.launch.spec import ClusterSpec
from asyncfabric_services.settings.keys import SettingsError

GROUP = "app.kubernetes.io/component"
VERSION = "0.1.0"


def chart_files(spec: ClusterSpec, file: Path) -> dict[str, str]:
    """Return the files of a chart by path; `file` is where the cluster is described.

    Raises SettingsError as `cluster_objects` does, and for a new key: charts are kept and shared.
    """
    objects = cluster_objects(spec)
    if any(each["kind"] == "Secret" for each in objects):
        raise SettingsError('a chart holds no key: leave link_key = "secret", and make the Secret by kubectl')
    values: Fields = {"nodes": {}}
    files = {}
    for each in objects:
        rendered = _with_values(spec, copy.deepcopy(each), values)
        path = f"templates/{each['metadata']['name']}-{each['kind'].lower()}.yaml"
        files[path] = yaml_text(rendered, quoted=_literal)
    about = {"apiVersion": "v2", "name": spec.name, "version": VERSION, "description": f"The cluster of {file.name}."}
    return {"Chart.yaml": yaml_text(about), "values.yaml": yaml_text(values), **files}


def _with_values(cluster: ClusterSpec, each: Fields, values: Fields) -> Fields:
    """Put expressions into a workload, and what they stand for into the values.

    The number of directories, and of ranks where there is one, is no value: other objects would be needed for others.
    """
    if each["kind"] not in ("Deployment", "LeaderWorkerSet"):
        return each
    spec, group = each["spec"], each["metadata"]["labels"][GROUP]
    inner = spec.get("leaderWorkerTemplate", spec)
    pods = [inner[name]["spec"] for name in ("template", "leaderTemplate", "workerTemplate") if name in inner]
    node = pods[0]["containers"][0]
    values.setdefault("image", node["image"])
    values["nodes"][group] = {"resources": node["resources"]}
    ranks = cluster.role_of(group) == "trainer"
    if cluster.role_of(group) != "directory" and not (ranks and inner is spec):
        counted, where = (inner, "size") if ranks else (spec, "replicas")
        values["nodes"][group] = {"count": counted[where]} | values["nodes"][group]
        counted[where] = _value("nodes", group, "count")
    for pod in pods:
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            container["image"] = _value("image")
            if "resources" in container:
                container["resources"] = _value("nodes", group, "resources")
    return each


def _value(*path: str) -> Template:
    return Template(f"{{{{ index .Values {' '.join(map(json.dumps, path))} | toJson }}}}")


def _literal(text: str) -> str:
    """Return text that Helm writes as it is: braces open expressions."""
    return text.replace("{{", '{{ "{{" }}')
