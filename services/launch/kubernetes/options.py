"""The section `[launcher.kubernetes]` of a cluster file, decoded strictly. Pure."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Volume(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A volume that all pods mount.

    Attributes:
        name: of the volume.
        mount: the folder where it is seen.
        source: as a pod has it, such as `{ persistentVolumeClaim = { claimName = "models" } }`.
        writable: whether pods may write to it.
    """

    name: str
    mount: str
    source: dict[str, Any]
    writable: bool = False


class KubernetesOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What Kubernetes needs to know beside the cluster's own description.

    Attributes:
        image: with asyncfabric and what its nodes need, and `sh`.
        pull_policy: when the image is pulled.
        link_key: `secret`: a Secret that the user makes has the key; `generate`: a new key is printed with the objects.
        secret: name of the Secret of the link key; empty: NAME-link-key.
        environment_from: further Secrets whose keys become variables, such as ASYNCFABRIC_API__KEY.
        service: type of the router's Service.
        gpu: the resource of one GPU.
        shared_memory: bound of /dev/shm, as Kubernetes writes it ("8Gi"); empty: the memory of the pod.
        leader_workers: group -> worker pods beside each leader, for an engine over several hosts.
        volumes: that all pods mount.
        pod: further fields of each pod (nodeSelector, tolerations, imagePullSecrets ...).
        pods: group -> further fields of its pods.
    """

    image: str
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    link_key: Literal["secret", "generate"] = "secret"
    secret: str = ""
    environment_from: list[str] = []
    service: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    gpu: str = "nvidia.com/gpu"
    shared_memory: str = ""
    leader_workers: dict[str, int] = {}
    volumes: list[Volume] = []
    pod: dict[str, Any] = {}
    pods: dict[str, dict[str, Any]] = {}
