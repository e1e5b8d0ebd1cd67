"""The actor that runs one node: `asyncfabric serve` is a child process of it, so that they share no event loop.

Lives in a worker of Ray. One thread starts the child, waits for it and, when the child ends unasked, ends the actor:
what is restarted, and where, is for Ray to decide. The child ends with that thread. Methods run in other threads.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping

import msgspec
import ray

from asyncfabric_services.launch.launcher import LaunchedNode, NodeState
from asyncfabric_services.launch.local_node import PROGRAM
from asyncfabric_services.launch.plan import DIRECTORY, NodePlan
from asyncfabric_services.launch.ray.addresses import ClusterAddresses
from asyncfabric_services.settings.keys import all_keys
from asyncfabric_services.settings.sources import PREFIX, load_settings

LOOK_SECONDS = 0.5
AGAIN_SECONDS = 2.0
END_SECONDS = 10.0
READ_SECONDS = 1.0
LOG_LINES = 20
BIND, KEYS, RAILS = (all_keys()[f"cluster.{name}"].variable for name in ("bind", "keys", "rails"))


class Announced(msgspec.Struct):
    """What a node prints when it listens."""

    listening: str
    link: str


class NodeActor:
    """One node of a cluster.

    Args:
        cluster: its name.
        plan: of the node.
        key: text of the key file of the cluster's links; "" for none. It is kept in memory, and on no disk.
    """

    def __init__(self, cluster: str, plan: NodePlan, key: str) -> None:
        self._addresses = ClusterAddresses(cluster)
        self._plan = plan
        self._key = key
        self._host = ray.util.get_node_ip_address()
        self._restarts = self._addresses.count(f"restarts/{plan.name}")
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._child: subprocess.Popen[str] | None = None
        self._announced = Announced("", "")
        self._reason = ""
        self._ending = False
        self._settled = threading.Event()  # it listens, or its first start failed
        threading.Thread(target=self._keep, name=f"node {plan.name}", daemon=True).start()

    def started(self) -> LaunchedNode:
        """Wait until the node listens, or failed at its first start; return it."""
        self._settled.wait()
        return self.report()

    def report(self) -> LaunchedNode:
        """Return the node as it is now."""
        state: NodeState = "failed" if self._reason else "running" if self._announced.link else "starting"
        plan = self._plan
        at = (self._announced.listening, self._announced.link)
        return LaunchedNode(plan.name, plan.group, plan.role, state, *at, self._restarts, self._reason)

    def stop(self) -> int:
        """Have the node drain and end; return its exit status. Killed when it takes longer than its drain."""
        self._ending = True
        return self._end() if self._child is not None else 0

    def _keep(self) -> None:
        try:
            while self._run(self._directories()):  # again when one came back elsewhere: it would not be found
                pass
        except BaseException as error:
            self._log.append(f"{type(error).__name__}: {error}")
        if self._ending:
            return
        if self._settled.is_set() or self._restarts:
            if not self._announced.link:
                time.sleep(AGAIN_SECONDS)
            os._exit(1)  # Ray starts the actor again, here or elsewhere
        self._reason = "\n".join(self._log) or "it ended without a word"
        self._settled.set()

    def _run(self, directories: dict[str, str]) -> bool:
        """Run the node until it ends; return whether it was ended because a directory is elsewhere now."""
        plan = self._plan.joined(",".join(directories.values()))
        self._announced = Announced("", "")
        child = self._child = self._spawn(plan)
        if self._ending:
            child.terminate()
        readers = [threading.Thread(target=one, args=(child,), daemon=True) for one in (self._forward, self._announce)]
        for reader in readers:
            reader.start()
        while child.poll() is None:
            time.sleep(LOOK_SECONDS)
            # Also before it listens: it waits for a directory, and may have begun with the address of one that died.
            now = self._addresses.below(DIRECTORY) if directories else {}
            if any(now.get(name, address) != address for name, address in directories.items()):
                self._end()
                return not self._ending
        for reader in readers:
            reader.join(READ_SECONDS)
        return False

    def _announce(self, child: subprocess.Popen[str]) -> None:
        """Take the line that a node prints when it listens."""
        assert child.stdout is not None
        if line := child.stdout.readline():
            self._announced = msgspec.json.decode(line, type=Announced)
            if self._plan.role == DIRECTORY:
                self._addresses.put(self._own_place, self._announced.link)
            self._settled.set()

    @property
    def _own_place(self) -> str:
        """Where a directory leaves its address."""
        return f"{DIRECTORY}/{self._plan.name}"

    def _directories(self) -> dict[str, str]:
        """Return the link addresses of the directories by name, once there are any; nothing for a directory itself."""
        if self._plan.role == DIRECTORY:
            return {}
        while not (addresses := self._addresses.below(DIRECTORY)):
            time.sleep(LOOK_SECONDS)
        return addresses

    def _spawn(self, plan: NodePlan) -> subprocess.Popen[str]:
        variables = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        variables |= {RAILS: f"local,tcp?address={self._host}"} | plan.environment
        variables[BIND] = f"tcp://{self._host}:{self._port()}"
        passed = []
        if self._key:
            passed = [_memory_file(self._key)]
            variables[KEYS] = f"/proc/self/fd/{passed[0]}"
        if plan.role == "trainer":
            variables |= self._meeting(variables)
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, *plan.arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=variables,
                pass_fds=passed,
                start_new_session=True,
                text=True,
            )
        finally:
            for handle in passed:
                os.close(handle)

    def _port(self) -> int:
        return self._addresses.port_at(self._own_place, self._host) if self._plan.role == DIRECTORY else 0

    def _meeting(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return where the ranks of a training meet: rank 0 chooses it, the others wait for its choice."""
        place = f"ranks/{self._plan.group}"
        if variables["RANK"] == "0":
            self._addresses.put(place, f"{self._host}:{self._addresses.port_at(place, self._host)}")
        while not (address := self._addresses.get(place)):
            time.sleep(LOOK_SECONDS)
        host, _, port = address.rpartition(":")
        return {"MASTER_ADDR": host, "MASTER_PORT": port}

    def _forward(self, child: subprocess.Popen[str]) -> None:
        """Pass what the node logs on to Ray, which keeps the logs of its workers."""
        assert child.stderr is not None
        for line in child.stderr:
            self._log.append(line.rstrip())
            print(f"{self._plan.name}: {line}", end="", file=sys.stderr, flush=True)

    def _end(self) -> int:
        assert self._child is not None
        known = {name: value for name, value in self._plan.environment.items() if name.startswith(PREFIX)}
        self._child.send_signal(signal.SIGTERM)
        try:
            return self._child.wait(load_settings(environment=known).settings.http.drain + END_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.wait()


def _memory_file(text: str) -> int:
    """Return a descriptor of a file in memory that this user alone may read; its name is /proc/self/fd/N."""
    handle = os.memfd_create("link.key", 0)
    os.fchmod(handle, 0o600)
    os.write(handle, text.encode())
    return handle
