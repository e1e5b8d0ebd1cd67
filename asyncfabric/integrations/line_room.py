"""LineRoom: a fabric on a thread of its own and the exchanges that a blocking program has needed so far.

Methods run on the caller's thread, one at a time; the fabric and the exchanges on the portal's.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from typing import Any

import anyio
import torch
from anyio.from_thread import start_blocking_portal

from asyncfabric import FabricAddress, FabricConfig, open_fabric
from asyncfabric.integrations.step_line import StepLine
from asyncfabric.moe import MoeConfig, MoeExchange, MoeGroup, open_moe


class LineRoom:
    """The fabric of one rank and its exchanges, each opened when it is needed first.

    Attributes:
        rank: of this process.
        ranks: how many there are.
    """

    def __init__(
        self, owner: object, group: Any, comm: Any, fabric_config: FabricConfig | None, patience_s: float
    ) -> None:
        """Open the fabric and meet the others over a group of torch.distributed, or over `comm` of mpi4py.

        Closed with `close`, with the owner, or at the end of the program.
        """
        if group is None and comm is None:
            raise ValueError("either group or comm must be given")
        self.rank: int = group.rank() if group is not None else comm.Get_rank()
        self.ranks: int = group.size() if group is not None else comm.Get_size()
        self._group = group
        self._comm = comm
        self._patience_s = patience_s
        self._lines: dict[MoeConfig, StepLine] = {}
        self._stack = ExitStack()
        self._closing = weakref.finalize(owner, self._stack.close)
        self._portal = self._stack.enter_context(start_blocking_portal("trio"))
        opened = open_fabric(fabric_config or FabricConfig())
        self._fabric = self._stack.enter_context(self._portal.wrap_async_context_manager(opened))
        addresses = self.gathered(bytes(self._fabric.address))
        self._addresses = [FabricAddress.from_bytes(address) for address in addresses]

    def close(self) -> None:
        """Close all exchanges and the fabric; a second call does nothing."""
        self._closing()

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks, over the group."""
        if self._group is None:
            return list(self._comm.allgather(value))
        import torch.distributed

        values: list[Any] = [None] * self.ranks
        torch.distributed.all_gather_object(values, value, self._group)
        return values

    def line(
        self,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens: int,
        dtype: torch.dtype,
        scale_block: int,
        out_dtype: torch.dtype,
    ) -> StepLine:
        """Return the steps of the exchange of this shape; opens it with all other ranks where it is new.

        Raises:
            ValueError: no exchange can have this shape.
            MissingRankError: a rank is lost, or did not come in time.
        """
        if not self._closing.alive:
            raise ValueError("the buffer was destroyed")
        config = MoeConfig(
            num_experts=num_experts,
            top_k=top_k,
            hidden=hidden,
            max_tokens=max_tokens,
            ranks=self.ranks,
            in_dtype=str(dtype).removeprefix("torch."),
            scale_block=scale_block,
            out_dtype=str(out_dtype).removeprefix("torch."),
        )
        if config not in self._lines:
            manager = self._portal.wrap_async_context_manager(self._open(config))
            line = StepLine(self._portal, self._stack.enter_context(manager), self._patience_s)
            self._lines[config] = line
        return self._lines[config]

    def exclude(self, ranks: list[int]) -> None:
        """Go on without ranks in the exchanges that are open; one of a new shape would still wait for them."""
        for line in self._lines.values():
            line.exclude(ranks)

    @asynccontextmanager
    async def _open(self, config: MoeConfig) -> AsyncIterator[MoeExchange]:
        group = MoeGroup(self.rank, self._addresses, tag=f"line {len(self._lines)}")
        async with AsyncExitStack() as stack:
            with anyio.fail_after(self._patience_s):
                moe = await stack.enter_async_context(open_moe(self._fabric, group, config))
            yield moe
