"""CudaNodeExchange: dispatch and combine among GPUs by the nodes: a token crosses to another node once.

Two lanes of the same kernels, with small ones between them; see docs/explain/moe_gpu.md. On the event loop's thread.
"""

from __future__ import annotations

import anyio.abc
import torch

from asyncfabric import Fabric
from asyncfabric.moe.config import MoeConfig
from asyncfabric.moe.gpu.between import Between
from asyncfabric.moe.gpu.exchange import CudaMoeExchange
from asyncfabric.moe.gpu.handle import CudaMoeHandle
from asyncfabric.moe.gpu.lanes import NodeLanes, cuda_buffer_bytes
from asyncfabric.moe.gpu.launch import RECEIVE, SEND, combine_words, dispatch_words
from asyncfabric.moe.gpu.session import NvlinkSession, join_verdicts, open_nvlink
from asyncfabric.moe.gpu.site import Site
from asyncfabric.moe.group import MoeGroup

PATIENCE = {"across": 1, "inside": 2, "inside back": 3, "across back": 4}
"""Deadlines of the waits of a step, in those of the exchange: who waits for a rank that itself waits, waits longer."""


class CudaNodeExchange(CudaMoeExchange):
    """An open exchange among GPUs by the nodes; what users call is that of CudaMoeExchange."""

    def __init__(
        self,
        fabric: Fabric,
        group: MoeGroup,
        lanes: NodeLanes,
        sites: tuple[Site, Site],
        tasks: anyio.abc.TaskGroup | None,
    ) -> None:
        """Not for users: `async with open_moe_cuda(...)`; `sites` across and inside."""
        super().__init__(fabric, group, sites[1], tasks)
        self.config: MoeConfig = lanes.config
        self._present = tuple(range(lanes.config.ranks))
        self._lanes = lanes
        self._across_site = sites[0]
        self._across: NvlinkSession | None = None
        self._between: list[Between] = []

    @property
    def buffer_bytes(self) -> int:
        """Bytes of GPU memory that the exchange may have allocated on this rank, for both lanes."""
        return cuda_buffer_bytes(self.config)

    async def _open(self) -> None:
        lanes, opened = self._lanes, []
        for name, layout, site in (
            ("across", lanes.across, self._across_site),
            ("inside", lanes.inside, self._site),
        ):
            members = lanes.members(self.rank, layout)
            addresses = [self._group.addresses[member] for member in members]
            tag = f"{self._group.tag}/{name} {members.start}"
            group = MoeGroup(site.rank, addresses, tag, self._group.channel)
            present = lanes.present(self.rank, layout, self._present)
            opening = open_nvlink(self._fabric, group, site, self.epoch, present, self._tasks)
            opened.append(await self._stack.enter_async_context(opening))
        across, inside = opened
        for one, other, site in ((across, inside, self._site), (inside, across, self._across_site)):
            join_verdicts(one.words, site.rank, other.words)
            one.words.verdict_sent[1] = other.words.verdict_sent[0]
        inside.words.missing, inside.words.broken = across.words.missing, across.words.broken
        inside.missing = across.missing
        self._between = [
            Between(lanes, self.rank, *outputs) for outputs in zip(across.outputs, inside.outputs, strict=True)
        ]
        self._across, self._session = across, inside
        torch.cuda.synchronize(self.device)

    def _shut(self) -> None:
        super()._shut()
        self._across = None

    def _losses(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for layout, session in ((self._lanes.across, self._across), (self._lanes.inside, self._session)):
            members = self._lanes.members(self.rank, layout)
            found |= {members[rank]: why for rank, why in session.losses.items()} if session else {}
        return found

    def _begun(self, handle: CudaMoeHandle) -> None:
        self._between[handle.number % self.config.in_flight].begin(handle)
        super()._begun(handle)

    def _dispatch(self, roles: int, handle: CudaMoeHandle) -> CudaMoeHandle:
        inside, across = self._opened(handle), self._across
        assert across is not None
        words, stream = self._between[handle.number % self.config.in_flight].words(handle), self._stream()
        there, here = handle.lanes
        if roles & SEND:
            across.kernels.between("spread", words, stream)
        self._patience(across, "across")
        across.kernels.dispatch(across.words, dispatch_words(there, roles), stream)
        if roles & RECEIVE:
            across.kernels.between("unpack", words, stream)
            self._patience(inside, "inside")
            inside.kernels.dispatch(inside.words, dispatch_words(here, SEND | RECEIVE), stream)
            across.kernels.between("trace", words, stream)
            handle.received = True
        return handle

    def _combine(self, roles: int, handle: CudaMoeHandle, y: torch.Tensor) -> None:
        inside, across = self._opened(handle), self._across
        assert across is not None
        there, here = handle.lanes
        sums, stream = self._between[handle.number % self.config.in_flight].sums, self._stream()
        here.expert_rows, there.expert_rows = handle.expert_rows, sums
        self._patience(inside, "inside back")
        inside.kernels.combine(inside.words, combine_words(here, sums, roles), stream)
        if roles & RECEIVE:
            self._patience(across, "across back")
            across.kernels.combine(across.words, combine_words(there, y, SEND | RECEIVE), stream)

    def _end(self, handle: CudaMoeHandle) -> None:
        super()._end(handle)
        handle.lanes = ()

    def _patience(self, session: NvlinkSession, stage: str) -> None:
        session.words.deadline_ns = int(self._site.deadline_s * PATIENCE[stage] * 1e9)
