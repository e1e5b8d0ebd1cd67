"""What a kubelet does with a pod, as far as our pods go: containers as processes of a host, from the printed objects.

A pod is a host of its own (network namespace), its containers have a pid and a mount namespace: PID 1 is the node, and
volumes, /etc/hosts and /dev/shm are where the objects put them. Probes and hooks run as they are written.
"""

from __future__ import annotations

import http.client
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import processes
from hosts import Host

Fields = dict[str, Any]
PATIENCE = 90.0
SETUP = """
mount -t tmpfs scratch {scratch} && mkdir {scratch}/upper {scratch}/work
mount -t overlay overlay -o lowerdir=/etc,upperdir={scratch}/upper,workdir={scratch}/work /etc
mount --bind {hosts} /etc/hosts
{mounts}
exec {command}
"""
VARIABLE = re.compile(r"\$\(([A-Z_]+)\)")


class Pod:
    """One pod of a workload.

    Args:
        workload: a Deployment among the objects.
        host: where it runs.
        objects: of the cluster, ConfigMaps and Secrets among them.
        hosts: a file as /etc/hosts, with the names of Services.
        folder: for volumes and the log.
    """

    def __init__(self, workload: Fields, host: Host, objects: list[Fields], hosts: Path, folder: Path) -> None:
        self.host = host
        self.labels = workload["spec"]["template"]["metadata"]["labels"]
        self.name = f"{workload['metadata']['name']}-7d9c-{host.port}"
        self.spec = workload["spec"]["template"]["spec"]
        self.log = folder / f"{self.name}.log"
        self._objects = {(each["kind"], each["metadata"]["name"]): each for each in objects}
        self._hosts = hosts
        self._folder = folder / self.name
        self._volumes = {volume["name"]: self._volume(volume) for volume in self.spec["volumes"]}
        self.node = self.spec["containers"][0]

    def start(self) -> None:
        """Run the first containers, one after the other, and start the node."""
        with self.log.open("ab") as log:
            for container in self.spec["initContainers"]:
                status = self._process(container, log).wait(PATIENCE)
                assert status == 0, f"{container['name']} of {self.name} ended with {status}: {self.log.read_text()}"
            self._unshare = self._process(self.node, log)

    def probe(self, name: str) -> bool:
        """Return whether a probe of the node succeeds."""
        asked = self.node[name]["httpGet"]
        try:
            return 200 <= self.ask("GET", asked["path"])[0] < 400
        except OSError:
            return False

    def until(self, probe: str) -> None:
        """Wait until a probe succeeds, as often as its period and its threshold let it."""
        deadline = time.monotonic() + PATIENCE
        while not self.probe(probe):
            assert self._unshare.poll() is None and time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.1)

    def ask(self, method: str, path: str, body: str | None = None, name: str = "") -> tuple[int, str]:
        """Ask the node from its host, by the name of a Service if there is one; return status and body."""
        port = next(one["containerPort"] for one in self.node["ports"] if one["name"] == "http")
        headers = {"host": name, "content-type": "application/json"} if name else {}
        with self.host.inside():
            connection = http.client.HTTPConnection(self.host.address, port, timeout=PATIENCE)
            connection.connect()
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def delete(self) -> float:
        """Run the preStop hook and wait for the node, as long as the pod has; return how long it took."""
        begun = time.monotonic()
        hook = self.node["lifecycle"]["preStop"]["exec"]["command"]
        pid = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text().split()[0]
        subprocess.run(["nsenter", "-t", pid, "-m", "-p", *hook], timeout=PATIENCE)
        self._unshare.wait(max(0.0, self.spec["terminationGracePeriodSeconds"] - (time.monotonic() - begun)))
        return time.monotonic() - begun

    def kill(self) -> None:
        """End whatever is left of it."""
        unshare = getattr(self, "_unshare", None)
        if unshare is not None and unshare.poll() is None:
            unshare.send_signal(signal.SIGKILL)
            unshare.wait(PATIENCE)

    def _process(self, container: Fields, log: Any) -> subprocess.Popen[bytes]:
        variables = self._variables(container)
        mounts = []
        for mount in container["volumeMounts"]:
            source, target = shlex.quote(str(self._volumes[mount["name"]])), mount["mountPath"]
            mounts.append(f"mkdir -p {target} && mount --bind {source} {target}")
        scratch = self._folder / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        command = shlex.join(_filled(word, variables) for word in container["command"])
        script = SETUP.format(scratch=scratch, hosts=self._hosts, mounts=" && ".join(mounts), command=command)
        unshare = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-ec", script]
        image = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": "/root"}
        child = subprocess.Popen([*self.host.prefix, *unshare], env={**image, **variables}, stdout=log, stderr=log)
        processes.started.append(child.pid)
        return child

    def _variables(self, container: Fields) -> dict[str, str]:
        fields = {"metadata.name": self.name, "metadata.namespace": "trial", "status.podIP": self.host.address}
        found: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            found |= self._objects["ConfigMap", source["configMapRef"]["name"]]["data"]
        for variable in container.get("env", ()):
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                value = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                asked = source["secretKeyRef"]
                value = self._objects["Secret", asked["name"]]["stringData"][asked["key"]]
            else:
                value = _filled(variable["value"], found)
            found[variable["name"]] = value
        return found

    def _volume(self, volume: Fields) -> Path:
        folder = self._folder / volume["name"]
        folder.mkdir(parents=True)
        if "secret" in volume:
            data = self._objects["Secret", volume["secret"]["secretName"]]["stringData"]
            for item in volume["secret"]["items"]:
                (folder / item["path"]).write_text(data[item["key"]])
                (folder / item["path"]).chmod(0o644)  # the default of Kubernetes
        else:
            assert volume["emptyDir"]["medium"] == "Memory"
        return folder


def _filled(text: str, variables: dict[str, str]) -> str:
    """Return text with variables filled in; like Kubernetes, leave those that are not known yet."""
    return VARIABLE.sub(lambda found: variables.get(found[1], found[0]), text)
