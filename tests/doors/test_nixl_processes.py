"""Agents of two processes on both faces: bytes and notes, a peer that dies, transfers released in flight."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from faces import Face
from nixl_peer import BYTES, NixlPeer
from two_agents import eventually, finished, notes_of

pytestmark = pytest.mark.slow


class Initiator:
    """Agent "a" of the test's process, with memory as long as the peer's."""

    def __init__(self, face: Face) -> None:
        """Open the agent and register its memory."""
        self.agent = face.agent("a")
        self.memory = np.random.default_rng(3).integers(0, 255, BYTES, dtype=np.uint8)
        self.registered = self.agent.register_memory([(self.memory.ctypes.data, BYTES, 0, "")], "DRAM")

    def made(self, peer: NixlPeer, operation: str, at: int, length: int, note: bytes = b"") -> Any:
        """Return a transfer between the same offsets of both memories."""
        local, remote = (
            self.agent.get_xfer_descs([(base + at, length, 0)], "DRAM")
            for base in (self.memory.ctypes.data, peer.address)
        )
        return self.agent.initialize_xfer(operation, local, remote, "b", note)

    def ran(self, handle: Any) -> str:
        """Transfer and wait; returns the last state."""
        self.agent.transfer(handle)
        return finished(self.agent, handle)


@pytest.fixture
def initiator(face: Face) -> Iterator[Initiator]:
    found = Initiator(face)
    yield found
    del found.agent
    gc.collect()


def notes_there(peer: NixlPeer, count: int) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {}

    def enough() -> bool:
        for sender, notes in peer.call("notes").items():
            found.setdefault(sender, []).extend(notes)
        return sum(map(len, found.values())) >= count

    eventually(enough)
    return found


def test_bytes_and_notes_between_processes(face: Face, initiator: Initiator) -> None:
    with NixlPeer(face.name) as peer:
        assert initiator.agent.add_remote_agent(peer.metadata) == b"b"
        handle = initiator.made(peer, "WRITE", 100, 70_000, b"written")
        assert initiator.ran(handle) == "DONE"
        assert notes_there(peer, 1) == {"a": [b"written"]}
        assert peer.call("bytes", 100, 70_000) == initiator.memory[100:70_100].tobytes()
        assert peer.call("bytes", 0, 100) == bytes(100) and peer.call("bytes", 70_100, 100) == bytes(100)

        peer.call("fill", 9)
        handle = initiator.made(peer, "READ", 4096, 1 << 20, b"read")
        assert initiator.ran(handle) == "DONE"
        assert (initiator.memory[4096 : 4096 + (1 << 20)] == 9).all() and initiator.memory[:4096].any()
        assert notes_there(peer, 1) == {"a": [b"read"]}

        assert peer.call("meet", initiator.agent.get_agent_metadata()) == b"a"
        peer.call("note", "a", b"from there")
        assert notes_of(initiator.agent, 1) == {"b": [b"from there"]}
        initiator.agent.remove_remote_agent("b")


def test_a_peer_that_died_is_named_and_comes_back(face: Face, initiator: Initiator) -> None:
    agent, gone = initiator.agent, face.error("RemoteDisconnect")
    with NixlPeer(face.name) as peer:
        agent.add_remote_agent(peer.metadata)
        handle = initiator.made(peer, "WRITE", 0, 4096)
        assert initiator.ran(handle) == "DONE"
        peer.signal(signal.SIGKILL)

        def refused() -> bool:
            try:
                state = agent.transfer(handle)
                while state == "PROC":
                    state = agent.check_xfer_state(handle)
            except gone:
                return True
            return False

        assert eventually(refused)
        with pytest.raises(gone):
            agent.send_notif("b", b"x")
        agent.release_xfer_handle(handle)
        agent.remove_remote_agent("b")
    with NixlPeer(face.name) as peer:
        assert agent.add_remote_agent(peer.metadata) == b"b"
        handle = initiator.made(peer, "WRITE", 0, 4096, b"again")
        assert initiator.ran(handle) == "DONE" and notes_there(peer, 1) == {"a": [b"again"]}
        assert peer.call("bytes", 0, 4096) == initiator.memory[:4096].tobytes()
        agent.release_xfer_handle(handle)
        agent.remove_remote_agent("b")


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_a_transfer_is_released_in_flight(face: Face, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP a peer that is stopped leaves the transfer in flight; released, it sends no note and harms no other."""
    for name, value in face.over_tcp.items():
        monkeypatch.setenv(name, value)
    initiator = Initiator(face)
    agent = initiator.agent
    with NixlPeer(face.name) as peer:
        agent.add_remote_agent(peer.metadata)
        assert initiator.ran(initiator.made(peer, operation, 0, 4096, b"before")) == "DONE"
        assert notes_there(peer, 1) == {"a": [b"before"]}
        handle = initiator.made(peer, operation, 0, BYTES, b"cancelled")
        releasing = threading.Thread(target=agent.release_xfer_handle, args=(handle,))
        peer.signal(signal.SIGSTOP)
        try:
            assert agent.transfer(handle) == "PROC"
            with pytest.raises(face.error("RepostActive")):
                agent.transfer(handle)
            assert agent.check_xfer_state(handle) == "PROC"
            releasing.start()
            releasing.join(0.2)  # ours waits for the peer, bounded, before the memory is the caller's again
        finally:
            peer.signal(signal.SIGCONT)
        releasing.join()
        kept = initiator.memory.copy()
        after = initiator.made(peer, operation, 0, 4096, b"after")
        assert initiator.ran(after) == "DONE"
        assert notes_there(peer, 1) == {"a": [b"after"]}
        if face.differs("release"):
            assert (initiator.memory[4096:] == kept[4096:]).all()
        agent.remove_remote_agent("b")
    del releasing, handle, after, agent, initiator.agent
    gc.collect()
