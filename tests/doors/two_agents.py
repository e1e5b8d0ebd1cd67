"""Two agents in one process, each with registered memory, and the calls that most tests of behaviour make with them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
from faces import Face

BYTES = 1 << 20
PATIENCE_S = 20.0

Notes = dict[str, list[bytes]]


def finished(agent: Any, handle: Any, patience_s: float = PATIENCE_S) -> str:
    """Return the state in which a posted transfer ends, or "PROC" where it does not."""
    deadline = time.monotonic() + patience_s
    while (state := str(agent.check_xfer_state(handle))) == "PROC" and time.monotonic() < deadline:
        time.sleep(0)
    return state


def eventually(check: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
    """Return whether a condition comes true in time."""
    deadline = time.monotonic() + patience_s
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0)
    return True


def notes_of(agent: Any, count: int, patience_s: float = PATIENCE_S) -> Notes:
    """Drain an agent until `count` notes came."""
    found: Notes = {}

    def enough() -> bool:
        for sender, notes in agent.get_new_notifs().items():
            found.setdefault(sender, []).extend(notes)
        return sum(map(len, found.values())) >= count

    eventually(enough, patience_s)
    return found


class TwoAgents:
    """Agents "a" and "b" of one face; `source` belongs to a, `target` to b, both random and registered."""

    def __init__(self, face: Face, **config: Any) -> None:
        """Open both and let them know each other."""
        self.face = face
        self.source, self.target = np.empty(BYTES, np.uint8), np.empty(BYTES, np.uint8)
        self._random = np.random.default_rng(5)
        self._fill()
        self.a, self.b = face.agent("a", **config), face.agent("b", **config)
        self.source_descs = self.a.register_memory([(self.source.ctypes.data, BYTES, 0, "")], "DRAM")
        self.target_descs = self.b.register_memory([(self.target.ctypes.data, BYTES, 0, "")], "DRAM")
        self.meet()

    def renew(self) -> None:
        """Fill both memories anew and drain both agents."""
        self._fill()
        for agent in (self.a, self.b):
            agent.get_new_notifs()
            agent.notifs.clear()

    def _fill(self) -> None:
        for memory in (self.source, self.target):
            memory[:] = self._random.integers(0, 255, BYTES, dtype=np.uint8)

    def meet(self) -> None:
        """Give each agent the other's metadata of now."""
        self.a.add_remote_agent(self.b.get_agent_metadata())
        self.b.add_remote_agent(self.a.get_agent_metadata())

    def local(self, *spans: tuple[int, int]) -> Any:
        """Return a list over offsets and lengths of the source."""
        return self.a.get_xfer_descs([(self.source.ctypes.data + at, length, 0) for at, length in spans], "DRAM")

    def remote(self, *spans: tuple[int, int]) -> Any:
        """Return a list over offsets and lengths of the target."""
        return self.a.get_xfer_descs([(self.target.ctypes.data + at, length, 0) for at, length in spans], "DRAM")

    def made(self, operation: str = "WRITE", at: int = 0, length: int = 4096, note: Any = b"") -> Any:
        """Return a transfer between the same offsets of both memories."""
        return self.a.initialize_xfer(operation, self.local((at, length)), self.remote((at, length)), "b", note)

    def ran(self, handle: Any, *note: Any) -> str:
        """Transfer and wait; returns the last state."""
        state = str(self.a.transfer(handle, *note))
        assert state in ("DONE", "PROC")
        return finished(self.a, handle)

    def pages(self, side: str, page_bytes: int, count: int) -> Any:
        """Return a prepared list of the first pages: of side "" or "NIXL_INIT_AGENT" ours, of "b" the target's."""
        base = (self.target if side == "b" else self.source).ctypes.data
        rows = [(base + page * page_bytes, page_bytes, 0) for page in range(count)]
        return self.a.prep_xfer_dlist(side, rows, "DRAM")

    def same(self, at: int = 0, length: int = 4096, to: int | None = None) -> bool:
        """Return whether the target holds the source's bytes."""
        to = at if to is None else to
        return bool((self.source[at : at + length] == self.target[to : to + length]).all())

    def __enter__(self) -> TwoAgents:
        """Return the pair."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Drop both agents before their memory goes."""
        del self.source_descs, self.target_descs
        del self.a, self.b
        gc.collect()
