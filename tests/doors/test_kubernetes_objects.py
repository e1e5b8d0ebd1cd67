"""What `up --print kubernetes` and `--print helm` make, against the published schemas and Helm's own engine."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from helm_python.chart import Chart, lint

from asyncfabric.control.keys import read_keys
from asyncfabric_services.launch.kubernetes.chart import chart_files
from asyncfabric_services.launch.kubernetes.objects import cluster_objects, cluster_text
from asyncfabric_services.launch.spec import ClusterSpec, spec_of
from asyncfabric_services.settings.keys import SettingsError

Fields = dict[str, Any]
VERSIONS = ("1.29", "1.37")
WARNING = 2
FILE = Path("cluster.toml")
BRACES = '{"speculative_config": {"a": {"b": {{1}}}}}'
CLUSTER: Fields = {
    "name": "chat",
    "settings": {"http": {"drain": "90s"}},
    "nodes": {
        "directory": {},
        "prefill": {
            "count": 2,
            "resources": {"cpus": 1.5, "gpus": 1, "memory": "16GiB", "rdma": {"rdma/hca_shared_devices_a": 1}},
        },
        "decode-large": {"count": 2, "role": "decode", "engine": "vllm", "settings": {"engine": {"args": BRACES}}},
        "router": {},
        "coordinator": {},
        "trainer": {"count": 2},
        "rollout": {},
    },
    "launcher": {
        "kubernetes": {
            "image": "registry.example/asyncfabric:1",
            "leader_workers": {"decode-large": 1},
            "environment_from": ["chat-api"],
            "shared_memory": "8Gi",
            "volumes": [{"name": "models", "mount": "/m", "source": {"persistentVolumeClaim": {"claimName": "m"}}}],
            "pod": {"nodeSelector": {"pool": "gpu"}},
            "pods": {"router": {"nodeSelector": {"pool": "cpu"}}},
        }
    },
}
# LeaderWorkerSet: the fields that we print, as api/leaderworkerset/v1/leaderworkerset_types.go of
# github.com/kubernetes-sigs/lws has them. Templates of pods are checked by Kubernetes' own schema.
TEMPLATE = {"type": "object", "required": ["metadata", "spec"]}
LEADER_WORKER_SET = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "required": ["leaderWorkerTemplate"],
            "additionalProperties": False,
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "leaderWorkerTemplate": {
                    "type": "object",
                    "required": ["workerTemplate"],
                    "additionalProperties": False,
                    "properties": {
                        "leaderTemplate": TEMPLATE,
                        "workerTemplate": TEMPLATE,
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                    },
                },
            },
        },
    },
}


def cluster(**options: Any) -> ClusterSpec:
    document = copy.deepcopy(CLUSTER)
    document["launcher"]["kubernetes"] |= options
    return spec_of(document)


def check(each: Fields, version: str) -> None:
    """Validate one object; of a LeaderWorkerSet each template as if it were a Deployment's."""
    if each["kind"] != "LeaderWorkerSet":
        kubernetes_validate.validate(each, version, strict=True)
        return
    jsonschema.validate(each, LEADER_WORKER_SET)
    for name, template in each["spec"]["leaderWorkerTemplate"].items():
        if name.endswith("Template"):
            spec = {"selector": {"matchLabels": template["metadata"]["labels"]}, "template": template}
            alike = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": each["metadata"], "spec": spec}
            kubernetes_validate.validate(alike, version, strict=True)


def named(objects: list[Fields]) -> dict[tuple[str, str], Fields]:
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert len(found) == len(objects), "two objects have one name"
    return found


def written(files: dict[str, str], folder: Path) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("version", VERSIONS)
def test_all_objects_fit_the_published_schemas(version: str) -> None:
    objects = cluster_objects(cluster(link_key="generate"))
    assert {each["kind"] for each in objects} == {"Secret", "ConfigMap", "Service", "Deployment", "LeaderWorkerSet"}
    for each in objects:
        check(each, version)


def test_the_check_refuses_a_misspelled_field_of_a_pod() -> None:
    for each in cluster_objects(cluster(pod={"nodeSelectors": {}})):
        if each["kind"] in ("Deployment", "LeaderWorkerSet"):
            with pytest.raises(kubernetes_validate.ValidationError):
                check(each, VERSIONS[-1])


def test_the_printed_text_is_the_objects_and_holds_no_key() -> None:
    text = cluster_text(cluster(), FILE)
    assert list(yaml.safe_load_all(text)) == cluster_objects(cluster())
    assert "kind: Secret" not in text and "kubectl create secret generic chat-link-key" in text


