"""A measured process with an agent of the real NIXL, whose notes messages are compared with, where it is installed.

Notes are looked for without a pause, which is how NIXL's callers do it.
"""

from __future__ import annotations

import os
import time
from importlib import import_module
from typing import Any

from asyncfabric_services.bench.nixl.worker import installed_nixl
from asyncfabric_services.bench.worker import BenchWorker

TRANSPORTS = {"tcp": "tcp,self", "local": "sm,self,tcp"}
"""What UCX may use, by the provider that it is compared with."""


class NoteWorker(BenchWorker):
    """One agent."""

    _agent: Any
    _peer: str

    async def do_open(self, name: str, provider: str) -> str:
        """Open the agent over UCX; return its metadata."""
        os.environ["UCX_TLS"] = TRANSPORTS[provider]
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        api = import_module(f"{installed_nixl()}._api")
        self._agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        return bytes(self._agent.get_agent_metadata()).hex()

    async def do_connect(self, name: str, metadata: str) -> None:
        """Add the other agent."""
        self._agent.add_remote_agent(bytes.fromhex(metadata))
        self._peer = name

    async def do_ping(self, length_bytes: int, count: int) -> list[int]:
        """Send a note and look for the answer `count` times; return round trips in ns."""
        note, samples = bytes(length_bytes), []
        for _ in range(count):
            before = time.perf_counter_ns()
            self._agent.send_notif(self._peer, note)
            self._notes()
            samples.append(time.perf_counter_ns() - before)
        return samples

    async def do_pong(self, length_bytes: int, count: int) -> None:
        """Answer do_ping."""
        note = bytes(length_bytes)
        for _ in range(count):
            self._notes()
            self._agent.send_notif(self._peer, note)

    async def do_send_many(self, length_bytes: int, count: int) -> int:
        """Send `count` notes, then wait for one; return the stamp before the first."""
        note = bytes(length_bytes)
        started = time.monotonic_ns()
        for _ in range(count):
            self._agent.send_notif(self._peer, note)
        self._notes()  # what is still to leave needs this process to make progress
        return started

    async def do_receive_many(self, count: int) -> int:
        """Take `count` notes and send one; return the stamp after the last."""
        taken = 0
        while taken < count:
            taken += self._notes()
        ended = time.monotonic_ns()
        self._agent.send_notif(self._peer, b"all")
        return ended

    def _notes(self) -> int:
        while not (notes := self._agent.get_new_notifs()):
            pass
        return sum(map(len, notes.values()))
