"""A measured process with a bare engine: the same bytes without Python in the loop (`--engine-level`)."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import trio

from asyncfabric.bench.engine_level import BareEngine
from asyncfabric_services.bench.worker import BenchWorker, config_of

ROUND_DEADLINE_NS = 10_000_000_000
"""A round or a wait that takes longer is a hang."""

SAMPLES_KEPT = 5000

STEP_EVERY_S = 0.001

NO_SAMPLES = np.empty(0, dtype=np.uint64)


class EngineWorker(BenchWorker):
    """One engine, opened by `do_open`; no event loop touches it."""

    _bare: BareEngine | None = None
    _region: int
    _counter: int
    _peer: int
    _key: int

    @property
    def _engine(self) -> Any:
        assert self._bare is not None
        return self._bare.native

    @property
    def _manual(self) -> bool:
        return self._bare is not None and self._bare.manual

    async def beside(self) -> None:
        """Drive an engine without a worker between two calls: the other end may want an answer."""
        while True:
            if self._manual:
                self._engine.step()
            await trio.sleep(STEP_EVERY_S)

    async def aclose(self) -> None:
        """Close the engine: drains what is in flight."""
        if self._bare is not None:
            self._bare.close()
        await super().aclose()

    async def do_open(self, config: dict[str, Any]) -> dict[str, Any]:
        """Open the engine; return its address and what its rails are."""
        self._bare = BareEngine(config_of(config))
        self._counter, imm = self._engine.open_counter(-1)
        rail = self._engine.rails()[0]
        return {
            "address": self._engine.address().hex(),
            "imm": imm,
            "library": rail["library"],
            "version": rail["version"],
        }

    async def do_memory(self, kind: str, length_bytes: int, seed: int | None) -> str:
        """Make a region: random bytes for a sender, poison for a receiver. Returns the key for peers."""
        assert self._bare is not None
        if kind == "allocated":
            self._region = self._bare.allocate(length_bytes)
            self.memory = np.frombuffer(self._engine.region_memory(self._region), dtype=np.uint8)
        else:
            self.memory = np.empty(length_bytes, dtype=np.uint8)
            self._region = self._bare.register(self.memory)
        if seed is None:
            await self.do_poison()
        else:
            await self.do_fill(seed)
        return bytes(self._engine.region_key(self._region, 1, 0, length_bytes)).hex()

    async def do_connect(self, address: str, key: str) -> None:
        """Connect to the other end and open its key."""
        assert self._bare is not None
        self._peer = self._bare.connect(bytes.fromhex(address))
        self._key, _ = self._engine.open_key(bytes.fromhex(key))

    async def do_value(self) -> int:
        """Return the own counter's value."""
        return int(self._engine.counter_value(self._counter))

    async def do_write_window(
        self, walk_bytes: int, op_bytes: int, window: int, count: int, imm: int | None
    ) -> dict[str, Any]:
        """Write natively; return the stamps of start and end, and the durations."""
        from asyncfabric.bench import native_loops

        samples = np.empty(count, dtype=np.uint64)
        started, finished, _ = native_loops.engine_writes(
            self._engine,
            self._region,
            self._key,
            walk_bytes,
            op_bytes,
            window,
            count,
            -1 if imm is None else imm,
            samples,
            self._manual,
        )
        # A million durations as JSON would take longer than the run: every n-th one shows the same.
        some = samples[:: max(1, count // SAMPLES_KEPT)]
        return {"started_ns": started, "finished_ns": finished, "samples_ns": some.tolist()}

    async def do_wait(self, target: int) -> None:
        """Wait until the own counter reached `target`."""
        await self.do_spin(target)

    async def do_spin(self, target: int) -> int:
        """Spin natively until the own counter reached `target`; return the stamp when it had."""
        from asyncfabric.bench import native_loops

        _, finished, _ = native_loops.engine_spin(self._engine, self._counter, target, deadline_ns())
        return finished

    async def do_ping(self, op_bytes: int, imm: int, base: int, count: int) -> list[int]:
        """Play ping natively; return round trips in ns."""
        from asyncfabric.bench import native_loops

        samples = np.empty(count, dtype=np.uint64)
        native_loops.engine_ping(
            self._engine, self._peer, self._region, self._key, op_bytes, self._counter, base, imm,
            ROUND_DEADLINE_NS, samples, count, True, self._manual,
        )  # fmt: skip
        return samples.tolist()

    async def do_pong(self, op_bytes: int, imm: int, base: int, count: int) -> None:
        """Answer do_ping natively."""
        from asyncfabric.bench import native_loops

        native_loops.engine_ping(
            self._engine, self._peer, self._region, self._key, op_bytes, self._counter, base, imm,
            ROUND_DEADLINE_NS, NO_SAMPLES, count, False, self._manual,
        )  # fmt: skip


def deadline_ns() -> int:
    """Return the moment on CLOCK_MONOTONIC after which a wait is a hang."""
    return time.monotonic_ns() + ROUND_DEADLINE_NS
