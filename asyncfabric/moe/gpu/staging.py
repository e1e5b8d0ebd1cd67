"""Staging: what kernels and a proxy share on this host: parcels in pinned memory, watch words, flags and notes.

Runs on the event loop's thread. Opened and closed with the session.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import anyio
import numpy as np
import torch

from asyncfabric import Fabric, Region, WatchWord
from asyncfabric._gpu import Driver
from asyncfabric.moe.gpu.launch import ExchangeWords
from asyncfabric.moe.gpu.layout import NvlinkLayout
from asyncfabric.moe.gpu.pinned import Pinned, PinnedWord
from asyncfabric.moe.gpu.proxy import STEP_KINDS, Notes, Proxy
from asyncfabric.types import AccessMode

REPORT_WORDS = 3


class BlockCounts(NamedTuple):
    """Memory of the blocks of all far ranks, one after the other: the region, and where kernels find it."""

    region: Region
    pinned: Pinned


class Staging:
    """Pinned memory of one epoch.

    Attributes:
        outgoing: blocks that kernels fill and the proxy writes from.
        incoming: blocks that the proxies of other ranks write to.
        reported: watch words that kernels store: step of dispatch, step of combine, verdict.
        notes: what the proxy stores for kernels.
    """

    def __init__(
        self,
        layout: NvlinkLayout,
        far: Sequence[int],
        outgoing: BlockCounts,
        incoming: BlockCounts,
        reported: Sequence[WatchWord],
        stack: AsyncExitStack,
        driver: Driver,
        device: torch.device,
    ) -> None:
        """Not for users; what is opened here is closed by the stack."""
        config = layout.config
        self.outgoing: Region = outgoing.region
        self.incoming: Region = incoming.region
        self.reported: tuple[WatchWord, ...] = tuple(reported)
        self._notes = torch.zeros(config.ranks, 1 + 2 * config.in_flight, dtype=torch.int32, pin_memory=True)
        self.notes: Notes = Notes(self._notes.numpy(), config.in_flight)
        self._layout = layout
        self._far = tuple(sorted(far))
        self._addresses = outgoing.pinned.address, incoming.pinned.address
        self._stack = stack
        self._driver = driver
        self._device = device
        self._arrivals: torch.Tensor | None = None

    def key_for(self, rank: int) -> bytes:
        """Return the right to write to the block of a far rank, as bytes."""
        at = self._far.index(rank) * self._layout.block_bytes
        return bytes(self.incoming[at : at + self._layout.block_bytes].key())

    def fill(self, words: ExchangeWords, proxy: Proxy) -> None:
        """Show kernels where everything is."""
        config, block = self._layout.config, self._layout.block_bytes
        for number, rank in enumerate(self._far):
            words.proxied |= 1 << rank
            words.outbox[rank], words.inbox[rank] = (base + number * block for base in self._addresses)
        reported = [self._word(word.address) for word in self.reported]
        words.reported[0], words.reported[1], words.verdict_sent[0] = reported
        words.notes = self._notes.data_ptr()
        arrivals = np.zeros((len(STEP_KINDS), config.ranks, config.in_flight, 2), dtype=np.int64)
        for (kind, turn, rank), counter in proxy.counters.items():
            if kind in STEP_KINDS:
                arrivals[kind, rank, turn, 0] = self._word(counter.flag_address)
        self._arrivals = torch.from_numpy(arrivals).to(self._device)
        words.arrivals = self._arrivals.data_ptr()

    def _word(self, address: int) -> int:
        word = PinnedWord(self._driver, self._device, address)
        self._stack.callback(word.close)
        return word.address


@asynccontextmanager
async def open_staging(
    fabric: Fabric, layout: NvlinkLayout, far: Sequence[int], driver: Driver, device: torch.device
) -> AsyncIterator[Staging]:
    """Allocate and pin the blocks of far ranks, and open the words; released on leaving, when no kernel runs any more.

    Raises:
        DeviceError: no memory left, or it cannot be pinned.
        BusyError: the fabric has no watch word left.

    Cancellation: shielded while memory is released; then it goes on.
    """
    async with AsyncExitStack() as stack:
        length = len(far) * layout.block_bytes
        outgoing = await _open_blocks(fabric, length, "local", driver, device, stack)
        incoming = await _open_blocks(fabric, length, "write", driver, device, stack)
        reported = [await stack.enter_async_context(fabric.watch()) for _ in range(REPORT_WORDS)]
        yield Staging(layout, far, outgoing, incoming, reported, stack, driver, device)


async def _open_blocks(
    fabric: Fabric, length: int, access: AccessMode, driver: Driver, device: torch.device, stack: AsyncExitStack
) -> BlockCounts:
    region = await fabric.allocate(length, access=access)

    async def release() -> None:
        with anyio.CancelScope(shield=True):
            await region.release()

    stack.push_async_callback(release)
    pinned = Pinned(driver, device, np.frombuffer(region.memory, dtype=np.uint8).ctypes.data, length)
    stack.callback(pinned.close)
    return BlockCounts(region, pinned)
