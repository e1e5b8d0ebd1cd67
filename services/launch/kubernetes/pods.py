"""The pod of a group of nodes: variables, probes, drain, doctor, key and memory. Pure.

A node listens at the address of its pod, at the same ports in all pods, under the name of the pod. The key of its link
comes out of a Secret and is copied: Kubernetes lets groups read Secrets, and such a key file is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncfabric_services.doctor.finding import PROVIDERS
from asyncfabric_services.launch.kubernetes.options import KubernetesOptions
from asyncfabric_services.launch.plan import DIRECTORY, DIRECTORY_VARIABLE, plan_nodes
from asyncfabric_services.launch.spec import ClusterSpec, Resources
from asyncfabric_services.settings.keys import all_keys
from asyncfabric_services.settings.schema import Settings
from asyncfabric_services.settings.sources import PREFIX, load_settings

LINK_PORT, HTTP_PORT, WORLD_PORT, RAY_PORT = 7400, 8100, 29500, 6379
SECRET_FOLDER, KEY_FOLDER = "/etc/asyncfabric/secret", "/etc/asyncfabric/key"
KEY_FILE = "link.key"
LEAVE_SECONDS = 5
"""How long a router answers when its pod is to end: until no Service leads to it any more."""
DRAIN = "kill -TERM 1; while kill -0 1 2>/dev/null; do sleep 1; done"
"""A node drains at the first SIGTERM and ends at once at a second one: the hook lasts until the node has ended."""
PORT, RAILS = all_keys()["http.port"].variable, all_keys()["cluster.rails"].variable
Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PodPlan:
    """The pods of one group.

    Attributes:
        cluster: name of the cluster.
        group: name of the group.
        role: what its nodes serve.
        http_port: where its nodes answer HTTP.
        environment: variables that are the same in all its pods; they stand in a ConfigMap.
        resources: of each pod.
        options: of the launcher.
    """

    cluster: str
    group: str
    role: str
    http_port: int
    environment: Mapping[str, str]
    resources: Resources
    options: KubernetesOptions

    @property
    def name(self) -> str:
        """The name of the group's objects."""
        return f"{self.cluster}-{self.group}"

    @property
    def labels(self) -> dict[str, str]:
        """What selects its pods."""
        return {
            "app.kubernetes.io/name": "asyncfabric",
            "app.kubernetes.io/instance": self.cluster,
            "app.kubernetes.io/component": self.group,
        }

    @property
    def settings(self) -> Settings:
        """The settings of its nodes, as far as they are the same in all pods."""
        known = {name: value for name, value in self.environment.items() if name.startswith(PREFIX)}
        return load_settings(environment=known).settings

    @property
    def rails(self) -> str:
        """The rails of its nodes: TCP at the address of the pod unless the cluster's file names others."""
        return self.environment.get(RAILS, "tcp?address=$(POD_IP)")

    @property
    def secret(self) -> str:
        """The Secret of the link key; "" for plain TCP."""
        plain = self.settings.cluster.plain_tcp == "allow"
        return "" if plain else self.options.secret or f"{self.cluster}-link-key"


def pod_plan(spec: ClusterSpec, group: str) -> PodPlan:
    """Return the pods of a group of a cluster; raises SettingsError for a wrong section of the launcher."""
    options = spec.launcher_section("kubernetes", KubernetesOptions)
    node = next(plan for plan in plan_nodes(spec.scaled(group, 1)) if plan.group == group)
    environment = {name: value for name, value in node.environment.items() if name not in (PORT, "RANK", "WORLD_SIZE")}
    port = int(node.environment[PORT]) or HTTP_PORT
    return PodPlan(spec.name, group, node.role, port, environment, node.resources, options)


