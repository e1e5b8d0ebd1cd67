"""The pods of `up --print kubernetes`, run as processes: variables, key, doctor, probes, names and drain fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

for needed in ("torch", "transformers", "yaml", "hypercorn"):
    pytest.importorskip(needed, reason=f"the pods need {needed}")

import yaml  # noqa: E402
from availability import need  # noqa: E402
from hosts import open_hosts  # noqa: E402
from kubelet import Pod  # noqa: E402
from plain_model import PlainModel  # noqa: E402

from asyncfabric_services.launch.kubernetes.objects import cluster_text  # noqa: E402
from asyncfabric_services.launch.kubernetes.pods import LEAVE_SECONDS  # noqa: E402
from asyncfabric_services.launch.spec import spec_of  # noqa: E402
from asyncfabric_services.runner.model import ModelChoice  # noqa: E402

pytestmark = pytest.mark.slow
PROMPT, COUNT = "What Kubernetes runs. ", 12
TINY = {"layers": 3, "hidden": 64, "query_heads": 4, "kv_heads": 2}
CLUSTER = {
    "name": "chat",
    "settings": {"model": TINY, "cache": {"memory": "16MiB"}, "http": {"drain": "20s"}},
    "nodes": {"directory": {}, "prefill": {}, "decode": {}, "router": {}},
    "launcher": {"kubernetes": {"image": "none", "link_key": "generate"}},
}


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[dict[str, Pod]]:
    """Return a pod of each group; its headless Service leads to it."""
    need("tcp")
    objects = list(yaml.safe_load_all(cluster_text(spec_of(CLUSTER), Path("cluster.toml"))))
    workloads = [each for each in objects if each["kind"] == "Deployment"]
    headless = [each for each in objects if each["kind"] == "Service" and each["spec"].get("clusterIP") == "None"]
    with open_hosts(len(workloads)) as hosts:
        names = tmp_path / "hosts"
        found = [Pod(each, host, objects, names, tmp_path) for each, host in zip(workloads, hosts, strict=True)]
        lines = [
            f"{pod.host.address} {service['metadata']['name']}"
            for service in headless
            for pod in found
            if service["spec"]["selector"].items() <= pod.labels.items()
        ]
        names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        try:
            yield {pod.labels["app.kubernetes.io/component"]: pod for pod in found}
        finally:
            for pod in found:
                pod.kill()


def test_the_printed_pods_answer_and_drain_before_they_end(pods: dict[str, Pod]) -> None:
    router = pods["router"]
    with ThreadPoolExecutor(len(pods)) as threads:
        list(threads.map(Pod.start, pods.values()))
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        for pod in pods.values():
            pod.until(probe)

    def ask(count: int, name: str) -> str:
        body = json.dumps({"model": "asyncfabric-random", "prompt": PROMPT, "max_tokens": count, "temperature": 0})
        status, answer = router.ask("POST", "/v1/completions", body, name)
        assert status == 200, answer
        text: str = json.loads(answer)["choices"][0]["text"]
        return text

    model = PlainModel(ModelChoice(**TINY), 2048)
    assert ask(COUNT, "chat:8000") == model.text(PROMPT, COUNT)
    with ThreadPoolExecutor(1) as threads:
        long = threads.submit(ask, 120, "chat.trial.svc.cluster.local")
        while "asyncfabric_node_inside_requests 1.0" not in pods["decode"].ask("GET", "/metrics")[1]:
            assert not long.done(), "the request has ended before its node"
        pods["decode"].delete()  # within its grace period
        assert long.result() == model.text(PROMPT, 120)
    assert router.delete() >= LEAVE_SECONDS
    assert {name: pod.probe("livenessProbe") for name, pod in pods.items()} == {
        "directory": True,
        "prefill": True,
        "decode": False,
        "router": False,
    }
