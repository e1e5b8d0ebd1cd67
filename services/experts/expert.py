"""The seat of one expert node in a group. The actor runs on the event loop, the model on a worker thread."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any, ClassVar

import anyio
import trio
from prometheus_client import CollectorRegistry

from asyncfabric import Fabric, FabricAddress
from asyncfabric.actors import Actor, handles
from asyncfabric.integrations.sparse_blocks import ParallelBlock, config_for, parallelize
from asyncfabric.moe import MissingRankError, MoeExchange, MoeGroup, open_moe
from asyncfabric_services.experts.messages import LeaveOut, Seated, SeatExpert, Speak, SpokenTokens
from asyncfabric_services.experts.sparse_model import attend, greedy
from asyncfabric_services.health.metrics import BoundedCounter, gauge
from asyncfabric_services.router.admission import RequestAdmission


class Expert:
    """One node's part of a group; `stack` closes its exchange."""

    def __init__(
        self,
        model: Any,
        fabric: Fabric,
        admission: RequestAdmission,
        stack: AsyncExitStack,
        most_tokens: int,
        registry: CollectorRegistry,
    ) -> None:
        self._model = model
        self._fabric = fabric
        self._admission = admission
        self._stack = stack
        self._most_tokens = most_tokens
        self._group = ""
        self._moe: MoeExchange | None = None
        self._blocks: list[ParallelBlock] = []
        self._forwards = BoundedCounter(registry, "expert_forward", "forwards_total", "Forwards of the first block.")
        self._missed = BoundedCounter(
            registry, "expert_missed", "steps_total", "Steps that failed for missing ranks.", because=("lost", "late")
        )
        present = gauge(registry, "expert_present", "ranks", "Ranks of the group that take part, as this node knows.")
        present.set_function(lambda: len(self._moe.present) if self._moe is not None else 0)

    async def sit(self, seat: SeatExpert) -> Seated:
        """Join a group; raises ValueError for a node that is in one, or for an address that is not ours.

        Cancellation: the node is in no group, and its experts are still whole.
        """
        if self._group:
            raise ValueError(f"the node is in group {self._group} and let the other experts go; start it anew")
        addresses = [FabricAddress.from_bytes(address) for address in seat.addresses]
        if not 0 <= seat.rank < len(addresses) or addresses[seat.rank] != self._fabric.address:
            raise ValueError(f"rank {seat.rank} has another address than this node")
        config = config_for(self._model, ranks=len(addresses), max_tokens=self._most_tokens)
        with trio.fail_after(seat.patience_s):
            group = MoeGroup(seat.rank, addresses, tag=seat.group)
            moe = await self._stack.enter_async_context(open_moe(self._fabric, group, config))
        self._blocks = await trio.to_thread.run_sync(parallelize, self._model, moe)
        self._blocks[0].register_forward_hook(lambda *_: self._forwards.add())
        self._moe, self._group = moe, seat.group
        return Seated(len(moe.experts), self._most_tokens, self._model.config.vocab_size, moe.buffer_bytes)

    async def speak(self, asked: Speak) -> SpokenTokens:
        """Do forwards together with the others; see Speak.

        Cancellation: the forward under way ends at its next half; the group has to begin anew.
        """
        self._seated()
        with self._admission.admit() as place, place.scope:
            for block in self._blocks:
                block.caller.patience_s = asked.patience_s
            try:
                # anyio's, not trio's: the blocks come back to the loop from its threads.
                return SpokenTokens(tokens=await anyio.to_thread.run_sync(self._speak, asked))
            except MissingRankError as error:
                self._missed.add(because="lost" if error.lost else "late")
                return SpokenTokens(missing=list(error.ranks), lost=error.lost, because=str(error))
        raise ValueError("the node was stopped before the answer was complete")

    async def leave_out(self, order: LeaveOut) -> None:
        """Go on without ranks; see LeaveOut.

        Cancellation: the exchange is broken until this is repeated.
        """
        with trio.fail_after(order.patience_s):
            await self._seated().exclude(set(order.ranks))

    def _speak(self, asked: Speak) -> list[int]:
        if asked.prompt:
            return greedy(self._model, asked.prompt, asked.count)
        attend(self._blocks, asked.count)
        return []

    def _seated(self) -> MoeExchange:
        if self._moe is None:
            raise ValueError("the node is in no group")
        return self._moe


class ExpertActor(Actor):
    """Where a conductor asks an expert node; one thing after the other."""

    mailbox_capacity: ClassVar[int] = 64

    def __init__(self, expert: Expert) -> None:
        self._expert = expert

    @handles(SeatExpert)
    async def sit(self, message: SeatExpert) -> Seated:
        """Join a group; see Expert.sit."""
        return await self._expert.sit(message)

    @handles(Speak)
    async def speak(self, message: Speak) -> SpokenTokens:
        """Do forwards; see Expert.speak."""
        return await self._expert.speak(message)

    @handles(LeaveOut)
    async def leave_out(self, message: LeaveOut) -> None:
        """Go on without ranks; see Expert.leave_out."""
        await self._expert.leave_out(message)