def pod_spec(plan: PodPlan, directories: Sequence[str], *, ranks: bool = False) -> Fields:
    """Return the pod of a node.

    `directories` are the names of their Services; `ranks`: the pod is one of several ranks.
    """
    options = plan.options
    container = _container(
        plan, _variables(plan, directories) + (_rank_variables(ranks) if plan.role == "trainer" else [])
    )
    leave = f"sleep {LEAVE_SECONDS}; " if plan.role == "router" else ""
    node = container | {
        "command": ["asyncfabric", "serve", plan.role],
        "ports": [{"name": "link", "containerPort": LINK_PORT}, {"name": "http", "containerPort": plan.http_port}],
        "startupProbe": _probe("/health/live", periodSeconds=2, failureThreshold=300),  # it loads the model
        "readinessProbe": _probe("/health/ready", periodSeconds=2),
        "livenessProbe": _probe("/health/live", periodSeconds=5, failureThreshold=3),
        "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", leave + DRAIN]}}},
    }
    first = [_copy_key(plan, container)] if plan.secret else []
    asked = [name for name in PROVIDERS if any(rail.startswith(name) for rail in plan.rails.split(","))]
    doctor = ["asyncfabric", "doctor", *(f"--provider={name}" for name in asked)]
    return {
        "terminationGracePeriodSeconds": math.ceil(plan.settings.http.drain) + LEAVE_SECONDS + 10,
        "initContainers": [*first, container | {"name": "doctor", "command": doctor}],
        "containers": [node],
        "volumes": _volumes(plan),
        **options.pod,
        **options.pods.get(plan.group, {}),
    }


def leader_spec(plan: PodPlan, directories: Sequence[str]) -> Fields:
    """Return the pod of a node whose engine has workers on other hosts: the head of their Ray is in it."""
    pod = pod_spec(plan, directories)
    start = f"ray start --head --port={RAY_PORT} && exec asyncfabric serve {plan.role}"
    pod["containers"] = [pod["containers"][0] | {"command": ["sh", "-c", start]}]
    return pod


def worker_spec(plan: PodPlan) -> Fields:
    """Return the pod of a worker of an engine: it joins the Ray of its leader, and is no node."""
    start = ["ray", "start", f"--address=$(LWS_LEADER_ADDRESS):{RAY_PORT}", "--block"]
    volumes = [volume for volume in _volumes(plan) if volume["name"] not in ("link-secret", "link-key")]
    container = _container(plan, [])
    mounts = [mount for mount in container["volumeMounts"] if mount["name"] != "link-key"]
    return {
        "containers": [container | {"command": start, "volumeMounts": mounts}],
        "volumes": volumes,
        **plan.options.pod,
        **plan.options.pods.get(plan.group, {}),
    }


def _variables(plan: PodPlan, directories: Sequence[str]) -> list[Fields]:
    given = plan.environment
    variables = [
        _from_field("POD_NAME", "metadata.name"),
        _from_field("POD_NAMESPACE", "metadata.namespace"),
        _from_field("POD_IP", "status.podIP"),
        _variable("ASYNCFABRIC_NODE__NAME", "$(POD_NAME)"),
        _variable("ASYNCFABRIC_HTTP__HOST", "$(POD_IP)"),
        _variable("ASYNCFABRIC_HTTP__PORT", str(plan.http_port)),
        _variable("ASYNCFABRIC_CLUSTER__BIND", f"tcp://$(POD_IP):{LINK_PORT}"),
    ]
    variables.append(_variable(RAILS, plan.rails))  # here, unlike in a ConfigMap, $(POD_IP) is filled in
    if plan.secret:
        public = {"secretKeyRef": {"name": plan.secret, "key": "public"}}
        variables.append({"name": "LINK_PUBLIC_KEY", "valueFrom": public})
        variables.append(_variable("ASYNCFABRIC_CLUSTER__KEYS", f"{KEY_FOLDER}/{KEY_FILE}"))
    if plan.role != DIRECTORY:
        mark = "curve=$(LINK_PUBLIC_KEY)" if plan.secret else "insecure"
        links = ",".join(f"tcp://{directory}:{LINK_PORT}#{mark}" for directory in directories)
        variables.append(_variable(DIRECTORY_VARIABLE, links))
    if plan.role == "router":
        names = [f"{plan.cluster}.$(POD_NAMESPACE){domain}" for domain in ("", ".svc", ".svc.cluster.local")]
        names += filter(None, [given.get("ASYNCFABRIC_HTTP__NAMES")])
        variables.append(_variable("ASYNCFABRIC_HTTP__NAMES", ",".join(names)))
    return variables


