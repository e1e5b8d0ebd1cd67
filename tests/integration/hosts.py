"""What could be several hosts: network namespaces of one address each, at the ports of a switch, with cables to pull.

The switch is a bridge in a namespace of its own, so hosts share nothing but what it forwards.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from availability import namespaces_missing

CARD = "fabric0"
CLONE_NEWNET = 0x40000000
PATIENCE = 60.0

_libc = ctypes.CDLL(None, use_errno=True)


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        namespace: its name for `ip netns`.
        address: its one address, of TEST-NET-1.
        switch: namespace of the switch.
        port: of the switch, where its cable is.
    """

    namespace: str
    address: str
    switch: str
    port: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words in front of a command that make it run here."""
        return ("ip", "netns", "exec", self.namespace)

    def pull(self) -> None:
        """Pull the cable: the card loses its carrier, addresses and connections stay."""
        ip("-n", self.switch, "link", "set", self.port, "down")

    def plug(self) -> None:
        """Put the cable back and wait until the card runs."""
        ip("-n", self.switch, "link", "set", self.port, "up")
        deadline = time.monotonic() + PATIENCE
        # libfabric lists only interfaces that are running, and a veth runs some moments after both ends are up.
        while json.loads(ip("-n", self.namespace, "-j", "link", "show", CARD))[0]["operstate"] != "UP":
            assert time.monotonic() < deadline, f"{CARD} of {self.namespace} did not come up"

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Make sockets of this thread here; they stay here."""
        with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{self.namespace}") as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def open_hosts(count: int) -> Iterator[list[Host]]:
    """Make hosts on one switch; skips the test, loudly, where that is not permitted."""
    if reason := namespaces_missing():
        pytest.skip(f"network namespaces cannot be made here: {reason}")
    switch = f"afsw{os.getpid()}"
    hosts = [
        Host(f"afh{number}x{os.getpid()}", f"192.0.2.{number}", switch, f"p{number}") for number in range(1, count + 1)
    ]
    try:
        try:
            for name in (switch, *(host.namespace for host in hosts)):
                ip("netns", "add", name)
            ip("-n", switch, "link", "add", "switch0", "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces and bridges are not permitted here: {error.stderr.strip()}")
        ip("-n", switch, "link", "set", "switch0", "up")
        for host in hosts:
            ip("-n", switch, "link", "add", host.port, "type", "veth", "peer", "name", CARD, "netns", host.namespace)
            ip("-n", switch, "link", "set", host.port, "master", "switch0")
            ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", CARD)
            ip("-n", host.namespace, "link", "set", CARD, "up")
            ip("-n", host.namespace, "link", "set", "lo", "up")
            host.plug()
        yield hosts
    finally:
        for name in (switch, *(host.namespace for host in hosts)):
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)
            assert not Path(f"/run/netns/{name}").exists()
