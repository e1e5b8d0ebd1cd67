"""Agents of the NIXL face with memory of their own, over one fake network or over the compiled engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from asyncfabric import FabricConfig
from asyncfabric.integrations.nixl import nixl_agent, nixl_agent_config
from asyncfabric.integrations.nixl._api import nixl_xfer_handle
from asyncfabric.testing import FakeEngine, FakeNetwork

LENGTH = 1 << 16
Notes = dict[str, list[bytes]]


class Agent(nixl_agent):
    """An agent, and 64 KiB of registered memory."""

    def __init__(self, name: str, network: FakeNetwork | None, **config: Any) -> None:
        config.setdefault("enable_prog_thread", False)
        if network is not None:
            config["engine_factory"] = lambda wanted: FakeEngine(wanted, network)
        super().__init__(name, nixl_agent_config(**{"fabric": FabricConfig(drain_deadline=2.0), **config}))
        self.memory = np.random.default_rng(len(name)).integers(0, 256, LENGTH, dtype=np.uint8)
        self.registered = self.register_memory([(self.at(0), LENGTH, 0, "")], "DRAM")

    def at(self, offset: int) -> int:
        """Return an address in its memory."""
        return int(self.memory.ctypes.data) + offset

    def rows(self, *blocks: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Return blocks of (offset, length) of its memory as an Nx3 array."""
        return np.array([[self.at(offset), length, 0] for offset, length in blocks], dtype=np.uint64)

    def meets(self, other: Agent) -> None:
        """Take the metadata of another agent."""
        assert self.add_remote_agent(other.get_agent_metadata()) == other.name.encode()

    def made(self, operation: str, own: tuple[int, int], other: Agent, far: tuple[int, int], note: bytes = b"") -> Any:
        """Return a transfer between one block of its own and one of another agent."""
        local, remote = self.get_xfer_descs(self.rows(own), "DRAM"), self.get_xfer_descs(other.rows(far), "DRAM")
        return self.initialize_xfer(operation, local, remote, other.name, note)

    def ended(self, handle: nixl_xfer_handle) -> None:
        """Post a transfer and poll until it is done."""
        if self.transfer(handle) != "DONE":
            until(lambda: self.check_xfer_state(handle) == "DONE")

    def close(self) -> None:
        """Close it now."""
        self._close()


def notes_of(agent: Agent, count: int, senders: tuple[Agent, ...] = ()) -> Notes:
    """Return the notes of an agent once there are so many."""
    found: Notes = {}

    def came() -> bool:
        for sender in senders:
            sender.get_new_notifs()
        for name, notes in agent.get_new_notifs().items():
            found.setdefault(name, []).extend(notes)
        return sum(map(len, found.values())) >= count

    until(came)
    return found


def until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds; the agents need to be looked at for that, or have threads."""
    import threading

    for _ in range(20_000):
        if condition():
            return
        threading.Event().wait(0.0005)
    raise AssertionError("the condition did not come true")
