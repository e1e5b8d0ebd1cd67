"""What every measured process can do: hold memory, fill it, poison it, check it. Calls are the methods named `do_...`.

Runs on the process's own trio loop. Arguments and results are JSON values; bytes travel as hex text.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from asyncfabric.bench.pattern import (
    POISON,
    Bytes,
    Pages,
    expect_pages,
    expect_prefix,
    page_list,
    random_bytes,
    verdict,
)
from asyncfabric.config import FabricConfig


class BenchWorker:
    """Base of all measured processes.

    Attributes:
        memory: the bytes that this end sends from or receives into.
        meeting: a socket to the other end that both inherited, for loops that exchange addresses themselves.
    """

    def __init__(self, meeting: int = -1) -> None:
        """Hold nothing yet."""
        self.meeting = meeting
        self.memory: Bytes = np.empty(0, dtype=np.uint8)

    async def call(self, command: str, arguments: dict[str, Any]) -> Any:
        """Do one call; raises ValueError for one that does not exist."""
        method = getattr(self, f"do_{command}", None)
        if method is None:
            raise ValueError(f"{type(self).__name__} has no call {command!r}")
        return await method(**arguments)

    async def aclose(self) -> None:
        """Give everything back."""
        self.memory = np.empty(0, dtype=np.uint8)

    async def beside(self) -> None:
        """Run beside the calls until the process ends; nothing, where a worker needs nothing."""

    async def do_hello(self) -> int:
        """Return the process id: shows that the process is up."""
        return os.getpid()

    @property
    def memory_bytes(self) -> int:
        """Return how long the memory is."""
        return self.memory.size

    def content(self) -> Bytes:
        """Return what the memory holds now."""
        return self.memory

    def put(self, content: Bytes | int) -> None:
        """Fill the memory with these bytes, or with this one byte."""
        self.memory[:] = content

    async def do_fill(self, seed: int) -> None:
        """Fill the memory with the random bytes of a seed."""
        self.put(random_bytes(self.memory_bytes, seed))

    async def do_poison(self) -> None:
        """Overwrite the memory with poison, so that what was never written shows."""
        self.put(POISON)

    async def do_check_prefix(self, seed: int, written: int) -> str:
        """Check that the first `written` bytes of the sender's seed are here, and poison behind them; "" is good."""
        return verdict(self.content(), expect_prefix(random_bytes(self.memory_bytes, seed), written))

    async def do_check_pages(self, seed: int, page_bytes: int, count: int, list_seed: int, rounds: int) -> str:
        """Check for the page lists of `rounds` turns, and poison on all other pages; "" is good."""
        sent = random_bytes(self.memory_bytes, seed)
        lists = (lists_of(self.memory_bytes, page_bytes, count, list_seed + turn) for turn in range(rounds))
        return verdict(self.content(), expect_pages(sent, lists, page_bytes))


def config_of(arguments: dict[str, Any]) -> FabricConfig:
    """Return the configuration that a coordinator sent as JSON: lists become tuples."""
    return FabricConfig(**(arguments | {"rails": tuple(arguments["rails"])}))


def lists_of(memory_bytes: int, page_bytes: int, count: int, list_seed: int) -> tuple[Pages, Pages]:
    """Return (source pages, target pages) that both ends and the limit make from one seed."""
    room = memory_bytes // page_bytes
    return page_list(room, count, 2 * list_seed), page_list(room, count, 2 * list_seed + 1)
