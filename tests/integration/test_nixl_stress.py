"""Eight threads over one agent: random transfers to processes that are killed and register anew, random releases.

Each thread owns a part of every target. What it wrote it reads back, unless its target was troubled meanwhile. Size by
ASYNCFABRIC_TEST_NIXL_TRANSFERS, order by ASYNCFABRIC_TEST_SEED, rails by ASYNCFABRIC_NIXL_RAILS.
"""

from __future__ import annotations

import os
import random
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from processes import Process

from asyncfabric.integrations.nixl import _bindings as bind
from asyncfabric.integrations.nixl import nixl_agent, nixl_agent_config
from asyncfabric.integrations.nixl.settings import fabric_config

TRANSFERS = int(os.environ.get("ASYNCFABRIC_TEST_NIXL_TRANSFERS", "240"))
SEED = int(os.environ.get("ASYNCFABRIC_TEST_SEED", "1"))
THREADS, TARGETS = 8, 2
AREA = (1 << 20) // THREADS
PATIENCE_S = 60.0
ENDED_BADLY = (bind.nixlRemoteDisconnectError, bind.nixlNotFoundError, bind.nixlBackendError)


@dataclass
class Target:
    """A process with an agent; `troubles` grows before and after each trouble."""

    name: str
    process: Process
    address: int
    troubles: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def started(agent: nixl_agent, name: str) -> Target:
    """Start the process of a target and add its agent."""
    process = Process("nixl_target.py", name)
    return Target(name, process, known(agent, process))


def known(agent: nixl_agent, process: Process) -> int:
    """Take the metadata that a target reports; return where its memory is."""
    report = process.receive()
    agent.add_remote_agent(bytes.fromhex(report["metadata"]))
    return int(report["address"])


class Worker(threading.Thread):
    """One thread: memory of its own, and what went wrong."""

    def __init__(self, number: int, agent: nixl_agent, targets: list[Target]) -> None:
        super().__init__()
        self.number = number
        self.agent = agent
        self.targets = targets
        self.random = random.Random(SEED * 100 + number)
        self.bytes = np.random.default_rng(SEED * 100 + number)
        self.out, self.back = np.zeros(AREA, np.uint8), np.zeros(AREA, np.uint8)
        self.done = self.checked = self.troubled = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        """Move until all is moved."""
        try:
            registered = self.registered()
            while self.done < TRANSFERS // THREADS:
                if self.random.random() < 0.1:
                    self.agent.deregister_memory(registered)
                    registered = self.registered()
                self.move(self.random.choice(self.targets))
            self.agent.deregister_memory(registered)
        except BaseException as error:
            self.error = error

    def registered(self) -> Any:
        """Register both buffers."""
        rows = [(one.ctypes.data, AREA, 0, "") for one in (self.out, self.back)]
        return self.agent.register_memory(rows, "DRAM")

    def move(self, target: Target) -> None:
        """Write random blocks and read them back; or release the transfer under way."""
        before = target.troubles
        self.out[:] = self.bytes.integers(0, 256, AREA, dtype=np.uint8)
        blocks = self.blocks()
        try:
            if not self.moved(target, "WRITE", self.out, blocks):
                return
            self.back[:] = 0
            if not self.moved(target, "READ", self.back, blocks):
                return
        except ENDED_BADLY:
            self.troubled += 1
            assert before % 2 or before != target.troubles, f"failed without trouble at {target.name}"
            return
        if not before % 2 and before == target.troubles:
            self.checked += 1
            for begin, length in blocks:
                assert (self.back[begin : begin + length] == self.out[begin : begin + length]).all()

    def moved(self, target: Target, operation: str, buffer: Any, blocks: list[tuple[int, int]]) -> bool:
        """Transfer the blocks; return False when it was released instead."""
        agent, base = self.agent, target.address + self.number * AREA
        own = np.array([[buffer.ctypes.data + begin, length, 0] for begin, length in blocks], dtype=np.uint64)
        far = np.array([[base + begin, length, 0] for begin, length in blocks], dtype=np.uint64)
        local, remote = agent.get_xfer_descs(own, "DRAM"), agent.get_xfer_descs(far, "DRAM")
        self.done += 1
        handle = agent.initialize_xfer(operation, local, remote, target.name, b"note" if self.done % 3 else b"")
        try:
            agent.transfer(handle)
            if self.random.random() < 0.2:
                return False
            while agent.check_xfer_state(handle) != "DONE":
                threading.Event().wait(0.0005)
            return True
        finally:
            agent.release_xfer_handle(handle)

    def blocks(self) -> list[tuple[int, int]]:
        """Return pieces of the area that do not overlap: equal ones, or of all lengths."""
        count, page = self.random.randint(1, 40), AREA // 40
        even = self.random.random() < 0.5
        return [
            (slot * page, page if even else self.random.randint(1, page))
            for slot in self.random.sample(range(40), count)
        ]


@pytest.mark.slow
def test_threads_kills_releases_and_registrations_break_no_byte() -> None:
    config = replace(fabric_config(None), drain_deadline=2.0)
    agent = nixl_agent("initiator", nixl_agent_config(fabric=config))
    targets = [started(agent, f"target {number}") for number in range(TARGETS)]
    workers = [Worker(number, agent, targets) for number in range(THREADS)]
    order = random.Random(SEED)
    for worker in workers:
        worker.start()
    troubles = 2 + TRANSFERS // 1000
    for trouble in range(troubles):
        while sum(worker.done for worker in workers) < (trouble + 1) * TRANSFERS // (troubles + 1):
            if not any(worker.is_alive() for worker in workers):
                break
            threading.Event().wait(0.002)
        target = order.choice(targets)
        target.troubles += 1
        if trouble % 2:
            target.process.__exit__(None, None, None)  # kill -9
            agent.remove_remote_agent(target.name)
            target.process = Process("nixl_target.py", target.name)
        else:
            target.process.send(do="again")
        target.address = known(agent, target.process)
        target.troubles += 1
    for worker in workers:
        worker.join(PATIENCE_S)
        assert not worker.is_alive(), "a thread hangs"
        if worker.error is not None:
            raise worker.error
    assert sum(worker.checked for worker in workers) > TRANSFERS // 10
    assert not agent._core.fabric.regions() and not len(agent._core.memory) and not agent._core.noted
    agent._close()
    for target in targets:
        target.process.__exit__(None, None, None)
