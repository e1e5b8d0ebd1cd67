"""All objects of a cluster on Kubernetes, in the order in which they are applied. Pure but for a key that is asked for.

A group is a Deployment with a headless Service, whose pods have link addresses of their own; the router has a Service
for clients beside it. Ranks of a training, and engines over several hosts, are sets of the kind LeaderWorkerSet
(leaderworkerset.x-k8s.io).
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from asyncfabric_services.launch.kubernetes.options import KubernetesOptions
from asyncfabric_services.launch.kubernetes.pods import (
    KEY_FILE,
    LINK_PORT,
    Fields,
    PodPlan,
    leader_spec,
    pod_plan,
    pod_spec,
    worker_spec,
)
from asyncfabric_services.launch.kubernetes.yaml_text import yaml_documents
from asyncfabric_services.launch.plan import DIRECTORY
from asyncfabric_services.launch.spec import ClusterSpec
from asyncfabric_services.settings.keys import SettingsError

SECRET_TEXT = """# before, once:
#   kubectl create secret generic {secret} --from-literal=public="$(asyncfabric keys new link.key)" --from-file=link.key
"""
LONGEST_NAME = 45  # of cluster and group; Kubernetes appends two words to it for a pod, 63 at most


def cluster_text(spec: ClusterSpec, file: Path) -> str:
    """Return what `up --print kubernetes` prints; `file` is where the cluster is described. Raises SettingsError."""
    how = f"# The cluster {spec.name}, from {file.name}: kubectl apply -f FILE\n"
    if spec.launcher_section("kubernetes", KubernetesOptions).link_key == "secret":
        secret = pod_plan(spec, next(iter(spec.nodes))).secret
        how += SECRET_TEXT.format(secret=secret) if secret else ""
    return how + yaml_documents(cluster_objects(spec))


def cluster_objects(spec: ClusterSpec) -> list[Fields]:
    """Return the objects of a cluster.

    Raises SettingsError for what Kubernetes cannot run: long names, secrets among settings, unknown groups.
    """
    groups = [pod_plan(spec, name) for name in spec.nodes]
    _check(groups)
    options, directories = groups[0].options, [plan.name for plan in groups if plan.role == DIRECTORY]
    objects = [_new_key(groups[0])] if options.link_key == "generate" and groups[0].secret else []
    for plan in groups:
        objects.append(_object("v1", "ConfigMap", plan.name, plan.labels, data=dict(plan.environment)))
        objects.append(_service(plan, plan.name, headless=True))
        if plan.role == "router":
            objects.append(_service(plan, plan.cluster, headless=False))
    return objects + [_workload(plan, spec.nodes[plan.group].count, directories) for plan in groups]


def _check(groups: Sequence[PodPlan]) -> None:
    for plan in groups:
        if len(plan.name) > LONGEST_NAME:
            raise SettingsError(
                f"{plan.name!r} is too long for the names of pods: cluster and group have at most "
                f"{LONGEST_NAME - 1} letters together"
            )
        if plan.settings.api.key:
            raise SettingsError(
                f"api.key of group {plan.group} would stand readable in a ConfigMap: put it into a Secret under the "
                "key ASYNCFABRIC_API__KEY, and name that Secret in environment_from of [launcher.kubernetes]"
            )
    unknown = groups[0].options.leader_workers.keys() - {plan.group for plan in groups if plan.role != "trainer"}
    if unknown:
        raise SettingsError(
            f"leader_workers of [launcher.kubernetes] names {', '.join(sorted(unknown))}: no such group"
        )


def _workload(plan: PodPlan, count: int, directories: Sequence[str]) -> Fields:
    if plan.role == DIRECTORY and count > 1:
        raise SettingsError(
            f"nodes.{plan.group} has {count} directories, and on Kubernetes each needs a Service of its own: write "
            f'groups of one node each, such as [nodes.{plan.group}-b] with role = "directory"'
        )
    workers = plan.options.leader_workers.get(plan.group, 0)
    if plan.role == "trainer" and count > 1:
        return _leader_set(plan, 1, count, workerTemplate=_template(plan, pod_spec(plan, directories, ranks=True)))
    if workers:
        leader, worker = _template(plan, leader_spec(plan, directories)), _template(plan, worker_spec(plan))
        worker["metadata"]["labels"] = {**plan.labels, "app.kubernetes.io/component": f"{plan.group}-worker"}
        return _leader_set(plan, count, workers + 1, leaderTemplate=leader, workerTemplate=worker)
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    spec = {
        "replicas": count,
        "strategy": {"type": "Recreate"} if plan.role == DIRECTORY else rolling,
        "selector": {"matchLabels": plan.labels},
        "template": _template(plan, pod_spec(plan, directories)),
    }
    return _object("apps/v1", "Deployment", plan.name, plan.labels, spec=spec)


def _leader_set(plan: PodPlan, replicas: int, size: int, **templates: Fields) -> Fields:
    of_pods = {"size": size, "restartPolicy": "RecreateGroupOnPodRestart", **templates}
    spec = {"replicas": replicas, "leaderWorkerTemplate": of_pods}
    return _object("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", plan.name, plan.labels, spec=spec)


def _template(plan: PodPlan, pod: Fields) -> Fields:
    settings = hashlib.sha256(json.dumps(dict(plan.environment), sort_keys=True).encode()).hexdigest()[:16]
    # Other settings are other pods: without this a changed ConfigMap would reach none that runs.
    return {"metadata": {"labels": plan.labels, "annotations": {"asyncfabric/settings": settings}}, "spec": pod}


def _service(plan: PodPlan, name: str, *, headless: bool) -> Fields:
    ports = [{"name": "http", "port": plan.http_port, "targetPort": "http"}]
    spec: Fields = {"selector": plan.labels}
    if headless:
        # Names of pods that wait resolve too: nodes wait for the directory, and it is ready without them.
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
        ports.insert(0, {"name": "link", "port": LINK_PORT, "targetPort": "link"})
    else:
        spec["type"] = plan.options.service
    return _object("v1", "Service", name, plan.labels, spec=spec | {"ports": ports})


def _new_key(plan: PodPlan) -> Fields:
    from asyncfabric.control.keys import write_keys
    from asyncfabric.control.zmq_wire import make_keys

    public, secret = make_keys()
    with tempfile.TemporaryDirectory() as folder:
        write_keys(Path(folder, KEY_FILE), public, secret)
        text = Path(folder, KEY_FILE).read_text(encoding="ascii")
    labels = {name: value for name, value in plan.labels.items() if not name.endswith("component")}
    return _object("v1", "Secret", plan.secret, labels, type="Opaque", stringData={KEY_FILE: text, "public": public})


def _object(version: str, kind: str, name: str, labels: Fields, **fields: object) -> Fields:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": labels}, **fields}
