"""Base of the processes of `bench nixl`: memory of the host or of a GPU, and the loops that all contenders share.

All three are driven the same way: the initiator starts a move and polls it; the target polls for what it is notified of
and answers. Everything blocks the process's loop while it is measured.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any, Literal

import numpy as np

from asyncfabric.bench.pattern import Bytes
from asyncfabric_services.bench.nixl.namespaces import enter_namespace
from asyncfabric_services.bench.worker import BenchWorker, lists_of
from asyncfabric_services.exits import CheckFailed, EnvironmentUnfit

Operation = Literal["WRITE", "READ"]
Lists = list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]

PATIENCE_S = 60.0


class MovingWorker(BenchWorker):
    """One memory, moves between it and the other end's, and the loops that are measured."""

    name = "bare calls"

    def __init__(self, meeting: int = -1) -> None:
        """Hold nothing yet."""
        super().__init__(meeting)
        self._tensor: Any = None
        self._moves: list[Any] = []
        self._expiry = 0.0
        self._spins = False

    # ---- what each contender does in its own way ----

    def make_writes(self, operation: Operation, op_bytes: int, offsets: list[int]) -> list[Any]:
        """Return one move for each offset, the same one in both memories."""
        raise NotImplementedError

    def make_pages(self, operation: Operation, page_bytes: int, lists: Lists) -> list[Any]:
        """Return one move for each list of (source pages, target pages)."""
        raise NotImplementedError

    def start(self, move: Any, note: bool) -> Any:
        """Start a move, with a notification of the target or without; returns what `ended` looks at."""
        raise NotImplementedError

    def ended(self, moving: Any) -> bool:
        """Return whether a started move is done; raises when it failed."""
        raise NotImplementedError

    def notify_last(self) -> None:
        """Notify the target that all moves of a run are done."""
        raise NotImplementedError

    def await_answer(self) -> None:
        """Wait until the target answered once more."""
        raise NotImplementedError

    def drop_moves(self) -> None:
        """Let go of the moves."""
        self._moves = []

    # ---- calls ----

    async def do_prepare_writes(self, operation: Operation, op_bytes: int, slots: int, count: int) -> None:
        """Make the moves of a figure, which take turns over so many slots."""
        self.drop_moves()
        self._moves = self.make_writes(operation, op_bytes, [n % slots * op_bytes for n in range(count)])

    async def do_prepare_pages(
        self, operation: Operation, page_bytes: int, count: int, list_seed: int, lists: int
    ) -> None:
        """Make the moves of a figure over page lists of consecutive seeds."""
        self.drop_moves()
        self._moves = self.make_pages(
            operation, page_bytes, [lists_of(self.memory_bytes, page_bytes, count, list_seed + n) for n in range(lists)]
        )

    async def do_run(self, count: int, window: int, note: bool, each: bool) -> float:
        """Do `count` moves, `window` at a time, until the target answered each or the last; return seconds."""
        self.be_patient()
        moves, flying = self._moves, deque[Any]()
        begin = time.perf_counter()
        for turn in range(count):
            if len(flying) == window:
                self._finish(flying.popleft())
            flying.append(self.start(moves[turn % len(moves)], note))
            if window == 1:
                self._finish(flying.popleft())
                if each:
                    self.await_answer()
        while flying:
            self._finish(flying.popleft())
        self.notify_last()
        self.await_answer()
        return time.perf_counter() - begin

    def _finish(self, moving: Any) -> None:
        while not self.ended(moving):
            self.check_patience()

    def be_patient(self) -> None:
        """Start the time that waits of one call may take."""
        self._expiry = time.monotonic() + PATIENCE_S

    def check_patience(self) -> None:
        """Raise when the other end does not answer; between two looks others may have the core, unless polls spin."""
        if not self._spins:
            os.sched_yield()
        if time.monotonic() > self._expiry:
            raise CheckFailed(f"the other end of {self.name} did not answer within {PATIENCE_S:g} s")

    # ---- where it runs, and the memory ----

    def place(self, place: dict[str, Any]) -> list[str]:
        """Enter the namespace, make the memory, and return the rails; before anything opens a NIC or a GPU.

        A place has `rails`, `namespace`, `memory`, `length_bytes` and `spins`; "last" in them is the last GPU.
        """
        self._spins = place["spins"]
        if place["namespace"] is not None:
            enter_namespace(place["namespace"])
        last = 0
        if place["memory"] != "host":
            last = self._gpus() - 1
        texts = [text.replace(":last", f":{last}") for text in (place["memory"], *place["rails"])]
        self._make_memory(texts[0], place["length_bytes"])
        return texts[1:]

    @staticmethod
    def _gpus() -> int:
        try:
            import torch
        except ImportError as error:
            raise EnvironmentUnfit("memory of GPUs is made by torch, which is not installed here") from error
        if not torch.cuda.is_available():
            raise EnvironmentUnfit("torch sees no GPU here: see `asyncfabric doctor`")
        return torch.cuda.device_count()

    def _make_memory(self, memory: str, length_bytes: int) -> None:
        """Make the memory: of the host, or of the GPU "cuda:N"."""
        if memory == "host":
            self.memory = np.zeros(length_bytes, np.uint8)
            return
        import torch

        self._tensor = torch.zeros(length_bytes, dtype=torch.uint8, device=memory)
        torch.cuda.synchronize(memory)

    @property
    def address(self) -> int:
        """Return where the memory begins."""
        return int(self.memory.ctypes.data if self._tensor is None else self._tensor.data_ptr())

    @property
    def ordinal(self) -> int:
        """Return the number of the GPU, 0 for the host."""
        return 0 if self._tensor is None else int(self._tensor.device.index)

    @property
    def mem_type(self) -> str:
        """Return NIXL's name of the kind of memory."""
        return "DRAM" if self._tensor is None else "VRAM"

    @property
    def memory_bytes(self) -> int:
        """Return how long the memory is."""
        return int(self.memory.size if self._tensor is None else self._tensor.numel())

    def content(self) -> Bytes:
        """Return what the memory holds; of a GPU a copy."""
        if self._tensor is None:
            return self.memory
        found: Bytes = self._tensor.cpu().numpy()
        return found

    def put(self, content: Bytes | int) -> None:
        """Fill the memory, and wait for the GPU."""
        if self._tensor is None:
            self.memory[:] = content
            return
        import torch

        if isinstance(content, int):
            self._tensor.fill_(content)
        else:
            self._tensor.copy_(torch.from_numpy(content))
        torch.cuda.synchronize(self._tensor.device)

    async def aclose(self) -> None:
        """Give the memory back."""
        await super().aclose()
        self._tensor = None


def rails_in_environment(rails: list[str], ours: bool) -> None:
    """Have an agent of this process open these rails: ours by its variable, NIXL over TCP by the settings of UCX."""
    if ours:
        os.environ["ASYNCFABRIC_NIXL_RAILS"] = ",".join(rails)
    elif all(rail.partition(":")[0] == "tcp" for rail in rails):
        os.environ["UCX_TLS"] = "tcp"
        devices = [rail.partition(":")[2] for rail in rails if ":" in rail]
        if devices:
            os.environ["UCX_NET_DEVICES"] = ",".join(devices)
