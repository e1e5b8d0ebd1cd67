"""LineRoom: a fabric on a thread of its own and the exchanges that a blocking program has needed so far.

Methods run on the caller's thread, one at a time; the fabric and the exchanges on the portal's.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, nullcontext
from typing import Any, TypeVar

import anyio
import torch
from anyio.from_thread import start_blocking_portal

from asyncfabric import Fabric, FabricAddress, FabricConfig, open_fabric
from asyncfabric.integrations.deep_ep.step_line import StepLine
from asyncfabric.integrations.rails_variable import config_from
from asyncfabric.moe import MoeConfig, MoeGroup, open_moe

Exchange = TypeVar("Exchange")
Result = TypeVar("Result")


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
        self._opened = 0
        self._stack = ExitStack()
        self._closing = weakref.finalize(owner, self._stack.close)
        self._portal = self._stack.enter_context(start_blocking_portal("trio"))
        opened = open_fabric(fabric_config or config_from(os.environ))
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
        self.check_open()
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
            moe = self.entered(lambda fabric, group: open_moe(fabric, group, config))
            self._lines[config] = StepLine(self._portal, moe, self._patience_s)
        return self._lines[config]

    def check_open(self) -> None:
        """Raise ValueError once it was closed."""
        if not self._closing.alive:
            raise ValueError("the buffer was destroyed")

    def entered(
        self,
        opening: Callable[[Fabric, MoeGroup], AbstractAsyncContextManager[Exchange]],
        *,
        limited: bool = True,
    ) -> Exchange:
        """Open an exchange with all other ranks, on the portal's thread; closed with the room.

        Without `limited` no scope is around the opening: an exchange with tasks outlives no scope that it was opened
        in.
        """
        self._opened += 1
        manager = self._portal.wrap_async_context_manager(self._open(opening, self._opened, limited))
        return self._stack.enter_context(manager)

    def wait(self, call: Callable[..., Coroutine[Any, Any, Result]], *arguments: Any) -> Result:
        """Run a coroutine function on the portal's thread, for as long as one half of a call may take."""

        async def patiently() -> Result:
            with anyio.fail_after(self._patience_s):
                return await call(*arguments)

        return self._portal.call(patiently)

    def missing(self) -> set[int]:
        """Return the ranks that calls on host tensors have missed so far."""
        return {rank for line in self._lines.values() for rank in line.missing}

    def exclude(self, ranks: list[int]) -> None:
        """Go on without ranks in the exchanges that are open; one of a new shape would still wait for them."""
        for line in self._lines.values():
            line.exclude(ranks)

    @asynccontextmanager
    async def _open(
        self,
        opening: Callable[[Fabric, MoeGroup], AbstractAsyncContextManager[Exchange]],
        number: int,
        limited: bool,
    ) -> AsyncIterator[Exchange]:
        group = MoeGroup(self.rank, self._addresses, tag=f"line {number}")
        async with AsyncExitStack() as stack:
            with anyio.fail_after(self._patience_s) if limited else nullcontext():
                moe = await stack.enter_async_context(opening(self._fabric, group))
            yield moe
