"""A measured process without a fabric: one end of the bare loops. Foreign memory as a user's array would be."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np

from asyncfabric.bench import limits, notify
from asyncfabric.bench.pattern import Bytes, random_bytes, verdict
from asyncfabric_services.bench.worker import BenchWorker, lists_of
from asyncfabric_services.exits import EnvironmentUnfit


class LimitWorker(BenchWorker):
    """One end of the bare loops."""

    def __init__(self, meeting: int = -1) -> None:
        """Hold no mirror and no socket yet."""
        super().__init__(meeting)
        self._mirror: Bytes = np.empty(0, dtype=np.uint8)
        self._listener: socket.socket | None = None
        self._stream: socket.socket | None = None

    async def aclose(self) -> None:
        """Close the sockets."""
        for each in (self._listener, self._stream):
            if each is not None:
                each.close()
        await super().aclose()

    async def do_memory(self, length_bytes: int, seed: int | None) -> dict[str, int]:
        """Make memory: random bytes for a sender, poison for a receiver. Returns where it is, for process_vm_writev."""
        from asyncfabric.bench import native_loops

        native_loops.allow_cma()
        self.memory = np.empty(length_bytes, dtype=np.uint8)
        if seed is None:
            await self.do_poison()
        else:
            await self.do_fill(seed)
        return {"address": self.memory.ctypes.data, "length_bytes": length_bytes}

    async def do_mirror(self) -> None:
        """Make a second region in this process: what the copy loops copy into."""
        self._mirror = np.zeros(self.memory.size, dtype=np.uint8)

    async def do_core_distance(self) -> tuple[str, float]:
        """State whether two threads are near or far now."""
        return limits.core_distance()

    async def do_non_temporal_kind(self) -> str:
        """Return which streaming stores memcpy_nt uses."""
        from asyncfabric.bench import native_loops

        return native_loops.non_temporal_kind()

    async def do_copy(self, limit: limits.CopyLimit, walk_bytes: int, op_bytes: int, count: int) -> float:
        """Copy into the mirror, walking round its first `walk_bytes`; return seconds."""
        return limits.copy_seconds(limit, self._mirror[:walk_bytes], self.memory[:walk_bytes], op_bytes, count)

    async def do_copy_pages(self, limit: limits.CopyLimit, page_bytes: int, count: int, list_seed: int) -> float:
        """Copy a page list into the mirror once; return seconds."""
        source_pages, target_pages = lists_of(self.memory.size, page_bytes, count, list_seed)
        return limits.page_copy_seconds(limit, self._mirror, self.memory, target_pages, source_pages, page_bytes)

    async def do_check_mirror(self, written: int) -> str:
        """Compare what the copy loops wrote with its source; "" is good."""
        equal = np.array_equal(self._mirror[:written], self.memory[:written])
        return "" if equal else "the copy differs from its source"

    async def do_check_landed(self, seed: int, written: int) -> str:
        """Compare what the other process wrote here with the bytes of its seed; "" is good."""
        return verdict(self.memory[:written], random_bytes(self.memory.size, seed)[:written])

    async def do_cma(self, pid: int, address: int, walk_bytes: int, op_bytes: int, count: int) -> float:
        """Write into the other process with process_vm_writev; return seconds."""
        return limits.cma_seconds(pid, address, self.memory[:walk_bytes], op_bytes, count)

    async def do_cma_pages(self, pid: int, address: int, page_bytes: int, count: int, list_seed: int) -> float:
        """Write a page list into the other process with process_vm_writev; return seconds."""
        source_pages, target_pages = lists_of(self.memory.size, page_bytes, count, list_seed)
        return limits.cma_page_seconds(pid, address, self.memory, target_pages, source_pages, page_bytes)

    async def do_listen(self) -> int:
        """Listen on loopback; return the port."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        return int(self._listener.getsockname()[1])

    async def do_accept(self) -> None:
        """Take the one stream."""
        assert self._listener is not None
        self._stream, _ = self._listener.accept()
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def do_connect(self, port: int) -> None:
        """Open the one stream."""
        self._stream = socket.create_connection(("127.0.0.1", port))
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def do_stream_send(self, walk_bytes: int, op_bytes: int, count: int) -> float:
        """Send over the stream until all was acknowledged; return seconds."""
        from asyncfabric.bench import native_loops

        assert self._stream is not None
        return native_loops.stream_send(self._stream.fileno(), self.memory[:walk_bytes], op_bytes, count)

    async def do_stream_receive(self, walk_bytes: int, total_bytes: int) -> float:
        """Receive from the stream, walking round the first `walk_bytes`; return seconds."""
        from asyncfabric.bench import native_loops

        assert self._stream is not None
        return native_loops.stream_receive(self._stream.fileno(), self.memory[:walk_bytes], total_bytes)

    async def do_libfabric(
        self,
        profile: str,
        workload: str,
        op_bytes: int,
        operations: int,
        window: int,
        pages: int,
        region_bytes: int,
        initiator: bool,
    ) -> dict[str, Any]:
        """Run one end of the bare libfabric loop; both ends meet over the socket that they inherited."""
        from asyncfabric.bench import native_loops

        warmup = max(window, operations // 8) if workload != "pages" else 1
        try:
            facts: dict[str, Any] = native_loops.libfabric(
                profile, workload, op_bytes, operations, warmup, window, pages, region_bytes, self.meeting, initiator
            )
        except OSError as error:
            raise EnvironmentUnfit(str(error)) from None
        return facts

    async def do_eventfd_ping(self, out: int, into: int, count: int) -> list[int]:
        """Play ping over blocking eventfds, natively; return round trips in ns."""
        from asyncfabric.bench import native_loops

        samples = np.empty(count, dtype=np.uint64)
        native_loops.eventfd_ping(out, into, samples)
        return samples.tolist()

    async def do_eventfd_pong(self, out: int, into: int, count: int) -> None:
        """Answer do_eventfd_ping."""
        from asyncfabric.bench import native_loops

        native_loops.eventfd_pong(out, into, count)

    async def do_trio_ping(self, out: int, into: int, count: int) -> list[int]:
        """Play ping over eventfds with bare trio; return round trips in ns."""
        return await notify.ping_bare(out, into, count)

    async def do_trio_pong(self, out: int, into: int, count: int) -> None:
        """Answer do_trio_ping."""
        await notify.pong_bare(out, into, count)
