"""Two network namespaces joined by a veth pair: tcp between what could be two hosts, and a cable that is pulled."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator

import pytest
from availability import namespaces_missing, need
from processes import party

MIB = 1 << 20
SLOW, PIECES = 240 * MIB, 12  # five seconds at 400 Mbit/s
LEFT, RIGHT = "192.0.2.1", "192.0.2.2"  # TEST-NET-1


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _wait_until_up(namespace: str) -> None:
    # libfabric lists only interfaces that are running, and a veth runs some moments after both ends are up.
    deadline = time.monotonic() + 10
    command = ["ip", "-n", namespace, "-j", "link", "show", "fabric0"]
    while (
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)[0]["operstate"] != "UP"
    ):
        assert time.monotonic() < deadline, f"fabric0 of {namespace} did not come up"


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    if reason := namespaces_missing():
        pytest.skip(f"network namespaces cannot be made here: {reason}")
    left, right = (f"af{side}{os.getpid()}" for side in "ab")
    try:
        for name in (left, right):
            try:
                _ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"ip netns is not permitted here: {error.stderr.strip()}")
        _ip("-n", left, "link", "add", "fabric0", "type", "veth", "peer", "name", "fabric0", "netns", right)
        for name, address in ((left, LEFT), (right, RIGHT)):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "fabric0")
            _ip("-n", name, "link", "set", "fabric0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        for name in (left, right):
            _wait_until_up(name)
        yield left, right
    finally:
        for name in (left, right):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _inside(namespace: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", namespace)


def test_tcp_between_namespaces(namespaces: tuple[str, str]) -> None:
    need("tcp")
    left, right = namespaces
    with (
        party("tcp:fabric0", prefix=_inside(left), peer_deadline_network=2.0, drain_deadline=2.0) as writer,
        party("tcp:fabric0", prefix=_inside(right)) as target,
    ):
        writer.receive(), target.receive()
        key = target.ask("expose", length=8 * MIB)["key"]
        imm = target.ask("counter")["imm"]
        writer.ask("expose", length=MIB, name="source", seed=2)
        writer.ask("write", key=key, length=MIB, imm=imm)
        assert target.ask("wait", imm=imm, value=1)["value"] == 1
        writer.send(do="stream", key=key, piece=MIB)
        assert writer.receive() == {"streaming": True}
        _ip("-n", right, "link", "set", "fabric0", "down")
        error = writer.receive()
        assert error["error"] == "PeerError", error
        assert error["seconds"] < 20


@pytest.mark.slow
def test_a_slow_cable_is_not_a_dead_peer(namespaces: tuple[str, str]) -> None:
    """What is queued for a peer takes twice as long as a peer may be silent: heartbeats must not stand behind it."""
    need("tcp")
    left, right = namespaces
    limit = ("tbf", "rate", "400mbit", "burst", "1mb", "latency", "50ms")
    subprocess.run(["tc", "-n", left, "qdisc", "add", "dev", "fabric0", "root", *limit], check=True)
    with (
        party("tcp:fabric0", prefix=_inside(left), peer_deadline_network=2.5) as writer,
        party("tcp:fabric0", prefix=_inside(right), peer_deadline_network=2.5) as target,
    ):
        writer.receive()
        address = writer.ask("about")["address"]
        target.receive()
        key = target.ask("expose", length=SLOW)["key"]
        imm = target.ask("counter")["imm"]
        writer.ask("expose", length=SLOW, name="source", seed=2)
        writer.ask("connect", address=target.ask("about")["address"])
        target.send(do="wait", imm=imm, value=PIECES, address=address)
        assert writer.ask("pieces", key=key, count=PIECES, imm=imm) == {"bytes": SLOW}
        assert target.receive() == {"value": PIECES}
        assert target.ask("digest")["sha"] == writer.ask("digest", name="source")["sha"]
