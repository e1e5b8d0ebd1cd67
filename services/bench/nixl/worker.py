"""A process of `bench nixl` with an agent: of the real NIXL, or of our face, driven by the same lines.

Progress threads are off in both: calls make the progress, and no other thread takes a core.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import numpy as np

from asyncfabric_services.bench.nixl.moving_worker import Lists, MovingWorker, Operation, rails_in_environment
from asyncfabric_services.exits import CheckFailed

MOVED, LAST, ANSWER = b"moved", b"last", b"answer"
FACE = "asyncfabric.integrations.nixl"
INSTALLED_NAMES = ("nixl_cu13", "nixl_cu12")


def installed_nixl() -> str | None:
    """Return the module of the NIXL that is installed here, or None."""
    return next((name for name in INSTALLED_NAMES if importlib.util.find_spec(name) is not None), None)


class NixlWorker(MovingWorker):
    """One agent with one registered memory, and one other agent."""

    _agent: Any
    _peer: str
    _there: tuple[int, int]

    async def do_open(self, module: str, place: dict[str, Any]) -> dict[str, Any]:
        """Make the memory, the agent, and register; return what the other end needs."""
        rails_in_environment(self.place(place), ours=module == FACE)
        self.name = module
        api = importlib.import_module(module if module == FACE else f"{module}._api")
        self._agent = api.nixl_agent(f"{module}/{os.getpid()}", api.nixl_agent_config(enable_prog_thread=False))
        self._agent.register_memory([(self.address, self.memory_bytes, self.ordinal, "")], self.mem_type)
        metadata: bytes = self._agent.get_agent_metadata()
        return {"metadata": metadata.hex(), "address": self.address, "ordinal": self.ordinal}

    async def do_meet(self, metadata: str, address: int, ordinal: int) -> None:
        """Take what the other end gave."""
        self._peer = self._agent.add_remote_agent(bytes.fromhex(metadata)).decode()
        self._there = (address, ordinal)

    def make_writes(self, operation: Operation, op_bytes: int, offsets: list[int]) -> list[Any]:
        """Return one handle for each offset."""
        handles = []
        for at in offsets:
            here, there = (
                self._agent.get_xfer_descs([(base + at, op_bytes, ordinal)], self.mem_type)
                for base, ordinal in ((self.address, self.ordinal), self._there)
            )
            handles.append(self._agent.initialize_xfer(operation, here, there, self._peer))
        return handles

    def make_pages(self, operation: Operation, page_bytes: int, lists: Lists) -> list[Any]:
        """Return one handle for each page list, chosen from two prepared lists of all pages."""
        numbers = np.arange(self.memory_bytes // page_bytes, dtype=np.uint64)
        sides = []
        for side, (base, ordinal) in (("", (self.address, self.ordinal)), (self._peer, self._there)):
            rows = np.empty((len(numbers), 3), np.uint64)
            rows[:, 0], rows[:, 1], rows[:, 2] = numbers * np.uint64(page_bytes) + np.uint64(base), page_bytes, ordinal
            sides.append(self._agent.prep_xfer_dlist(side, rows, self.mem_type))
        handles = []
        for sources, targets in lists:
            here, there = (sources, targets) if operation == "WRITE" else (targets, sources)
            handles.append(
                self._agent.make_prepped_xfer(
                    operation, sides[0], here.astype(np.int32), sides[1], there.astype(np.int32)
                )
            )
        return handles

    def start(self, move: Any, note: bool) -> Any:
        """Post a transfer; returns None when that finished it."""
        return None if self._agent.transfer(move, MOVED if note else b"") == "DONE" else move

    def ended(self, moving: Any) -> bool:
        """Return whether a posted transfer is done."""
        if moving is None:
            return True
        state = self._agent.check_xfer_state(moving)
        if state == "ERR":
            raise CheckFailed("a transfer ended in ERR")
        return bool(state == "DONE")

    def notify_last(self) -> None:
        """Send the last note."""
        self._agent.send_notif(self._peer, LAST)

    def await_answer(self) -> None:
        """Wait for one note."""
        while not self._agent.get_new_notifs():
            self.check_patience()

    async def do_answer(self, count: int, note: bool, each: bool, worth: int) -> None:
        """Take the notes of a run; answer each, or the last."""
        self.be_patient()
        seen, last, expected = 0, False, count if note else 0
        while not (last and seen == expected):
            for notes in self._agent.get_new_notifs().values():
                for text in notes:
                    last = last or text == LAST
                    seen += text == MOVED
                    if each and text == MOVED:
                        self._agent.send_notif(self._peer, ANSWER)
            self.check_patience()
        self._agent.send_notif(self._peer, ANSWER)

    def drop_moves(self) -> None:
        """Release the handles."""
        for handle in self._moves:
            self._agent.release_xfer_handle(handle)
        super().drop_moves()

    async def aclose(self) -> None:
        """Drop the agent before its memory."""
        self.drop_moves()
        del self._agent
        await super().aclose()