def test_a_generated_key_is_one_that_nodes_read(tmp_path: Path) -> None:
    secret = named(cluster_objects(cluster(link_key="generate")))["Secret", "chat-link-key"]["stringData"]
    (tmp_path / "link.key").write_text(secret["link.key"])
    (tmp_path / "link.key").chmod(0o600)
    assert read_keys(tmp_path / "link.key").public == secret["public"]


def test_pods_get_what_their_group_asks_for() -> None:
    objects = named(cluster_objects(cluster()))
    pod = objects["Deployment", "chat-prefill"]["spec"]["template"]["spec"]
    node = pod["containers"][0]
    assert pod["terminationGracePeriodSeconds"] > 90
    devices = {"rdma/hca_shared_devices_a": "1", "nvidia.com/gpu": "1", "memory": "16Gi"}
    assert node["resources"] == {"requests": {"cpu": "1.5", **devices}, "limits": devices}
    assert node["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}
    assert [one["name"] for one in pod["initContainers"]] == ["key", "doctor"]
    assert pod["nodeSelector"] == {"pool": "gpu"}
    assert objects["Deployment", "chat-router"]["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "cpu"}
    assert objects["LeaderWorkerSet", "chat-trainer"]["spec"]["leaderWorkerTemplate"]["size"] == 2
    engine = objects["LeaderWorkerSet", "chat-decode-large"]["spec"]
    assert (engine["replicas"], engine["leaderWorkerTemplate"]["size"]) == (2, 2)
    assert objects["ConfigMap", "chat-decode-large"]["data"]["ASYNCFABRIC_ENGINE__ARGS"] == BRACES


def test_other_settings_are_other_pods() -> None:
    before, after = (
        named(cluster_objects(spec_of({**CLUSTER, "settings": {"http": {"drain": drain}}}))) for drain in ("90s", "91s")
    )
    for name in ("chat-prefill", "chat-router"):
        templates = [each["Deployment", name]["spec"]["template"]["metadata"] for each in (before, after)]
        assert templates[0] != templates[1]


def test_the_chart_renders_to_the_very_objects(tmp_path: Path) -> None:
    folder = written(chart_files(cluster(), FILE), tmp_path / "chart")
    rendered = [yaml.safe_load(text) for text in Chart.load(folder).render().values()]
    assert named(rendered) == named(cluster_objects(cluster()))
    report = lint(folder, strict=True)
    assert [one for one in report["messages"] if one["severity"] >= WARNING] == [] == report["errors"]


def test_values_change_counts_image_and_resources(tmp_path: Path) -> None:
    folder = written(chart_files(cluster(), FILE), tmp_path / "chart")
    values: Fields = {
        "image": "other:2",
        "nodes": {"prefill": {"count": 5, "resources": {"limits": {"memory": "1Gi"}}}, "decode-large": {"count": 3}},
    }
    rendered = named([yaml.safe_load(text) for text in Chart.load(folder).render(values).values()])
    changed = spec_of(
        {
            **CLUSTER,
            "nodes": {
                **CLUSTER["nodes"],
                "prefill": {"count": 5},
                "decode-large": {**CLUSTER["nodes"]["decode-large"], "count": 3},
            },
            "launcher": {"kubernetes": {**CLUSTER["launcher"]["kubernetes"], "image": "other:2"}},
        }
    )
    expected = named(cluster_objects(changed))
    for kind, name in (("Deployment", "chat-router"), ("LeaderWorkerSet", "chat-decode-large")):
        assert rendered[kind, name] == expected[kind, name]
    prefill = rendered["Deployment", "chat-prefill"]["spec"]
    assert prefill["replicas"] == 5
    assert prefill["template"]["spec"]["containers"][0]["resources"] == {
        "limits": {"memory": "1Gi", "nvidia.com/gpu": "1", "rdma/hca_shared_devices_a": "1"},
        "requests": {"cpu": "1.5", "memory": "16Gi", "nvidia.com/gpu": "1", "rdma/hca_shared_devices_a": "1"},
    }, "Helm merges maps of values"


def test_what_kubernetes_cannot_run_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="chart holds no key"):
        chart_files(cluster(link_key="generate"), FILE)
    with pytest.raises(SettingsError, match="decod: no such group"):
        cluster_objects(cluster(leader_workers={"decod": 1}))
    with pytest.raises(SettingsError, match="ASYNCFABRIC_API__KEY"):
        cluster_objects(spec_of({**CLUSTER, "settings": {"api": {"key": ["0123456789abcdef"]}}}))
    with pytest.raises(SettingsError, match="too long"):
        cluster_objects(spec_of({**CLUSTER, "name": "a" * 40}))
    with pytest.raises(SettingsError, match=r"launcher\.kubernetes.*image"):
        cluster_objects(spec_of({**CLUSTER, "launcher": {}}))