def _rank_variables(ranks: bool) -> list[Fields]:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    several = {
        "RANK": "$(LWS_WORKER_INDEX)",
        "WORLD_SIZE": "$(LWS_GROUP_SIZE)",
        "MASTER_ADDR": "$(LWS_LEADER_ADDRESS)",
    }
    values = {**(several if ranks else alone), "MASTER_PORT": str(WORLD_PORT)}
    return [_variable(name, value) for name, value in values.items()]


def _container(plan: PodPlan, variables: list[Fields]) -> Fields:
    options = plan.options
    mounts: list[Fields] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if plan.secret:
        mounts.append({"name": "link-key", "mountPath": KEY_FOLDER})
    for volume in options.volumes:
        mounts.append(
            {"name": volume.name, "mountPath": volume.mount, **({} if volume.writable else {"readOnly": True})}
        )
    return {
        "name": "node",
        "image": options.image,
        "imagePullPolicy": options.pull_policy,
        **({"env": variables} if variables else {}),
        "envFrom": [
            {"configMapRef": {"name": plan.name}},
            *({"secretRef": {"name": name}} for name in options.environment_from),
        ],
        "resources": _quantities(plan),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            **({"capabilities": {"add": ["IPC_LOCK"]}} if plan.resources.rdma else {}),
        },
        "volumeMounts": mounts,
    }


def _quantities(plan: PodPlan) -> Fields:
    """Return what a pod asks for: memory and devices are bounds too, cores may be more than were asked for."""
    asked, devices = plan.resources, dict(plan.resources.rdma)
    if asked.gpus:
        devices[plan.options.gpu] = asked.gpus
    bounds: Fields = {name: str(count) for name, count in devices.items()}
    if asked.memory_bytes:
        bounds["memory"] = _memory(asked.memory_bytes)
    cores = {"cpu": f"{asked.cpus:g}"} if asked.cpus else {}
    found = {"requests": cores | bounds, "limits": bounds}
    return {name: values for name, values in found.items() if values}


def _memory(length: int) -> str:
    units = ((1 << 30, "Gi"), (1 << 20, "Mi"), (1 << 10, "Ki"))
    return next((f"{length // unit}{name}" for unit, name in units if length % unit == 0), str(length))


def _copy_key(plan: PodPlan, container: Fields) -> Fields:
    copy = ["install", "-m", "600", f"{SECRET_FOLDER}/{KEY_FILE}", f"{KEY_FOLDER}/{KEY_FILE}"]
    mounts = [{"name": "link-secret", "mountPath": SECRET_FOLDER}, {"name": "link-key", "mountPath": KEY_FOLDER}]
    kept = {name: container[name] for name in ("image", "imagePullPolicy")}
    return {"name": "key", **kept, "command": copy, "volumeMounts": mounts}


def _volumes(plan: PodPlan) -> list[Fields]:
    bound = {"sizeLimit": plan.options.shared_memory} if plan.options.shared_memory else {}
    volumes: list[Fields] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory", **bound}}]
    if plan.secret:
        items = [{"key": KEY_FILE, "path": KEY_FILE}]
        volumes.append({"name": "link-secret", "secret": {"secretName": plan.secret, "items": items}})
        volumes.append({"name": "link-key", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}})
    return volumes + [{"name": volume.name, **volume.source} for volume in plan.options.volumes]


def _variable(name: str, value: str) -> Fields:
    return {"name": name, "value": value}


def _from_field(name: str, path: str) -> Fields:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _probe(path: str, **times: int) -> Fields:
    return {"httpGet": {"path": path, "port": "http"}, **times}
